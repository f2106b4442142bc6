"""Checkpoints of one lease: delivered, processed and saved positions, and requests of user code."""

from __future__ import annotations

from collections import deque
from typing import Final

from kclrun.errors import InvariantViolation, StaleCheckpoint
from kclrun.lease.commands import (
    AllowDelivery,
    AnswerCheckpoint,
    CheckpointAnswer,
    StopDelivery,
)
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.protocol.reports import ProcessorFailed

# A checkpoint at half of `uncheckpointed_max`, due or not, so that the cap does not stop
# deliveries.
EARLY_SHARE: Final = 0.5


class CheckpointLedger:
    """Positions and counts of one lease in this process.

    Counts are of user records since the start of the process. A checkpoint inside a batch counts no
    record of that batch as covered, so the count of uncheckpointed records is never too low.
    """

    def __init__(self, position: ExtendedSequenceNumber, uncheckpointed_max: int) -> None:
        self.checkpointed = position
        self.processed = position
        self.delivered = position
        # Whether a processed record has no checkpoint. A field and not a property: each event reads
        # it.
        self.has_unsaved = False
        self.delivered_total = 0
        self.checkpointed_total = 0
        self._uncheckpointed_max = uncheckpointed_max
        # One entry for each delivered batch that is not yet covered. Each batch holds at least one
        # record, so there are never more entries than `uncheckpointed_max`.
        self._open: deque[tuple[ExtendedSequenceNumber, int]] = deque()

    @property
    def delivered_max(self) -> int:
        """How many records in all may be delivered before the next checkpoint [I7]."""
        return self.checkpointed_total + self._uncheckpointed_max

    @property
    def is_full(self) -> bool:
        return self.delivered_total >= self.delivered_max

    @property
    def uncheckpointed(self) -> int:
        """The number of delivered records that no checkpoint covers."""
        return self.delivered_total - self.checkpointed_total

    @property
    def has_uncounted(self) -> bool:
        """Whether a whole processed batch has no checkpoint."""
        return bool(self._open) and self._open[0][0] <= self.processed

    @property
    def is_idle(self) -> bool:
        """Whether every delivered record is processed, too."""
        return self.processed >= self.delivered

    def deliver(self, last: ExtendedSequenceNumber, records: int) -> None:
        """A batch up to `last` is given to user code (again, if user code raised before)."""
        if last > self.delivered:
            self.delivered = last
            self.delivered_total += records
            if records:
                self._open.append((last, self.delivered_total))
                self._count_covered()  # the row may be ahead, by a late checkpoint

    def adopt(self, position: ExtendedSequenceNumber) -> None:
        """The outputs have the rows of all records up to `position`: they count as processed, and
        no process delivers them again [K12]."""
        self.delivered = max(self.delivered, position)
        self.process(max(self.processed, position))

    def process(self, last: ExtendedSequenceNumber) -> None:
        """User code returned for every record up to `last`."""
        if last < self.processed:
            raise InvariantViolation(f"processed moved back from {self.processed} to {last}")
        self.processed = last
        if last != self.delivered:
            self.delivered = max(self.delivered, last)
        self.has_unsaved = self.has_unsaved or last > self.checkpointed

    def confirm(self, position: ExtendedSequenceNumber) -> None:
        """The row's checkpoint is `position` now, by our write or by another owner's late one."""
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
        """The position of a request of user code; None stands for every delivered record.

        Raises: StaleCheckpoint if it is below the last checkpoint, above the last delivered record,
        or a sentinel, which is not a position of a record.
        """
        # A child of which no record was read has positions, too: those of the timers it inherited.
        is_none = position is not None and position.is_sentinel and not position.tick
        if is_none and position != self.checkpointed:
            raise StaleCheckpoint(
                f"cannot checkpoint {position}: it is not the position of a record"
            )
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


