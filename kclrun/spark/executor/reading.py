"""Reads the ranges of one task on an executor and makes Arrow rows of their records.

Up to eight threads read shards. They have ended before the iterator ends, is closed or raises.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from kclrun import errors
from kclrun.codec.kpl import drop_until, open_aggregates
from kclrun.model.quotas import GET_BYTES_MAX
from kclrun.model.reading import Fetch
from kclrun.model.record import Record, StartPoint
from kclrun.model.retries import PASSING, Retries
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant, WallTime
from kclrun.ports import ShardReader, StreamAdmin
from kclrun.spark.executor.range_cursor import (
    SILENCE_S_MAX,
    AskRetention,
    RangeCursor,
    ReadPace,
    Request,
)
from kclrun.spark.offsets import ShardRange
from kclrun.spark.options import SourceSettings
from kclrun.spark.positions import Position
from kclrun.spark.stream_set import summary_of

# Pages on their way from the threads that read shards to the thread that takes them.
#
# `ReadAhead` does not know the content of a page or how it is read. Each shard has at most one page
# on its way; all pages together stay within a bound of bytes; closing wakes all threads.
Page = TypeVar("Page")

# Bytes that a task holds beside the page in work: little for a Python worker, and enough for the
# largest answers (10 MiB of data) of several shards.
BYTES_MAX: Final = 64 * 2**20
# A page is counted before it arrives, with the size of the largest so far; the first with this.
_FIRST_PAGE_BYTES: Final = 2**20


class Closed(Exception):
    """The pages are not wanted any more."""


class ReadAhead(Generic[Page]):
    """A bounded queue of pages from `readers` threads to one taker.

    The bound is exceeded at most by the bytes that the first pages have above 1 MiB each: the size
    of a page is unknown before the first one has arrived.
    """

    def __init__(self, readers: int) -> None:
        self._changed = threading.Condition()
        self._readers = readers
        self._held_bytes: dict[str, int] = {}
        self._waiting: deque[tuple[str, Page]] = deque()
        self._largest_bytes = _FIRST_PAGE_BYTES
        self._error: BaseException | None = None
        self._is_closed = False

    def admit(self, shard_id: str) -> None:
        """Wait until the shard's next page may be fetched; counts it. Raises: Closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_room(shard_id))
            if self._is_closed:
                raise Closed
            self._held_bytes[shard_id] = self._largest_bytes

    def put(self, shard_id: str, page: Page, size_bytes: int) -> None:
        """Queue a page that was admitted."""
        with self._changed:
            self._held_bytes[shard_id] = size_bytes
            self._largest_bytes = min(max(self._largest_bytes, size_bytes), GET_BYTES_MAX)
            self._waiting.append((shard_id, page))
            self._changed.notify_all()

    def leave(self, error: BaseException | None = None) -> None:
        """A reading thread has finished, or failed with an error that `pages` raises."""
        with self._changed:
            self._readers -= 1
            self._error = self._error or error
            self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait for some time. Raises: Closed, as soon as the queue is closed."""
        with self._changed:
            if self._changed.wait_for(lambda: self._is_closed, seconds):
                raise Closed

    def pages(self) -> Iterator[Page]:
        """The pages as they come, until all readers have left. Raises: the error of a reader."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._waiting or self._error is not None or self._readers == 0
                )
                if self._error is not None:
                    raise self._error
                if not self._waiting:
                    return
                shard_id, page = self._waiting.popleft()
                del self._held_bytes[shard_id]
                self._changed.notify_all()
            yield page

    def close(self) -> None:
        """Take no more pages; wakes every waiting reader."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _has_room(self, shard_id: str) -> bool:
        if shard_id in self._held_bytes:
            return False
        # An empty queue always has room: a page counts as 10 MiB at most.
        return sum(self._held_bytes.values()) + self._largest_bytes <= BYTES_MAX


# One range in one thread: sends the requests of its cursor, paced, and repeats failed ones.
#
# It decides nothing about records; `range_cursor.py` does. Temporary errors are waited out, with
# one log message if they last. Other errors are raised at once, with the shard and the stream.
_log = logging.getLogger("kclrun.spark.executor.reading")

# An outage is logged once it has lasted so long; shorter outages are normal.
_LOGGED_AFTER_S: Final = 30.0
# A wait for records is logged, too: a gap of a day is 240 empty pages, which take a minute and a
# half.
_AWAITED_S_MAX: Final = 120.0
# A shard that one host of the service does not find is asked for again, as long and as often.
_MISSING_S_MAX: Final = 10.0
_MISSING_PAUSE_S: Final = 1.0
# GetRecords allows five calls a second: the shortest pause after a throttled call.


@dataclass(frozen=True)
class Clocks:
    """The time and random sources of a reader. `sleep` None really waits, and is interruptible."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    chance: Callable[[], float] = random.random
    sleep: Callable[[float], None] | None = None


