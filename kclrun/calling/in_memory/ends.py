"""Where a run in memory ends before its last record."""

from __future__ import annotations

from typing import Final

# A processor that raises RetryLater each time would never end a run in which no time passes.
RESTS_MAX: Final = 100


class Ends:
    """As it is: nowhere but at Ctrl-C. A subclass raises from a method where the run ends."""

    def are_reached_by(self, error: BaseException) -> bool:
        """Whether this error ends the run. A call that raised any other is repeated."""
        return isinstance(error, KeyboardInterrupt)

    def batch_max(self, delivered: int) -> int | None:
        """How many records the next batch has at most, after so many were delivered."""
        return None

    def given(self, count: int) -> None:
        """So many records were given, in whole batches."""

    def returned(self) -> None:
        """A call of `process_record` returned."""

    def all_given(self) -> None:
        """Every record was given."""

    def checkpointing(self) -> None:
        """User code asks for a checkpoint, which is not made yet."""
