"""Which rows of a lease belong to which checkpoint, while they wait for their outputs. Pure.

A row does not name its record: user code emits it during a call. So the ledger counts rows. A `Cut`
says: the rows up to these counts belong to a checkpoint at this position, or to a later one. A call
that returns makes a cut at its last record, and a checkpoint that user code requests makes one at
the position that it names.

The rules, for every output:

- A checkpoint covers all rows that were emitted before it was requested: those up to the last cut
  at or below its position. That holds also for a position below that of an earlier cut. The earlier
  cut may then have rows of records above the checkpoint; after a crash these records emit them
  again.
- A cut that the call under way made at the position of a new cut, or above it, is void: its
  checkpoint was refused, or it counts fewer rows. Cuts of former calls stay.
- A call that raised keeps the rows that an acknowledged checkpoint covers, and no others.

A ledger is not for two threads at once: its owner has a lock, which the thread that renews the
lease needs, too. So no method looks at all cuts each time it is called.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable
from typing import Final, Generic, TypeVar

import msgspec

from kclrun.model.sequence import ExtendedSequenceNumber

# With so many cuts, and twice as many as the last merge left, neighbours are merged. So a merge
# looks at each cut a few times at most, however long a destination is away.
MERGED_FROM: Final = 32


class RowCount(msgspec.Struct, frozen=True, gc=False, order=True):
    """The number and the bytes of the first rows of an output since the lease began."""

    rows: int = 0
    size: int = 0


# How a ledger counts: the rows of an output, or the bytes of a file.
Count = TypeVar("Count", RowCount, int)


class Cut(msgspec.Struct, Generic[Count], frozen=True):
    """The rows that a checkpoint at `position` covers, with one count for each output. `lowest` is
    the lowest position of this cut and of those that were before it when it was made."""

    position: ExtendedSequenceNumber
    counts: tuple[Count, ...]
    lowest: ExtendedSequenceNumber


class RowLedger(Generic[Count]):
    """The cuts whose rows wait, in the order in which they were made.

    `call_start` counts the rows from before the call under way; None outside of a call.
    """

    def __init__(self) -> None:
        self.call_start: tuple[Count, ...] | None = None
        self._cuts: deque[Cut[Count]] = deque()
        self._merge_at = MERGED_FROM

    def __len__(self) -> int:
        return len(self._cuts)

    def begin_call(self, emitted: tuple[Count, ...]) -> None:
        self.call_start = emitted

    def end_call(self) -> None:
        self.call_start = None

    def make_void(self, position: ExtendedSequenceNumber) -> None:
        """Remove the cuts that the call under way made at `position` or above."""
        start = self.call_start
        while start is not None and self._cuts and self._cuts[-1].position >= position:
            if not is_beyond(self._cuts[-1].counts, start):
                break
            self._cuts.pop()

    def cut(
        self, position: ExtendedSequenceNumber, emitted: tuple[Count, ...], had: tuple[Count, ...]
    ) -> None:
        """The rows `emitted` so far belong to a checkpoint at `position`, or to a later one. Rows
        that such a checkpoint covers already do not need a cut: without any cut below it, these are
        the rows that it `had` before."""
        self.make_void(position)
        covered = self.covered(position)
        if emitted != (had if covered is None else covered):
            lowest = min(position, self._cuts[-1].lowest) if self._cuts else position
            self._cuts.append(Cut(position, emitted, lowest))

    def covered(self, position: ExtendedSequenceNumber) -> tuple[Count, ...] | None:
        """The rows that a checkpoint at `position` covers; None if all of them left already."""
        if not self.has_any_upto(position):
            return None
        newest = self._cuts[-1]
        if newest.position <= position:  # as a rule
            return newest.counts
        return next(cut.counts for cut in reversed(self._cuts) if cut.position <= position)

    def has_any_upto(self, position: ExtendedSequenceNumber | None) -> bool:
        """Whether rows wait that a checkpoint at `position` covers."""
        return bool(self._cuts) and position is not None and self._cuts[-1].lowest <= position

    def upto(self, position: ExtendedSequenceNumber) -> list[Cut[Count]]:
        """The cuts whose rows a checkpoint at `position` covers; it covers those of the last."""
        if not self.has_any_upto(position):
            return []
        newest_first = itertools.dropwhile(
            lambda cut: cut.position > position, reversed(self._cuts)
        )
        return list(newest_first)[::-1]

    def replayed_upto(self, position: ExtendedSequenceNumber) -> list[Cut[Count]]:
        """The cuts of records up to `position`: a destination whose cursor was there when the lease
        began has their rows."""
        return list(itertools.takewhile(lambda cut: cut.position <= position, self._cuts))

    def leave(self, position: ExtendedSequenceNumber) -> None:
        """The rows that a checkpoint at `position` covers do not wait any more."""
        gone = self.upto(position)
        for _ in gone:
            self._cuts.popleft()
        if gone and self._cuts:
            self._count_anew(self._cuts)

    def kept(
        self, acknowledged: ExtendedSequenceNumber | None, at_least: tuple[Count, ...]
    ) -> tuple[Count, ...]:
        """The rows that stay if the call under way raises: those of former calls, those that a
        checkpoint at `acknowledged` covers, and `at_least` so many."""
        assert self.call_start is not None, "no call to take back"
        covered = None if acknowledged is None else self.covered(acknowledged)
        return tuple(map(max, self.call_start, at_least, covered or self.call_start))

    def take_back(self, kept: tuple[Count, ...]) -> None:
        """The call raised: only these rows stay."""
        while self._cuts and is_beyond(self._cuts[-1].counts, kept):
            self._cuts.pop()
        self.call_start = None

    def merge(
        self, settled: ExtendedSequenceNumber, ends: Iterable[ExtendedSequenceNumber | None]
    ) -> None:
        """Merge neighbours up to `settled`, if there are many cuts. From now on rows leave up to
        `settled` at least, except that they may be divided at `ends`. While a destination is away,
        each batch makes a cut: an hour of small batches would be as many cuts."""
        if len(self._cuts) < self._merge_at:
            return
        divided = [end for end in ends if end is not None]
        merged: list[Cut[Count]] = []
        for cut in self._cuts:
            if merged and cut.position <= settled:
                low, high = sorted((merged[-1].position, cut.position))
                if not any(low <= end < high for end in divided):
                    merged.pop()
            merged.append(cut)
        self._count_anew(merged)
        self._merge_at = max(MERGED_FROM, 2 * len(merged))

    def _count_anew(self, cuts: Iterable[Cut[Count]]) -> None:
        """Keep these cuts, with the lowest position of each made from them alone."""
        lowest = itertools.accumulate((cut.position for cut in cuts), min)
        self._cuts = deque(
            Cut(cut.position, cut.counts, low) for cut, low in zip(cuts, lowest, strict=True)
        )


def is_beyond(counts: tuple[Count, ...], start: tuple[Count, ...]) -> bool:
    """Whether `counts` has a row that `start` has not."""
    return any(map(operator.gt, counts, start))
