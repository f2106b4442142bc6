"""The lease's own row: its confirmed state, the one write under way, and the meaning of outcomes.

Implements P2 (conditions), P4 (only a success claims), P5 (one unresolved write), P6 (unknown
outcomes), P7 (the fence counts from the earliest unresolved send), R8 (a KCL 3 leader's handover),
and the repair of a vanished row. Must not know: time-outs, how a row is written. Rule: every answer
of the table goes through `_judge`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

import msgspec

from kclrun.consuming import commands as do
from kclrun.consuming import events as on
from kclrun.consuming.checkpoints import CheckpointLedger, CheckpointRequests
from kclrun.consuming.policy import LifePolicy
from kclrun.consuming.states import State
from kclrun.errors import InvariantViolation
from kclrun.model.lease import WRITTEN_AGAIN_AHEAD, Lease, LeaseKey, OwnerId
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant, backoff_s
from kclrun.protocol import writes as changes
from kclrun.protocol.fence import FailoverTerms
from kclrun.protocol.writes import (
    Applied,
    Checkpoint,
    Claim,
    ConditionFailed,
    CreateChildren,
    CreateLease,
    End,
    HandOver,
    LateCheckpoint,
    NameChildren,
    Offer,
    Outcome,
    OutcomeUnknown,
    Refused,
    Release,
    Renew,
    Throttled,
    Unavailable,
)

# The last writes, which give the lease to others.
GivingAway = Release | Offer | HandOver
OwnChange = (
    Claim | Renew | Checkpoint | NameChildren | End | GivingAway | CreateChildren | CreateLease
)


def holds(change: OwnChange, row: Lease) -> bool:
    """Whether the row is still ours and already holds the result of the change."""
    match change:
        case Renew():
            return True
        case Checkpoint(position=position):
            return row.checkpoint >= position
        case NameChildren(children=children):
            return children <= row.children
        case End():
            return row.is_ended
        case _:
            return False


def holds_after_giving_up(change: OwnChange, row: Lease, seen_counter: int) -> bool:
    """Whether a change that ends our ownership has applied, by the state of the row.

    The row is offered, unowned, or owned by the next owner already. Then the counter is further on,
    and only the applied write can have moved the position to ours.
    """
    if row.counter <= seen_counter:
        return False
    match change:
        case End():
            return row.is_ended
        case Release(position=position, owner=me) | Offer(position=position, owner=me):
            return row.owner != me and row.checkpoint >= position
        case HandOver(position=position, owner=me):
            return me not in {row.owner, row.checkpoint_owner} and row.checkpoint >= position
        case _:
            return False


def rebase(change: OwnChange, row: Lease) -> OwnChange:
    """The same change for the current row: with its counter, never to a lower position [P2, N1]."""
    match change:
        case Checkpoint(position=position) | Release(position=position) | Offer(position=position):
            return msgspec.structs.replace(
                change,
                seen_counter=row.counter,
                last=row.checkpoint,
                position=max(position, row.checkpoint),
            )
        case HandOver(position=position):
            return msgspec.structs.replace(
                change,
                seen_counter=row.counter,
                last=row.checkpoint,
                position=max(position, row.checkpoint),
                next_owner=row.owner or change.next_owner,
            )
        case End():
            return msgspec.structs.replace(change, seen_counter=row.counter, last=row.checkpoint)
        case Renew() | NameChildren() | Claim():
            return msgspec.structs.replace(change, seen_counter=row.counter)
        case CreateChildren() | CreateLease():
            return change


# One attempt a back-off, and no back-off is below 25 ms: 400 fill a failover of 10 s.
ATTEMPTS_MAX: Final = 1000
# The last renewal before an outage is at most a third of `failover` old. With a pause of an eighth
# there is a try in the last quarter before the fence, so an outage of up to half a `failover` costs
# no lease. DESIGN 5 also limits the pause to 3 s.
RETRY_PAUSE_MAX_S: Final = 3.0
RETRY_PAUSES_PER_FAILOVER: Final = 8


class VerdictKind(enum.Enum):
    """The conclusion about the write under way."""

    CONFIRMED = "it holds on the row"
    AGAIN = "it does not hold yet: send `change`"
    READ_BACK = "nobody knows: read the row"
    REDO = "children were not created for sure: look at the parents again"
    HANDED_OVER = "a KCL 3 leader named the next owner, who waits for our last write"
    LOST = "the row is not ours any more"


class Verdict(msgspec.Struct, frozen=True):
    """`change` holds (CONFIRMED) or must be sent (AGAIN, after a back-off if `slower`)."""

    kind: VerdictKind
    change: OwnChange | None = None
    slower: bool = False
    reason: str = ""


class LeaseWriter:
    """The row as last confirmed, and at most one change under way."""

    def __init__(self, key: LeaseKey, me: OwnerId, seen_counter: int, failover_s: float) -> None:
        self.key = key
        self.me = me
        self._terms = FailoverTerms(failover_s)
        self.row: Lease | None = None
        self.counter = seen_counter
        self.pending: OwnChange | None = None
        self.retries = 0
        # Why the write under way has not succeeded yet, in words; empty once a write has.
        self.trouble = ""
        # The owner that a KCL 3 leader gives the lease to. From then on only the handover can be
        # written.
        self.next_owner: OwnerId | None = None
        self.is_gone = False
        # No batch may start at or after this instant; None before the claim [P7].
        self.fence: Instant | None = None
        # When the next heartbeat is due; any write that moves the counter is one.
        self.renewal_instant: Instant | None = None
        self._was_written_again = False
        self._permitted_since: Instant | None = None
        self._unresolved: list[Instant] = []

    @property
    def failover_s(self) -> float:
        """The smallest failover in the fleet."""
        return self._terms.failover_s

    def set_failover(self, failover_s: float, now: Instant) -> None:
        """The smallest failover in the fleet has changed. A shorter one makes a renewal due at
        once, and the fence counts by it from that send on (`fence.py`)."""
        self._terms.change(failover_s, now)
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
        """Write nothing more: the lease is lost. A late outcome has no effect."""
        self.pending = None
        self._unresolved.clear()

    def put_off(self) -> bool:
        """Withdraw the change, which surely did not apply, so that another may go first.

        Returns False if an earlier send of it may still arrive: then it stays under way [P5].
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
                self.trouble = message
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
        """Decide what the current row means for the change under way."""
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
        """A row exists where ours had vanished: ours if the reply was lost, else another's."""
        is_ours = row.owner == self.me and row.counter == change.lease.counter
        if is_ours and self._unresolved:
            self._confirm(row, min(self._unresolved))
            return self._settle(change)
        return self._lost(
            f"its row had vanished, and the one that stands there belongs to"
            f" {row.owner or 'nobody'}, at {row.checkpoint}"
        )

    def _is_handed_over(self, row: Lease) -> bool:
        """Whether a KCL 3 leader has written the next owner while we are its `checkpointOwner`."""
        if row.checkpoint_owner != self.me or row.owner in {self.me, None} or self.row is None:
            return False
        is_mine_moved = row.counter == self.counter + 1 and bool(self._unresolved)
        return row.counter == self.counter or is_mine_moved

    def _hand_over(self, change: OwnChange, row: Lease) -> Verdict:
        """From here on only the handover can apply: all other writes expect us as the owner."""
        if row.counter != self.counter:  # an unresolved write of ours came before the leader's
            self._confirm(row, min(self._unresolved))
        self.row = row
        self.next_owner = row.owner
        if isinstance(change, HandOver):
            self.pending = rebase(change, row)
            return Verdict(VerdictKind.AGAIN, self.pending, slower=self.pending == change)
        self.pending = None
        self._unresolved.clear()
        return Verdict(VerdictKind.HANDED_OVER, reason=f"a KCL 3 leader gives it to {row.owner}")

    def _unmoved(self, change: OwnChange, row: Lease, *, answered: bool) -> Verdict:
        """The counter is unchanged: no send has applied so far, but one may still arrive [P6]."""
        if isinstance(change, Claim) or self.row is None:
            return self._again("the claim did not apply")
        if answered:
            # Owner and counter hold, so only the position part failed: a late checkpoint of a
            # former owner moved it. Adopt the row's position; never write a lower one [P2].
            self.row = row
        self.pending = rebase(change, row)
        return Verdict(VerdictKind.AGAIN, self.pending, slower=self.pending == change)

    def _moved(self, change: OwnChange, row: Lease) -> Verdict:
        """Some write of ours applied: adopt the row, and send again what is missing on it [P6].

        Only an unresolved write can have applied. Without one, the writer is another process of
        this owner (trace N3). Only a claim may follow a write of the former process; it claims
        again [P4].
        """
        if isinstance(change, Claim):
            self.counter = row.counter
            self._unresolved.clear()
            self.pending = msgspec.structs.replace(change, seen_counter=row.counter)
            return Verdict(VerdictKind.AGAIN, self.pending)
        self._confirm(row, min(self._unresolved))
        if holds(change, row):
            return self._settle(change)
        self.pending = rebase(change, row)
        return Verdict(VerdictKind.AGAIN, self.pending)

    def _abandon_children(self, outcome: Outcome) -> Verdict:
        """Give up creating children. The creation leaves this row as it is and is conditional on
        its counter, so a send that still arrives later is harmless. Begin again from fresh reads
        [P12]. Meanwhile the lease is renewed, also where the service refuses (a permission is
        missing)."""
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
        self.trouble = message
        return Verdict(VerdictKind.AGAIN, self._pending(), slower=True, reason=message)

    def _settle(self, change: OwnChange) -> Verdict:
        self._was_written_again = isinstance(change, CreateLease)
        self.pending = None
        self.retries = 0
        self.trouble = ""
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
        self._terms.confirmed(permitted_since)
        self._permit_since(permitted_since)
        self.row = row
        self.counter = row.counter
        self._unresolved.clear()

    def _permit_since(self, sent: Instant | None) -> None:
        self._permitted_since = sent
        if sent is not None:
            self.fence = self._terms.fence(sent)
            self.renewal_instant = self._terms.renewal_instant(sent)

    def _pending(self) -> OwnChange:
        if self.pending is None:
            raise InvariantViolation(f"lease {self.key}: an outcome without a write under way")
        return self.pending


