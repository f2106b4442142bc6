"""The reference of the command line, read from the commands themselves."""

import inspect

import click

from kclrun.cli.program import program
from tests.docs.regions import escaped, table


def verbs():
    """A section for each verb: what it does, its examples, its options."""
    with click.Context(program, info_name="kclrun", max_content_width=100) as context:
        parts = list(_sections(program, context, "kclrun"))
    return "\n\n".join(parts)


def _sections(group, context, path):
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        whole = f"{path} {name}"
        yield _section(command, whole)
        if isinstance(command, click.Group):
            inner = click.Context(command, info_name=name, parent=context)
            yield from _sections(command, inner, whole)


def _section(command, path):
    arguments = " ".join(
        each.make_metavar(click.Context(command))
        for each in command.params
        if isinstance(each, click.Argument)
    )
    parts = [f"## {path}", *_paragraphs(command.help or "")]
    if arguments:
        parts.insert(1, f"`{path} [OPTIONS] {arguments}`")
    options = [each for each in command.params if isinstance(each, click.Option)]
    rows = [_row(each) for each in options if not each.hidden]
    if rows:
        parts.append(table(("option", "meaning"), rows))
    return "\n\n".join(parts)


def _paragraphs(text):
    """The paragraphs of a help text; those that click keeps as they are hold commands."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines = paragraph.strip("\n").splitlines()
        if lines and lines[0].strip() == "\b":
            yield "\n".join(["```text", *lines[1:], "```"])
        elif lines:
            yield escaped(" ".join(lines)).replace("\\|", "|")


def _row(option):
    context = click.Context(click.Command("verb"))
    shown = option.get_help_record(context)
    if shown is None:
        return f"`{option.opts[0]}`", ""
    names, meaning = shown
    return f"`{escaped(names)}`", escaped(meaning)
