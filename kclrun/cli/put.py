"""`kclrun put`: records from a file or a pipe into a stream; nothing dropped, memory bounded."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import click

from kclrun.cli import exit_codes
from kclrun.cli.stream_options import stream_options, stream_settings
from kclrun.errors import ServiceError, SettingsError

if TYPE_CHECKING:
    from kclrun.cli.world import Aws
    from kclrun.model.outgoing import PutEntry

__all__ = ["put"]

Progress = Callable[[int], None]
# Entries to put; None says that nothing more is in sight, so what there is should be sent.
Rows = Iterator["PutEntry | None"]

_FORMAT_HELP: Final = "By default from the extension: .csv, .jsonl; text for all else."
# A pipe that is silent this long has its waiting rows sent.
_IDLE_S: Final = 0.2
# Rows read ahead of the sender: two requests.
_AHEAD_MAX: Final = 1_000
# After a reshard, aggregates made for a former shard may hold records of its sibling: bound that.
_SHARDS_AGE_MAX_S: Final = 30.0


@click.command()
@click.argument("file", metavar="[FILE|-]", default="-")
@stream_options
@click.option("--format", "kind", type=click.Choice(["csv", "jsonl", "text"]), help=_FORMAT_HELP)
@click.option("--key", metavar="COLUMN", help="Column or field that is the partition key.")
@click.option("--rate", type=click.IntRange(min=1), metavar="N", help="At most N records a second.")
@click.option("--aggregate", is_flag=True, help="Pack records as the KPL does, per shard.")
@click.option("--ordered", is_flag=True, help="Keep each key's order under throttling; slower.")
def put(
    *,
    file: str,
    config: Path | None,
    overrides: tuple[str, ...],
    stream: str | None,
    endpoint: str | None,
    region: str | None,
    kind: str | None,
    key: str | None,
    rate: int | None,
    aggregate: bool,
    ordered: bool,
) -> int:
    """Put each row of FILE (or of standard input) into a stream as one record.

    Rows of CSV become JSON objects; lines of JSON and text go as they are. Without --key the
    partition key is a hash of the row. Records the service refuses for the moment are sent again
    in their order; within one request a later record of the same key may pass one that was
    refused, unless --ordered.

    \b
    kclrun put --config app.yaml flights.csv --key carrier
    tail -F app.log | kclrun put --stream logs --region eu-west-1
    """
    from kclrun.cli.world import Aws

    settings = stream_settings(
        config=config,
        overrides=overrides,
        stream=stream,
        endpoint=endpoint,
        region=region,
        verb="put",
    )
    aws = Aws(settings)
    from kclrun.cli.put_input import entries, format_of

    with _opened(file) as source, _progress() as progress:
        read = entries(source, kind or format_of(file), key)
        rows = _paced(read if file != "-" else _as_they_come(read), rate)
        return _put_all(aws, rows, progress, aggregate=aggregate, ordered=ordered)


def _put_all(aws: Aws, rows: Rows, progress: Progress, *, aggregate: bool, ordered: bool) -> int:
    """Send every row; the exit code. Raises: SettingsError, ServiceError, told how far it got."""
    from kclrun.aws.put_records import batches, send_all

    packed = _aggregated(aws, rows) if aggregate else rows
    done = 0
    started = time.monotonic()
    try:
        for batch in batches(packed, one_a_key=ordered):
            send_all(aws.kinesis_client, aws.settings.only_stream, batch)
            done += sum(entry.user_records for entry in batch)
            progress(done)
    except KeyboardInterrupt:
        click.echo(f"Interrupted: {done:,} rows are in the stream for certain", err=True)
        raise
    except (ServiceError, SettingsError) as error:
        error.args = (f"{error}\n{done:,} rows are in the stream for certain", *error.args[1:])
        raise
    took_s = max(time.monotonic() - started, 1e-9)
    click.echo(f"{done:,} rows put in {took_s:.1f} s ({done / took_s:,.0f}/s)")
    return exit_codes.DRAINED


def _aggregated(aws: Aws, rows: Rows) -> Rows:
    """The rows packed by shard; the shards are listed anew when the list may have aged."""
    from kclrun.aws.put_records import ShardPacker

    packer = ShardPacker(aws.stream.list_shards(), share=1.0)
    listed = time.monotonic()
    for row in rows:
        if row is not None:
            yield from packer.add(row)
        is_old = time.monotonic() - listed > _SHARDS_AGE_MAX_S
        if row is None or is_old:
            yield from packer.flush()
            yield None
        if is_old:
            packer, listed = ShardPacker(aws.stream.list_shards(), share=1.0), time.monotonic()
    yield from packer.flush()


def _paced(rows: Rows, rate: int | None) -> Rows:
    """The rows, no sooner than `rate` a second allows."""
    if rate is None:
        yield from rows
        return
    started = time.monotonic()
    number = 0
    for row in rows:
        early_s = started + number / rate - time.monotonic()
        if row is not None and early_s > 0:
            if early_s > _IDLE_S:
                yield None  # what is waiting need not wait for the pace
            time.sleep(early_s)
        number += row is not None
        yield row


def _as_they_come(rows: Iterator[PutEntry]) -> Rows:
    """The rows of a pipe, and None when it has been silent for a moment: time to send."""
    arrived: queue.Queue[PutEntry | BaseException | None] = queue.Queue(maxsize=_AHEAD_MAX)

    def read() -> None:
        try:
            for row in rows:
                arrived.put(row)
            arrived.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that sends
            arrived.put(error)

    # A thread that waits for a pipe cannot be stopped: it ends with the program.
    threading.Thread(target=read, name="input", daemon=True).start()
    while True:
        try:
            row = arrived.get(timeout=_IDLE_S)
        except queue.Empty:
            yield None
            continue
        if row is None:
            return
        if isinstance(row, BaseException):
            raise row
        yield row


@contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        if sys.stdin.isatty():
            click.echo("Reading rows from the terminal; Ctrl-D ends them.", err=True)
        yield sys.stdin.buffer
        return
    try:
        source = Path(file).open("rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from None
    with source:
        yield source


def _progress() -> AbstractContextManager[Progress]:
    return _bar() if sys.stderr.isatty() else nullcontext(lambda _: None)


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    started = time.monotonic()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("0 rows")

        def show(rows: int) -> None:
            rate = rows / max(time.monotonic() - started, 1e-9)
            bar.update(task, description=f"{rows:,} rows, {rate:,.0f}/s")

        yield show
