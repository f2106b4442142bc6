"""The driver's facts about one shard since the bound of the last batch. Pure.

It decides nothing about when to read: `shard_search.py` does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from kclrun.errors import ExpiredIterator, ServiceError
from kclrun.model.quotas import GET_RECORDS_MAX
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.shard import Shard
from kclrun.model.time import WallTime
from kclrun.spark.offsets import Hint
from kclrun.spark.positions import SHARD_END, Position, PositionKind, after, before


class Read(msgspec.Struct, frozen=True):
    """The next read of a search: from a token, or from a start that needs an iterator first."""

    limit: int
    token: str | None = None
    opening: StartPoint | None = None


class AskPage(msgspec.Struct, frozen=True):
    """One GetRecords of one shard, after one GetShardIterator where `read` has no token.

    `turn` separates answers to this request from answers to older ones.
    """

    shard_id: str
    turn: int
    read: Read


class AskListing(msgspec.Struct, frozen=True):
    """A complete ListShards."""


class Paged(msgspec.Struct, frozen=True):
    """A page, and the iterator that gave it: its place is before the page's first record."""

    token: str
    page: FetchedPage
    sent_at: float
    received_at: float


class Expired(msgspec.Struct, frozen=True):
    """The iterator was too old."""

    error: ServiceError = msgspec.field(
        default_factory=lambda: ExpiredIterator("the iterator has expired")
    )


class Slowed(msgspec.Struct, frozen=True):
    """Throttled: the call had no effect. `token` if the iterator was made before that."""

    token: str | None
    error: ServiceError


class Delayed(msgspec.Struct, frozen=True):
    """No answer, or a server's error: the request may be repeated. `token` as with `Slowed`."""

    token: str | None
    error: ServiceError


class Gone(msgspec.Struct, frozen=True):
    """The service does not know the shard or the stream."""

    error: ServiceError
    sent_at: float


class Refused(msgspec.Struct, frozen=True):
    """The request was called invalid: a time in the future, or a number of another stream."""

    error: ServiceError


class Listed(msgspec.Struct, frozen=True):
    """All shards, as of some moments between sending and receiving."""

    shards: tuple[Shard, ...]
    sent_at: float


class NotListed(msgspec.Struct, frozen=True):
    """The listing was throttled or failed: the known shards stay known."""

    error: ServiceError


Outcome = Paged | Expired | Slowed | Delayed | Gone | Refused
Answer = Outcome | Listed | NotListed


# Arrival times have milliseconds: records of one instant count as of one millisecond.
_SPAN_MIN_S: Final = 0.001


class Density(msgspec.Struct, frozen=True):
    """Records and bytes a second, and the mean size of a record."""

    records_per_second: float
    bytes_per_second: float
    record_bytes: float


def arrival_ms(record: Record) -> int:
    """A record's arrival in whole milliseconds, as timestamps of positions are."""
    return round(record.approximate_arrival_timestamp * 1000)


def size_of(records: Collection[Record]) -> int:
    """About the bytes that these records have in an answer of the service."""
    # A list: a generator costs half as much again, for each record of each look.
    return _RECORD_OVERHEAD_BYTES * len(records) + sum([len(record.data) for record in records])


def density_of(
    records: Sequence[Record], size_bytes: int, span_s: float | None = None
) -> Density | None:
    """The density of one page, over its own span or the given one; None for a single record, which
    does not show a rate."""
    if not records:
        return None
    steps = len(records)
    if span_s is None:
        steps -= 1
        span_s = (arrival_ms(records[-1]) - arrival_ms(records[0])) / 1000
    if steps < 1:
        return None
    mean = size_bytes / len(records)
    rate = steps / max(_SPAN_MIN_S, span_s)
    return Density(rate, rate * mean, mean)


# The pages of one shard that were read in a row from a position on, and the iterators at both ends.
#
# `PageRun` knows the read records and whether they are complete; it decides nothing about bounds. A
# record is in the run exactly if the service returned it between `base` and `token`.
# Iterators live five minutes; executors get half a minute to begin with one.
TOKEN_AGE_MAX_S: Final = 270.0
# The key, the sequence number and the JSON around a record.
_RECORD_OVERHEAD_BYTES: Final = 100


