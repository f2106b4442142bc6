"""The texts of the program: a command line in a hint can be typed as it stands, and a document that
a text names is there for the user of a wheel."""

import ast
import inspect
import re
import shlex
from functools import cache
from pathlib import Path

import click

import kclrun
from kclrun.cli.config_options import with_verb_first
from kclrun.cli.program import _VERBS, program
from tests.architecture.sources import ROOT, files_of_the_package

PACKAGE = Path(kclrun.__file__).parent
PAGE = re.compile(r'the page "([^"]+)" of the documentation')
# What stands in a text for something of the user.
STAND_INS = {"SHARD": "1", "TIME": "10m", "NUMBER": "123456789012", "N": "2", "…": "10m"}
# Between two blanks, or in backticks: how a text names a command.
COMMAND = re.compile(r"(?:`|  |\| )(kclrun(?: [^`\n]+?)?)(?=`|  |$|\n|;| \|| &&)", re.MULTILINE)


def texts_of(nodes):
    """The texts of a module that are not docstrings, with a stand-in for what is filled in."""
    others = set()
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                others.add(first.value)
        elif isinstance(node, ast.JoinedStr):
            others.update(inner for inner in ast.walk(node) if inner is not node)
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(
                    part.value if isinstance(part, ast.Constant) else "1" for part in node.values
                ),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in others:
            yield node.lineno, node.value


@cache
def texts():
    return [
        (source.name, line, text)
        for source in files_of_the_package()
        for line, text in texts_of(source.nodes)
    ]


def hints():
    return sorted({found for _, _, text in texts() for found in COMMAND.findall(text)})


def examples(command=program, path=""):
    """The lines of examples in the help of each verb."""
    lines = inspect.cleandoc(command.help or "").splitlines()
    for line in lines:
        if (at := line.find("kclrun ")) >= 0 and (line.startswith("kclrun ") or "| kclrun" in line):
            if "VERB" in line:
                continue
            yield re.split(r"   +| \|\| | > | && | \| (?!kclrun)| \\", line[at:])[0]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from examples(command.get_command(context, name), f"{path} {name}")


def parse(line):
    """Read a command line as the program does, up to the call of the verb.
    Raises: click.UsageError."""
    words = [STAND_INS.get(word, word) for word in shlex.split(line)[1:]]
    command, args = program, with_verb_first(words, _VERBS, "run")
    parent = click.Context(program, info_name="kclrun")
    while isinstance(command, click.Group):
        if not args or (command is not program and command.invoke_without_command):
            break
        _, command, args = command.resolve_command(parent, args)
    try:
        command.make_context("verb", list(args), parent=parent)
    except click.BadParameter as error:
        if "does not exist" not in error.format_message():  # a file of the user
            raise


def refused(lines):
    """The lines that cannot be typed, each with the reason."""
    found = {}
    for line in lines:
        try:
            parse(line)
        except click.UsageError as error:
            found[line] = error.format_message()
    return found


def test_an_example_of_the_help_can_be_typed():
    lines = set(examples())

    assert len(lines) > 15
    assert refused(lines) == {}


def test_a_command_line_in_a_hint_can_be_typed():
    # A verb alone, as a name in a sentence, is not a line to type.
    lines = [hint for hint in hints() if len(hint.split()) > 2]

    assert len(lines) > 15
    assert refused(lines) == {}


def test_a_line_that_cannot_be_typed_is_seen():
    assert list(refused(["kclrun put --formt text", "kclrun put"])) == ["kclrun put --formt text"]


def test_a_hint_that_puts_plain_lines_names_their_format():
    piped = [text for _, _, text in texts() if re.search(r"\| kclrun put", text)]

    assert piped
    assert all("--format text" in text for text in piped)


def titles():
    return {
        page.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        for page in (ROOT / "docs").rglob("*.md")
    }


def test_a_text_names_a_page_by_a_title_that_is_there():
    named = {found for _, _, text in texts() for found in PAGE.findall(text)}

    assert named >= {"Exit codes and signals", "Run in Docker", "Metrics"}
    assert named <= titles()


def test_no_text_names_a_file_that_a_wheel_does_not_have():
    """Neither do the files that `kclrun init` writes, and the processors that it copies."""
    written = [
        (path.relative_to(ROOT), 0, path.read_text("utf-8"))
        for folder in (PACKAGE / "cli" / "templates", ROOT / "processors")
        for path in sorted(folder.rglob("*"))
        if path.suffix in {".py", ".yaml", ".md"}
    ]
    of_checkout = re.compile(r"\b(?:docs|config)/[\w./-]+|(?<!\()\b[\w-]+/[\w-]+\.md\b")
    found = [
        (str(where), line, name)
        for where, line, text in texts() + written
        for name in of_checkout.findall(text)
        if "://" not in text.split(name)[0][-40:]
    ]

    assert found == []
