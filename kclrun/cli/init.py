"""`kclrun init`: writes a starter project that runs at once. Never overwrites a file.

A template is the folder of its name in `cli/templates`: its `app.yaml`, whose first line describes
the template, and its README. The processor that it names is a copy of a module of `kclrun.samples`,
and its test one of `cli/templates/tests`; both are tested where they stand, so the starter project
is correct.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

import kclrun
from kclrun.cli import exit_codes
from kclrun.cli.messages import echo
from kclrun.config.file_permissions import write_new
from kclrun.errors import SettingsError

_TEMPLATES: Final = Path(kclrun.__file__).resolve().parent / "cli" / "templates"
_DEFAULT: Final = "hello"
_PROCESSOR: Final = re.compile(r"^processor: processors\.([a-z_]+):", re.MULTILINE)

_PROCESSORS: Final = '"""Your processors."""\n'
# With this file the test can import `processors`, also if pytest is started in another folder.
_CONFTEST: Final = '"""With this file pytest takes its folder as the root of the imports."""\n'


def templates() -> Mapping[str, str]:
    """What each template shows, in a line, by its name; the default one first."""
    names = sorted(
        (path.parent.name for path in _TEMPLATES.glob("*/app.yaml")),
        key=lambda name: (name != _DEFAULT, name),
    )
    return {name: _app(name).partition("\n")[0].removeprefix("# ") for name in names}


def starter_files(template: str = _DEFAULT) -> Mapping[str, str]:
    """The text of each file, by its path inside the project."""
    app = _app(template)
    named = _PROCESSOR.search(app)
    assert named is not None, "the app.yaml of a template names its processor"
    sample = named[1]
    return {
        "app.yaml": app,
        "conftest.py": _CONFTEST,
        "processors/__init__.py": _PROCESSORS,
        f"processors/{sample}.py": _sample(sample),
        f"tests/test_{sample}.py": (_TEMPLATES / "tests" / f"test_{sample}.py").read_text("utf-8"),
        "README.md": (_TEMPLATES / template / "README.md").read_text("utf-8"),
    }


def _app(template: str) -> str:
    return (_TEMPLATES / template / "app.yaml").read_text("utf-8")


def _sample(name: str) -> str:
    """The source of a sample of this installation."""
    spec = importlib.util.find_spec(f"kclrun.samples.{name}")
    assert spec is not None, "an installation without its samples"
    assert spec.origin is not None, "a sample is a file"
    return Path(spec.origin).read_text("utf-8")


class _InitCommand(click.Command):
    """Its help lists the templates."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Templates"):
            formatter.write_dl(list(templates().items()))


@click.command(cls=_InitCommand)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--template",
    type=click.Choice(list(templates())),
    default=_DEFAULT,
    show_default=True,
    help="What the project begins with; see below.",
)
def init(folder: Path, template: str) -> int:
    """Write a commented starter project into DIR: app.yaml, a processor, its test.

    \b
    kclrun init hello && cd hello
    kclrun --config app.yaml
    kclrun init --template s3-parquet orders
    """
    files = starter_files(template)
    # Path.exists raises where this user may not look.
    existing = [name for name in files if os.path.exists(folder / name)]
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
    echo(f"Wrote {', '.join(files)} to {folder}")
    program = shlex.quote(os.environ.get("KCLRUN_PROGRAM", "kclrun"))
    echo(f"Next:  cd {shlex.quote(str(folder))} && {program} --config app.yaml")
    return exit_codes.DRAINED