@dataclass(frozen=True)
class ReadingFrom:
    """The stream that a task reads, and how."""

    reader: ShardReader
    admin: StreamAdmin
    settings: SourceSettings
    clocks: Clocks


class ShardReading:
    """Performs one range. `pause` waits some seconds, or raises once the pages are not wanted."""

    def __init__(
        self, wanted: ShardRange, source: ReadingFrom, pause: Callable[[float], None]
    ) -> None:
        clocks, settings = source.clocks, source.settings
        self._wanted = wanted
        self._reader = source.reader
        self._admin = source.admin
        self._settings = settings
        self._retries = Retries(
            attempts_max=settings.retry_attempts,
            base_s=0.1,
            max_s=settings.retry_backoff_max_s,
            passing=(*PASSING, errors.ExpiredIterator),
        )
        self._clocks = clocks
        self._pause = pause
        self._stream, self._shard_id = settings.address.named(wanted.shard_id)
        self._cursor = RangeCursor(
            wanted,
            stream=self._stream,
            tolerates_loss=not settings.fails_on_data_loss,
            token_now=WallTime(clocks.wall()),
        )
        self._pace = ReadPace(settings.reads_per_second_max, self._now())
        self._failures = 0
        self._failing_since: Instant  # the first failure of the current outage
        self._is_logged: bool  # whether that outage is
        self._asked_at: Instant  # the last call of `next_records`
        self._is_wait_logged = False
        self._missing_since: Instant | None = None  # while the shard is not found

    @property
    def is_done(self) -> bool:
        """Whether the range's end was reached."""
        return self._cursor.request() is None

    def next_records(self) -> Sequence[Record]:
        """The next records of the range; none only once it is done.

        Raises: DataLoss, AccessDenied, InvalidRequest; Throttled and Unavailable once
        `retry_attempts` in a row have failed.
        """
        self._asked_at = self._now()
        while (request := self._cursor.request()) is not None:
            try:
                records = self._perform(request)
            except errors.ServiceError as error:
                self._recover(error, request)
                records = ()
            else:
                if isinstance(request, Fetch):
                    self._failures = 0
                    self._missing_since = None
                    self._log_wait(records)
            self._log_losses()
            if records:
                return records
        return ()

    def _perform(self, request: Request) -> Sequence[Record]:
        match request:
            case StartPoint():
                shard_id = self._wanted.shard_id
                self._cursor.opened(self._reader.iterator(shard_id, request))
                return ()
            case Fetch(iterator, limit):
                # Pause also for zero seconds: `pause` raises Closed when reading must stop.
                self._pause(self._pace.delay_s(self._now()))
                return self._cursor.take(self._reader.fetch(iterator, limit), self._now())
            case AskRetention():
                summary = summary_of(self._admin, self._wanted.shard_id)
                retention_hours = summary.retention_hours
                return self._cursor.judge(retention_hours, WallTime(self._clocks.wall()))

    def _recover(self, error: errors.ServiceError, request: Request) -> None:
        """Prepare for another attempt. Raises: errors that another attempt would not repair."""
        is_refused = isinstance(
            error, errors.ExpiredIterator | errors.NotFound | errors.InvalidRequest
        )
        if is_refused and self._cursor.is_hinted:
            self._cursor.reopen()
            return
        if isinstance(error, errors.NotFound) and not isinstance(request, AskRetention):
            self._missed(error)
            return
        if isinstance(error, errors.ExpiredIterator):
            self._cursor.reopen()
        self._wait_after(error)

    def _missed(self, error: errors.NotFound) -> None:
        """The shard is not found. One host of the service may lag behind a reshard: only a shard
        that is not found for some time is missing. Raises: DataLoss then, unless that is allowed.
        An error is soon: a retry of the task looks again. What is left out is left out for good."""
        if self._missing_since is None:
            self._missing_since = self._now()
        fails = self._settings.fails_on_data_loss
        if self._now() - self._missing_since >= (_MISSING_S_MAX if fails else SILENCE_S_MAX):
            self._cursor.missing(str(error))
            return
        self._cursor.reopen()
        self._pause(_MISSING_PAUSE_S)

    def _wait_after(self, error: errors.ServiceError) -> None:
        now = self._now()
        if not self._failures:
            self._failing_since, self._is_logged = now, False
        self._failures += 1
        pause_s = self._retries.pause_s(error, self._failures, self._clocks.chance())
        if pause_s is None:
            raise self._explained(error) from error
        if now - self._failing_since >= _LOGGED_AFTER_S and not self._is_logged:
            self._is_logged = True
            _log.warning(
                "%s of stream %s cannot be read for %.0f s now, still trying: %s",
                self._shard_id,
                self._stream,
                now - self._failing_since,
                error,
            )
        self._pause(pause_s)

    def _log_wait(self, records: Sequence[Record]) -> None:
        """Log once that no record comes for long, although the driver has seen the next one."""
        waited_s = self._now() - self._asked_at
        if not records and waited_s >= _AWAITED_S_MAX and not self._is_wait_logged:
            self._is_wait_logged = True
            _log.warning(
                "%s of stream %s has given no record for %.0f s, still waiting for %s",
                self._shard_id,
                self._stream,
                waited_s,
                self._wanted.end,
            )

    def _explained(self, error: errors.ServiceError) -> errors.ServiceError:
        """An error of the same class, with the shard, the stream and advice added."""
        text = f"{self._shard_id} of stream {self._stream}: {error}"
        if isinstance(error, errors.AccessDenied):
            text += (
                "\n  Each executor uses the AWS credentials of its own host: its role needs"
                " kinesis:GetShardIterator, kinesis:GetRecords and kinesis:DescribeStreamSummary"
            )
        elif isinstance(error, errors.InvalidRequest):
            text += (
                f"\n  The range is {self._wanted.begin} to {self._wanted.end}: a stream that was"
                " deleted and created again needs a new checkpoint location"
            )
        return error.reworded(text)

    def _log_losses(self) -> None:
        while self._cursor.notices:
            _log.warning("%s", self._cursor.notices.pop(0))

    def _now(self) -> Instant:
        return Instant(self._clocks.monotonic())


