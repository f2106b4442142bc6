"""Decides how one range of a shard is read: the next request, and which records belong to it [A6].

Pure: time is an argument; requests are values that `reading.py` performs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import msgspec

from kclrun.errors import DataLoss, InvariantViolation
from kclrun.model.reading import RECORDS_A_CALL, Fetch, FetchedPage, PageCursor
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.time import Instant, WallTime
from kclrun.spark.offsets import ShardRange
from kclrun.spark.positions import SHARD_END, Position, PositionKind, after

# Most ranges are one page. A second call may follow at once; that leaves three of the five calls a
# second that the service allows to other readers.
_BURST: Final = 2.0


class ReadPace:
    """At most `rate` calls a second in the long run; two may follow each other at once."""

    def __init__(self, rate: float, now: Instant) -> None:
        self._rate = rate
        self._tokens = _BURST
        self._at = now

    def delay_s(self, now: Instant) -> float:
        """Count one call. Returns: the seconds that the call must wait before it is sent."""
        elapsed_s = max(0.0, now - self._at)
        self._tokens = min(_BURST, self._tokens + elapsed_s * self._rate) - 1
        self._at = max(self._at, now)
        return max(0.0, -self._tokens / self._rate)


# Tokens live five minutes; one minute is left for the way to the executor and its clock.
TOKEN_AGE_MAX_S: Final = 240.0
# The driver's estimate comes from a density: a tenth more costs little and often saves a call.
_SPARE_TENTHS: Final = 11
# The expected number contains neither the record that is read AT nor the record of the bound.
_EDGES: Final = 2
# After the expected number: six reads of doubling size lead to full pages.
_BEYOND_MIN: Final = 250
# A record that the driver saw is gone if a reader at the tip does not get it for so long. Other
# front ends of the service may lag, but not by a minute.
SILENCE_S_MAX: Final = 60.0
_HOUR_S: Final = 3600.0


class AskRetention(msgspec.Struct, frozen=True):
    """Request the stream's retention: it shows whether records can have been lost."""


# The requests of a cursor: an iterator at a place, a page, the retention.
Request = StartPoint | Fetch | AskRetention


