"""`kclrun page`: a web page of the whole fleet, from the lease table and the stream's tip.

It only reads, as `kclrun leases`, `kclrun lag` and `kclrun doctor` without `--yes` do; with
`--actions` it also writes what the verbs with `--yes` write, for those who have the token.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigChoice, ConfigCommand, config_options
from kclrun.cli.messages import command_of, echo
from kclrun.cli.terminal import stop_signals
from kclrun.cli.times import DURATION
from kclrun.config.destinations import OutputSettings
from kclrun.config.file_permissions import read_secret
from kclrun.config.outputs import named_outputs
from kclrun.config.schema import (
    Settings,
    StreamErrorSettings,
    StreamSettings,
    stream_name,
)
from kclrun.config.units import Duration, parse_listen
from kclrun.errors import KclrunError, SettingsError
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import setting_of
from kclrun.model.stream import is_loopback_host

if TYPE_CHECKING:
    from kclrun.cli.config_options import Configuration
    from kclrun.cli.page.letters import PageLetters
    from kclrun.cli.page.reading import FleetReader
    from kclrun.cli.services import Aws
    from kclrun.operating.changes import LeasePlan
    from kclrun.page.acting import Actions
    from kclrun.page.snapshot import About, ShownOutput
    from kclrun.protocol.writes import Outcome

# More often it would take too much of the reads that a shard's applications share (`reading.py`).
_EVERY_MIN_S: Final = 5.0
_EVERY_MAX_S: Final = 3_600.0
# Beside a manager the page may take 1 % of a core. Of 1,000 shards the rows take 37 ms, examined,
# and a viewer 45 ms: with the lag (`measured_every_s`) these are 0.8 %.
BESIDE_A_MANAGER_S: Final = 15.0
_ENVIRONMENT: Final = "KCLRUN_PAGE_TOKEN"
# 16 random hexadecimal digits are 64 bits: too many to guess over four connections.
_TOKEN_CHARACTERS_MIN: Final = 16


every_option = click.option(
    "--every",
    type=DURATION,
    default="10s",
    show_default=True,
    metavar="DURATION",
    help="How often the table is read, however many people look; the lag every third time or less.",
)


@click.command(cls=ConfigCommand)
@config_options
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True)
@click.option(
    "--listen",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Another address than loopback: there is no password.",
)
@every_option
@click.option(
    "--actions",
    "has_actions",
    is_flag=True,
    help="Also release, move, pause, resume and redrive, for those who have the token.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"With --actions: the token is in this file, not in the environment as {_ENVIRONMENT}.",
)
def page(
    config: ConfigChoice,
    *,
    port: int,
    listen: str,
    every: Duration,
    has_actions: bool,
    token_file: Path | None,
) -> int:
    """Show the whole fleet as a web page: owners, shards, lag, halts, findings of the doctor.

    It only reads, with your credentials, and changes nothing unless --actions is given; it runs on
    a laptop until Ctrl-C. Without credentials for the stream it shows the table, and no lag.

    \b
    kclrun page --config app.yaml
    kclrun page --config app.yaml --port 0            takes a free port, and prints it
    KCLRUN_PAGE_TOKEN=$(openssl rand -hex 16) kclrun page --config app.yaml --actions
    """
    if not listen:
        raise click.UsageError("--listen is empty, which would be every address of this machine.")
    token = page_token(token_file, listen) if has_actions else None
    if token_file is not None and not has_actions:
        raise click.UsageError("--token-file goes with --actions.")
    refuse_interval(every)
    from kclrun.cli.page.details import DetailReader
    from kclrun.cli.page.letters import PageLetters
    from kclrun.cli.page.reading import FleetReader
    from kclrun.cli.services import fleet_aws
    from kclrun.local.server import signal_event
    from kclrun.page.server import serve_pages

    # An action may process letters again, with all that a run needs.
    configuration = config.load() if has_actions else config.load_for("observe", "on_error")
    aws = fleet_aws(config, "observe", "on_error")
    letters = PageLetters(configuration)
    about = _about(aws, config.file, config.overrides, every_s=float(every))
    about = msgspec.structs.replace(about, has_actions=has_actions)
    # Credentials that are missing end the start, not each reading.
    aws.credentials.current()
    reader = FleetReader(aws, every_s=float(every))
    asked = signal_event(stop_signals())
    actions = _actions(aws, token, reader, letters) if token is not None else None
    details = DetailReader(aws, letters)
    server = serve_pages(listen, port, about, reader.look, actions, details=details)
    try:
        reader.start()
        reader.require_listener()
        echo(f"The fleet of {about.application}: {server.url}/ (Ctrl-C ends it)")
        if not is_loopback_host(listen):
            echo(
                "There is no password: everyone that reaches this address can read the page.",
                err=True,
            )
        asked.wait()
    finally:
        reader.close()
        server.close()
    return exit_codes.DRAINED


def refuse_interval(every: Duration) -> None:
    """Raises: click.UsageError for an `--every` that is too short or too long."""
    if not _EVERY_MIN_S <= every <= _EVERY_MAX_S:
        raise click.UsageError(f"--every is {_EVERY_MIN_S:g}s to {_EVERY_MAX_S:g}s.")


@contextmanager
def page_beside_run(configuration: Configuration) -> Iterator[str | None]:
    """`observe.page`: serve the page in the manager's process while it runs; gives its address, or
    None without that setting. It only reads, in threads of its own, and a table that cannot be read
    is shown on the page.

    Raises: SettingsError if it cannot listen there.
    """
    settings = configuration.settings
    if settings.observe.page is None:
        yield None
        return
    from kclrun.cli.page.details import DetailReader
    from kclrun.cli.page.letters import PageLetters
    from kclrun.cli.page.reading import FleetReader
    from kclrun.cli.services import Aws
    from kclrun.page.server import serve_pages

    aws = Aws(settings)
    about = _about(aws, configuration.file, configuration.overrides, every_s=BESIDE_A_MANAGER_S)
    reader = FleetReader(aws, every_s=BESIDE_A_MANAGER_S)
    host, port = parse_listen(settings.observe.page)
    details = DetailReader(aws, PageLetters(configuration))
    server = serve_pages(host, port, about, reader.look, details=details, setting="observe.page")
    # The manager does not wait for the first scan.
    threading.Thread(target=reader.start, name="page", daemon=True).start()
    try:
        yield server.url
    finally:
        reader.close()
        server.close()


def page_token(file: Path | None, listen: str) -> str:
    """The token for actions: from the file, or from the environment, which it then leaves.

    Raises: SettingsError if there is none, if it is short, or if others may read the file; also for
    an address where it would travel in clear text.
    """
    if not is_loopback_host(listen):
        raise SettingsError(
            "--actions: the token would cross the network in clear text\n"
            "Leave --listen out, and reach the page through a tunnel:"
            " ssh -L 8080:127.0.0.1:8080 HOST"
        )
    if file is None:
        token, source = os.environ.pop(_ENVIRONMENT, ""), _ENVIRONMENT
    else:
        token, source = read_secret(file), str(file)
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise SettingsError(f"--token-file: others may use {file}\nTo go on:  chmod 600 {file}")
    if len(token) < _TOKEN_CHARACTERS_MIN:
        raise SettingsError(
            f"--actions: {source} holds {'no' if not token else 'a short'} token; it has at least"
            f" {_TOKEN_CHARACTERS_MIN} characters, such as the output of  openssl rand -hex 16"
        )
    return token


def _actions(aws: Aws, token: str, reader: FleetReader, letters: PageLetters) -> Actions:
    from kclrun.cli.leases import views
    from kclrun.cli.leases.pause import write_all
    from kclrun.page.acting import Actions
    from kclrun.protocol.writes import Refused

    def read(key: LeaseKey | None) -> tuple[Lease, ...]:
        if key is None:
            return views.scan_table(aws).leases
        lease = aws.table.read(key)
        return () if lease is None else (lease,)

    def write(plans: Sequence[LeasePlan]) -> Mapping[LeaseKey, Outcome]:
        written = write_all(aws, plans)
        reader.read_table()
        return {
            key: Refused("", str(outcome)) if isinstance(outcome, KclrunError) else outcome
            for (key, _), outcome in written.items()
        }

    redriven, now = letters if letters.are_here else None, aws.dynamodb_client.service_time
    return Actions(
        token, read=read, write=write, now=now, letters=redriven, refused=_say_wrong_token
    )


def _say_wrong_token(count: int) -> None:
    echo(f"An action was refused: its token is wrong ({count} so far)", err=True)


def _about(aws: Aws, file: Path, overrides: Sequence[str], *, every_s: float) -> About:
    from kclrun.page.snapshot import About

    settings = aws.settings
    return About(
        application=settings.application,
        streams=settings.stream_names,
        table=settings.table,
        place=settings.aws.endpoint or f"region {aws.kinesis.region}",
        leases_command=command_of("leases", file, overrides),
        doctor_command=command_of("doctor", file, overrides),
        letters_command=command_of("dead-letters", file, overrides),
        story_command=command_of("why", file, overrides),
        unpause_command=command_of("resume", file, overrides),
        letters=letters_of(settings),
        refresh_s=round(every_s),
        plan=plan_of(settings),
        outputs=tuple(_place(name, output) for name, output in named_outputs(settings)),
    )


def _place(name: str, output: OutputSettings) -> ShownOutput:
    from kclrun.page.snapshot import ShownOutput

    kind, where = next(iter(_output(output)))
    roll_s = float(output.roll.every) if output.roll is not None else 0.0
    place = where if "://" in where else f"{kind} {where}"
    return ShownOutput(name, setting_of(name), place, roll_s)


# The settings as the page shows them: only those that are named here, none of which can hold a
# secret. Of options and tags only the names are shown, of a database nothing.

Pairs = tuple[tuple[str, str], ...]

# Settings in sections of their own, all values of which are durations, sizes, numbers and names.
_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "leases": (
        "max",
        "per_process",
        "moves_per_cycle",
        "balance",
        "failover",
        "group",
        "cleanup",
        "create",
    ),
    "fetch": ("mode", "consumer", "idle", "buffer", "batch_max", "kpl_range"),
    "checkpoint": ("every", "uncheckpointed_max"),
    "on_error": ("retries", "backoff", "max_age", "then", "limit"),
    "observe": ("listen", "hot_window"),
    "instance": ("watch", "rebalance", "group", "launch_hook", "termination_hook"),
    "aws": ("region", "endpoint", "profile", "role_arn", "start_timeout"),
}
_DESTINATIONS: Final = ("path", "s3", "dynamodb", "kinesis", "sqs", "sns", "firehose", "use")


def plan_of(settings: Settings) -> tuple[tuple[str, Pairs], ...]:
    """All sections, in the order of the page."""
    application = [
        ("application", settings.application),
        ("lease table", settings.table),
        ("engine", settings.engine),
        ("start", settings.start_text),
        ("stall", _text(settings.stall)),
    ]
    sections: list[tuple[str, Pairs]] = [("Application", tuple(application))]
    sections += [
        (f"Stream {stream_name(source.name)}", tuple(_stream(source, settings)))
        for source in settings.sources
    ]
    for name, names in _SECTIONS.items():
        section = getattr(settings, name)
        pairs = tuple((f"{name}.{setting}", _text(getattr(section, setting))) for setting in names)
        sections.append((name, pairs))
    sections += [
        (f"Output {name}", tuple(_output(output))) for name, output in named_outputs(settings)
    ]
    return tuple(sections)


def letters_of(settings: Settings) -> str:
    """Where dead letters are, in words; empty if the application keeps none."""
    if settings.on_error.then != "dead-letter":
        return ""
    place = settings.on_error.dead_letter
    kinds = (("folder", place.path), ("bucket", place.s3), ("queue", place.sqs))
    named = [f"{kind} {where}" for kind, where in (*kinds, ("stream", place.stream)) if where]
    return f"Dead letters are kept in: {', '.join(named) or 'the folder of the application'}."


def _stream(source: StreamSettings, settings: Settings) -> Iterator[tuple[str, str]]:
    yield "name", source.name
    yield "processor", _text(source.processor)
    yield "decode", _text(source.decode)
    yield "start", _text(source.start)
    yield "priority", _text(source.priority)
    if source.concurrency is not None:
        yield "concurrency.records", _text(source.concurrency.records)
    if source.on_error != StreamErrorSettings():
        on_error = settings.on_error_of(source)
        for name in _SECTIONS["on_error"]:
            yield f"on_error.{name}", _text(getattr(on_error, name))
    yield "options (names only)", ", ".join(sorted(source.options)) or "none"


def _output(output: OutputSettings) -> Iterator[tuple[str, str]]:
    for name in _DESTINATIONS:
        where = getattr(output, name)
        if where is not None:
            yield name, where
    if output.sql is not None:
        yield "sql", f"table {output.table}; its address is not shown"
    if output.use is not None:
        yield "options (names only)", ", ".join(sorted(output.options)) or "none"
    yield "format", _text(output.format)
    if output.roll is not None:
        yield "roll", f"every {_text(output.roll.every)} or {_text(output.roll.size)}"


def _text(value: Any) -> str:
    """A value as the file would have it; a dash where it is left out."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    shown = getattr(value, "text", None)
    return str(shown) if isinstance(shown, str) else str(msgspec.to_builtins(value, str_keys=True))