# Records as Arrow rows: the columns of the source.
#
# Spark compares the first batch of a task with the schema exactly, types and order: `string`, not
# `large_string`; microseconds in UTC. `SCHEMA` is the same schema as DDL.
# Each record is one row, in the order of the records; a batch is bounded in rows and in bytes.
SCHEMA: Final = (
    "data binary, partitionKey string, explicitHashKey string, stream string, shardId string,"
    " sequenceNumber string, subSequenceNumber bigint, approximateArrivalTimestamp timestamp"
)
ARROW_SCHEMA: Final = pa.schema(
    [
        ("data", pa.binary()),
        ("partitionKey", pa.string()),
        ("explicitHashKey", pa.string()),
        ("stream", pa.string()),
        ("shardId", pa.string()),
        ("sequenceNumber", pa.string()),
        ("subSequenceNumber", pa.int64()),
        ("approximateArrivalTimestamp", pa.timestamp("us", tz="UTC")),
    ]
)

# Spark's own limit of one batch (spark.sql.execution.arrow.maxRecordsPerBatch).
_ROWS_MAX: Final = 10_000
# Offsets of a binary column are 32-bit, and a batch exists several times on its way to the JVM.
_DATA_BYTES_MAX: Final = 32 * 2**20
_MICROSECONDS: Final = 1_000_000


def record_batches(
    records: Sequence[Record], stream: str, shard_id: str
) -> Iterator[pa.RecordBatch]:
    """The rows of some records of one shard, in their order; none for no records.

    Each batch has the schema `ARROW_SCHEMA`, at most 10,000 rows, and at most 32 MiB of data
    unless a single record is larger. `explicitHashKey` is null unless the record came out of an
    aggregate: GetRecords does not return it.
    """
    data = [record.data for record in records]
    for first, last in cuts(list(map(len, data)), _ROWS_MAX, _DATA_BYTES_MAX):
        yield _batch(records[first:last], data[first:last], stream, shard_id)


