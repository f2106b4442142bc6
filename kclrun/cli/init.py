"""`kclrun init`: a starter project that runs at once. Never overwrites a file.

And `--add-index`, for a lease table from before kclrun: `index_adding.py`; `--from`, for the
properties of the MultiLangDaemon: `properties_import.py`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from kclrun.cli import exit_codes
from kclrun.cli.config_options import load_configuration
from kclrun.cli.new_files import write_new
from kclrun.errors import SettingsError

__all__ = ["init"]


@click.command()
@click.argument("folder", metavar="DIR", required=False, type=click.Path(path_type=Path))
@click.option("--add-index", is_flag=True, help="Add the owner index to an existing lease table.")
@click.option(
    "--from",
    "properties",
    metavar="PROPERTIES",
    type=click.Path(path_type=Path),
    help="Write app.yaml from a properties file of amazon_kclpy.",
)
@click.option(
    "--config", "-c", metavar="FILE", type=click.Path(path_type=Path), help="Its table's."
)
@click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override a setting.")
@click.option("--yes", is_flag=True, help="Add it; without, only show the plan.")
def init(
    folder: Path | None,
    properties: Path | None,
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

    Or write app.yaml for an application of amazon_kclpy, beside its properties or into DIR.

    \b
    kclrun init --from app.properties
    """
    if add_index:
        if folder is not None or properties is not None or config is None:
            raise click.UsageError("--add-index takes --config FILE, and neither DIR nor --from.")
        return _add_index(config, overrides, is_confirmed=yes)
    if config is not None or overrides or yes:
        raise click.UsageError("--config, --set and --yes go with --add-index.")
    if properties is not None:
        from kclrun.cli.properties_import import import_properties

        return import_properties(properties, folder)
    if folder is None:
        raise click.UsageError("Missing argument 'DIR'.")
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
            write_new(folder / name, text)
    except OSError as error:
        raise SettingsError(f"{error.filename or folder}: {error.strerror}") from None
    click.echo(f"Wrote {', '.join(files)} to {folder}")
    program = shlex.quote(os.environ.get("KCLRUN_PROGRAM", "kclrun"))
    click.echo(f"Next:  cd {shlex.quote(str(folder))} && {program} --config app.yaml")
