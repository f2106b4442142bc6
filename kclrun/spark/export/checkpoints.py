"""Expresses a query's position in a shard as a lease's checkpoint: everything up to it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from kclrun.codec.kpl import open_aggregates
from kclrun.errors import Unavailable
from kclrun.model.record import IteratorType, Record
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.ports import ShardReader
from kclrun.spark.positions import Place, Position

# How far before record n the search for the previous record begins. If no record arrived in one
# stretch, the next stretch is ten times as long. Only the records of the last one are read.
_BACK_S: Final = (1.0, 10.0, 100.0, 1_000.0, 10_000.0, 100_000.0)
_PAGE_RECORDS: Final = 1_000
# A front end of the service may lag: an empty answer at the tip is believed the third time.
_TIP_LOOKS: Final = 3
_TIP_PAUSE_S: Final = 0.3


class LeaseCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint; with LATEST, the instant it is pinned to [P14]. `note` names a loss."""

    checkpoint: ExtendedSequenceNumber
    pinned_at: WallTime | None = None
    note: str = ""


def checkpoint_for(
    reader: ShardReader,
    shard_id: str,
    position: Position,
    *,
    wait: Callable[[float], object] = time.sleep,
) -> LeaseCheckpoint:
    """The checkpoint from which a fleet reads exactly the records after `position`.

    Spark's bounds are often "before record n", and a lease can only name a processed record. n - 1
    does not help: it is not the number of a record, and the service refuses numbers that it did not
    make. So the stream is read to find the record before n; a sentinel is used if none is found.
    The result is a record's number, a sentinel, or SHARD_END, and never a guess. Where the answer
    is not certain, the position is lower, so that records come twice.

    Reads the stream only for a record's number: two to four calls, more where the shard had been
    idle. Raises: a ServiceError leaf.
    """
    match position.place:
        case Place.TRIM_HORIZON:
            return LeaseCheckpoint(TRIM_HORIZON)
        case Place.TIMESTAMP:
            return LeaseCheckpoint(LATEST, WallTime(position.timestamp_ms / 1000))
        case Place.SHARD_END:
            return LeaseCheckpoint(SHARD_END)
    if position.sub_sequence_number is not None:
        return LeaseCheckpoint(
            ExtendedSequenceNumber(position.number, position.sub_sequence_number)
        )
    search = _Search(reader, shard_id, position.number, wait)
    return search.before() if position.is_before else search.after()


class _Search:
    """Searches one record of one shard, and the record before it."""

    def __init__(
        self, reader: ShardReader, shard_id: str, number: str, wait: Callable[[float], object]
    ) -> None:
        self._reader = reader
        self._shard_id = shard_id
        self._number = number
        self._wait = wait

    def after(self) -> LeaseCheckpoint:
        record = self._record()
        if record is not None:
            return LeaseCheckpoint(_end_of(record))
        # The record is not in the stream any more, so no part of it comes again.
        return LeaseCheckpoint(
            ExtendedSequenceNumber(self._number),
            note="that record has expired; so has what followed it, if it is as old",
        )

    def before(self) -> LeaseCheckpoint:
        record = self._record()
        if record is None:
            return LeaseCheckpoint(
                TRIM_HORIZON, note="records that the query had not read have expired: lost"
            )
        for back_s in _BACK_S:
            since = WallTime(max(0.0, record.approximate_arrival_timestamp - back_s))
            token = self._reader.iterator(
                self._shard_id, IteratorType.AT_TIMESTAMP, timestamp=since
            )
            if (found := self._last_before(token)) is not None:
                return LeaseCheckpoint(_end_of(found))
        token = self._reader.iterator(self._shard_id, IteratorType.TRIM_HORIZON)
        found = self._last_before(token)
        return LeaseCheckpoint(TRIM_HORIZON if found is None else _end_of(found))

    def _record(self) -> Record | None:
        """The record itself, None if it is not in the stream any more."""
        token = self._reader.iterator(
            self._shard_id, IteratorType.AT_SEQUENCE_NUMBER, sequence_number=self._number
        )
        first = next(self._records(token, 1), None)
        return first if first is not None and first.sequence_number == self._number else None

    def _last_before(self, token: str) -> Record | None:
        """The last record before ours, found by reading on from an earlier place (`token`)."""
        last = None
        for record in self._records(token, _PAGE_RECORDS):
            if _order(record.sequence_number) >= _order(self._number):
                return last
            last = record
        raise Unavailable(
            f"{self._shard_id} held record {self._number} a moment ago and does not show it now:"
            " try again",
            operation="GetRecords",
        )

    def _records(self, token: str, limit: int) -> Iterator[Record]:
        next_token: str | None = token
        looks = 0
        while next_token is not None and looks < _TIP_LOOKS:
            page = self._reader.fetch(next_token, limit)
            yield from page.records
            next_token = page.next_iterator
            if not page.records and not page.millis_behind_latest:
                looks += 1
                self._wait(_TIP_PAUSE_S)


def _end_of(record: Record) -> ExtendedSequenceNumber:
    """The position after the whole record: the last user record where it is an aggregate."""
    users = open_aggregates([record])
    # An aggregate may be empty.
    return users[-1].position if users else ExtendedSequenceNumber(record.sequence_number)


def _order(number: str) -> tuple[int, str]:
    return (len(number), number)
