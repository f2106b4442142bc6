"""One output of a lease with the rows that wait for it, and its pace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kclrun.model.output import Cursor
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.outputs.row_ledger import RowCount
from kclrun.ports import Output

# A full output stops delivery until this share of its buffer is free. Otherwise a small batch would
# start for each row that is sent.
FREE_SHARE: Final = 0.5


class Pace(msgspec.Struct, frozen=True):
    """When an output commits without a request of the core. `roll_s` and `roll_bytes` are the age
    and the size at which a roll ends, both 0 for an output that commits with every checkpoint.
    While `buffer_bytes` are unsent no batch starts."""

    roll_s: float
    roll_bytes: int
    buffer_bytes: int


class PacedOutput(NamedTuple):
    """An output of the settings that is open, and when it commits."""

    name: str
    output: Output
    pace: Pace


class Lane:
    """One output with the rows that wait for it."""

    def __init__(self, index: int, name: str, output: Output, pace: Pace) -> None:
        self.index = index
        self.name = name
        self.output = output
        self.pace = pace
        self.rows: list[Any] = []  # emitted and not yet added
        # The number of all rows that were emitted, and their bytes. Not a RowCount, because it
        # changes with each row.
        self.emitted_rows = self.emitted_bytes = 0
        self.added = RowCount()
        # The destination had the rows of records up to here when the lease began: rows that these
        # records emit again are dropped [K12].
        self.known: ExtendedSequenceNumber | None = None
        self.committed: Cursor | None = None
        self.is_dirty = False  # rows were added since the last commit
        self.committed_rows = self.committed_bytes = 0  # of the rows that were added until then
        self.is_unresolved = False  # a commit raised: nothing is added before it is repeated [K6]
        self.dirty_since = Instant(0.0)
        # The rows of all records up to here are durable at the destination.
        self.clear: ExtendedSequenceNumber | None = None

    @property
    def may_be_refused(self) -> bool:
        """Whether its destination may refuse rows for their values (`TryingOutput`)."""
        return hasattr(self.output, "try_rows")

    @property
    def emitted(self) -> RowCount:
        return RowCount(self.emitted_rows, self.emitted_bytes)

    def append(self, row: Any, size: int) -> None:
        self.rows.append(row)
        self.emitted_rows += 1
        self.emitted_bytes += size

    def waiting(self, first: int, last: int | None = None) -> Sequence[Any]:
        """The rows from `first` to `last`, counted since the lease began, that were not added."""
        base = self.added.rows
        return self.rows[max(0, first - base) : None if last is None else max(0, last - base)]

    def take_back(self, kept: RowCount) -> Sequence[Any]:
        """Remove and return the rows emitted after `kept`, which are not added yet."""
        first = kept.rows - self.added.rows
        taken = self.rows[first:]
        del self.rows[first:]
        self.emitted_rows, self.emitted_bytes = kept.rows, kept.size
        return taken

    @property
    def waiting_bytes(self) -> int:
        return self.emitted_bytes - self.added.size + self.output.unsent_bytes

    def is_due(self, now: Instant, *, is_asked: bool, is_held: bool) -> bool:
        """Whether the output commits now although no checkpoint needs its rows at once. `is_held`:
        delivery waits until half of the buffer is free."""
        if not self.is_dirty:
            return False
        pace, unsent = self.pace, self.output.unsent_bytes
        if unsent >= pace.buffer_bytes * (FREE_SHARE if is_held else 1.0):
            return True
        if not pace.roll_bytes:
            return is_asked
        # Not the unsent bytes: parts of a roll are sent as they fill.
        rolled = self.added.size - self.committed_bytes
        return rolled >= pace.roll_bytes or now >= self.dirty_since + pace.roll_s
