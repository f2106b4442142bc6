"""`kclrun init`: writes a starter project that runs at once. Never overwrites a file.

With `--add-index` it adds the owner index to a lease table that is older than kclrun. With `--from`
it converts the properties of the MultiLangDaemon (`properties_import.py`).
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

import kclrun
from kclrun.aws.lease_table import OWNER_INDEX
from kclrun.aws.table_setup import (
    INDEX_WAIT_S,
    IndexState,
    add_owner_index,
    inspect_owner_index,
)
from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigCommand, load_configuration
from kclrun.cli.new_files import write_new
from kclrun.errors import SettingsError
from kclrun.model.time import Instant

if TYPE_CHECKING:
    from kclrun.cli.world import Aws

# The files of a starter project. Its processor is a copy of the module `kclrun.samples.hello`. That
# module is tested, so the starter project stays correct.
_PACKAGE_ROOT: Final = Path(kclrun.__file__).resolve().parent

_PROCESSORS: Final = '"""Your processors."""\n'

_TEST: Final = '''\
"""Run it with pytest; it needs no AWS."""

from kclrun.testing import run_processor
from processors.hello import Hello


def test_words_are_counted() -> None:
    run = run_processor(Hello, [b"world", b"moon", b"world"], options={"greeting": "hi"})

    assert {row["word"]: row["times"] for row in run.rows} == {"moon": 1, "world": 2}
'''

_README: Final = """\
# hello

    kclrun --config app.yaml          # runs on an AWS inside kclrun; rows appear in out/
    kclrun check --config app.yaml    # is everything right?
    python -m pytest                  # the processor's test

(In an environment with `pip install '/path/to/kclrun[local]' pytest`, the path of a checkout; or
write the path of its `bin/kclrun`, and `bin/test` installs pytest beside it.)

`processors/hello.py` is the code, `app.yaml` the configuration. For a stream of yours, remove
`embedded:` and `aws.endpoint` from `app.yaml` and set `stream` and `aws.region`.
"""

# With this file the test can import `processors`, also if pytest is started in another folder.
_CONFTEST: Final = '"""Its place tells pytest that this folder is the root of the imports."""\n'


def starter_files() -> Mapping[str, str]:
    """The text of each file, by its path inside the project."""
    return {
        "app.yaml": (_PACKAGE_ROOT / "cli" / "starter_app.yaml").read_text(encoding="utf-8"),
        "conftest.py": _CONFTEST,
        "processors/__init__.py": _PROCESSORS,
        "processors/hello.py": _sample("hello"),
        "tests/test_hello.py": _TEST,
        "README.md": _README,
    }


def _sample(name: str) -> str:
    """The source of a sample of this installation."""
    spec = importlib.util.find_spec(f"kclrun.samples.{name}")
    assert spec is not None, "an installation without its samples"
    assert spec.origin is not None, "a sample is a file"
    return Path(spec.origin).read_text(encoding="utf-8")


def add_index(aws: Aws, *, is_confirmed: bool) -> int:
    """Show the plan for the new index, or add the index and wait; returns the exit code.

    Raises: TableRefused (no such table, other keys); Unavailable if it takes longer than
    `INDEX_WAIT_S`; AccessDenied and other ServiceError leaves.
    """
    table = aws.settings.table
    state = inspect_owner_index(aws.control.dynamodb_reads(), table)
    if state.is_active:
        click.echo(f"{table} has its index {OWNER_INDEX} already. Nothing to do.")
        return exit_codes.DRAINED
    click.echo(_plan(table, state))
    if not is_confirmed:
        click.echo("Nothing was changed. To do it, add --yes")
        return exit_codes.DRAINED
    began = time.monotonic()
    add_owner_index(
        aws.control,
        table,
        tell=click.echo,
        clock=lambda: Instant(time.monotonic()),
        wait=time.sleep,
    )
    click.echo(f"{OWNER_INDEX} is ACTIVE, after {time.monotonic() - began:.0f} s")
    return exit_codes.DRAINED


def _plan(table: str, state: IndexState) -> str:
    if state.status is not None:
        return f"{table}: index {OWNER_INDEX} is {state.status}; with --yes this waits for it"
    billing = "on demand, as the table is"
    if state.capacity is not None:
        read, write = state.capacity
        billing = f"provisioned as the table is: {read} read and {write} write units more to pay"
    return (
        f"{table}: add index {OWNER_INDEX} (leaseOwner, leaseKey; keys only; {billing})\n"
        "AWS needs minutes for it, 15 to 20 have been seen; the fleet runs on meanwhile.\n"
        f"This waits up to {INDEX_WAIT_S / 60:.0f} minutes; Ctrl-C stops the waiting, not the work."
    )


@click.command(cls=ConfigCommand)
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
        if folder is not None or properties is not None:
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


def _add_index(config: Path | None, overrides: Sequence[str], *, is_confirmed: bool) -> int:
    from kclrun.cli.world import Aws

    settings = load_configuration(config, overrides).settings
    if settings.engine == "spark":
        raise SettingsError("engine: spark keeps no leases, and so no lease table")
    return add_index(Aws(settings), is_confirmed=is_confirmed)


def _write_starter(folder: Path) -> None:

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
