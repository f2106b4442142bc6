"""`kclrun init`: a starter project that runs at once. Never overwrites a file."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Final

import click

from kclrun.errors import SettingsError

__all__ = ["init"]

# The configuration must not be writable by others [S4], whatever the umask says.
_MODE: Final = 0o644


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def init(folder: Path) -> None:
    """Write a commented starter project into DIR: app.yaml, a processor, its test.

    \b
    kclrun init hello && cd hello
    kclrun --config app.yaml
    """
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
