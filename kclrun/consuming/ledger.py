"""The checkpoint ledger: delivered >= processed >= checkpointed, never backwards [I2, I2b, I7]."""

from __future__ import annotations

from collections import deque

from kclrun.errors import InvariantViolation, StaleCheckpoint
from kclrun.model.sequence import ExtendedSequenceNumber

__all__ = ["CheckpointLedger"]


class CheckpointLedger:
    """Positions and counts of one lease in this process.

    Counts are of user records since the start of the process. A checkpoint inside a batch counts
    none of that batch as covered until the whole batch is, which errs towards fewer duplicates.
    """

    def __init__(self, position: ExtendedSequenceNumber, uncheckpointed_max: int) -> None:
        self.checkpointed = position
        self.processed = position
        self.delivered = position
        # Whether something is processed that no checkpoint covers: asked at each event.
        self.has_unsaved = False
        self.delivered_total = 0
        self.checkpointed_total = 0
        self._uncheckpointed_max = uncheckpointed_max
        # One entry a delivered batch that is not yet covered; each holds at least one record, so
        # there are never more than `uncheckpointed_max`.
        self._open: deque[tuple[ExtendedSequenceNumber, int]] = deque()

    @property
    def delivered_max(self) -> int:
        """How many records in all may have been delivered before the next checkpoint [I7]."""
        return self.checkpointed_total + self._uncheckpointed_max

    @property
    def is_full(self) -> bool:
        return self.delivered_total >= self.delivered_max

    @property
    def uncheckpointed(self) -> int:
        """Records delivered that no checkpoint covers."""
        return self.delivered_total - self.checkpointed_total

    @property
    def has_uncounted(self) -> bool:
        """Whether a whole batch of records is processed that no checkpoint covers."""
        return bool(self._open) and self._open[0][0] <= self.processed

    @property
    def is_idle(self) -> bool:
        """Whether everything delivered is processed too."""
        return self.processed >= self.delivered

    def deliver(self, last: ExtendedSequenceNumber, records: int) -> None:
        """A batch up to `last` is given to user code (again, when user code raised)."""
        if last > self.delivered:
            self.delivered = last
            self.delivered_total += records
            if records:
                self._open.append((last, self.delivered_total))
                self._count_covered()  # the row may be ahead, by a late checkpoint

    def process(self, last: ExtendedSequenceNumber) -> None:
        """User code returned for everything up to `last`."""
        if last < self.processed:
            raise InvariantViolation(f"processed moved back from {self.processed} to {last}")
        self.processed = last
        self.delivered = max(self.delivered, last)
        self.has_unsaved = last > self.checkpointed

    def confirm(self, position: ExtendedSequenceNumber) -> None:
        """The row's checkpoint is `position` now, by our write or somebody's late one."""
        if position < self.checkpointed:
            raise InvariantViolation(
                f"checkpoint moved back from {self.checkpointed} to {position} [I2]"
            )
        self.checkpointed = position
        self.has_unsaved = self.processed > position
        self._count_covered()

    def _count_covered(self) -> None:
        while self._open and self._open[0][0] <= self.checkpointed:
            self.checkpointed_total = self._open.popleft()[1]

    def admit(self, position: ExtendedSequenceNumber | None) -> ExtendedSequenceNumber:
        """The position a request of user code stands for; None is everything delivered.

        Raises: StaleCheckpoint below the last checkpoint or above what was delivered, and for a
        sentinel, which is no position of a record.
        """
        if position is not None and position.is_sentinel and position != self.checkpointed:
            raise StaleCheckpoint(f"cannot checkpoint {position}: it is no position of a record")
        wanted = max(self.delivered, self.checkpointed) if position is None else position
        if wanted < self.checkpointed:
            raise StaleCheckpoint(
                f"cannot checkpoint {wanted}: the last checkpoint is {self.checkpointed} already"
            )
        if wanted > max(self.delivered, self.checkpointed):
            raise StaleCheckpoint(
                f"cannot checkpoint {wanted}: nothing above {self.delivered} was delivered"
            )
        return wanted

    def check(self) -> None:
        """The invariants this room can see."""
        assert self.processed <= self.delivered, "processed beyond delivered [I2b]"
        assert self.checkpointed_total <= self.delivered_total, "counts out of step"
