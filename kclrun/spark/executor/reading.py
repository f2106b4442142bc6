"""Reads the ranges of one task on an executor and makes Arrow rows of their records.

Up to eight threads read shards. When the iterator ends, is closed or fails, its threads have ended
before it returns.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from kclrun.codec.kpl import drop_until, open_aggregates
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.ports import ShardReader, StreamAdmin
from kclrun.spark.executor.shard_reading import Clocks, Closed, ReadAhead, ReadingFrom, ShardReading
from kclrun.spark.offsets import ShardRange
from kclrun.spark.options import SourceSettings
from kclrun.spark.positions import Position

# Records as Arrow rows: the columns of the source.
#
# Spark compares the first batch of a task with the schema exactly, types and order: `string`, not
# `large_string`; microseconds in UTC. `SCHEMA` says the same to Spark, as DDL.
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
    for first, last in _cuts(records):
        yield _batch(records[first:last], stream, shard_id)


def _cuts(records: Sequence[Record]) -> Iterator[tuple[int, int]]:
    """The first and last index of each batch."""
    size = sum([len(record.data) for record in records])
    if 0 < len(records) <= _ROWS_MAX and size <= _DATA_BYTES_MAX:
        yield 0, len(records)
        return
    first = size = 0
    for index, record in enumerate(records):
        length = len(record.data)
        if index > first and (index - first == _ROWS_MAX or size + length > _DATA_BYTES_MAX):
            yield first, index
            first, size = index, 0
        size += length
    if first < len(records):
        yield first, len(records)


def _batch(records: Sequence[Record], stream: str, shard_id: str) -> pa.RecordBatch:
    count = len(records)
    arrived_s = pa.array([each.approximate_arrival_timestamp for each in records], pa.float64())
    arrived_us = pc.round(pc.multiply(arrived_s, _MICROSECONDS)).cast(pa.int64())
    columns = [
        pa.array([each.data for each in records], pa.binary()),
        pa.array([each.partition_key for each in records], pa.string()),
        pa.array([each.explicit_hash_key for each in records], pa.string()),
        pa.repeat(pa.scalar(stream, pa.string()), count),
        pa.repeat(pa.scalar(shard_id, pa.string()), count),
        pa.array([each.sequence_number for each in records], pa.string()),
        pa.array([each.sub_sequence_number for each in records], pa.int64()),
        arrived_us.cast(ARROW_SCHEMA.field("approximateArrivalTimestamp").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ARROW_SCHEMA)


# A range waits 27 ms for its first record: fifty shards one after the other would take 1.35 s.
# The number is the same as that of the wire client's connections.
SHARDS_AT_ONCE: Final = 8
# Aggregates are opened in pieces of this size: ten thousand records of 200 bytes in one piece, and
# at most some hundred thousand user records where they are tiny.
_OPENED_BYTES_MAX: Final = 2 * 2**20

# A fetched page: its range, its records with aggregates not opened, whether it is the last page.
_Raw = tuple[ShardRange, Sequence[Record], bool]


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
    for generation in sorted({each.generation for each in ranges}):
        yield from _read_together(
            [each for each in ranges if each.generation == generation], source
        )


def _read_together(
    ranges: Sequence[ShardRange], source: ReadingFrom
) -> Generator[ReadPage, None, None]:
    settings = source.settings
    unread = deque(each for each in ranges if each.hint.rows is None)
    count = min(SHARDS_AT_ONCE, len(unread))
    ahead: ReadAhead[_Raw] = ReadAhead(count)
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
                yield from _opened(wanted, wanted.hint.rows, settings, is_last=True)
        for wanted, records, is_last in ahead.pages():
            yield from _opened(wanted, records, settings, is_last=is_last)
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
        ahead: ReadAhead[_Raw],
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
            size_bytes = sum([len(record.data) for record in records])
            self._ahead.put(wanted.shard_id, (wanted, records, is_done), size_bytes)

    def _pause(self, seconds: float) -> None:
        if self._source.clocks.sleep is not None:
            self._source.clocks.sleep(seconds)
            seconds = 0.0
        self._ahead.pause(seconds)


def _opened(
    wanted: ShardRange, records: Sequence[Record], settings: SourceSettings, *, is_last: bool
) -> Iterator[ReadPage]:
    """A page as its consumer gets it, in pieces: opening makes many records of few bytes."""
    if not settings.opens_aggregates:
        left = _closed_beyond(wanted.begin, records)
        if left or is_last:
            yield ReadPage(wanted, left, is_last)
        return
    pieces = list(_pieces(records))
    for index, piece in enumerate(pieces, start=1):
        opened = _beyond(wanted.begin, open_aggregates(piece))
        ends = is_last and index == len(pieces)
        if opened or ends:
            yield ReadPage(wanted, opened, ends)


def _pieces(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    """The records in pieces of at most 2 MiB; one piece where there are none."""
    if sum([len(record.data) for record in records]) <= _OPENED_BYTES_MAX:
        yield records
        return
    first = size = 0
    for index, record in enumerate(records):
        if size > 0 and size + len(record.data) > _OPENED_BYTES_MAX:
            yield records[first:index]
            first, size = index, 0
        size += len(record.data)
    yield records[first:]


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