class PageRun:
    """Begins at `base`. `rows_bytes_max` bounds the kept rows; beyond it only the ends are known.

    `first` is the first record after `base`, `last` the last one read. `tip_ms` is the service's
    time of the last request whose page said that no record follows it; `is_ended` means that the
    page was the shard's last. `is_whole` is False where the record that `base` names was not
    found any more: such a run finds bounds, but executors must read its rows again and judge them.
    `is_pushed` means that the last page came from a subscription; `read_bytes` are the bytes of the
    pages that did not. `page_bytes` is the size of the last page's records.
    """

    def __init__(
        self, base: Position, rows_bytes_max: int, token: str | None = None, token_at: float = 0.0
    ) -> None:
        self.base = base
        self.token = token
        self.token_at = token_at
        self.base_token = token
        self.base_token_at = token_at
        self.first: Record | None = None
        self.last: Record | None = None
        self.rows: list[Record] | None = []
        self.count = 0
        self.size_bytes = self.page_bytes = 0
        self.tip_ms: int | None = None
        self.tip_seen_at: float | None = None
        self.is_ended = False
        self.is_pushed = False
        self.read_bytes = 0
        self.is_whole = True
        self._rows_bytes_max = rows_bytes_max
        self._page_token, self._page_token_at = token, token_at
        # An iterator made by number is trusted once the record with that number came first.
        # A given iterator may be behind records that a time would find.
        self.is_given = token is not None
        self._awaited = base.number if token is None and base.kind is PositionKind.RECORD else None

    @property
    def at_tip(self) -> bool:
        """Whether no record followed the last page."""
        return self.tip_ms is not None

    @property
    def reached(self) -> Position:
        """The position up to which it was read."""
        return self.base if self.last is None else after(self.last.sequence_number)

    def read(self, limit: int, now: float) -> Read:
        """The next read of this run."""
        if self.token is not None and now - self.token_at < TOKEN_AGE_MAX_S:
            return Read(limit, self.token)
        self.token = None
        # One record more where the first one is the record at the base, which is dropped.
        return Read(min(10_000, limit + (self._awaited is not None)), None, self._opening())

    def begin_at(self, base: Position) -> None:
        """The page just taken in begins at `base`; so does the run, whose base was a time."""
        self.base = base
        self.base_token, self.base_token_at = self._page_token, self._page_token_at

    def hold(self, token: str | None, now: float) -> None:
        """An iterator was made, and the read after it failed: the iterator is still good."""
        if self.token is None:
            self.token, self.token_at = token, now

    def forget_token(self) -> None:
        """The service called the iterator expired: the next read makes another."""
        self.token = None

    def absorb(self, paged: Paged, asked_ms: int) -> list[Record]:
        """Take in the page for `read`. Returns: its records after the base.

        `asked_ms` is a time that the service's clock had reached when the request was sent.
        """
        page = paged.page
        self._note_base_token(paged)
        self._page_token, self._page_token_at = paged.token, paged.received_at
        records = list(page.records)
        if self._awaited is not None and records:
            records = self._judged(records)
            if not records and page.next_iterator is not None and self.base_token is None:
                self.base_token, self.base_token_at = page.next_iterator, paged.received_at
        self.token, self.token_at = page.next_iterator, paged.received_at
        self.is_pushed = page.is_pushed
        self.is_ended = page.next_iterator is None
        is_tip = not self.is_ended and page.millis_behind_latest == 0
        self.tip_ms, self.tip_seen_at = (asked_ms, paged.sent_at) if is_tip else (None, None)
        self.page_bytes = size_of(records)
        if records:
            self.first = self.first or records[0]
            self.last = records[-1]
            self._keep(records, self.page_bytes)
        return records

    def rest_after(self, bound: Position) -> PageRun | None:
        """The part after a bound inside the run; None if its records are not all kept."""
        if self.last is not None and bound == after(self.last.sequence_number):
            rest = PageRun(bound, self._rows_bytes_max, self.token, self.token_at)
            if self.token is None:
                return None
            rest.tip_ms, rest.tip_seen_at = self.tip_ms, self.tip_seen_at
            rest.is_pushed = self.is_pushed
            return rest
        rows = self.rows or ()
        kept = [row for row in rows if not bound.covers(row.sequence_number)]
        if not kept or len(kept) == len(rows) or self.token is None:
            return None
        if before(kept[0].sequence_number) != bound:
            return None
        rest = PageRun(bound, self._rows_bytes_max, self.token, self.token_at)
        rest.base_token = None
        rest.first, rest.last = kept[0], kept[-1]
        rest.tip_ms, rest.tip_seen_at = self.tip_ms, self.tip_seen_at
        rest.is_pushed = self.is_pushed
        rest._keep(kept, size_of(kept))
        return rest

    def rows_to(self, bound: Position) -> tuple[Record, ...] | None:
        """All records up to a bound, None if some of them are not kept."""
        is_reached = (
            self.is_ended if bound.kind is PositionKind.SHARD_END else bound <= self.reached
        )
        if self.rows is None or not self.is_whole or not is_reached:
            return None
        if self.reached <= bound:
            return tuple(self.rows)
        return tuple(row for row in self.rows if bound.covers(row.sequence_number))

    def _opening(self) -> StartPoint:
        if self.last is not None:
            number = self.last.sequence_number
            return StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, number)
        match self.base.kind:
            case PositionKind.TRIM_HORIZON:
                return StartPoint(IteratorType.TRIM_HORIZON)
            case PositionKind.TIMESTAMP:
                timestamp = WallTime(self.base.timestamp_ms / 1000)
                return StartPoint(IteratorType.AT_TIMESTAMP, timestamp=timestamp)
            case _:
                self._awaited = self.base.number
                return StartPoint(IteratorType.AT_SEQUENCE_NUMBER, self.base.number)

    def _note_base_token(self, paged: Paged) -> None:
        """The iterator of the first page is at the base, unless the record there is dropped."""
        drops = self._awaited is not None and self.base == after(self.base.number)
        if self.base_token is None and self.last is None and not drops:
            self.base_token, self.base_token_at = paged.token, paged.received_at

    def _judged(self, records: list[Record]) -> list[Record]:
        self.is_whole = records[0].sequence_number == self._awaited
        self._awaited = None
        if not self.is_whole:
            self.rows = self.base_token = None
        return [row for row in records if not self.base.covers(row.sequence_number)]

    def _slim(self) -> None:
        """Keep the first and the last record without their data, which may be 10 MiB each."""
        is_one = self.first is self.last
        self.first = None if self.first is None else _without_data(self.first)
        self.last = self.first if is_one or self.last is None else _without_data(self.last)

    def _keep(self, records: list[Record], size_bytes: int) -> None:
        self.count += len(records)
        self.size_bytes += size_bytes
        self.read_bytes += 0 if self.is_pushed else size_bytes
        if self.size_bytes > self._rows_bytes_max:
            self.rows = None
            self._slim()
        elif self.rows is not None:
            self.rows.extend(records)


