"""`kclrun tail`: the records of a stream as they arrive, across splits and merges.

It reads only the stream, no lease and no checkpoint, so it may be used beside any application.
Records go to standard output, messages to standard error.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from math import inf
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, assert_never

import click

from kclrun.cli import exit_codes
from kclrun.cli.config_options import (
    ConfigCommand,
    RenamedOption,
    StreamChoice,
    keys_option,
    shards_option,
    stream_options,
)
from kclrun.cli.messages import columns_of, echo, has_lost_reader
from kclrun.cli.terminal import stop_signals
from kclrun.cli.times import DURATION, GivenTime, TimeType, is_sequence_number, time_option
from kclrun.config.changes import refuse_changes
from kclrun.errors import SettingsError
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.sequence import LATEST, TRIM_HORIZON
from kclrun.model.stream import is_change_stream, short_name, spelled_out
from kclrun.model.text import escaped, escaped_in_json
from kclrun.model.time import Instant

if TYPE_CHECKING:
    from kclrun.cli.services import Aws
    from kclrun.config.units import Duration
    from kclrun.reading.readers import ReadEvent
    from kclrun.reading.starts import ShardStart


# Aggregates of so many records are opened at a time: one of 1 MiB may hold thousands.
_OPENED_AT_ONCE: Final = 100


@click.command(cls=ConfigCommand)
@stream_options
@time_option(
    "--from",
    "begin",
    kind=TimeType(TRIM_HORIZON, LATEST, is_other=is_sequence_number),
    metavar="TRIM_HORIZON|LATEST|TIME|NUMBER",
    default="LATEST",
    help_text="Where it begins: the oldest record, now (the default), a time, or with one --shard a"
    " sequence number.",
)
@shards_option
@keys_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option(
    "--limit",
    "records_max",
    cls=RenamedOption,
    older="--max",
    type=click.IntRange(min=1),
    metavar="N",
    help="End after N records.",
)
@click.option("--timeout", type=DURATION, metavar="DURATION", help="End after so long, as 30s.")
def tail(
    *,
    of: StreamChoice,
    begin: GivenTime,
    shards: tuple[str, ...],
    keys: tuple[str, ...],
    as_json: bool,
    records_max: int | None,
    timeout: Duration | None,
) -> int:
    """Print the records of a stream as they arrive; Ctrl-C ends it.

    Aggregates are opened. When a shard is split or merged, its children follow; a key's records
    come in their order. With --shard only the named shards are read, and it ends when they do.
    Takes at most half of a shard's five reads a second, and touches no lease.

    \b
    kclrun tail --config app.yaml                         from now on
    kclrun tail --config app.yaml --from 10m --key UA     one key, from ten minutes ago
    kclrun tail --stream logs --region eu-west-1 --from TRIM_HORIZON --json --limit 1000
    """
    from kclrun.cli.services import Aws

    settings = of.settings("tail")
    until = inf if timeout is None else time.monotonic() + timeout
    with _stop_signals() as is_stopped:
        aws = Aws(settings)
        starts = _starts(aws, begin, shards)
        if is_stopped():
            return exit_codes.DRAINED
        count = "1 shard" if len(starts) == 1 else f"{len(starts)} shards"
        view = _View(_line_maker(begin.text, as_json=as_json), keys, records_max)
        return _follow(
            aws,
            starts,
            view,
            follows=not shards,
            said=f"{settings.only_stream}: {count} from {begin.text}",
            is_over=lambda: is_stopped() or time.monotonic() >= until,
        )


def _follow(
    aws: Aws,
    starts: Mapping[str, ShardStart],
    view: _View,
    *,
    follows: bool,
    said: str,
    is_over: Callable[[], bool],
) -> int:
    from kclrun.reading.readers import StreamReaders

    patience_s = float(aws.settings.aws.start_timeout)
    with StreamReaders(
        starts,
        aws.reader,
        aws.stream,
        follows=follows,
        patience_s=patience_s,
        may_be_listed=is_change_stream(aws.settings.only_stream),
    ) as readers:
        for event in readers.events():
            if event is not None:
                _take_in(event, view, said, follows=follows)
            # On a quiet stream no write would show it.
            elif has_lost_reader(sys.stdout):
                raise BrokenPipeError
            if view.is_full or is_over():
                break
    return exit_codes.DRAINED


def _take_in(event: ReadEvent, view: _View, said: str, *, follows: bool) -> None:
    from kclrun.reading.readers import Arrived, Ended, EveryShardBegan, Expired, Passed, Trouble

    match event:
        case Arrived(shard_id=shard_id, records=records):
            view.show(shard_id, records)
        case EveryShardBegan():
            echo(f"Tailing {said}; Ctrl-C ends it", err=True)
        case Ended(shard_id=shard_id, children=children, is_trimmed=is_trimmed):
            heirs = ", ".join(children) or "nothing"
            after = "follows" if follows else "came after it"
            ended = "is trimmed, with records that were not read" if is_trimmed else "has ended"
            echo(f"{shard_id} {ended}; {heirs} {after}", err=True)
        case Expired(shard_id=shard_id, text=text):
            echo(f"{shard_id}: {text}", err=True)
        case Passed():  # a tail goes on until it is stopped
            pass
        case Trouble(text=text):
            echo(text, err=True)
        case _:
            assert_never(event)


class _View:
    """Prints records, and knows how many more it may print."""

    def __init__(self, line_of: LineMaker, keys: Collection[str], records_max: int | None) -> None:
        self._line_of = line_of
        self._keys = keys
        self._left = records_max

    @property
    def is_full(self) -> bool:
        return self._left == 0

    def show(self, shard_id: str, records: Sequence[Record]) -> None:
        """Print the records that match the options. Raises: BrokenPipeError."""
        from kclrun.codec.kpl import open_aggregates

        for first in range(0, len(records), _OPENED_AT_ONCE):
            opened = open_aggregates(records[first : first + _OPENED_AT_ONCE])
            if self._keys:
                opened = [record for record in opened if record.partition_key in self._keys]
            if self._left is not None:
                opened = opened[: self._left]
                self._left -= len(opened)
            text = "".join([f"{self._line_of(shard_id, record)}\n" for record in opened])
            sys.stdout.buffer.write(text.encode())
            sys.stdout.buffer.flush()


def _starts(aws: Aws, begin: GivenTime, shards: Sequence[str]) -> Mapping[str, ShardStart]:
    from kclrun.cli.services import advising_on_streams
    from kclrun.cli.startup import patiently
    from kclrun.reading.starts import first_listing, shard_starts

    start = start_of(begin)
    if start.kind is IteratorType.AT_TIMESTAMP:
        refuse_changes(
            aws.settings,
            "tail --from a time",
            "that of a DynamoDB table cannot be read from one; --from TRIM_HORIZON or LATEST",
        )
    named = [spelled_out(shard) for shard in shards]
    require_one_shard(start, named)
    patience_s = float(aws.settings.aws.start_timeout)
    with advising_on_streams(aws):
        listed = patiently(
            lambda: aws.stream.list_shards(first_listing(start)),
            Instant(time.monotonic() + patience_s),
            patience_s,
            what=aws.called_stream(aws.settings.only_stream),
        )
    return shard_starts(listed, named, start)


def start_of(given: GivenTime) -> StartPoint:
    """The first record of `--from`: that of a sequence number, a position or an instant."""
    from kclrun.reading.starts import start_point

    if given.start is None:
        return StartPoint(IteratorType.AT_SEQUENCE_NUMBER, sequence_number=given.text)
    return start_point(given.start)


def require_one_shard(start: StartPoint, named: Sequence[str]) -> None:
    """Raises: SettingsError for a sequence number that is not of one shard."""
    if start.kind is IteratorType.AT_SEQUENCE_NUMBER and len(set(named)) != 1:
        raise SettingsError("--from with a sequence number is of one shard: name it with --shard")


def _line_maker(begin: str, *, as_json: bool) -> LineMaker:

    if as_json:
        return json_line
    is_terminal = sys.stdout.isatty()
    return for_people(
        columns_max=shutil.get_terminal_size().columns if is_terminal else None,
        # Records from now on need no date.
        with_date=begin != "LATEST",
        with_colours=is_terminal and "NO_COLOR" not in os.environ,
    )


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """The first signal ends the tail between two lines, a second one at once.

    The second one is needed if standard output is a pager that does not read on. A terminal that is
    closed sends SIGHUP more than once.
    """
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if came and number != signal.SIGHUP:
            raise KeyboardInterrupt
        came.append(number)

    former = {number: signal.signal(number, note) for number in stop_signals()}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


# From a shard id and a record to the line without its end.
LineMaker = Callable[[str, Record], str]

# Most keys are shorter; the column aligns the payloads.
_KEY_COLUMN: Final = 12
_KEY_CHARS_MAX: Final = 32
_SHARD_COLUMN: Final = 3
# The data have at least so many columns. On a very narrow terminal the line may therefore wrap.
_DATA_COLUMNS_MIN: Final = 16


def json_line(shard_id: str, record: Record) -> str:
    """One JSON object. `data` is text if the payload is UTF-8, else base64: see `encoding`."""
    try:
        data, encoding = record.data.decode(), "utf-8"
    except UnicodeDecodeError:
        data, encoding = base64.b64encode(record.data).decode(), "base64"
    shown: dict[str, Any] = {
        "shard": shard_id,
        "sequence_number": record.sequence_number,
        "sub_sequence_number": record.sub_sequence_number,
        "partition_key": record.partition_key,
        "arrived_at": _moment(record).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "aggregated": record.aggregated,
        "encoding": encoding,
        "data": data,
    }
    if record.explicit_hash_key is not None:
        shown["explicit_hash_key"] = record.explicit_hash_key
    if record.malformed:
        shown["malformed"] = True
    return escaped_in_json(json.dumps(shown, ensure_ascii=False))


def for_people(*, columns_max: int | None, with_date: bool, with_colours: bool) -> LineMaker:
    """Lines of arrival time (UTC), shard, key and data.

    `columns_max` is the width of the terminal. It is None if the output is not a terminal; then
    lines are not cut.
    """
    pattern = "%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S"
    style = click.style if with_colours else _plain

    def line(shard_id: str, record: Record) -> str:
        moment = _moment(record)
        time_text = f"{moment.strftime(pattern)}.{moment.microsecond // 1000:03d}"
        shard = escaped(short_name(shard_id)).rjust(_SHARD_COLUMN)
        key = escaped(record.partition_key)
        if columns_max is not None:
            key = _cut(key, _KEY_CHARS_MAX)
        key = key.ljust(_KEY_COLUMN)
        data = escaped(record.data.decode("utf-8", "backslashreplace"))
        if record.malformed:
            data = f"(a malformed aggregate) {data}"
        if columns_max is not None:
            used = columns_of(f"{time_text}  {shard}  {key}  ")
            data = _cut(data, max(_DATA_COLUMNS_MIN, columns_max - used))
        return "  ".join(
            (style(time_text, dim=True), style(shard, fg="cyan"), style(key, bold=True), data)
        )

    return line


def _plain(text: str, **_: Any) -> str:
    return text


def _moment(record: Record) -> datetime:
    return datetime.fromtimestamp(record.approximate_arrival_timestamp, UTC)


def _cut(text: str, columns_max: int) -> str:
    """The beginning of `text`, with … if text is cut off."""
    if len(text) <= columns_max and columns_of(text) <= columns_max:
        return text
    from rich.cells import set_cell_size

    # No character is wider than two columns: more of the text cannot fit.
    return set_cell_size(text[:columns_max], columns_max - 1).rstrip() + "…"