class CheckpointRequests:
    """The waiting requests. Several threads may ask; one write answers all requests it covers.

    `is_manual`: only the processor moves the checkpoint. `highest` is the position that one write
    must reach to answer all requests; None without requests.
    """

    def __init__(self, *, is_manual: bool) -> None:
        self.highest: ExtendedSequenceNumber | None = None
        self._is_manual = is_manual
        self._waiting: dict[int, ExtendedSequenceNumber] = {}
        # The highest position with a waiting request when checkpoints became impossible.
        self._refused: ExtendedSequenceNumber | None = None
        self._closed_because: str | None = None

    def admit(
        self, request: int, position: ExtendedSequenceNumber | None, ledger: CheckpointLedger
    ) -> tuple[AnswerCheckpoint, ...]:
        """Accept a request. Requests that need no write, or can have none, are answered at once."""
        if self._closed_because is not None:
            return (AnswerCheckpoint(request, CheckpointAnswer.LOST, self._closed_because),)
        try:
            wanted = ledger.admit(position)
        except StaleCheckpoint as refusal:
            return (AnswerCheckpoint(request, CheckpointAnswer.STALE, str(refusal)),)
        if wanted == ledger.checkpointed:
            return (AnswerCheckpoint(request, CheckpointAnswer.DURABLE),)
        self._waiting[request] = wanted
        self.highest = wanted if self.highest is None else max(self.highest, wanted)
        return ()

    def answer(self, durable: ExtendedSequenceNumber) -> tuple[AnswerCheckpoint, ...]:
        """Answer every request up to `durable`: the row has reached it."""
        covered = [request for request, wanted in self._waiting.items() if wanted <= durable]
        for request in covered:
            del self._waiting[request]
        self.highest = max(self._waiting.values(), default=None)
        return tuple(AnswerCheckpoint(request, CheckpointAnswer.DURABLE) for request in covered)

    def refuse_all(self, reason: str) -> tuple[AnswerCheckpoint, ...]:
        """Checkpoints are impossible from now on: answer all requests, and every later one at once.

        The first reason stays: later ones are its consequences.
        """
        self._closed_because = self._closed_because or reason
        self._refused = self.highest or self._refused
        self.highest = None
        waiting = tuple(self._waiting)
        self._waiting.clear()
        return tuple(
            AnswerCheckpoint(request, CheckpointAnswer.LOST, reason) for request in waiting
        )

    def final_position(self, ledger: CheckpointLedger) -> ExtendedSequenceNumber:
        """The position of the last write: of all processed records, or the one that was
        requested."""
        if self._is_manual:
            return self.highest or self.unacknowledged(ledger)
        return max(ledger.processed, self.highest or ledger.processed)

    def unacknowledged(self, ledger: CheckpointLedger) -> ExtendedSequenceNumber:
        """The highest position that may still be written for a lease that takes no more writes.

        With automatic checkpoints it covers all processed records. With manual ones it is the
        position that user code waited for when the writing ended, but only if its batch then
        returned all the same. A batch that raised on the refusal has taken its rows back.
        """
        if not self._is_manual:
            return ledger.processed
        refused = self._refused
        if refused is None or refused > ledger.processed:
            return ledger.checkpointed
        return max(refused, ledger.checkpointed)


class DeliveryPermit:
    """The permit that the shell has: only changes of it become commands."""

    def __init__(self, *, one_batch_a_checkpoint: bool) -> None:
        self._one_batch_a_checkpoint = one_batch_a_checkpoint
        self._last_allowed: AllowDelivery | None = None
        self.is_stopped = True

    def allow(self, fence: Instant, ledger: CheckpointLedger) -> tuple[AllowDelivery, ...]:
        """Let batches start. With one batch a checkpoint, only when no record is uncheckpointed."""
        allowed = ledger.delivered_max
        start_below = ledger.checkpointed_total + 1 if self._one_batch_a_checkpoint else allowed
        permit = AllowDelivery(fence, start_below, allowed)
        if permit == self._last_allowed:
            return ()
        self._last_allowed, self.is_stopped = permit, False
        return (permit,)

    def stop(self) -> tuple[StopDelivery, ...]:
        """Stop new batches. It is stopped once DeliveryStopped says that no user code runs."""
        self._last_allowed = None
        self.is_stopped = False
        return (StopDelivery(),)


def stuck_at_cap(ledger: CheckpointLedger) -> ProcessorFailed:
    """With manual checkpoints, only the processor can make room [I7]."""
    return ProcessorFailed(
        "process_records",
        f"{ledger.uncheckpointed} records were processed and none checkpointed:"
        " checkpoint: manual asks for checkpointer.checkpoint() before"
        " checkpoint.uncheckpointed_max is reached",
        attempts=1,
        position=ledger.processed,
    )
