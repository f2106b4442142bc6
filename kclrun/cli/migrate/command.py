"""`kclrun migrate`: takes over the configuration or the positions of another consumer.

For an application of `amazon_kclpy` this finds the script and writes the file;
`compat/kclpy/app_yaml.py` converts each property. `spark.py` writes positions.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from pathlib import Path
from typing import Final

import click

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigChoice, ConfigGroup, config_options, yes_option
from kclrun.cli.messages import echo
from kclrun.compat.kclpy.app_yaml import Script, app_yaml
from kclrun.compat.kclpy.property_table import read_properties
from kclrun.config.file_permissions import read_trusted, write_new
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime

_FILE: Final = "app.yaml"
# The words before the script: an interpreter by name or path, with or without env.
_INTERPRETER: Final = re.compile(r"(?:.*/)?(?:env|python[0-9.]*)\Z")
_SCRIPT: Final = re.compile(r"[\w-][\w.-]*\.py\Z")


@click.group(cls=ConfigGroup)
def migrate() -> None:
    """Move from another consumer: convert its configuration, or go on at its positions.

    \b
    kclrun migrate kclpy app.properties                            amazon_kclpy: writes app.yaml
    kclrun migrate spark CHECKPOINT --config app.yaml              a query: shows its positions
    kclrun migrate spark CHECKPOINT --config app.yaml --yes        and writes them to the table
    """


@migrate.command(cls=click.Command)  # it writes a configuration and reads none
@click.argument("properties", metavar="PROPERTIES", type=click.Path(path_type=Path))
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
def kclpy(properties: Path, folder: Path | None) -> int:
    """Write app.yaml for an application of amazon_kclpy, beside its properties or into DIR."""
    if os.path.isdir(properties):  # raises nothing
        raise SettingsError(
            f"{properties} is a folder\nName the file in it:  {properties}/app.properties"
        )
    # The file names code to run, so it must pass the same checks as a configuration file [S4].
    values = read_properties(read_trusted(properties, encoding="latin-1"))  # as Java reads it
    target = (folder or properties.parent) / _FILE
    executable = values.get("executableName", "").strip()
    script = _script(executable, properties.resolve().parent, target.resolve().parent)
    text = app_yaml(values, script, properties.name, WallTime(time.time()))
    try:
        write_new(target, text)
    except FileExistsError:
        raise SettingsError(
            f"{target} is there already\nNothing was written; name another folder"
        ) from None
    except OSError as error:
        raise SettingsError(f"{error.filename or target}: {error.strerror}") from None
    echo(f"Wrote {target}; its comments show what changes, property by property")
    program = shlex.quote(os.environ.get("KCLRUN_PROGRAM", "kclrun"))
    echo(f"Next:  {program} check --config {shlex.quote(str(target))}")
    return exit_codes.DRAINED


@migrate.command()
@click.argument("checkpoint", metavar="CHECKPOINT")
@config_options
@yes_option
def spark(checkpoint: str, config: ConfigChoice, *, yes: bool) -> int:
    """Write a stopped Spark query's positions to the lease table: the fleet goes on from there.

    CHECKPOINT is the query's folder. No lease goes back, and nothing is written while an owner
    renews a lease.
    """
    from kclrun.cli.migrate.spark import import_leases

    settings = config.load_for().settings
    return import_leases(settings, checkpoint, is_confirmed=yes)


def _script(executable: str, beside: Path, config_folder: Path) -> Script:
    """The script that `executableName` starts, searched as the daemon does."""
    words = executable.split()  # as the daemon does: no quotes
    while words and (_INTERPRETER.match(words[0]) or words[0].startswith("-")):
        if words[0] == "-m":
            return Script(None, remark=f"executableName ({executable}) runs a module.")
        words.pop(0)
    if not words:
        return Script(None, remark="executableName names no script.")
    name = Path(words[0]).name
    if not _SCRIPT.match(name):
        return Script(None, remark=f"executableName ({words[0]}) is not named like a .py script.")
    arguments = tuple(words[1:])
    found = _found(words[0], beside)
    if found is None:
        where = f"beside the properties, in {Path.cwd()} or on PATH; set path: to its folder."
        return Script(name, None, arguments, f"Not found {where}")
    return Script(name, _path_setting(found.parent, config_folder), arguments)


def _found(name: str, beside: Path) -> Path | None:
    for folder in (beside, Path.cwd()):
        if os.path.isfile(folder / name):  # raises nothing
            return (folder / name).resolve()
    on_path = shutil.which(name)
    return Path(on_path).resolve() if on_path is not None else None


def _path_setting(folder: Path, config_folder: Path) -> str | None:
    """`path:` for a script in `folder`; the file's own folder and its parent need no setting."""
    if folder in {config_folder, config_folder.parent}:
        return None
    if folder.is_relative_to(config_folder):
        return str(folder.relative_to(config_folder))
    return str(folder)
