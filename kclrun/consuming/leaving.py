"""How a lease leaves its process: given away in good order [P16, P17, R8], or lost [P19].

Must not know: when user code is idle; `life.py` decides that. A lost lease never writes as owner.
"""

from __future__ import annotations

from typing import Final

from kclrun.consuming.checkpoints import CheckpointLedger
from kclrun.consuming.commands import SendLateCheckpoint
from kclrun.consuming.lease_writer import GivingAway, LeaseWriter, WriteScheduler
from kclrun.consuming.states import ANSWERS_ASKS, State
from kclrun.model.lease import ANYBODY, ASK_STALE_AFTER_S, Handoff, OwnerId
from kclrun.model.sequence import SHARD_END
from kclrun.model.time import Instant, backoff_s
from kclrun.protocol.writes import (
    Applied,
    HandOver,
    LateCheckpoint,
    Offer,
    Outcome,
    Release,
    Throttled,
    Unavailable,
)


class GracefulRelease:
    """Gives the lease away in good order [P16, P17, R8]: watches asks on the own row and makes the
    last write.

    The age of an ask is counted by this process: the same ask for 30 s by its own clock.
    `handoffAt` is another host's wall clock, and a wrong one must not stop balancing.
    """

    def __init__(
        self, own: LeaseWriter, scheduler: WriteScheduler, *, others_in_sight: bool
    ) -> None:
        self.others_in_sight = others_in_sight
        self._own = own
        self._scheduler = scheduler
        self._seen: Handoff | None = None
        self._seen_since = Instant(0.0)

    def is_asked_for(self, state: State, now: Instant) -> bool:
        """Whether to give the lease up because of an ask on the row as last confirmed.

        An ask that the claim sees is answered at once, before any user code is called. At the end
        of a shard, and while the lease is halting, an ask is left to grow old.
        """
        found = None if self._own.row is None else self._own.row.handoff
        if found != self._seen:
            self._seen, self._seen_since = found, now
        return found is not None and state in ANSWERS_ASKS and self.asker(now) is not None

    def asker(self, now: Instant) -> OwnerId | None:
        """The asker to answer, if any (ANYBODY if an operator asked for any owner)."""
        ask = self._seen
        return None if ask is None or self.drops_ask(now) else ask.to

    def drops_ask(self, now: Instant) -> bool:
        """Whether the next renewal removes the ask: it is too old, or our own."""
        ask = self._seen
        if ask is None:
            return False
        return ask.to == self._own.me or now - self._seen_since >= ASK_STALE_AFTER_S

    def last_write(self, ledger: CheckpointLedger, now: Instant) -> GivingAway:
        """The final checkpoint and the end of our ownership, in one write.

        A handover if a KCL 3 leader has named the next owner. An offer if another owner asked, or
        another owner is in sight. Else a release: the next owner finds it by a scan.
        """
        own, row = self._own, self._own.confirmed
        position = max(self._scheduler.final_position(ledger), row.checkpoint)
        if own.next_owner is not None:
            return HandOver(own.key, own.me, own.next_owner, own.counter, position, row.checkpoint)
        asker = self.asker(now)
        if asker is None and not self.others_in_sight:
            return Release(own.key, own.me, own.counter, position, row.checkpoint)
        to = None if asker == ANYBODY else asker
        return Offer(own.key, own.me, own.counter, position, row.checkpoint, to)


def words_of(change: GivingAway) -> str:
    """The receiver of the lease, in words for the report."""
    match change:
        case HandOver(next_owner=next_owner):
            return f"handed over to {next_owner}, as a KCL 3 leader asked"
        case Offer(offered_to=str(to)):
            return f"offered to {to}, who asked for it"
        case Offer():
            return "offered to any owner"
        case Release():
            return "released: no other owner is in sight"


# How long a lost lease waits for the batch under way. Then the process ends, even if the batch is
# still running. Its results do not count any more; half a minute lets most work reach a clean end.
LOST_GRACE_S: Final = 30.0
# The next owner begins within a second or two of its take, and a late checkpoint after its first
# own one saves no work. A throttled table gets some four tries in this time.
LATE_CHECKPOINT_S: Final = 3.0
# A burst of temporary files is over by then. It is well below the usual `stall`, after which user
# code that waits for a checkpoint would be taken for the cause.
OUTPUT_WAIT_S: Final = 30.0


