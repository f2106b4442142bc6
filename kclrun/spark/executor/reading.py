"""Reading the ranges of one task on an executor.

Shards are opened by up to eight threads (`shard_reading.py`), whose pages come through
`read_ahead.py`; what belongs to a range is decided in `range_cursor.py`.
Rule: when the iterator ends, is closed or fails, its threads are gone before it returns.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Final

import msgspec

from kclrun.codec.kpl import drop_until, open_aggregates
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.ports import ShardReader, StreamAdmin
from kclrun.spark.executor.read_ahead import Closed, ReadAhead
from kclrun.spark.executor.shard_reading import Clocks, ReadingFrom, ShardReading
from kclrun.spark.positions import Position
from kclrun.spark.ranges import ShardRange
from kclrun.spark.settings import SourceSettings

__all__ = ["Clocks", "ReadPage", "read_ranges"]

# A range takes 27 ms of waiting before its first record: fifty shards one after the other would
# be 1.35 s. As many as the wire client has connections.
SHARDS_AT_ONCE: Final = 8
# What is opened at once: ten thousand records of 200 bytes in one piece, and no more than some
# hundred thousand user records where they are tiny.
_OPENED_BYTES_MAX: Final = 2 * 2**20

# A page as it was fetched: its range, aggregates not opened, whether it is the last.
_Raw = tuple[ShardRange, Sequence[Record], bool]


class ReadPage(msgspec.Struct, frozen=True):
    """Records of one range, in order.

    `is_last` is true once a range: with the last of its records, or with none. Pages of several
    ranges come mixed; those of one come in its order.
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
    waits for records that the driver has seen and this reader not yet. Throttling, outages and
    expired iterators are waited out (`retry_attempts` in a row at most). `admin` is asked for the
    retention, and only where a record is gone. Close the iterator or exhaust it: its threads end
    with it. Holds at most one page a shard ahead, 64 MiB of data in all.

    Raises: DataLoss where records of a range are gone, unless `fails_on_data_loss` is off: then
    one warning a range is logged, and what is left is read. AccessDenied and InvalidRequest at
    once, Throttled and Unavailable when the attempts are spent.
    """
    unread = deque(each for each in ranges if each.hint.rows is None)
    count = min(SHARDS_AT_ONCE, len(unread))
    ahead: ReadAhead[_Raw] = ReadAhead(count)
    task = _Task(ReadingFrom(reader, admin, settings, clocks or Clocks()), ahead, unread)
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
    """What the reading threads of one task share."""

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
        """A thread's life: one range after the other, until none is left."""
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
    """A page as its consumer sees it, in pieces: opening makes many records of few bytes."""
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
    """Without the record that the range begins in, if nothing of it is left.

    An aggregate that stays closed cannot be had in part: it comes again whole.
    """
    if begin.sub_sequence_number is None:
        return list(records)
    return [
        record
        for record in records
        if record.sequence_number != begin.number or _beyond(begin, open_aggregates([record]))
    ]


def _beyond(begin: Position, records: list[Record]) -> list[Record]:
    """Without the user records up to where the range begins inside an aggregate."""
    if begin.sub_sequence_number is None:
        return records
    return drop_until(records, ExtendedSequenceNumber(begin.number, begin.sub_sequence_number))