# A checkpoint at half of `uncheckpointed_max`, due or not, so that the cap does not stop
# deliveries.
EARLY_SHARE: Final = 0.5
# The Java KCL 3 smooths `throughputKBps` by half and keeps six decimals.
THROUGHPUT_ALPHA: Final = 0.5
THROUGHPUT_DECIMALS: Final = 6


class WriteScheduler:
    """Decides the next write from the row, the ledger and the clock; None if none is due."""

    def __init__(self, policy: LifePolicy, own: LeaseWriter, requests: CheckpointRequests) -> None:
        self._policy = policy
        self._own = own
        self._requests = requests
        self._saved_instant = Instant(0.0)
        self._put_off_until = Instant(0.0)
        self._bytes = 0
        self._measured_since = Instant(0.0)
        self._throughput_kbps = 0.0

    def begin(self, now: Instant) -> None:
        """The lease is claimed: times count from here."""
        self._saved_instant = now
        self._measured_since = now

    def note_saved(self, now: Instant) -> None:
        self._saved_instant = now

    def put_off(self, until: Instant) -> None:
        """The last checkpoint failed: no other before `until`."""
        self._put_off_until = until

    def note_bytes(self, payload_bytes: int) -> None:
        self._bytes += payload_bytes

    def due_instant(self, ledger: CheckpointLedger, *, renews: bool) -> Instant | None:
        """When the next write may be due, while no write is under way."""
        if self._own.next_owner is not None:
            return None  # no write before the batch has ended
        renewing = self._own.renewal_instant if renews else None
        saving = self.save_instant(ledger)
        if renewing is None or saving is None:
            return saving if renewing is None else renewing
        return min(renewing, saving)

    def save_instant(self, ledger: CheckpointLedger) -> Instant | None:
        """When the next automatic checkpoint is due, if a position is unsaved."""
        if self._policy.checkpoint_mode != "auto" or not ledger.has_unsaved:
            return None
        due = Instant(self._saved_instant + self._policy.checkpoint_every_s)
        return max(due, self._put_off_until)

    def checkpoint(self, state: State, ledger: CheckpointLedger, now: Instant) -> Checkpoint | None:
        """The checkpoint that is due: asked for, by time, by number, or before a halt."""
        wanted = self._requests.highest
        if wanted is None and not ledger.has_unsaved:
            return None
        if self._must_save(state, ledger, now):
            wanted = ledger.processed if wanted is None else max(wanted, ledger.processed)
        if wanted is None or wanted <= ledger.checkpointed or now < self._put_off_until:
            return None
        own, row = self._own, self._own.confirmed
        # A renewal may have shown a late checkpoint of a former owner: never write a lower one
        # (N1).
        position = max(wanted, row.checkpoint)
        return Checkpoint(own.key, own.me, own.counter, position, row.checkpoint)

    def is_renewal_due(self, now: Instant) -> bool:
        due = self._own.renewal_instant
        assert due is not None, "no renewal before the claim"
        return now >= due

    def renewal(self, now: Instant, *, drops_ask: bool) -> Renew:
        """The heartbeat. It also removes an ask that is not answered [P16]."""
        self._measure(now)
        own = self._own
        return Renew(own.key, own.me, own.counter, self._throughput_kbps, drops_ask)

    def claim(self) -> Claim:
        """The very first write; it expects the counter of the manager's take [P4]."""
        own = self._own
        return Claim(own.key, own.me, own.counter, self._policy.has_waited)

    def naming(self, children: tuple[str, ...]) -> NameChildren:
        own = self._own
        return NameChildren(own.key, own.me, own.counter, frozenset(children))

    def end(self) -> End:
        own = self._own
        return End(own.key, own.me, own.counter, own.confirmed.checkpoint)

    def final_position(self, ledger: CheckpointLedger) -> ExtendedSequenceNumber:
        """The last write's position: all processed records, or the one user code asked for."""
        if self._policy.is_manual:
            return self._requests.highest or self.unacknowledged(ledger)
        return max(ledger.processed, self._requests.highest or ledger.processed)

    def unacknowledged(self, ledger: CheckpointLedger) -> ExtendedSequenceNumber:
        """The furthest position that may still be written for a lease that took no more writes.

        With automatic checkpoints it covers all processed records. With manual ones it is the
        position that user code waited for when the writing ended, but only if its batch then
        returned all the same. A batch that raised on the refusal has taken its rows back.
        """
        if not self._policy.is_manual:
            return ledger.processed
        refused = self._requests.refused
        is_processed = refused is not None and refused <= ledger.processed
        return (
            max(refused, ledger.checkpointed) if refused and is_processed else ledger.checkpointed
        )

    def late_checkpoint(self, ledger: CheckpointLedger) -> LateCheckpoint | None:
        """The late checkpoint that a lost lease leaves for the next owner, if there is one [P19].

        None with keyed state, whose snapshot belongs to each position, and none if the row is gone.
        The lower bound is the last position acknowledged to us: below it an operator has reset the
        lease on purpose.
        """
        position = self.unacknowledged(ledger)
        is_barred = self._policy.has_keyed_state or self._own.is_gone
        if is_barred or position <= ledger.checkpointed:
            return None
        return LateCheckpoint(self._own.key, self._own.me, ledger.checkpointed, position)

    def _must_save(self, state: State, ledger: CheckpointLedger, now: Instant) -> bool:
        if self._policy.is_manual or not ledger.has_unsaved:
            return False
        if state is State.FAILING:
            return True
        if self._policy.checkpoint_mode == "batch" and ledger.has_uncounted:
            return True
        if ledger.uncheckpointed >= self._policy.uncheckpointed_max * EARLY_SHARE:
            return True
        return now >= self._saved_instant + self._policy.checkpoint_every_s

    def _measure(self, now: Instant) -> None:
        elapsed_s = now - self._measured_since
        if elapsed_s <= 0:
            return
        rate_kbps = self._bytes / 1024 / elapsed_s
        smoothed = THROUGHPUT_ALPHA * rate_kbps + (1 - THROUGHPUT_ALPHA) * self._throughput_kbps
        self._throughput_kbps = round(smoothed, THROUGHPUT_DECIMALS)
        self._bytes = 0
        self._measured_since = now