class LateWriting:
    """One late checkpoint: sent once, and again only while it surely was not applied [P19].

    An unknown outcome is left unknown: only the new owner's row could show it, and neither answer
    would change the next step. A failed condition is an answer, too: the owner is not a kclrun
    owner, the shard has ended, or the position is passed already.
    """

    def __init__(self, change: LateCheckpoint, now: Instant) -> None:
        assert change.position != SHARD_END, "a late checkpoint never ends a shard (trace N6)"
        self.change = change
        self.until = Instant(now + LATE_CHECKPOINT_S)
        self.is_resolved = False
        self.has_applied = False
        self._attempts = 1

    def resolve(
        self, outcome: Outcome, now: Instant, chance: float
    ) -> tuple[SendLateCheckpoint, ...]:
        """Take in the outcome; return the command to send again, if needed."""
        pause_s = backoff_s(self._attempts, chance, max_s=LATE_CHECKPOINT_S)
        is_unsent = isinstance(outcome, Throttled | Unavailable)
        if is_unsent and now + pause_s < self.until:
            self._attempts += 1
            return (SendLateCheckpoint(self.change, Instant(now + pause_s)),)
        self.is_resolved = True
        self.has_applied = isinstance(outcome, Applied)
        return ()


class LostLease:
    """Why the lease was lost, and what the process still waits for before it ends.

    `is_host_fault`: the row is still ours, but this process cannot serve it.
    """

    def __init__(
        self, reason: str, let_go_instant: Instant, *, is_host_fault: bool = False
    ) -> None:
        self.reason = reason
        self.is_host_fault = is_host_fault
        self.user_code_is_done = False
        self.late: LateWriting | None = None
        self._let_go_instant = let_go_instant

    def save_late(self, change: LateCheckpoint, now: Instant) -> SendLateCheckpoint:
        """User code is idle: write its processed position once."""
        self.late = LateWriting(change, now)
        return SendLateCheckpoint(change)

    @property
    def deadline(self) -> Instant:
        """When to stop waiting at the latest."""
        late = self.late
        if self.user_code_is_done and late is not None:
            return min(late.until, self._let_go_instant)
        return self._let_go_instant

    def is_over(self, now: Instant) -> bool:
        """Whether the waiting is over."""
        is_writing = self.late is not None and not self.late.is_resolved
        return now >= self.deadline or (self.user_code_is_done and not is_writing)

    @property
    def words(self) -> str:
        """The reason, and the effect of the late checkpoint on the row."""
        if self.late is None or not self.late.has_applied:
            return self.reason
        position = self.late.change.position
        return f"{self.reason}; what it had processed was checkpointed late, at {position}"


class OutputWatch:
    """Since when the output keeps no rows, and when the host should leave the lease to another one.

    Emitted rows are made durable before the checkpoint that covers them. While that fails (a full
    disk, a broken file), the process reads ahead as far as it may and then stands still, and renews
    its lease. Most disks are cleared, so it waits for that, but not for long while another host
    could read the shard. Then it gives the lease up as if it were lost.
    """

    def __init__(self) -> None:
        self._failing_since: Instant | None = None
        self._message = ""

    def failed(self, message: str, now: Instant) -> None:
        """Rows could not be made durable."""
        self._message = message
        if self._failing_since is None:
            self._failing_since = now

    def kept(self) -> None:
        """The rows were made durable, or there were none."""
        self._failing_since = None

    @property
    def give_up_instant(self) -> Instant | None:
        """When to leave the lease to another host, if there is one; None while rows are kept."""
        since = self._failing_since
        return None if since is None else Instant(since + OUTPUT_WAIT_S)

    @property
    def words(self) -> str:
        """Why the lease leaves this host."""
        return f"the output kept no rows for {OUTPUT_WAIT_S:g} s: {self._message}"
