"""`kclrun put`: puts records from a file or a pipe into a stream, drops none, in bounded memory."""

from __future__ import annotations

import csv
import hashlib
import io
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigCommand, StreamChoice, stream_options
from kclrun.cli.messages import echo
from kclrun.cli.waiting import waiting_for
from kclrun.codec.record_sizes import RecordLimit
from kclrun.config.changes import refuse_changes
from kclrun.config.embedded import SHARDS_MAX
from kclrun.errors import LimitExceeded, ServiceError, SettingsError
from kclrun.model.quotas import RECORD_BYTES_LARGEST
from kclrun.model.record import PutEntry
from kclrun.model.stream import is_loopback
from kclrun.ports import record_limit
from kclrun.producing.flow_control import ProducerSettings

if TYPE_CHECKING:
    from kclrun.cli.services import Aws
    from kclrun.producing.kinesis_producer import KinesisProducer

# Converts rows of a file to entries to put: CSV, JSON lines or text, one record for each row,
# streamed. A JSON line and a text line become a record byte for byte, a CSV row becomes the JSON
# object of its columns. An error names an unusable line by its number and never quotes it.

_FORMATS: Final = ("csv", "jsonl", "text")
_BY_SUFFIX: Final = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}


def format_of(name: str) -> str:
    """The format by the suffix of the file's name; otherwise text, also for standard input."""
    return _BY_SUFFIX.get(PurePath(name).suffix.lower(), "text")


def entries(source: BinaryIO, kind: str, key: str | None, limit: RecordLimit) -> Iterator[PutEntry]:
    """One entry for each row. `key` names the column or field of the partition key; with None the
    key is a hash of the row. `limit` is that of the stream.

    Raises: SettingsError naming the line, for a row that has no key, is broken JSON, or is too
    long.
    """
    rows = {"csv": _csv_rows, "jsonl": _json_rows, "text": _text_rows}[kind](source, key)
    for number, data, routed_by in rows:
        partition_key = routed_by if routed_by is not None else _hash(data)
        entry = PutEntry(data, partition_key)
        try:
            limit.checked_size_bytes(entry)
        except LimitExceeded as error:
            raise SettingsError(f"line {number}: {error}") from None
        yield entry


class Row(NamedTuple):
    """A row of a file: the number of its line, the data of its record, and the partition key that
    its column or field names."""

    line: int
    data: bytes
    key: str | None


def _text_rows(source: BinaryIO, key: str | None) -> Iterator[Row]:
    if key is not None:
        raise SettingsError("--key names a column or field, and text has none: --format csv|jsonl")
    for number, line in _lines(source):
        yield Row(number, line, None)


def _json_rows(source: BinaryIO, key: str | None) -> Iterator[Row]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    for number, line in _lines(source):
        try:
            fields = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise SettingsError(f"line {number}: not a JSON object") from None
        yield Row(number, line, None if key is None else _key_of(fields, key, number))