def _without_data(record: Record) -> Record:
    return msgspec.structs.replace(record, data=b"")


# The bytes that a read further on may have: little beside a shard's 2 MB/s.
_SAMPLE_BYTES: Final = 64 * 1024
_SAMPLE_RECORDS_MAX: Final = 100
# Where a trigger limits the records, their density matters: producers send up to 500 at once, which
# arrive in one millisecond, so a sample must reach over several of their requests.
_COUNTED_SAMPLE_BYTES: Final = 256 * 1024
_COUNTED_SAMPLE_RECORDS_MAX: Final = 1_000
# A guess before a record was seen: many records have about this size.
_RECORD_BYTES_GUESS: Final = 1024.0


class Finding(msgspec.Struct, frozen=True):
    """A bound for the batch. `arrived_ms` is the arrival of the record that the bound is before;
    `tip_ms` the service's time at which the shard was seen to hold nothing after the bound."""

    bound: Position
    arrived_ms: int | None = None
    tip_ms: int | None = None


class ShardCursor:
    """One shard from `position` on. `rows_bytes_max` bounds the rows kept for the executors;
    `is_counted` means that a batch has a limit of records.

    Holds the pages read from the position on (`kept`), the pages read from a later place on
    (`ahead`), and the best bound found so far.
    """

    def __init__(
        self,
        shard_id: str,
        position: Position,
        rows_bytes_max: int,
        *,
        is_counted: bool = False,
    ) -> None:
        self.shard_id = shard_id
        self.position = position
        self.rows_bytes_max = rows_bytes_max
        self._is_counted = is_counted
        self.kept = PageRun(position, rows_bytes_max)
        self.ahead: PageRun | None = None
        self.finding: Finding | None = None
        self.density: Density | None = None
        self.is_busy = False
        self.misled_until_ms = 0
        self.is_lost = False
        self.lag_ms: int | None = None

    @property
    def bound(self) -> Position:
        """The end of a batch that would end now."""
        return self.position if self.finding is None else self.finding.bound

    @property
    def tip_at_bound_ms(self) -> int | None:
        """The service's time at which no record followed the bound, if it was seen."""
        if self.finding is not None:
            return self.finding.tip_ms
        return self.kept.tip_ms if self.kept.last is None else None

    @property
    def is_short_of_tip(self) -> bool:
        """Whether a bound was found, and further records may follow it."""
        return self.finding is not None and self.finding.tip_ms is None

    @property
    def head_ms(self) -> int | None:
        """The arrival of the first record after the position, if it is known."""
        return None if self.kept.first is None else arrival_ms(self.kept.first)

    def is_misled(self, until_ms: int) -> bool:
        """Whether AT_TIMESTAMP with this time is known to lead back to a record that is stamped
        later than the records after it."""
        return until_ms <= self.misled_until_ms

    @property
    def sample_limit(self) -> int:
        """The number of records that a read further on requests."""
        if self._is_counted:
            return min(_COUNTED_SAMPLE_RECORDS_MAX, self._records_in(_COUNTED_SAMPLE_BYTES))
        return min(_SAMPLE_RECORDS_MAX, self._records_in(_SAMPLE_BYTES))

    def page_limit(self, size_bytes: int) -> int:
        """The number of records that have about so many bytes."""
        return min(GET_RECORDS_MAX, self._records_in(max(_SAMPLE_BYTES, size_bytes)))

    def find(self, bound: Position, at: Record | None = None, tip_ms: int | None = None) -> None:
        """Note a bound, unless a later one is known."""
        if bound > self.bound or (bound == self.bound and tip_ms is not None):
            self.finding = Finding(bound, None if at is None else arrival_ms(at), tip_ms)

    def move(self, start: Position) -> None:
        """The next batch begins at `start`: keep the records read beyond it."""
        if start == self.position:
            return
        kept = None
        for page_run in (self.ahead, self.kept):
            if page_run is not None and kept is None:
                kept = page_run if page_run.base == start else page_run.rest_after(start)
        self.kept = kept or PageRun(start, self.rows_bytes_max)
        self.position, self.ahead, self.finding = start, None, None

    def lose(self) -> None:
        """The records after the position are gone: the range begins and ends at the shard's end."""
        self.finding, self.is_lost = Finding(SHARD_END), True

    @property
    def wasted_bytes(self) -> int:
        """The bytes that were read since the position and will be read again; a subscription's
        bytes are not those that all readers of the shard share."""
        return self.kept.read_bytes + (0 if self.ahead is None else self.ahead.read_bytes)

    def began(self) -> Position:
        """The beginning of the batch's range, exact where a record names it. A range with rows
        begins neither at a timestamp nor at the horizon, which may move before a replay reads
        it."""
        if self.is_lost:
            return SHARD_END
        first = self.kept.first
        if not self.position.is_exact and self.finding is not None and first is not None:
            return before(first.sequence_number)
        return self.position

    def hint(self, now: float, wall_ahead_s: float) -> Hint:
        """Short cuts for the range from the position to the bound."""
        kept = self.kept
        is_fresh = kept.is_whole and now - kept.base_token_at < TOKEN_AGE_MAX_S
        token = kept.base_token if is_fresh else None
        rows = kept.rows_to(self.bound)
        return Hint(
            iterator=token,
            iterator_at=kept.base_token_at + wall_ahead_s if token else 0.0,
            rows=rows,
            records_expected=self._expected() if rows is None else None,
        )

    def _expected(self) -> int | None:
        if self.bound == SHARD_END:
            return None
        head = self.head_ms
        until = None if self.finding is None else self.finding.arrived_ms
        if self.density is None or head is None or until is None or until <= head:
            return None
        return max(1, round(self.density.records_per_second * (until - head) / 1000))

    def _records_in(self, size_bytes: int) -> int:
        mean = _RECORD_BYTES_GUESS if self.density is None else self.density.record_bytes
        return max(1, int(size_bytes / mean))
