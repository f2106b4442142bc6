"""Which rows of a lease belong to which checkpoint, while they wait for their outputs.

A `Note` says: the rows up to these marks belong to a checkpoint at this position, or to a later
one. `Notes` is not for two threads at once: its owner (`worker/outputs.py`) has a lock, which the
thread that renews the lease needs, too. So no method looks at all notes each time it is called.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from kclrun.model.sequence import ExtendedSequenceNumber

# With so many notes, and twice as many as the last merge left, neighbours are merged. So a merge
# looks at each note a few times at most, however long a destination is away.
MERGED_FROM: Final = 32


class Mark(msgspec.Struct, frozen=True, gc=False, order=True):
    """The number and the bytes of the first rows of an output since the lease began."""

    rows: int = 0
    size: int = 0


# One mark for each output.
Marks = tuple[Mark, ...]


class Note(msgspec.Struct, frozen=True):
    """The rows that a checkpoint at `position` covers."""

    position: ExtendedSequenceNumber
    marks: Marks


class Notes:
    """The notes that wait, by position.

    While a destination is away, each batch leaves a note. Once no turn of the outputs can send the
    rows of a note without those of the following one, the two are merged. Otherwise an hour of
    small batches would be as many notes.
    """

    def __init__(self) -> None:
        self._notes: deque[Note] = deque()
        self._merge_at = MERGED_FROM

    def __len__(self) -> int:
        return len(self._notes)

    def has_any_upto(self, limit: ExtendedSequenceNumber | None) -> bool:
        return bool(self._notes) and limit is not None and self._notes[0].position <= limit

    def add(self, note: Note, added: Marks) -> None:
        """Rows that are noted already, or `added` to their outputs, do not need a note."""
        if note.marks != (self._notes[-1].marks if self._notes else added):
            self._notes.append(note)

    def drop_void(self, position: ExtendedSequenceNumber, start: Marks) -> None:
        """Remove the notes that the batch which began at `start` made at `position` or above."""
        while self._notes and self._notes[-1].position >= position:
            if not is_beyond(self._notes[-1].marks, start):
                break
            self._notes.pop()

    def drop_beyond(self, marks: Marks) -> None:
        """The rows after `marks` were taken back: remove their notes."""
        while self._notes and is_beyond(self._notes[-1].marks, marks):
            self._notes.pop()

    def drop_upto(self, position: ExtendedSequenceNumber) -> None:
        """The rows up to `position` were added to their outputs."""
        while self._notes and self._notes[0].position <= position:
            self._notes.popleft()

    def upto(self, limit: ExtendedSequenceNumber) -> list[Note]:
        return list(itertools.takewhile(lambda note: note.position <= limit, self._notes))

    def covered(self, limit: ExtendedSequenceNumber, start: Marks) -> Marks:
        """The rows of the batch that began at `start` which belong to a checkpoint at `limit`."""
        for note in reversed(self._notes):
            if not is_beyond(note.marks, start):
                break
            if note.position <= limit:
                return note.marks
        return start

    def merge(
        self, settled: ExtendedSequenceNumber, ends: Iterable[ExtendedSequenceNumber | None]
    ) -> None:
        """Merge neighbours up to `settled`, if there are many notes. From now on rows leave up to
        `settled` at least, except that they may be divided at `ends`."""
        if len(self._notes) < self._merge_at:
            return
        divided = [end for end in ends if end is not None]
        merged: list[Note] = []
        for note in self._notes:
            if merged and note.position <= settled:
                before = merged[-1].position
                if not any(before <= end < note.position for end in divided):
                    merged.pop()
            merged.append(note)
        self._notes = deque(merged)
        self._merge_at = max(MERGED_FROM, 2 * len(merged))


def is_beyond(marks: Marks, start: Marks) -> bool:
    """Whether `marks` count a row that `start` does not."""
    return any(map(operator.gt, marks, start))
