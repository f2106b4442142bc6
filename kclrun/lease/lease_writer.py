"""The lease's own row as last confirmed, and the meaning of the table's answers about it.

Implements P2 (conditions), P4 (only a success claims), P7 (the fence counts from the earliest
unresolved send), R8 (a KCL 3 leader's handover) and the repair of a vanished row, over the one
write in flight (`protocol/in_flight.py`). Must not know: when a row is written, and how.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final, assert_never

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.lease import events
from kclrun.model.lease import WRITTEN_AGAIN_AHEAD, Lease, LeaseKey, OwnerId
from kclrun.model.sequence import SHARD_END
from kclrun.model.time import Instant, backoff_s
from kclrun.protocol import writes
from kclrun.protocol.fence import FailoverTerms
from kclrun.protocol.in_flight import Fate, InFlight
from kclrun.protocol.reports import GilHeld, ProcessWarned, Report

# One attempt a back-off, and no back-off is below 25 ms: 400 fill a failover of 10 s.
ATTEMPTS_MAX: Final = 1000
# The last renewal before an outage is at most a third of `failover` old. With a pause of an eighth
# there is a try in the last quarter before the fence, so an outage of up to half a `failover` costs
# no lease. Above that the limit is that of any failed request (`model/time.py`).
RETRY_PAUSE_MAX_S: Final = 3.0
RETRY_PAUSES_PER_FAILOVER: Final = 8


class VerdictKind(enum.Enum):
    """The conclusion about the write in flight."""

    CONFIRMED = "it holds on the row"
    AGAIN = "it does not hold yet: send `change`"
    READ_BACK = "its outcome is not known: read the row"
    REDO = "children were not created for sure: look at the parents again"
    MOVED = "another program moved its position: begin again from the row"
    HANDED_OVER = "a KCL 3 leader named the next owner, who waits for our last write"
    LOST = "the row is not ours any more"


class WriteVerdict(msgspec.Struct, frozen=True):
    """`change` holds (CONFIRMED) or must be sent (AGAIN, after a back-off if `slower`).

    `not_before`: when to send (AGAIN), or to read (READ_BACK; None for now).
    """

    kind: VerdictKind
    change: writes.Change | None = None
    slower: bool = False
    reason: str = ""
    not_before: Instant | None = None


# An answer of the table about the own row.
Answer = events.WriteResolved | events.OwnRowRead | events.ReadFailed


class LeaseWriter:
    """The row as last confirmed, and at most one change in flight.

    `adopts`: a position on the row that another owner wrote is taken over [P2]. Else it ends the
    process: the outputs have rows in step with our own positions [K3].
    """

    def __init__(
        self,
        key: LeaseKey,
        me: OwnerId,
        seen_counter: int,
        failover_s: float,
        chance: Callable[[], float],
        *,
        adopts: bool = True,
    ) -> None:
        self.key = key
        self.me = me
        self.in_flight = InFlight()
        self.row: Lease | None = None
        self.counter = seen_counter
        # Why the write in flight has not succeeded yet, in words; empty after a success.
        self.trouble = ""
        # The owner that a KCL 3 leader gives the lease to. From then on only the handover can be
        # written.
        self.next_owner: OwnerId | None = None
        self.is_gone = False
        # No batch may start at or after this instant; None before the claim [P7].
        self.fence: Instant | None = None
        # When the next heartbeat is due; any write that moves the counter is one.
        self.renewal_instant: Instant | None = None
        self._terms = FailoverTerms(failover_s)
        self._chance = chance
        self._adopts = adopts
        self._retries = 0
        self._reads_failed = 0
        self._was_written_again = False
        self._permitted_since: Instant | None = None

    @property
    def failover_s(self) -> float:
        """The smallest failover in the fleet."""
        return self._terms.failover_s

    @property
    def pending(self) -> writes.Change | None:
        """The change in flight."""
        return self.in_flight.change

    def sends(self, change: writes.LeaseChange) -> bool:
        """Whether a change that waited for its time is still sent: not if it was given up
        meanwhile."""
        return isinstance(change, writes.LateCheckpoint) or change == self.pending

    @property
    def confirmed(self) -> Lease:
        """The row after the claim. Raises: InvariantViolation before it."""
        if self.row is None:
            raise InvariantViolation(f"lease {self.key} is used before it was claimed [P4]")
        return self.row

    def set_failover(self, failover_s: float, now: Instant) -> None:
        """The smallest failover in the fleet has changed. A shorter one makes a renewal due at
        once, and the fence counts by it from that send on (`fence.py`)."""
        self._terms.change(failover_s, now)
        self._permit_since(self._permitted_since)

    def take_in(self, answer: Answer, now: Instant) -> WriteVerdict | None:
        """Take in an answer of the table. None if the change was given up (the fence passed)."""
        if self.in_flight.change is None:
            return None
        match answer:
            case events.WriteResolved(_, outcome, sent):
                verdict = self.resolve(outcome, sent)
            case events.OwnRowRead(row):  # read because an outcome was unknown [P6]
                self._reads_failed = 0
                verdict = self._judge(row, answered=False)
            case events.ReadFailed():
                self._reads_failed += 1
                at = Instant(now + self._pause_s(self._reads_failed))
                return WriteVerdict(VerdictKind.READ_BACK, not_before=at)
            case _:
                assert_never(answer)
        if verdict.kind is not VerdictKind.AGAIN:
            return verdict
        pause_s = self._pause_s(self._retries)
        at = Instant(now + (pause_s if verdict.slower else 0.0))
        return msgspec.structs.replace(verdict, not_before=at)

    def resolve(self, outcome: writes.Outcome, sent: Instant) -> WriteVerdict:
        """Take in the outcome of one send of the change in flight."""
        if len(self.in_flight.unresolved) >= ATTEMPTS_MAX:
            return self._lost("its row could not be written for too long")
        match outcome:
            case writes.Applied(row):
                return self._applied(row, sent)
            case _ if isinstance(self.in_flight.change, writes.CreateChildren):
                return self._abandon_children(outcome)
            case writes.ConditionFailed(row):
                return self._judge(row, answered=True)
            case writes.OutcomeUnknown(message):
                self.in_flight.unresolved.append(sent)
                self.trouble = message
                return WriteVerdict(VerdictKind.READ_BACK, reason=message)
            case writes.Throttled(message) | writes.Unavailable(message):
                return self._again(message)
            case writes.Refused(code, message):
                return self._again(f"{code}: {message}")
            case _:
                assert_never(outcome)

    def _applied(self, row: Lease | None, sent: Instant) -> WriteVerdict:
        change = self.in_flight.required()
        if isinstance(change, writes.CreateChildren):
            return self._settle(change)
        if isinstance(change, writes.CreateLease):
            row = change.lease  # a creation returns no row: it stands as it was sent
        if row is None:
            raise InvariantViolation(f"lease {self.key}: an applied {type(change)} without a row")
        if self._is_moved(change, row):
            return self._moved(row)
        self._confirm(row, self.in_flight.earliest(sent))
        return self._settle(change)

    def _judge(self, row: Lease | None, *, answered: bool) -> WriteVerdict:
        """Decide what the current row means for the change in flight."""
        change = self.in_flight.required()
        if row is None:
            return self._write_again(change)
        fate = self.in_flight.judge(row, self.me, self.counter)
        if row.owner == self.me and self._is_moved(change, row):
            return self._moved(row)
        if isinstance(change, writes.CreateLease):
            return self._judge_written_again(change, row, fate)
        if fate is Fate.APPLIED and isinstance(change, writes.End | writes.ReleaseWrite):
            self.row = row
            return self._settle(change)
        if fate is Fate.LOST:
            if self._is_handed_over(row):
                return self._hand_over(change, row)
            return self._lost(f"its row belongs to {row.owner or 'no owner'}")
        if fate is Fate.UNMOVED:
            return self._unmoved(change, row, answered=answered)
        if fate is Fate.OTHER_WRITER:
            return self._lost(f"its counter is {row.counter}, {self.counter} was confirmed")
        if isinstance(change, writes.Claim):  # a row that was read does not claim: claim again [P4]
            self.counter = row.counter
            self.in_flight.unresolved.clear()
            return WriteVerdict(VerdictKind.AGAIN, self.in_flight.rebase(row))
        # Some write of ours applied: adopt the row, and send the missing values again [P6].
        self._confirm(row, min(self.in_flight.unresolved))
        if fate is Fate.APPLIED:
            return self._settle(change)
        return WriteVerdict(VerdictKind.AGAIN, self.in_flight.rebase(row))

    def _is_moved(self, change: writes.Change, row: Lease) -> bool:
        """Whether the row's position is neither the confirmed one nor that of our change."""
        if self._adopts or self.row is None:
            return False
        ours = SHARD_END if isinstance(change, writes.End) else getattr(change, "position", None)
        return row.checkpoint not in {self.row.checkpoint, ours}

    def _moved(self, row: Lease) -> WriteVerdict:
        self.in_flight.end()
        was = "?" if self.row is None else self.row.checkpoint
        reason = (
            f"its checkpoint was moved from {was} to {row.checkpoint} by another program, or by a"
            " former owner: its outputs begin again from there"
        )
        return WriteVerdict(VerdictKind.MOVED, reason=reason)

    def _write_again(self, change: writes.Change) -> WriteVerdict:
        """The row has vanished: its live owner writes it again, as last confirmed, once in a row.

        P2 does not let any write bring a row back. This is the one exception: the owner's fence
        stands, so no other owner can have taken the row by expiry. Four races are possible:

        1. An unresolved renewal or checkpoint may have applied before the row went. An observer
           that saw it goes on counting down, while our fence begins anew [P7].
        2. A Java worker may have stolen the row before it went, and renew it with a counter that
           we, too, would have written.
        3. An unresolved end, offer, release or handover may have applied, and the row may have been
           deleted, or taken, after it.
        4. A creation in flight could land after the row was deleted for good (trace C3).

        Against 1 and 2 the new counter exceeds every counter that any observer can have seen, and
        no write on its way can match the new row. In case 3 the shard has ended or belongs to
        another owner, so nothing is written. Because of 4 the creation is sent again only if it
        surely did not apply.
        """
        flight, stays = self.in_flight, writes.Renew | writes.Checkpoint | writes.NameChildren
        is_barred = self._was_written_again or self.next_owner is not None
        has_gone_on = bool(flight.unresolved) and not isinstance(change, stays)
        if self.row is None or is_barred or has_gone_on:
            self.is_gone = True
            return self._lost("its row is gone from the table")
        counter = self.counter + WRITTEN_AGAIN_AHEAD
        row = msgspec.structs.replace(self.row, owner=self.me, counter=counter)
        self._was_written_again = True
        flight.end()
        creation = writes.CreateLease(row)
        flight.begin(creation)
        return WriteVerdict(VerdictKind.AGAIN, creation)

    def _judge_written_again(
        self, change: writes.CreateLease, row: Lease, fate: Fate
    ) -> WriteVerdict:
        """A row exists where ours had vanished: ours if the reply was lost, else another's."""
        if fate is Fate.APPLIED and self.in_flight.unresolved:
            self._confirm(row, min(self.in_flight.unresolved))
            return self._settle(change)
        return self._lost(
            f"its row had vanished, and the one that stands there belongs to"
            f" {row.owner or 'no owner'}, at {row.checkpoint}"
        )

    def _is_handed_over(self, row: Lease) -> bool:
        """Whether a KCL 3 leader has written the next owner while we are its `checkpointOwner`."""
        if row.checkpoint_owner != self.me or row.owner in {self.me, None} or self.row is None:
            return False
        is_mine_moved = row.counter == self.counter + 1 and bool(self.in_flight.unresolved)
        return row.counter == self.counter or is_mine_moved

    def _hand_over(self, change: writes.Change, row: Lease) -> WriteVerdict:
        """From here on only the handover can apply: all other writes expect us as the owner."""
        if row.counter != self.counter:  # an unresolved write of ours came before the leader's
            self._confirm(row, min(self.in_flight.unresolved))
        self.row = row
        self.next_owner = row.owner
        if isinstance(change, writes.HandOver):
            return self._rebase(change, row)
        self.in_flight.end()
        return WriteVerdict(
            VerdictKind.HANDED_OVER, reason=f"a KCL 3 leader gives it to {row.owner}"
        )

    def _unmoved(self, change: writes.Change, row: Lease, *, answered: bool) -> WriteVerdict:
        """The counter is unchanged: no send has applied so far, but one may still arrive [P6]."""
        if isinstance(change, writes.Claim) or self.row is None:
            return self._again("the claim did not apply")
        if answered:
            # Owner and counter hold, so only the position part failed: a late checkpoint of a
            # former owner moved it. Adopt the row's position; never write a lower one [P2].
            self.row = row
        return self._rebase(change, row)

    def _rebase(self, change: writes.Change, row: Lease) -> WriteVerdict:
        """Send the change for this row; slower if the row brought nothing new."""
        now_sent = self.in_flight.rebase(row)
        return WriteVerdict(VerdictKind.AGAIN, now_sent, slower=now_sent == change)

    def _abandon_children(self, outcome: writes.Outcome) -> WriteVerdict:
        """Give up creating children. The creation leaves this row as it is and is conditional on
        its counter, so a send that still arrives later is harmless. Begin again from fresh reads
        [P12]. Meanwhile the lease is renewed, also where the service refuses (a permission is
        missing)."""
        self.in_flight.change = None
        self._retries += 1
        reason = ""
        if not isinstance(outcome, writes.Applied | writes.ConditionFailed):
            reason = f"the children cannot be created: {outcome.message}"
        return WriteVerdict(VerdictKind.REDO, reason=reason)

    def _again(self, message: str) -> WriteVerdict:
        self._retries += 1
        self.trouble = message
        change = self.in_flight.required()
        return WriteVerdict(VerdictKind.AGAIN, change, slower=True, reason=message)

    def _pause_s(self, attempt: int) -> float:
        """How long to wait before attempt number `attempt` (from 1) at a write or a read-back."""
        max_s = min(RETRY_PAUSE_MAX_S, self.failover_s / RETRY_PAUSES_PER_FAILOVER)
        return backoff_s(attempt, self._chance(), max_s=max_s)

    def _settle(self, change: writes.Change) -> WriteVerdict:
        self._was_written_again = isinstance(change, writes.CreateLease)
        self._retries = 0
        self.trouble = ""
        self.in_flight.end()
        return WriteVerdict(VerdictKind.CONFIRMED, change)

    def _lost(self, reason: str) -> WriteVerdict:
        self.in_flight.end()
        return WriteVerdict(VerdictKind.LOST, reason=reason)

    def _confirm(self, row: Lease, permitted_since: Instant) -> None:
        self._terms.confirmed(permitted_since)
        self._permit_since(permitted_since)
        self.row = row
        self.counter = row.counter
        self.in_flight.unresolved.clear()

    def _permit_since(self, sent: Instant | None) -> None:
        self._permitted_since = sent
        if sent is not None:
            self.fence = self._terms.fence(sent)
            self.renewal_instant = self._terms.renewal_instant(sent)


def why_not_begun(row: Lease, *, has_waited: bool) -> str | None:
    """Why a claimed lease is not processed, or None."""
    if row.is_ended:  # by a write of the former process that landed late (trace H1)
        return "its shard has ended already"
    if row.taken_from is not None and not has_waited:
        return (
            f"it was taken by force from {row.taken_from}, which may still process it: the manager"
            " waits a failover and starts again [P18]"
        )
    return None


def written_again(row: Lease) -> Report:
    return ProcessWarned(
        "its row had vanished from the table and was written again, at"
        f" {row.checkpoint}: see who deletes rows of a running application",
    )


def stalled(stalled_s: float, *, in_user_code: bool) -> Report:
    """The lease thread stood still: user code held the GIL, or the whole process stood still."""
    if in_user_code:
        return GilHeld(stalled_s)
    return ProcessWarned(f"the process stood still for {stalled_s:.1f} s")
