"""Reads one shard page by page: the next request, where reading goes on after a failure, and
whether records expired before they were read.

Pure, and the same for every reader: the lease process, the tasks of Spark, `tail`, `lag` and the
move of a query to the fleet. It knows no pauses: each reader keeps its own share of the five calls
a second that Kinesis allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from kclrun.errors import ExpiredIterator, InvalidRequest, NotFound
from kclrun.model.quotas import GET_RECORDS_MAX, RETENTION_HOURS_MIN
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import ChildShard
from kclrun.model.time import WallTime, utc_text

# A reader of all records requests as many as there can be: a smaller limit only costs more calls.
RECORDS_A_CALL: Final = GET_RECORDS_MAX


class FetchedPage(msgspec.Struct, frozen=True):
    """One GetRecords answer, or one event of a subscription, aggregates not yet opened.

    An answer has `next_iterator`, an event `continuation`: a sequence number after which a later
    subscription goes on, though no record may have it. (Spark's reader gives events as answers:
    those have both.) Without either it is the end of a closed shard; `children` then names its
    children (possibly none with services that leave them out).
    `body_bytes` is the size on the wire; `served_at` the service's own time, to the second, None if
    it gave none.
    """

    records: Sequence[Record]
    next_iterator: str | None
    millis_behind_latest: int | None
    children: tuple[ChildShard, ...] = ()
    body_bytes: int = 0
    served_at: WallTime | None = None
    continuation: str | None = None

    @property
    def is_end(self) -> bool:
        """Whether the shard ends here, unless the service lost its position [D3]."""
        return self.next_iterator is None and self.continuation is None

    @property
    def is_pushed(self) -> bool:
        """Whether it is an event: no request for records was made for it."""
        return self.continuation is not None

    @property
    def is_empty_tip(self) -> bool:
        """Whether the shard held nothing more. An empty page with lag is a gap before the tip."""
        return not self.records and not self.millis_behind_latest


class Fetch(msgspec.Struct, frozen=True):
    """GetRecords with this iterator and limit."""

    iterator: str
    limit: int


# A record becomes readable within some 200 ms after it was put, and `served_at` is rounded down to
# the second: so long after its end, no record of a time range is still to come.
RANGE_SETTLED_S: Final = 2.5
# The arrival times of a shard may go back by milliseconds. Where the last record of a page arrived
# so long before the end, none of the page arrived after it.
_DISORDER_MAX_S: Final = 60.0


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """A reading of a time range, for `kclrun replay`: records that arrived before `until_at`.

    With `keys`, only records of these partition keys reach the processor. `row_names` are the
    outputs whose rows are kept in one file with the cursor of their record, for a comparison.

    For `kclrun state rebuild` each shard is read up to a position instead: `stops` has it by shard
    id, and `stop` is that of one shard. Reading then stands there, as at the tip of the stream;
    with SHARD_END the shard ends. Rows for the outputs of `row_names` are dropped.
    """

    until_at: WallTime = WallTime(math.inf)
    keys: tuple[str, ...] = ()
    row_names: tuple[str, ...] = ()
    stops: Mapping[str, ExtendedSequenceNumber] | None = None
    stop: ExtendedSequenceNumber | None = None

    def __repr__(self) -> str:
        """Without the keys: representations reach logs."""
        return f"Replay(until_at={self.until_at})"

    def of_shard(self, shard_id: str) -> Replay:
        """The same for one shard. Of a shard without a stop nothing is read."""
        if self.stops is None:
            return self
        stop = self.stops.get(shard_id, TRIM_HORIZON)
        return msgspec.structs.replace(self, stops=None, stop=stop)

    @property
    def drops_rows(self) -> bool:
        """Whether the rows of the processor go nowhere."""
        return self.stop is not None

    @property
    def stands(self) -> bool:
        """Whether reading stands at its end, and the shard does not end there."""
        return self.stop is not None and self.stop != SHARD_END

    def cut(self, page: FetchedPage) -> tuple[FetchedPage, bool]:
        """The page up to its first record at or after the end, and whether there was one.

        Arrival times may go back by some milliseconds; the first record decides, so the range is
        the same each time it is read.
        """
        records = page.records
        if self.stop is not None:
            return self._up_to(page, self.stop)
        # To look at each record of each page would take 5 % of all that a lease does.
        if not records or (
            records[-1].approximate_arrival_timestamp + _DISORDER_MAX_S < self.until_at
        ):
            return page, False
        for index, record in enumerate(records):
            if record.approximate_arrival_timestamp >= self.until_at:
                return msgspec.structs.replace(page, records=records[:index]), True
        return page, False

    def _up_to(self, page: FetchedPage, stop: ExtendedSequenceNumber) -> tuple[FetchedPage, bool]:
        if stop == SHARD_END:
            return page, False
        last = stop.of_record
        for index, record in enumerate(page.records):
            if ExtendedSequenceNumber(record.sequence_number) > last:
                return msgspec.structs.replace(page, records=page.records[:index]), True
        return page, page.is_end

    def is_past(self, page: FetchedPage) -> bool:
        """Whether reading stands behind the end: an open shard gets no more records of the range.

        A closed shard is read to its end instead, because children may have records of the range.
        """
        if page.served_at is None or page.millis_behind_latest is None:
            return False
        stands_at = page.served_at - page.millis_behind_latest / 1000
        return stands_at >= self.until_at + RANGE_SETTLED_S

    def chosen(self, records: list[Record]) -> list[Record]:
        """The records for the processor."""
        if self.stop is not None and records and records[-1].position > self.stop:
            records = [record for record in records if record.position <= self.stop]
        if not self.keys:
            return records
        return [record for record in records if record.partition_key in self.keys]


# DynamoDB Streams refuses a place whose record is not kept any more; Kinesis goes on at the oldest.
TRIMMED_CODE: Final = "TrimmedDataAccessException"


class PageCursor:
    """The pages of one shard, in order, from `start` on.

    Perform `request` and pass the answer to `opened` or `took`, an error to `failed`.

        opening ──opened──► reading ──took, without a next iterator──► opening
           ▲                  │                             (to be asked again only if the shard
           └──failed, reopen──┘                              is not closed [D3])

    An iterator that is lost is replaced by one after the last received record, so no record is
    skipped or comes twice. If the service says that this place was trimmed, reading goes on at the
    oldest record left. A reader that checks its place by a record reopens AT that record.

    Events of a subscription are taken as pages. `subscription_start` is where the next one begins.
    """

    __slots__ = ("_continuation", "_last_received", "_received_upto", "_start", "iterator")

    def __init__(self, start: StartPoint, *, iterator: str | None = None) -> None:
        self._start = start
        self._last_received: str | None = None
        self._continuation: str | None = None
        # After a place that was trimmed: records up to this one are not given again.
        self._received_upto: str | None = None
        self.iterator = iterator

    @property
    def start(self) -> StartPoint:
        """Where the next iterator is made."""
        if self._last_received is None:
            return self._start
        return StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, self._last_received)

    @property
    def subscription_start(self) -> StartPoint | None:
        """Where a subscription begins without a gap; None while only an iterator knows the place.

        A continuation is used for subscriptions alone: GetShardIterator is documented for numbers
        of records.
        """
        if self._continuation is not None:
            return StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, self._continuation)
        start = self.start
        return None if start.kind is IteratorType.LATEST else start

    def request(self, limit: int = RECORDS_A_CALL) -> StartPoint | Fetch:
        """The next request: an iterator at a place, or a page."""
        return self.start if self.iterator is None else Fetch(self.iterator, limit)

    def opened(self, iterator: str) -> None:
        self.iterator = iterator

    def took(self, page: FetchedPage) -> None:
        """The page that `request` asked for has come."""
        self.iterator = page.next_iterator
        if page.records or page.continuation is not None:
            self._continuation = page.continuation
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
        is_trimmed = isinstance(error, InvalidRequest) and error.code == TRIMMED_CODE
        if is_trimmed and self.start.sequence_number is not None:
            received = self._last_received or self._received_upto
            self.reopen(StartPoint(IteratorType.TRIM_HORIZON))
            self._received_upto = received

    def unreceived(self, page: FetchedPage) -> FetchedPage:
        """The page without the records that came before the place was trimmed."""
        upto = self._received_upto
        if upto is None or not page.records:
            return page
        new = [record for record in page.records if int(record.sequence_number) > int(upto)]
        if new:
            self._received_upto = None
        return msgspec.structs.replace(page, records=new)

    def reopen(self, start: StartPoint) -> None:
        """Go on at `start`, with a new iterator."""
        self.iterator, self._start = None, start
        self._last_received = self._continuation = self._received_upto = None


# Kinesis keeps records for 24 hours at least, so a reader that is nearer to the tip loses none.
RETENTION_MIN_S: Final = RETENTION_HOURS_MIN * 3600.0
# A reader that stays at the end of the retention loses records again and again: an error an hour.
# The retention may change meanwhile, so it is asked for as often.
LOSS_LOGGED_EVERY_S: Final = 3600.0
# DescribeStreamSummary has 20 calls a second for the whole account: a failed one is left for later.
RETENTION_ASKED_EVERY_S: Final = 60.0


class HeadWatch:
    """Detects that records of an open shard expired before they were read.

    Kinesis trims such records without an error: the iterator goes on at the oldest record that is
    left. Two things show it, by the service's own time, which it sends with each page:

    - The record of the checkpoint, which reading starts AT, is missing, and the oldest record that
      is left has waited for at least half the retention. A shard without traffic loses the record
      of its checkpoint, too, but its next record is read while it is young.
    - Everything up to some time had been read; that time is longer ago than the retention; and the
      next record arrived after it, within the retention.

    A sparse shard may have had no record in such a gap, so the text says "may". A gap at a start
    that ends in the younger half of the retention is not detected.

    For each page: `took`; if it returns True, `know` with the stream's retention; then `loss`.
    """

    __slots__ = (
        "_anchor",
        "_asked_at",
        "_known_at",
        "_read_until",
        "_reported_at",
        "_retention_s",
        "_suspicion",
    )

    def __init__(self, start: StartPoint) -> None:
        is_at_record = start.kind is IteratorType.AT_SEQUENCE_NUMBER
        self._anchor = start.sequence_number if is_at_record else None
        self._read_until: float | None = None
        # Read until when, the arrival of the oldest record left, and the time of that page.
        self._suspicion: tuple[float | None, float, float] | None = None
        self._retention_s = 0.0
        self._asked_at = self._known_at = self._reported_at = float("-inf")

    def took(self, page: FetchedPage) -> bool:
        """A page came. Whether to ask for the retention now."""
        served = page.served_at
        if served is None:
            return False
        if page.records:
            first = page.records[0]
            is_gone = self._anchor is not None and first.sequence_number != self._anchor
            self._anchor = None
            self._suspect(first.approximate_arrival_timestamp, served, is_gone=is_gone)
            self._read_until = page.records[-1].approximate_arrival_timestamp
        elif page.millis_behind_latest is not None and self._anchor is None:
            self._read_until = served - page.millis_behind_latest / 1000
        if self._suspicion is None or self._is_known():
            return False
        is_due = served - self._asked_at >= RETENTION_ASKED_EVERY_S
        self._asked_at = served if is_due else self._asked_at
        return is_due

    def know(self, retention_s: float) -> None:
        """The stream's retention, as the service says it now."""
        assert self._suspicion is not None, "asked for only where `took` said so"
        self._retention_s, self._known_at = retention_s, self._suspicion[2]

    def loss(self) -> str | None:
        """What may have been lost, for the log; None if nothing was. Once an hour at most."""
        if self._suspicion is None or not self._is_known():
            return None
        (before, oldest_left, served), self._suspicion = self._suspicion, None
        kept_from = served - self._retention_s
        if before is None:
            is_lost = oldest_left <= served - self._retention_s / 2
        else:
            is_lost = before < kept_from <= oldest_left
        if not is_lost:
            return None
        self._reported_at = served
        gone = "the record of its checkpoint, which is gone"
        place = gone if before is None else utc_text(before)
        return (
            f"records may have expired before they were read: the shard was read up to {place};"
            f" the stream keeps records for {self._retention_s / 3600:g} h, and the oldest record"
            f" left arrived at {utc_text(oldest_left)}\nTo go on: replay what was lost from its"
            " source; to prevent it, raise the retention above the longest time that this"
            " application lags or stands"
        )

    def _is_known(self) -> bool:
        suspicion = self._suspicion
        return suspicion is not None and suspicion[2] - self._known_at < LOSS_LOGGED_EVERY_S

    def _suspect(self, oldest_left: float, served: float, *, is_gone: bool) -> None:
        before = self._read_until
        if self._suspicion is not None or served - self._reported_at < LOSS_LOGGED_EVERY_S:
            return
        if before is None:
            is_suspicious = is_gone and served - oldest_left >= RETENTION_MIN_S / 2
        else:
            is_suspicious = before < served - RETENTION_MIN_S
        if is_suspicious:
            self._suspicion = (before, oldest_left, served)