def _csv_rows(source: BinaryIO, key: str | None) -> Iterator[Row]:
    text = io.TextIOWrapper(source, encoding="utf-8-sig", newline="")
    csv.field_size_limit(RECORD_BYTES_LARGEST)  # of this process; Python's own limit is 128 KiB
    reader = csv.DictReader(_csv_lines(text), strict=True)
    try:
        columns = reader.fieldnames or ()
        twice = next((name for name, count in Counter(columns).items() if count > 1), None)
        if twice is not None:
            raise SettingsError(f"line 1: two columns have the name {twice!r}; rename one")
        if key is not None and key not in columns:
            named = ", ".join(columns) or "none"
            raise SettingsError(f"--key {key}: no such column; there are {named}")
        for row in reader:
            if None in row or None in row.values():
                raise SettingsError(f"line {reader.line_num}: not as many columns as the header")
            data = msgspec.json.encode(row)
            named_key = None if key is None else _key_of(row, key, reader.line_num)
            yield Row(reader.line_num, data, named_key)
    except csv.Error as error:  # in words of Python, which quote nothing of the line
        line = reader.reader.line_num
        raise SettingsError(f"line {line}: not readable as CSV: {error}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"not UTF-8, after line {reader.line_num}") from None
    finally:
        if not source.closed:
            text.detach()  # the caller opened the source and closes it


def _csv_lines(text: io.TextIOWrapper) -> Iterator[str]:
    number = 0
    while line := text.readline(RECORD_BYTES_LARGEST + 1):
        number += 1
        if len(line) > RECORD_BYTES_LARGEST:
            raise SettingsError(f"line {number}: longer than 10 MiB, the most that any record has")
        yield line


def _lines(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines without their ends and without empty ones. At most a record's size of each is read."""
    number = 0
    while line := source.readline(RECORD_BYTES_LARGEST + 3):
        number += 1
        if len(line) > RECORD_BYTES_LARGEST + 2:
            raise SettingsError(f"line {number}: longer than 10 MiB, the most that any record has")
        stripped = line.rstrip(b"\r\n")
        if stripped:
            yield number, stripped


def _key_of(fields: dict[str, Any], key: str, number: int) -> str:
    value = fields.get(key)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise SettingsError(f"line {number}: no text or number in {key}, which --key names")
    return str(value)


def _hash(data: bytes) -> str:
    """A key that spreads rows evenly and sends equal rows to the same shard."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


Progress = Callable[[int], None]
# Entries to put. None means that no more are expected soon, so the entries so far should be sent.
Rows = Iterator["PutEntry | None"]

_FORMAT_HELP: Final = "By default from the extension: .csv, .jsonl; text for all else."
# If a pipe is silent for this time, its held rows are sent.
_IDLE_S: Final = 0.2
# Rows read ahead of the sender: two requests.
_AHEAD_MAX: Final = 1_000
# What waits in memory: ten requests.
_BUFFER_MAX: Final = 5_000


@click.command(cls=ConfigCommand)
@click.argument("file", metavar="[FILE|-]", default="-")
@stream_options
@click.option("--format", "kind", type=click.Choice(_FORMATS), help=_FORMAT_HELP)
@click.option("--key", metavar="COLUMN", help="Column or field that is the partition key.")
@click.option("--rate", type=click.IntRange(min=1), metavar="N", help="At most N records a second.")
@click.option("--aggregate", is_flag=True, help="Pack records as the KPL does, per shard.")
@click.option(
    "--create",
    "shards",
    type=click.IntRange(1, SHARDS_MAX),
    metavar="SHARDS",
    help="On an emulator: make the stream first, if it is not there, with so many shards.",
)
@click.option("--ordered", is_flag=True, help="Keep each key's order under throttling; slower.")
def put(
    *,
    file: str,
    of: StreamChoice,
    kind: str | None,
    key: str | None,
    rate: int | None,
    aggregate: bool,
    shards: int | None,
    ordered: bool,
) -> int:
    """Put each row of FILE (or of standard input) into a stream as one record.

    Rows of CSV become JSON objects; lines of JSON and text go as they are. Without --key the
    partition key is a hash of the row. Records the service refuses for the moment are sent again;
    a later record of the same key may pass one that was refused, unless --ordered or --aggregate.

    \b
    kclrun put --config app.yaml flights.csv --key carrier
    tail -F app.log | kclrun put --stream logs --region eu-west-1
    kclrun put --create 2 --stream hello --endpoint http://127.0.0.1:4567 rows.csv
    """
    from kclrun.cli.services import Aws

    settings = of.settings("put")
    refuse_changes(settings, "put", "that of a table has the changes of its items; write items")
    aws = Aws(settings)
    if shards is not None:
        _create(aws, shards)
    from kclrun.cli.services import advising_on_streams

    with advising_on_streams(aws), _opened(file) as source, _progress() as progress:
        limit = record_limit(aws.stream)
        read = entries(source, kind or format_of(file), key, limit)
        rows = _paced(read if file != "-" else _as_they_come(read), rate)
        sending = ProducerSettings(
            keeps_order=ordered,
            aggregates=aggregate,
            # One request after the other: without a refusal, rows arrive in their order anyhow.
            concurrency=4 if ordered or aggregate else 1,
            buffer_records_max=_BUFFER_MAX,
        )
        return _put_all(aws, rows, progress, sending, limit)


def _create(aws: Aws, shards: int) -> None:
    """Create the stream, only on this host: in AWS a stream costs money as long as it exists.

    Raises: SettingsError for another endpoint; a ServiceError leaf.
    """
    from kclrun.local.filling import make_stream

    name = aws.settings.only_stream
    if not is_loopback(aws.kinesis.url):
        raise SettingsError(
            f"--create makes streams on an emulator of this machine, and {aws.kinesis.url} is not"
            f" one\nMake it in AWS:  aws kinesis create-stream --stream-name {name}"
            f" --shard-count {shards}"
        )
    if make_stream(aws.kinesis, name, shards, aws.credentials.current()):
        echo(f"Made the stream {name} with {shards} {'shard' if shards == 1 else 'shards'}")


def _put_all(
    aws: Aws, rows: Rows, progress: Progress, sending: ProducerSettings, limit: RecordLimit
) -> int:
    """Send every row; returns the exit code. Rows before one that cannot be used are sent, too.

    Raises: SettingsError, ServiceError, after a message with the number of rows that were sent.
    """
    from kclrun.aws.put_records import WirePutter
    from kclrun.producing.kinesis_producer import KinesisProducer

    stream = aws.settings.only_stream
    what = aws.called_stream(stream)
    started = time.monotonic()
    with waiting_for(what):
        shards = aws.stream.list_shards()
    producer = KinesisProducer(
        WirePutter(aws.kinesis_client, stream),
        shards,
        sending,
        relist=aws.stream.list_shards,
        limit=limit,
    )
    backlog = producer.pending.backlog
    try:
        _send(producer, rows, progress, what)
    except KeyboardInterrupt:
        echo(f"Interrupted: {backlog.delivered:,} rows are in the stream for certain", err=True)
        raise
    except (ServiceError, SettingsError) as error:
        known = f"{backlog.delivered:,} rows are in the stream for certain"
        error.args = (f"{error}\n{known}", *error.args[1:])
        raise
    finally:
        producer.close()
    done, took_s = backlog.delivered, max(time.monotonic() - started, 1e-9)
    echo(f"{done:,} rows put in {took_s:.1f} s ({done / took_s:,.0f}/s)")
    return exit_codes.DRAINED


def _send(producer: KinesisProducer, rows: Rows, progress: Progress, what: str) -> None:
    backlog = producer.pending.backlog
    shown = 0
    try:
        for row in rows:
            # Only a full buffer and a flush wait for the service.
            with waiting_for(what) if row is None or backlog.is_full else nullcontext():
                if row is None:
                    producer.flush()
                else:
                    producer.add(row)
            if shown != backlog.delivered:
                shown = backlog.delivered
                progress(shown)
    except SettingsError:
        with waiting_for(what):
            producer.flush()
        raise
    with waiting_for(what):
        producer.flush()
    progress(backlog.delivered)


def _paced(rows: Rows, rate: int | None) -> Rows:
    """The rows, at most `rate` a second."""
    if rate is None:
        yield from rows
        return
    started = time.monotonic()
    number = 0
    for row in rows:
        early_s = started + number / rate - time.monotonic()
        if row is not None and early_s > 0:
            if early_s > _IDLE_S:
                yield None  # held rows need not wait for the pace
            time.sleep(early_s)
        number += row is not None
        yield row


def _as_they_come(rows: Iterator[PutEntry]) -> Rows:
    """The rows of a pipe, and None when the pipe was silent for `_IDLE_S`: send the held rows."""
    arrived: queue.Queue[PutEntry | BaseException | None] = queue.Queue(maxsize=_AHEAD_MAX)

    def read() -> None:
        try:
            for row in rows:
                arrived.put(row)
            arrived.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that sends
            arrived.put(error)

    # A thread that waits for a pipe cannot be stopped. It ends with the program.
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
        # Without a FILE, only this message shows that the program waits for input.
        if sys.stdin.isatty() or sys.stderr.isatty():
            end = "; Ctrl-D ends them" if sys.stdin.isatty() else ""
            echo(f"Reading rows from standard input, a row a line{end}", err=True)
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
