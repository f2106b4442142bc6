"""Reads one shard page by page: the next request, and where reading goes on after a failure.

Pure, and the same for every reader: the lease process, the tasks of Spark, `tail`, `lag` and the
move of a query to the fleet. It knows no pauses: each reader keeps its own share of the five calls
a second that Kinesis allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from kclrun.errors import ExpiredIterator, InvalidRequest, NotFound
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.shard import ChildShard
from kclrun.model.time import WallTime

# GetRecords returns at most 10,000 records or 10 MiB, so a reader of all records requests that: a
# smaller limit only costs more calls.
RECORDS_A_CALL: Final = 10_000


class FetchedPage(msgspec.Struct, frozen=True):
    """One GetRecords answer, aggregates not yet opened.

    `next_iterator` None means the end of a closed shard; `children` then names its children
    (possibly none with services that leave them out). `body_bytes` is the size on the wire;
    `served_at` the service's own time, to the second, None if it gave none.
    """

    records: Sequence[Record]
    next_iterator: str | None
    millis_behind_latest: int | None
    children: tuple[ChildShard, ...] = ()
    body_bytes: int = 0
    served_at: WallTime | None = None

    @property
    def is_empty_tip(self) -> bool:
        """Whether the shard held nothing more. An empty page with lag is a gap before the tip."""
        return not self.records and not self.millis_behind_latest


class Fetch(msgspec.Struct, frozen=True):
    """GetRecords with this iterator and limit."""

    iterator: str
    limit: int


class PageCursor:
    """The pages of one shard, in order, from `start` on.

    Perform `request` and pass the answer to `opened` or `took`, an error to `failed`.

        opening ──opened──► reading ──took, without a next iterator──► opening
           ▲                  │                             (to be asked again only if the shard
           └──failed, reopen──┘                              is not closed [D3])

    An iterator that is lost is replaced by one after the last received record, so no record is
    skipped or comes twice. A reader that checks its place by a record reopens AT that record.
    """

    __slots__ = ("_last_received", "_start", "iterator")

    def __init__(self, start: StartPoint, *, iterator: str | None = None) -> None:
        self._start = start
        self._last_received: str | None = None
        self.iterator = iterator

    @property
    def start(self) -> StartPoint:
        """Where the next iterator is made."""
        if self._last_received is None:
            return self._start
        return StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, self._last_received)

    def request(self, limit: int = RECORDS_A_CALL) -> StartPoint | Fetch:
        """The next request: an iterator at a place, or a page."""
        return self.start if self.iterator is None else Fetch(self.iterator, limit)

    def opened(self, iterator: str) -> None:
        self.iterator = iterator

    def took(self, page: FetchedPage) -> None:
        """The page that `request` asked for has come."""
        self.iterator = page.next_iterator
        if page.records:
            self._last_received = page.records[-1].sequence_number
        elif self._start.kind is IteratorType.LATEST and page.served_at is not None:
            # A second iterator for LATEST would skip the records put in between. The time of an
            # answer without records does not: it is rounded down to the second.
            self._start = StartPoint(IteratorType.AT_TIMESTAMP, timestamp=page.served_at)

    def failed(self, error: Exception) -> None:
        """The request failed. An iterator that the service did not accept is worth nothing; after
        throttling and outages it is used again, for it lasts five minutes."""
        if isinstance(error, ExpiredIterator | InvalidRequest | NotFound):
            self.iterator = None

    def reopen(self, start: StartPoint) -> None:
        """Go on at `start`, with a new iterator."""
        self.iterator, self._start, self._last_received = None, start, None
