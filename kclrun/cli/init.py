"""`kclrun init`: a starter project that runs at once. Never overwrites a file.

And `--add-index`, for a lease table from before kclrun: `index_adding.py`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from kclrun.cli import exit_codes
from kclrun.cli.config_options import load_configuration
from kclrun.errors import SettingsError

__all__ = ["init"]

# The configuration must not be writable by others [S4], whatever the umask says.
_MODE: Final = 0o644


@click.command()
@click.argument("folder", metavar="DIR", required=False, type=click.Path(path_type=Path))
@click.option("--add-index", is_flag=True, help="Add the owner index to an existing lease table.")
@click.option(
    "--config", "-c", metavar="FILE", type=click.Path(path_type=Path), help="Its table's."
)
@click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override a setting.")
@click.option("--yes", is_flag=True, help="Add it; without, only show the plan.")
def init(
    folder: Path | None,
    config: Path | None,
    overrides: tuple[str, ...],
    *,
    add_index: bool,
    yes: bool,
) -> int:
    """Write a commented starter project into DIR: app.yaml, a processor, its test.

    \b
    kclrun init hello && cd hello
    kclrun --config app.yaml

    Or give a lease table that the Java KCL made the index by which leases move within a second.

    \b
    kclrun init --add-index --config app.yaml          what it would do
    kclrun init --add-index --config app.yaml --yes
    """
    if add_index:
        if folder is not None or config is None:
            raise click.UsageError("--add-index takes --config FILE, and no DIR.")
        return _add_index(config, overrides, is_confirmed=yes)
    if folder is None:
        raise click.UsageError("Missing argument 'DIR'.")
    if config is not None or overrides or yes:
        raise click.UsageError("--config, --set and --yes go with --add-index.")
    _write_starter(folder)
    return exit_codes.DRAINED


def _add_index(config: Path, overrides: Sequence[str], *, is_confirmed: bool) -> int:
    from kclrun.cli.index_adding import add_index
    from kclrun.cli.world import Aws

    settings = load_configuration(config, overrides).settings
    if settings.engine == "spark":
        raise SettingsError("engine: spark keeps no leases, and so no lease table")
    return add_index(Aws(settings), is_confirmed=is_confirmed)


def _write_starter(folder: Path) -> None:
    from kclrun.cli.starter import starter_files

    files = starter_files()
    existing = [name for name in files if (folder / name).exists()]
    if existing:
        raise SettingsError(
            f"{folder} already has {', '.join(existing)}\n"
            "Nothing was written; choose another folder"
        )
    try:
        for name, text in files.items():
            _write(folder / name, text)
    except OSError as error:
        raise SettingsError(f"{error.filename or folder}: {error.strerror}") from None
    click.echo(f"Wrote {', '.join(files)} to {folder}")
    program = shlex.quote(os.environ.get("KCLRUN_PROGRAM", "kclrun"))
    click.echo(f"Next:  cd {shlex.quote(str(folder))} && {program} --config app.yaml")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Exclusive: a file that appeared since we looked is not overwritten either.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, _MODE)
        file.write(text)
