"""What the driver knows of one shard since the bound of the last batch.

Holds the stretch read from there (`kept`), the one read from further on (`ahead`), and the best
bound found so far. Decides nothing about when to read: `walk.py`. Pure.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kclrun.model.record import Record
from kclrun.spark.positions import SHARD_END, Position, before
from kclrun.spark.ranges import Hint
from kclrun.spark.scout.density import Density, arrival_ms
from kclrun.spark.scout.stretch import TOKEN_AGE_MAX_S, Stretch

__all__ = ["Finding", "Track"]

# What a look ahead may read: little beside a shard's 2 MB/s.
_SAMPLE_BYTES: Final = 64 * 1024
_SAMPLE_RECORDS_MAX: Final = 100
# Where a trigger may hold so many records only, their density matters: producers send up to 500
# at once, which arrive in one millisecond, so a sample must reach over several of their requests.
_COUNTED_SAMPLE_BYTES: Final = 256 * 1024
_COUNTED_SAMPLE_RECORDS_MAX: Final = 1_000
# Before a record was seen: many records are of about this size.
_RECORD_BYTES_GUESS: Final = 1024.0
_PAGE_RECORDS_MAX: Final = 10_000


class Finding(msgspec.Struct, frozen=True):
    """A bound for the batch. `arrived_ms` is the arrival of the record it stands before;
    `tip_ms` the service's time at which the shard was seen to hold nothing after it."""

    bound: Position
    arrived_ms: int | None = None
    tip_ms: int | None = None


class Track:
    """One shard from `position` on. `rows_bytes_max` is what may be kept for the executors;
    `is_counted` says that a batch may hold so many records only."""

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
        self.kept = Stretch(position, rows_bytes_max)
        self.ahead: Stretch | None = None
        self.finding: Finding | None = None
        self.density: Density | None = None
        self.is_busy = False
        self.misled_until_ms = 0
        self.is_lost = False
        self.lag_ms: int | None = None

    @property
    def bound(self) -> Position:
        """Where a batch would end now."""
        return self.position if self.finding is None else self.finding.bound

    @property
    def tip_at_bound_ms(self) -> int | None:
        """The service's time at which nothing followed the bound, if it was seen."""
        if self.finding is not None:
            return self.finding.tip_ms
        return self.kept.tip_ms if self.kept.last is None else None

    @property
    def is_short_of_tip(self) -> bool:
        """Whether a bound was found, and more may follow it."""
        return self.finding is not None and self.finding.tip_ms is None

    @property
    def head_ms(self) -> int | None:
        """When the first record after the position arrived, if it is known."""
        return None if self.kept.first is None else arrival_ms(self.kept.first)

    def is_misled(self, until_ms: int) -> bool:
        """Whether the time is known to lead to a record that lies behind, stamped ahead of it."""
        return until_ms <= self.misled_until_ms

    @property
    def sample_limit(self) -> int:
        """How many records a look ahead asks for."""
        if self._is_counted:
            return min(_COUNTED_SAMPLE_RECORDS_MAX, self._records_in(_COUNTED_SAMPLE_BYTES))
        return min(_SAMPLE_RECORDS_MAX, self._records_in(_SAMPLE_BYTES))

    def page_limit(self, size_bytes: int) -> int:
        """How many records are about so many bytes."""
        return min(_PAGE_RECORDS_MAX, self._records_in(max(_SAMPLE_BYTES, size_bytes)))

    def find(self, bound: Position, at: Record | None = None, tip_ms: int | None = None) -> None:
        """Note a bound, unless a later one is known."""
        if bound > self.bound or (bound == self.bound and tip_ms is not None):
            self.finding = Finding(bound, None if at is None else arrival_ms(at), tip_ms)

    def move(self, start: Position) -> None:
        """The next batch begins at `start`: keep what was read beyond it."""
        if start == self.position:
            return
        kept = None
        for stretch in (self.ahead, self.kept):
            if stretch is not None and kept is None:
                kept = stretch if stretch.base == start else stretch.rest_after(start)
        self.kept = kept or Stretch(start, self.rows_bytes_max)
        self.position, self.ahead, self.finding = start, None, None

    def lose(self) -> None:
        """What lies after the position is gone: the range ends where it begins, at the end."""
        self.finding, self.is_lost = Finding(SHARD_END), True

    @property
    def wasted_bytes(self) -> int:
        """What was read since the position and will be read again."""
        return self.kept.size_bytes + (0 if self.ahead is None else self.ahead.size_bytes)

    def began(self) -> Position:
        """Where the batch's range begins, exactly where a record says it: a range with rows begins
        neither at a timestamp nor at the horizon, which moves on before a replay may read it."""
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
