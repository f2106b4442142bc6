"""`kclrun`: finds the verb, and converts its errors to a message and an exit code.

`kclrun app.yaml` is `kclrun run --config app.yaml`. A verb's module is imported when the verb is
used. The verb's line of help is here, so that `kclrun --help` imports none of the modules.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click

from kclrun.cli import exit_codes, messages
from kclrun.cli.config_options import CONFIG_NAMES, with_verb_first
from kclrun.cli.messages import echo, versions
from kclrun.errors import SettingsError, host_refusal
from kclrun.model.text import sanitize

_DEFAULT: Final = "run"
_HEADINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "Run": {
        "run": "Run the application (the default verb).",
        "check": "Check settings, processor and AWS; change nothing.",
        "pause": "Stop reading a shard, a stream or all of them for a while.",
        "resume": "Go on with what is paused, or with a shard that is halted.",
        "iam": "Print the IAM policy that the application needs.",
        "consumers": "Show and remove the consumers of enhanced fan-out.",
    },
    "Look": {
        "lag": "Show how far each shard is behind; answer a monitor.",
        "leases": "Show who has which shard, and how far; give leases to other owners.",
        "top": "Show the whole fleet as a live table in the terminal.",
        "page": "Show the whole fleet as a web page; with --actions, change leases there.",
        "why": "Explain a shard: its owners so far, and why it stands still.",
        "tail": "Print the records of a stream as they arrive.",
        "dashboards": "Print a Grafana dashboard, or alert rules for Prometheus.",
    },
    "Repair": {
        "doctor": "Find what is wrong with the lease table; repair it with --yes.",
        "dead-letters": "Show, process again and drop the records that were given up.",
        "state": "Show, check, export and rebuild what the processors remember.",
        "files": "Find files of rows that are there twice, missing or unfinished.",
    },
    "Move": {
        "reset": "Read a stream again from a time on, or skip to its tip.",
        "replay": "Run the processor over a time range, beside the fleet.",
        "migrate": "Move from amazon_kclpy, or from a Spark query, to kclrun.",
    },
    "Develop": {
        "init": "Write a starter project that runs at once.",
        "local": "Serve Kinesis, DynamoDB, S3, SQS and more on this machine.",
        "put": "Put records from a file or a pipe into a stream.",
        "simulate": "Show what a fleet would do when hosts are lost, deployed, or shards double.",
        "completion": "Print the completion of commands for your shell.",
        "version": "Show versions.",
    },
}
_EXIT_CODES: Final = 'Exit codes (more in the page "Exit codes and signals" of the documentation)'
_READS_NO_SETTINGS: Final = "This verb reads no settings: leave --config and --set out."
_VERBS: Final = tuple(verb for lines in _HEADINGS.values() for verb in lines)
# Verbs that share a folder with another one, and their modules.
_SHARING: Final = {
    "reset": "leases.reset",
    "pause": "leases.pause",
    "resume": "leases.pause",
    "why": "leases.why",
    "top": "page.top",
}


def module_of(verb: str) -> str:
    """The name of the module with the command; a folder has the parts of a large verb."""
    name = verb.replace("-", "_")
    if verb in _SHARING:
        return f"kclrun.cli.{_SHARING[verb]}"
    # Not the folder itself: an update of a checkout leaves one behind that only has bytecode.
    is_folder = (Path(__file__).parent / name / "command.py").is_file()
    return f"kclrun.cli.{name}.command" if is_folder else f"kclrun.cli.{name}"


@contextmanager
def _unnumbered() -> Iterator[None]:
    """For a BrokenPipeError with an error number click ends the program with code 1, which is the
    answer of a check. Raises: BrokenPipeError without a number."""
    try:
        yield
    except BrokenPipeError:
        raise BrokenPipeError from None


class _Verbs(click.Group):
    """The verbs, each imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module = importlib.import_module(module_of(cmd_name))
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def make_context(self, *arguments: Any, **more: Any) -> click.Context:
        with _unnumbered():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: click.Context) -> Any:
        with _unnumbered():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _VERBS:
            from kclrun.model.names import nearest

            near = nearest(args[0], _VERBS)
            meant = f" Did you mean '{near}'?" if near is not None else ""
            ctx.fail(f"No such verb '{args[0]}'.{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, lines in _HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl(list(lines.items()))
        with formatter.section(_EXIT_CODES):
            formatter.write_dl([(str(code), text) for code, text in exit_codes.MEANINGS.items()])


def _show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001 - click
    if value:
        echo(versions())
        ctx.exit()


@click.group(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="First steps:  kclrun init hello && cd hello && kclrun --config app.yaml",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show versions.",
)
def program() -> None:
    """Python over Amazon Kinesis Data Streams, on a fleet of plain machines.

    \b
    kclrun --config app.yaml           run; SIGTERM or Ctrl-C drains
    kclrun VERB --help                 what a verb does, with examples
    """


def refuse_time_zone() -> None:
    """Raises: SettingsError if the C library makes of TZ an offset that Python does not take: each
    request to AWS would fail with it, like one without an answer."""
    try:
        datetime.now().astimezone()
    except (ValueError, OverflowError) as error:
        raise SettingsError(
            f"the environment variable TZ is {os.environ.get('TZ', '')!r}, which is not a time zone"
            f" ({error})\nSet one such as UTC or Europe/Berlin, or unset it"
        ) from None


def run_program(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Only here errors become messages."""
    ordered = with_verb_first(arguments, _VERBS, _DEFAULT)
    verb = next(iter(ordered), _DEFAULT)
    try:
        refuse_time_zone()
        code = program.main(ordered, prog_name="kclrun", standalone_mode=False)
        if sys.stdout is not None:  # else its terminal is gone
            sys.stdout.flush()  # Python's flush at the exit would report an error without advice
    except click.Abort:
        return exit_codes.INTERRUPTED
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption) and error.option_name in CONFIG_NAMES:
            error = click.UsageError(_READS_NO_SETTINGS, error.ctx)
        error.message = sanitize(error.message)  # type: ignore[misc]
        error.show()
        return exit_codes.USAGE
    except BrokenPipeError as error:
        if not messages.has_lost_reader(sys.stdout, sys.stderr):  # a pipe to another process
            return messages.report_error(error, verb)
        return _end_unread()  # `| head` has read enough
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the boundary of the program
        if messages.is_of_lost_terminal(error, sys.stdout, sys.stderr):
            return _end_unread()
        _drop_full_output()
        if isinstance(error, KeyboardInterrupt):
            return exit_codes.INTERRUPTED
        return messages.report_error(host_refusal(error) or error, verb)
    return code if isinstance(code, int) else exit_codes.DRAINED


def _end_unread() -> int:
    """The reader of our output has closed it. Python must not flush at exit."""
    sys.stdout = sys.stderr = None
    return exit_codes.DRAINED


def _drop_full_output() -> None:
    """Drop text that standard output does not take (its disk is full). Python's flush at the exit
    would fail again, and change the exit code to 120."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        sys.stdout = None
