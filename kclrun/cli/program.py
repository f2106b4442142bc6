"""`kclrun`: finds the verb, and turns whatever it raises into a message and an exit code.

`kclrun --config app.yaml` is `kclrun run --config app.yaml`. A verb's module is imported when the
verb is used; its line of help stands here, so that `kclrun --help` imports none of them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from kclrun.cli import exit_codes, messages

__all__ = ["program", "run_program"]

_DEFAULT: Final = "run"
_VERBS: Final[Mapping[str, str]] = {
    "run": "Run the application (the default verb).",
    "check": "Check settings, processor and AWS; change nothing.",
    "doctor": "Find what is wrong with the lease table; mend it with --yes.",
    "iam": "Print the IAM policy that the application needs.",
    "init": "Write a starter project that runs at once.",
    "lag": "Show how far each shard is behind; answer a monitor.",
    "leases": "Show who has which shard, and how far; move, release, resume them.",
    "local": "Serve Kinesis, DynamoDB, CloudWatch, S3 and SQS on this machine.",
    "put": "Put records from a file or a pipe into a stream.",
    "simulate": "Show what a fleet would do when hosts are lost, deployed, or shards double.",
    "tail": "Print the records of a stream as they arrive.",
    "version": "Show versions.",
}
_PACKAGE: Final = "kclrun.cli"


class _Verbs(click.Group):
    """The verbs, each imported when asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _VERBS:
            return None
        module = importlib.import_module(f"{_PACKAGE}.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in {"--help", "-h", "--version"}:
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Verbs"):
            formatter.write_dl(list(_VERBS.items()))
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), text) for code, text in exit_codes.MEANINGS.items()])


def _show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001 - click
    if value:
        from kclrun.cli.version import versions

        click.echo(versions())
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


def run_program(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code. The one place where errors become messages."""
    verb = _verb_of(arguments)
    try:
        code = program.main(list(arguments), prog_name="kclrun", standalone_mode=False)
    except click.UsageError as error:
        error.show()
        return exit_codes.USAGE
    except click.Abort:
        return exit_codes.INTERRUPTED
    except click.ClickException as error:
        error.show()
        return exit_codes.USAGE
    except BrokenPipeError:
        # Whoever read our output (`| head`) has seen enough; Python must not flush again at exit.
        sys.stderr.close()
        return exit_codes.DRAINED
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the boundary of the program
        return exit_codes.INTERRUPTED if _is_interrupt(error) else messages.tell(error, verb)
    return _as_code(code)


def _is_interrupt(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt)


def _as_code(returned: Any) -> int:
    return returned if isinstance(returned, int) else exit_codes.DRAINED


def _verb_of(arguments: Sequence[str]) -> str:
    first = arguments[0] if arguments else ""
    return first if first in _VERBS else _DEFAULT
