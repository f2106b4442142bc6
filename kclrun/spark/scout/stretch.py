"""Records of one shard read in a row from a position on, and the iterators at both its ends.

Knows what was read and whether it is all; decides nothing about bounds. Rule: a record is in a
stretch exactly if the service returned it between `base` and `token`, none skipped. Pure.
"""

from __future__ import annotations

from typing import Final

from kclrun.model.reading import IteratorType, StartPoint
from kclrun.model.record import Record
from kclrun.model.time import WallTime
from kclrun.spark.positions import Place, Position, after, before
from kclrun.spark.scout.asks import Paged, Read

__all__ = ["RECORD_OVERHEAD_BYTES", "TOKEN_AGE_MAX_S", "Stretch"]

# Iterators live five minutes; executors get half a minute to begin with one.
TOKEN_AGE_MAX_S: Final = 270.0
# The key, the sequence number and the JSON around a record.
RECORD_OVERHEAD_BYTES: Final = 100


class Stretch:
    """Begins at `base`. `rows_bytes_max` bounds what is kept; beyond it only the ends are known.

    `first` is the first record after `base`, `last` the last one read. `tip_ms` is the service's
    time at which the last page was asked for that said nothing follows it; `is_ended` says it was
    the shard's last. `is_whole` is False where the record that `base` names was not
    found any more: such a stretch finds bounds, but its rows are for the reader to judge.
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
        self.size_bytes = 0
        self.tip_ms: int | None = None
        self.is_ended = False
        self.is_whole = True
        self.pages = 0
        self._rows_bytes_max = rows_bytes_max
        self._page_token, self._page_token_at = token, token_at
        # An iterator made by number is trusted once the record with that number came first.
        # One that was given may stand behind records that a time would find.
        self.is_given = token is not None
        self._awaited = base.number if token is None and base.place is Place.RECORD else None

    @property
    def at_tip(self) -> bool:
        """Whether nothing followed the last page."""
        return self.tip_ms is not None

    @property
    def reached(self) -> Position:
        """Up to where it was read."""
        return self.base if self.last is None else after(self.last.sequence_number)

    def read(self, limit: int, now: float) -> Read:
        """How to read on."""
        if self.token is not None and now - self.token_at < TOKEN_AGE_MAX_S:
            return Read(limit, self.token)
        # One more where the first is the record at the base, which is dropped.
        return Read(min(10_000, limit + (self._awaited is not None)), None, self._opening())

    def begin_at(self, base: Position) -> None:
        """The page just taken in begins at `base`: so does the stretch, which had no place yet."""
        self.base = base
        self.base_token, self.base_token_at = self._page_token, self._page_token_at

    def hold(self, token: str | None, now: float) -> None:
        """An iterator was made, and the read after it failed: it is still good."""
        if token is not None and self.token is None:
            self.token, self.token_at = token, now

    def forget_token(self) -> None:
        """The service called it expired: the next read makes another."""
        self.token = None

    def absorb(self, paged: Paged, asked_ms: int) -> list[Record]:
        """Take in the page that `read` asked for; gives its records after the base.

        `asked_ms` is a time the service's clock had reached when it was asked.
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
        self.is_ended = page.next_iterator is None
        is_tip = not self.is_ended and page.millis_behind_latest == 0
        self.tip_ms = asked_ms if is_tip else None
        self.pages += 1
        if records:
            self.first = self.first or records[0]
            self.last = records[-1]
            self._keep(records)
        return records

    def rest_after(self, bound: Position) -> Stretch | None:
        """What of it lies after a bound inside it; None if that is not known record by record."""
        if self.last is not None and bound == after(self.last.sequence_number):
            rest = Stretch(bound, self._rows_bytes_max, self.token, self.token_at)
            if self.token is None:
                return None
            rest.tip_ms = self.tip_ms
            return rest
        kept = [row for row in self.rows or () if not bound.covers(row.sequence_number)]
        if not kept or len(kept) == len(self.rows or ()) or self.token is None:
            return None
        if before(kept[0].sequence_number) != bound:
            return None
        rest = Stretch(bound, self._rows_bytes_max, self.token, self.token_at)
        rest.base_token = None
        rest.first, rest.last, rest.tip_ms = kept[0], kept[-1], self.tip_ms
        rest._keep(kept)
        return rest

    def rows_to(self, bound: Position) -> tuple[Record, ...] | None:
        """All records up to a bound, None if they are not all at hand."""
        is_reached = self.is_ended if bound.place is Place.SHARD_END else self._reaches(bound)
        if self.rows is None or not self.is_whole or not is_reached:
            return None
        if self.reached <= bound:
            return tuple(self.rows)
        return tuple(row for row in self.rows if bound.covers(row.sequence_number))

    def _reaches(self, bound: Position) -> bool:
        return bound <= self.reached

    def _opening(self) -> StartPoint:
        if self.last is not None:
            number = self.last.sequence_number
            return StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, number)
        match self.base.place:
            case Place.TRIM_HORIZON:
                return StartPoint(IteratorType.TRIM_HORIZON)
            case Place.TIMESTAMP:
                timestamp = WallTime(self.base.timestamp_ms / 1000)
                return StartPoint(IteratorType.AT_TIMESTAMP, timestamp=timestamp)
            case _:
                self._awaited = self.base.number
                return StartPoint(IteratorType.AT_SEQUENCE_NUMBER, self.base.number)

    def _note_base_token(self, paged: Paged) -> None:
        """The iterator of the first page stands at the base, unless the record there is dropped."""
        drops = self._awaited is not None and self.base == after(self.base.number)
        if self.base_token is None and self.pages == 0 and self.last is None and not drops:
            self.base_token, self.base_token_at = paged.token, paged.received_at

    def _judged(self, records: list[Record]) -> list[Record]:
        self.is_whole = records[0].sequence_number == self._awaited
        self._awaited = None
        if not self.is_whole:
            self.rows = self.base_token = None
        return [row for row in records if not self.base.covers(row.sequence_number)]

    def _keep(self, records: list[Record]) -> None:
        self.count += len(records)
        self.size_bytes += sum(len(row.data) + RECORD_OVERHEAD_BYTES for row in records)
        if self.size_bytes > self._rows_bytes_max:
            self.rows = None
        elif self.rows is not None:
            self.rows.extend(records)