# Sends the one write under way until it is decided: repetitions, pauses, read-backs [P5, P6].
Answer = on.WriteResolved | on.OwnRowRead | on.ReadFailed


class RowWriting:
    """Takes in the answers of the table about the own row."""

    def __init__(
        self, own: LeaseWriter, scheduler: WriteScheduler, chance: Callable[[], float]
    ) -> None:
        self._own = own
        self._scheduler = scheduler
        self._chance = chance
        self._reads_failed = 0

    def take_in(
        self, answer: Answer, now: Instant, *, may_put_off: bool
    ) -> tuple[Verdict | None, tuple[do.Command, ...]]:
        """The verdict, None without news; and the next command to send.

        `may_put_off`: another write may go before a checkpoint that failed.
        """
        if self._own.pending is None:
            return None, ()  # the change was given up meanwhile (the fence passed): no verdict
        match answer:
            case on.WriteResolved(_, outcome, sent):
                verdict = self._own.resolve(outcome, sent)
            case on.OwnRowRead(row):
                self._reads_failed = 0
                verdict = self._own.read_back(row)
            case on.ReadFailed():
                self._reads_failed += 1
                pause_s = self._own.retry_pause_s(self._reads_failed, self._chance())
                return None, (do.ReadOwnRow(not_before=Instant(now + pause_s)),)
        return verdict, self._next(verdict, now, may_put_off=may_put_off)

    def _next(self, verdict: Verdict, now: Instant, *, may_put_off: bool) -> tuple[do.Command, ...]:
        match verdict.kind:
            case VerdictKind.READ_BACK:
                return (do.ReadOwnRow(),)
            case VerdictKind.AGAIN:
                assert verdict.change is not None, "a repetition names its change"
                paused_s = self._own.retry_pause_s(self._own.retries, self._chance())
                at = Instant(now + (paused_s if verdict.slower else 0.0))
                is_checkpoint = isinstance(verdict.change, changes.Checkpoint)
                if at > now and is_checkpoint and may_put_off and self._own.put_off():
                    self._scheduler.put_off(at)
                    return ()
                return (do.SendWrite(verdict.change, at),)
            case _:
                return ()
