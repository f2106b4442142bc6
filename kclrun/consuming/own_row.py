"""The lease's own row: what is confirmed, the one write under way, and what its outcome means.

Knows: P2 (conditions), P4 (only a success claims), P5 (one unresolved write), P6 (unknown
outcomes), P7 (the fence counts from the earliest unresolved send), R8 (a KCL 3 leader's
hand-over), and when a row that vanished is written again. May not know: time-outs, how a row is
written. Rule: every answer of the table goes through `_judge`, whichever way it came.
Look next: `row_evidence.py`.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from kclrun.consuming.fence import fence_instant, renew_interval_s
from kclrun.consuming.row_evidence import OwnChange, holds, holds_after_giving_up, rebased
from kclrun.errors import InvariantViolation
from kclrun.model.backoff import backoff_s
from kclrun.model.changes import (
    Checkpoint,
    Claim,
    CreateChildren,
    CreateLease,
    HandOver,
    NameChildren,
    Renew,
)
from kclrun.model.lease import WRITTEN_AGAIN_AHEAD, Lease, LeaseKey, OwnerId
from kclrun.model.outcomes import (
    Applied,
    ConditionFailed,
    Outcome,
    OutcomeUnknown,
    Refused,
    Throttled,
    Unavailable,
)
from kclrun.model.time import Instant

__all__ = ["OwnRow", "Verdict", "VerdictKind"]

# One attempt a back-off, and no back-off is below 25 ms: 400 fill a failover of 10 s.
ATTEMPTS_MAX: Final = 1000
# The last renewal before an outage is at most a third of `failover` old. With a pause of an eighth
# there is a try in the last quarter before the fence: an outage of up to half a `failover` costs
# no lease. DESIGN 5 bounds it at 3 s besides.
RETRY_PAUSE_MAX_S: Final = 3.0
RETRY_PAUSES_PER_FAILOVER: Final = 8


class VerdictKind(enum.Enum):
    """What became of the write under way."""

    CONFIRMED = "it holds on the row"
    AGAIN = "it does not hold yet: send `change`"
    READ_BACK = "nobody knows: read the row"
    REDO = "children were not created for sure: look at the parents again"
    HANDED_OVER = "a KCL 3 leader named the next owner, who waits for our last write"
    LOST = "the row is not ours any more"


class Verdict(msgspec.Struct, frozen=True):
    """`change` is what holds (CONFIRMED) or is to be sent (AGAIN, after a back-off if `slower`)."""

    kind: VerdictKind
    change: OwnChange | None = None
    slower: bool = False
    reason: str = ""


class OwnRow:
    """The row as last confirmed, and at most one change under way."""

    def __init__(self, key: LeaseKey, me: OwnerId, seen_counter: int, failover_s: float) -> None:
        self.key = key
        self.me = me
        self.failover_s = failover_s
        self.row: Lease | None = None
        self.counter = seen_counter
        self.pending: OwnChange | None = None
        self.retries = 0
        # Whom a KCL 3 leader gives the lease to; from then on only the hand-over can be written.
        self.next_owner: OwnerId | None = None
        self.is_gone = False
        # No batch may start at or after this instant; None before the claim [P7].
        self.fence: Instant | None = None
        # When the next heartbeat is due; any write that moves the counter is one.
        self.renewal_instant: Instant | None = None
        self._was_written_again = False
        self._permitted_since: Instant | None = None
        self._unresolved: list[Instant] = []

    def set_failover(self, failover_s: float) -> None:
        """The smallest in the fleet is another one now; what was permitted is so by the new one."""
        self.failover_s = failover_s
        self._permit_since(self._permitted_since)

    def retry_pause_s(self, attempt: int, chance: float) -> float:
        """How long to wait before attempt number `attempt` (from 1) at a write or a read-back."""
        max_s = min(RETRY_PAUSE_MAX_S, self.failover_s / RETRY_PAUSES_PER_FAILOVER)
        return backoff_s(attempt, chance, max_s=max_s)

    @property
    def confirmed(self) -> Lease:
        """The row after the claim. Raises: InvariantViolation before it."""
        if self.row is None:
            raise InvariantViolation(f"lease {self.key} is used before it was claimed [P4]")
        return self.row

    def begin(self, change: OwnChange) -> OwnChange:
        """Make this the one change under way [P5]."""
        if self.pending is not None:
            raise InvariantViolation(f"lease {self.key}: two writes at once [P5]")
        self.pending = change
        return change

    def give_up(self) -> None:
        """Write nothing more: the lease is lost. A late outcome decides nothing."""
        self.pending = None
        self._unresolved.clear()

    def put_off(self) -> bool:
        """Take the change back, which surely did not apply, so that another may go first.

        False if an earlier send of it may still arrive: then it stays the one under way [P5].
        """
        if self._unresolved:
            return False
        self.pending = None
        return True

    def resolve(self, outcome: Outcome, sent: Instant) -> Verdict:
        """Take in the outcome of one send of the change under way."""
        if len(self._unresolved) >= ATTEMPTS_MAX:
            return self._lost("its row could not be written for too long")
        match outcome:
            case Applied(row):
                return self._applied(row, sent)
            case _ if self._creates_children:
                return self._abandon_children(outcome)
            case ConditionFailed(row):
                return self._judge(row, answered=True)
            case OutcomeUnknown(message):
                self._unresolved.append(sent)
                return Verdict(VerdictKind.READ_BACK, reason=message)
            case Throttled(message) | Unavailable(message):
                return self._again(message)
            case Refused(code, message):
                return self._again(f"{code}: {message}")

    def read_back(self, row: Lease | None) -> Verdict:
        """Take in a consistent read made because an outcome was unknown [P6]."""
        return self._judge(row, answered=False)

    def _applied(self, row: Lease | None, sent: Instant) -> Verdict:
        change = self._pending()
        if isinstance(change, CreateChildren):
            return self._settle(change)
        if isinstance(change, CreateLease):  # a creation returns no row: it stands as it was sent
            row = change.lease
        if row is None:
            raise InvariantViolation(f"lease {self.key}: an applied {type(change)} without a row")
        self._confirm(row, min([*self._unresolved, sent]))
        return self._settle(change)

    def _judge(self, row: Lease | None, *, answered: bool) -> Verdict:
        """Say what the row that stands there means for the change under way."""
        change = self._pending()
        if row is None:
            return self._write_again(change)
        if isinstance(change, CreateLease):
            return self._judge_written_again(change, row)
        if holds_after_giving_up(change, row, self.counter):
            self.row = row
            return self._settle(change)
        if self._is_handed_over(row):
            return self._hand_over(change, row)
        if row.owner != self.me:
            return self._lost(f"its row belongs to {row.owner or 'nobody'}")
        if row.counter == self.counter:
            return self._unmoved(change, row, answered=answered)
        if row.counter == self.counter + 1 and (self._unresolved or isinstance(change, Claim)):
            return self._moved(change, row)
        return self._lost(f"its counter is {row.counter}, {self.counter} was confirmed")

    def _write_again(self, change: OwnChange) -> Verdict:
        """The row has vanished: its live owner writes it again, as last confirmed, once in a row.

        P2 lets nothing resurrect a row, and this is its one exception: by the owner whose fence
        stands, so nobody else may have taken it by expiry. What could spoil it: an unresolved
        renewal or checkpoint may have applied before the row went, and an observer that had seen
        it go on counting down while our fence begins anew [P7]; or a Java worker may have stolen
        the row before it went, and renew it by a counter that we, too, would have written. So the
        new counter passes whatever anybody can have seen, and no write on its way can match the
        new row. An unresolved end, offer,
        release or hand-over may have applied, and the row been deleted, or taken, after it: then
        the shard has ended or is somebody else's, and nothing is written. The creation is sent
        again only where it surely did not apply: one in flight could land after the row was
        deleted for good (trace C3).
        """
        if self.row is None or self._was_written_again or self.next_owner is not None:
            return self._vanished()
        if self._unresolved and not isinstance(change, Renew | Checkpoint | NameChildren):
            return self._vanished()
        counter = self.counter + WRITTEN_AGAIN_AHEAD
        row = msgspec.structs.replace(self.row, owner=self.me, counter=counter)
        self._was_written_again = True
        self._unresolved.clear()
        self.pending = CreateLease(row)
        return Verdict(VerdictKind.AGAIN, self.pending)

    def _judge_written_again(self, change: CreateLease, row: Lease) -> Verdict:
        """A row stands where ours had vanished: ours if its reply was lost, else another's."""
        is_ours = row.owner == self.me and row.counter == change.lease.counter
        if is_ours and self._unresolved:
            self._confirm(row, min(self._unresolved))
            return self._settle(change)
        return self._lost(
            f"its row had vanished, and the one that stands there belongs to"
            f" {row.owner or 'nobody'}, at {row.checkpoint}"
        )

    def _is_handed_over(self, row: Lease) -> bool:
        """Whether a KCL 3 leader has written the next owner beside us, its `checkpointOwner`."""
        if row.checkpoint_owner != self.me or row.owner in {self.me, None} or self.row is None:
            return False
        is_mine_moved = row.counter == self.counter + 1 and bool(self._unresolved)
        return row.counter == self.counter or is_mine_moved

    def _hand_over(self, change: OwnChange, row: Lease) -> Verdict:
        """Nothing else of ours can apply from here on: all other writes expect us as the owner."""
        if row.counter != self.counter:  # an unresolved write of ours came before the leader's
            self._confirm(row, min(self._unresolved))
        self.row = row
        self.next_owner = row.owner
        if isinstance(change, HandOver):
            self.pending = rebased(change, row)
            return Verdict(VerdictKind.AGAIN, self.pending, slower=self.pending == change)
        self.pending = None
        self._unresolved.clear()
        return Verdict(VerdictKind.HANDED_OVER, reason=f"a KCL 3 leader gives it to {row.owner}")

    def _unmoved(self, change: OwnChange, row: Lease, *, answered: bool) -> Verdict:
        """The counter stands: nothing applied so far, but an earlier send may still arrive [P6]."""
        if isinstance(change, Claim) or self.row is None:
            return self._again("the claim did not apply")
        if answered:
            # Owner and counter hold, so only the position part failed: a late checkpoint of a
            # former owner moved it. Adopt the row's position; never write a lower one [P2].
            self.row = row
        self.pending = rebased(change, row)
        return Verdict(VerdictKind.AGAIN, self.pending, slower=self.pending == change)

    def _moved(self, change: OwnChange, row: Lease) -> Verdict:
        """Some write of mine applied: adopt the row, and issue again what is missing on it [P6].

        Only an unresolved one can have: with none, the writer is another process of this owner
        (trace N3). A claim alone may follow a write of the former process, and claims again [P4].
        """
        if isinstance(change, Claim):
            self.counter = row.counter
            self._unresolved.clear()
            self.pending = msgspec.structs.replace(change, seen_counter=row.counter)
            return Verdict(VerdictKind.AGAIN, self.pending)
        self._confirm(row, min(self._unresolved))
        if holds(change, row):
            return self._settle(change)
        self.pending = rebased(change, row)
        return Verdict(VerdictKind.AGAIN, self.pending)

    def _abandon_children(self, outcome: Outcome) -> Verdict:
        """Creating children leaves this row as it is and is conditional on its counter, so a send
        that still arrives later is harmless: leave it, and begin again from fresh reads [P12].
        The lease is renewed meanwhile, also where the service refuses (a permission is missing)."""
        self.pending = None
        self.retries += 1
        message = "" if isinstance(outcome, Applied | ConditionFailed) else outcome.message
        reason = message and f"the children cannot be created: {message}"
        return Verdict(VerdictKind.REDO, slower=True, reason=reason)

    @property
    def _creates_children(self) -> bool:
        return isinstance(self.pending, CreateChildren)

    def _again(self, message: str) -> Verdict:
        self.retries += 1
        return Verdict(VerdictKind.AGAIN, self._pending(), slower=True, reason=message)

    def _settle(self, change: OwnChange) -> Verdict:
        self._was_written_again = isinstance(change, CreateLease)
        self.pending = None
        self.retries = 0
        self._unresolved.clear()
        return Verdict(VerdictKind.CONFIRMED, change)

    def _vanished(self) -> Verdict:
        self.is_gone = True
        return self._lost("its row is gone from the table")

    def _lost(self, reason: str) -> Verdict:
        self.pending = None
        self._unresolved.clear()
        return Verdict(VerdictKind.LOST, reason=reason)

    def _confirm(self, row: Lease, permitted_since: Instant) -> None:
        self._permit_since(permitted_since)
        self.row = row
        self.counter = row.counter
        self._unresolved.clear()

    def _permit_since(self, sent: Instant | None) -> None:
        self._permitted_since = sent
        if sent is not None:
            self.fence = fence_instant(sent, self.failover_s)
            self.renewal_instant = Instant(sent + renew_interval_s(self.failover_s))

    def _pending(self) -> OwnChange:
        if self.pending is None:
            raise InvariantViolation(f"lease {self.key}: an outcome without a write under way")
        return self.pending
