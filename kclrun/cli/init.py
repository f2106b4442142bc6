"""`kclrun init`: writes a starter project that runs at once. Never overwrites a file."""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

import kclrun
from kclrun.cli import exit_codes
from kclrun.config.file_permissions import write_new
from kclrun.errors import SettingsError

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


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def init(folder: Path) -> int:
    """Write a commented starter project into DIR: app.yaml, a processor, its test.

    \b
    kclrun init hello && cd hello
    kclrun --config app.yaml
    """
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
    return exit_codes.DRAINED