def cuts(sizes: Sequence[int], rows_max: int, bytes_max: int) -> Iterator[tuple[int, int]]:
    """The first and last index of each batch, from the sizes of the rows: at most so many rows
    and, unless one row is larger, so many bytes."""
    if 0 < len(sizes) <= rows_max and sum(sizes) <= bytes_max:
        yield 0, len(sizes)
        return
    first = size = 0
    for index, length in enumerate(sizes):
        if index > first and (index - first == rows_max or size + length > bytes_max):
            yield first, index
            first, size = index, 0
        size += length
    if first < len(sizes):
        yield first, len(sizes)


def _batch(
    records: Sequence[Record], data: Sequence[bytes], stream: str, shard_id: str
) -> pa.RecordBatch:
    count = len(records)
    arrived_s = pa.array([record.approximate_arrival_timestamp for record in records], pa.float64())
    arrived_us = pc.round(pc.multiply(arrived_s, _MICROSECONDS)).cast(pa.int64())
    if True in [record.aggregated for record in records]:
        hash_keys = pa.array([record.explicit_hash_key for record in records], pa.string())
        sub_numbers = pa.array([record.sub_sequence_number for record in records], pa.int64())
    else:
        hash_keys = pa.nulls(count, pa.string())
        sub_numbers = pa.repeat(pa.scalar(0, pa.int64()), count)
    columns = [
        pa.array(data, pa.binary()),
        pa.array([record.partition_key for record in records], pa.string()),
        hash_keys,
        pa.repeat(pa.scalar(stream, pa.string()), count),
        pa.repeat(pa.scalar(shard_id, pa.string()), count),
        pa.array([record.sequence_number for record in records], pa.string()),
        sub_numbers,
        arrived_us.cast(ARROW_SCHEMA.field("approximateArrivalTimestamp").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ARROW_SCHEMA)


# A range waits 27 ms for its first record: fifty shards one after the other would take 1.35 s.
# The number is the same as that of the wire client's connections.
SHARDS_AT_ONCE: Final = 8
# Aggregates are opened in pieces of this size: ten thousand records of 200 bytes in one piece, and
# at most some hundred thousand user records where they are tiny.
_OPENED_BYTES_MAX: Final = 2 * 2**20


class _FetchedPage(NamedTuple):  # aggregates are not opened
    range: ShardRange
    records: Sequence[Record]
    size_bytes: int
    is_last: bool


class ReadPage(msgspec.Struct, frozen=True):
    """Records of one range, in order.

    `is_last` is true exactly once for a range: with its last records, or without records. Pages of
    several ranges come interleaved; the pages of one range come in order.
    """

    range: ShardRange
    records: list[Record]
    is_last: bool


def read_ranges(
    reader: ShardReader,
    ranges: Sequence[ShardRange],
    settings: SourceSettings,
    *,
    admin: StreamAdmin,
    clocks: Clocks | None = None,
) -> Generator[ReadPage, None, None]:
    """All records of the ranges, as a function of their beginnings and ends.

    Aggregates are opened where the settings say so. A range ends at its end only: the iteration
    waits for records that the driver has seen and this reader has not yet. Throttling, outages and
    expired iterators are waited out (`retry_attempts` in a row at most). `admin` is asked for the
    retention, and only where a record is gone. Close the iterator or exhaust it: its threads end
    with it. Holds at most one page a shard ahead, 64 MiB of data in all.

    Where children and their parents are among the ranges, a generation is read to its end before
    the next one begins.

    Raises: DataLoss where records of a range are gone, unless `fails_on_data_loss` is off: then
    one warning a range is logged, and the remaining records are read. AccessDenied and
    InvalidRequest at once, Throttled and Unavailable when the attempts are spent.
    """
    source = ReadingFrom(reader, admin, settings, clocks or Clocks())
    for generation in sorted({shard_range.generation for shard_range in ranges}):
        yield from _read_together(
            [shard_range for shard_range in ranges if shard_range.generation == generation], source
        )


def _read_together(
    ranges: Sequence[ShardRange], source: ReadingFrom
) -> Generator[ReadPage, None, None]:
    settings = source.settings
    unread = deque(shard_range for shard_range in ranges if shard_range.hint.rows is None)
    count = min(SHARDS_AT_ONCE, len(unread))
    ahead: ReadAhead[_FetchedPage] = ReadAhead(count)
    task = _Task(source, ahead, unread)
    threads = [
        threading.Thread(target=task.work, name=f"kclrun-read-{number}", daemon=True)
        for number in range(count)
    ]
    try:
        for thread in threads:
            thread.start()
        for wanted in ranges:
            if wanted.hint.rows is not None:
                rows = wanted.hint.rows
                yield from _opened(wanted, rows, _bytes_of(rows), settings, is_last=True)
        for wanted, records, size_bytes, is_last in ahead.pages():
            yield from _opened(wanted, records, size_bytes, settings, is_last=is_last)
    finally:
        ahead.close()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


class _Task:
    """The state that the reading threads of one task share."""

    def __init__(
        self,
        source: ReadingFrom,
        ahead: ReadAhead[_FetchedPage],
        unread: deque[ShardRange],
    ) -> None:
        self._source = source
        self._ahead = ahead
        self._unread = unread

    def work(self) -> None:
        """The loop of one thread: reads one range after the other, until none is left."""
        try:
            while True:
                try:
                    wanted = self._unread.popleft()  # atomic
                except IndexError:
                    break
                self._read(wanted)
        except Closed:
            self._ahead.leave()
        except BaseException as error:  # noqa: BLE001 - the thread's edge: the taker raises it
            self._ahead.leave(error)
        else:
            self._ahead.leave()

    def _read(self, wanted: ShardRange) -> None:
        reading = ShardReading(wanted, self._source, self._pause)
        is_done = False
        while not is_done:
            self._ahead.admit(wanted.shard_id)
            records = reading.next_records()
            is_done = reading.is_done
            size_bytes = _bytes_of(records)
            page = _FetchedPage(wanted, records, size_bytes, is_done)
            self._ahead.put(wanted.shard_id, page, size_bytes)

    def _pause(self, seconds: float) -> None:
        if self._source.clocks.sleep is not None:
            self._source.clocks.sleep(seconds)
            seconds = 0.0
        self._ahead.pause(seconds)


def _bytes_of(records: Sequence[Record]) -> int:
    return sum([len(record.data) for record in records])


def _opened(
    wanted: ShardRange,
    records: Sequence[Record],
    size_bytes: int,
    settings: SourceSettings,
    *,
    is_last: bool,
) -> Iterator[ReadPage]:
    """A page as its consumer gets it, in pieces: opening makes many records of few bytes."""
    if not settings.opens_aggregates:
        left = _closed_beyond(wanted.begin, records)
        if left or is_last:
            yield ReadPage(wanted, left, is_last)
        return
    pieces = [records] if size_bytes <= _OPENED_BYTES_MAX else _pieces(records)
    for index, piece in enumerate(pieces, start=1):
        opened = _beyond(wanted.begin, open_aggregates(piece))
        ends = is_last and index == len(pieces)
        if opened or ends:
            yield ReadPage(wanted, opened, ends)


def _pieces(records: Sequence[Record]) -> Sequence[Sequence[Record]]:
    """The records in pieces of at most 2 MiB."""
    sizes = [len(record.data) for record in records]
    bounds = cuts(sizes, len(records), _OPENED_BYTES_MAX)
    return [records[first:last] for first, last in bounds]


def _closed_beyond(begin: Position, records: Sequence[Record]) -> list[Record]:
    """Drops the record that the range begins in if all its user records come before the range.

    A closed aggregate cannot be delivered in part. If one of its user records is in the range, it
    comes again as a whole.
    """
    if begin.sub_sequence_number is None:
        return list(records)
    return [
        record
        for record in records
        if record.sequence_number != begin.number or _beyond(begin, open_aggregates([record]))
    ]


def _beyond(begin: Position, records: list[Record]) -> list[Record]:
    """Drops the user records up to the range's beginning inside an aggregate."""
    if begin.sub_sequence_number is None:
        return records
    return drop_until(records, ExtendedSequenceNumber(begin.number, begin.sub_sequence_number))