class RangeCursor:
    """One range, from its first request to its end.

    Perform `request` and pass the answer to `opened`, `take` or `judge`, until `request` is None.
    `token_now` is the time that the age of the hinted token is measured by. Losses raise DataLoss;
    with `tolerates_loss` they are put into `notices` and reading continues with the records that
    are left.

    Reading ends at the range's end and nowhere else: not at an empty page, not at zero lag, not
    after some time. The cursor checks that no record is missing. A range is read AT the record that
    it begins at or after, and that record must come first. The record of the range's bound must
    come, too. Trimming takes the oldest records first: where the records of both ends are in the
    stream, all records between them are. (One loss stays unseen, because the service does not
    report it: records that are trimmed between two calls of a reader.)

        hinted ──first page fits──► reading ──bound or end of shard──► done
           │                          ▲  │ expired
           └─anything else─► opening ─┘◄─┘      (hinted: by the driver's token [A4])
    """

    def __init__(
        self, wanted: ShardRange, *, stream: str, tolerates_loss: bool, token_now: WallTime
    ) -> None:
        if wanted.end.kind not in {PositionKind.RECORD, PositionKind.SHARD_END}:
            raise InvariantViolation(f"{wanted.shard_id}: a range cannot end at {wanted.end}")
        hint = wanted.hint
        is_fresh = hint.iterator is not None and token_now - hint.iterator_at < TOKEN_AGE_MAX_S
        self.notices: list[str] = []
        self._wanted = wanted
        self._stream = stream
        self._tolerates_loss = tolerates_loss
        self._position = wanted.begin
        token = hint.iterator if is_fresh else None
        self._pages = PageCursor(_start_of(wanted.begin), iterator=token)
        self._is_hinted = is_fresh
        self._anchor = _first_of(wanted.begin) if is_fresh else None
        self._held: tuple[FetchedPage, Instant] | None = None
        self._taken = 0
        self._silent_since: Instant | None = None
        self._confirms_end = False
        self._has_lost = False
        self._is_done = False

    def request(self) -> Request | None:
        """The next request; None once the range is read."""
        if self._is_done:
            return None
        if self._held is not None:
            return AskRetention()
        return self._pages.request(self._limit())

    def opened(self, iterator: str) -> None:
        """The requested iterator. If it is AT a record, that record must come first."""
        self._pages.opened(iterator)
        self._anchor = self._position.number or None

    @property
    def is_hinted(self) -> bool:
        """Whether reading still relies on the driver's token, which the service may refuse."""
        return self._is_hinted

    def reopen(self) -> None:
        """The iterator has expired or was refused: continue from the position by its number."""
        self._pages.reopen(_start_of(self._position))
        self._anchor = None
        self._is_hinted = False

    def missing(self, reason: str) -> None:
        """The shard or its stream is missing, by the service's text. Raises: DataLoss."""
        # A bound that is a record was seen: it was there.
        is_known = self._wanted.end != SHARD_END
        self._lose(f"the shard is not in the stream any more ({reason})", is_known=is_known)
        self._is_done = True

    def take(self, page: FetchedPage, now: Instant) -> Sequence[Record]:
        """The records of a page that belong to the range, aggregates not opened.

        Raises: DataLoss where records of the range are gone.
        """
        if self._is_hinted and not self._fits_hint(page):
            self.reopen()
            return ()
        self._is_hinted = self._is_hinted and not page.records
        self._pages.took(page)
        if not self._saw_anchor(page, now):
            return ()
        return self._taken_of(page, now)

    def judge(self, retention_hours: float, now: WallTime) -> Sequence[Record]:
        """Whether the record that is gone took others with it. Raises: DataLoss.

        Every record that had arrived when the shard was last seen at its tip has been read. A later
        record is still there if that time is less than the retention ago. `now` is this host's
        time; it serves where the service did not send its own.
        """
        held, as_of_ms = self._held, self._wanted.as_of_ms
        assert held is not None, "asked for only while a page is held"
        assert as_of_ms is not None, "asked for only where it is known"
        self._held = None
        served_at = held[0].served_at or now
        if as_of_ms / 1000 < served_at - retention_hours * _HOUR_S:
            self._lose(
                f"the record it goes on after, {self._position.number}, was trimmed, and it was"
                f" last seen at its tip longer ago than the {retention_hours:g} h records are kept."
                " Whether records came after it that expired is not known",
                is_known=False,
            )
        return self._taken_of(*held)

    def _limit(self) -> int:
        expected = self._wanted.hint.records_expected
        if expected is None:
            return RECORDS_A_CALL
        if expected <= self._taken:
            # A little more than expected is likely; a whole page too much would be waste.
            beyond = max(_BEYOND_MIN, expected // 10, 2 * (self._taken - expected))
            return min(beyond, RECORDS_A_CALL)
        left_tenths = _SPARE_TENTHS * (expected - self._taken)
        return min(-(-left_tenths // 10) + _EDGES, RECORDS_A_CALL)

    def _fits_hint(self, page: FetchedPage) -> bool:
        """Whether a first page can come from a token that is at the range's beginning."""
        if not page.records:
            # Records follow, so the page must have lag; a token at the tip is past the bound.
            return page.next_iterator is not None and bool(page.millis_behind_latest)
        first = page.records[0].sequence_number
        if self._anchor is not None:
            return first == self._anchor
        end = self._wanted.end  # records before the beginning are left out as everywhere
        return end.covers(first) or first == end.number

    def _saw_anchor(self, page: FetchedPage, now: Instant) -> bool:
        """Whether the record read AT has come, or is known to be gone; otherwise read on."""
        if self._anchor is None:
            return True
        index = _index_of(page.records, self._anchor)
        if index < len(page.records):
            is_there = page.records[index].sequence_number == self._anchor
        elif page.next_iterator is None or self._is_silent(page, now):
            is_there = False
        else:
            return False
        self._anchor = None
        return is_there or self._may_go_on_without(page, now)

    def _may_go_on_without(self, page: FetchedPage, now: Instant) -> bool:
        """The record read AT is gone. Whether to continue with the page now. Raises: DataLoss."""
        gone = self._position
        is_read = not gone.is_before and gone.sub_sequence_number is None
        if is_read and gone == self._wanted.begin and self._wanted.as_of_ms is not None:
            self._held = (page, now)
            return False
        verb = "goes on after" if is_read else "begins with"
        text = f"the record it {verb}, {gone.number}, was trimmed before it was read"
        if is_read:
            text += " again. It was processed; whether records came after it that expired is not"
            text += " known"
        if gone.sub_sequence_number is not None:
            text = f"the record that the lease was at, {gone.number}, was trimmed, so whatever"
            text += " followed it may be gone as well"
        self._lose(text, is_known=gone.is_before)
        return True

    def _taken_of(self, page: FetchedPage, now: Instant) -> Sequence[Record]:
        records = self._within(page.records)
        if records:
            self._position = after(records[-1].sequence_number)
            self._taken += len(records)
        if page.next_iterator is None and not self._is_done:
            self._at_end_of_shard(page)
        elif self._doubts_bound() and self._is_silent(page, now):
            self._lose(f"the record it ends at, {self._wanted.end.number}, was trimmed")
            self._is_done = True
        return records

    def _doubts_bound(self) -> bool:
        """Whether the bound and the records before it may be trimmed, with no record after them."""
        is_proven = self._taken > 0 or self._wanted.begin.kind is PositionKind.RECORD
        is_awaited = not self._is_done and self._wanted.end != SHARD_END
        return is_awaited and (self._has_lost or not is_proven)

    def _within(self, records: Sequence[Record]) -> Sequence[Record]:
        """The records between position and end; done if the end is among the records."""
        first = 0
        if self._position.kind is PositionKind.RECORD:
            first = _index_of(records, self._position.number)
            if first < len(records) and self._position.covers(records[first].sequence_number):
                first += 1
        end = self._wanted.end
        if end == SHARD_END:
            return records[first:]
        last = _index_of(records, end.number)
        if last == len(records):
            return records[first:]
        self._is_done = True
        if records[last].sequence_number != end.number:
            self._lose(f"the record it ends at, {end.number}, was trimmed before it was read")
        elif not end.is_before:
            last += 1
        return records[first:last]

    def _at_end_of_shard(self, page: FetchedPage) -> None:
        """A null iterator. Without children it counts only the second time: the last page of a
        closed shard names its children, so the service may have lost its place."""
        if not page.children and not self._confirms_end:
            self._confirms_end = True
            self.reopen()
            return
        self._is_done = True
        if self._wanted.end != SHARD_END:
            self._lose(
                f"the shard ended before the record the range ends at, {self._wanted.end.number}"
            )

    def _is_silent(self, page: FetchedPage, now: Instant) -> bool:
        """Whether no record came at the tip for so long that none can be on its way."""
        if not page.is_empty_tip:
            self._silent_since = None
            return False
        if self._silent_since is None:
            self._silent_since = now
        return now - self._silent_since >= SILENCE_S_MAX

    def _lose(self, what: str, *, is_known: bool = True) -> None:
        """Records are gone, or, if that is not known, may be gone. Raises: DataLoss."""
        wanted = self._wanted
        verb = "are" if is_known else "may be"
        text = (
            f"records of {wanted.shard_id} of stream {self._stream} {verb} gone: {what}\n"
            f"  range  {wanted.begin} to {wanted.end}"
        )
        if not (self._tolerates_loss or wanted.is_from_horizon):
            raise DataLoss(
                f"{text}\n  To go on with what is left:  set the option failOnDataLoss to false\n"
                "  To lose nothing next time:  let the stream keep records for longer"
            )
        if not self._has_lost:
            self.notices.append(f"{text}\n  The query goes on with what is left.")
        self._has_lost = True


def _first_of(begin: Position) -> str | None:
    """The record that must be first after a token at `begin`; None where any record may be."""
    is_within = begin.is_before or begin.sub_sequence_number is not None
    return begin.number if is_within else None


def _start_of(position: Position) -> StartPoint:
    match position.kind:
        case PositionKind.TRIM_HORIZON:
            return StartPoint(IteratorType.TRIM_HORIZON)
        case PositionKind.TIMESTAMP:
            at = WallTime(position.timestamp_ms / 1000)
            return StartPoint(IteratorType.AT_TIMESTAMP, timestamp=at)
        case PositionKind.RECORD:
            return StartPoint(IteratorType.AT_SEQUENCE_NUMBER, position.number)
        case PositionKind.SHARD_END:
            raise InvariantViolation("nothing can be read after the end of a shard")


def _index_of(records: Sequence[Record], number: str) -> int:
    """The index of a sequence number, or of its place: the records of a shard ascend."""
    key = (len(number), number)
    return bisect_left(
        records, key, key=lambda record: (len(record.sequence_number), record.sequence_number)
    )
