"""How a lease leaves its process: its shard ends [P12, P13, I3], it is given away in good order
[P16, P17, R8], or it is lost [P19].

Must not know: when user code is idle; `state_machine.py` decides that. A lost lease never writes as
owner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, assert_never

import msgspec

from kclrun.lease.commands import ExitCause, ListShards, ReadRows, SendLateCheckpoint
from kclrun.lease.lease_writer import LeaseWriter
from kclrun.lease.outputs import OutputCommits
from kclrun.lease.policy import LeasePolicy
from kclrun.lease.states import ANSWERS_ASKS, State
from kclrun.model.lease import (
    ANYBODY,
    ASK_STALE_AFTER_S,
    CHILDREN_EXPIRED,
    Handoff,
    Lease,
    LeaseKey,
    OwnerId,
    Pause,
    are_children_lost,
    highest_generation,
    inherited_pause,
)
from kclrun.model.output import StoredCursors
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import ChildShard, Shard
from kclrun.model.state import OF_PARENTS
from kclrun.model.time import Instant, backoff_s
from kclrun.protocol import writes
from kclrun.protocol.reports import (
    LeaseLost,
    LeaseReleased,
    ProcessBroke,
    ProcessReplaced,
    RecordsExpired,
)
from kclrun.protocol.trimming import Absence, absence_of

# The other parent gets its lease when its own parents have ended: that may take minutes, seldom.
# One try a second costs one GetItem.
CHILDREN_RETRY_S: Final = 1.0


class Deferred(msgspec.Struct, frozen=True):
    """The children cannot be created yet: keep renewing, do not end, try again."""

    reason: str


class ChildrenExist(msgspec.Struct, frozen=True):
    """There is nothing to create: every child has a row already, or was trimmed like its parent."""


class ShardEnd:
    """The end of one shard: its children, their other parents, and the one write that follows.

    Made from the `ChildShards` of the last GetRecords, and completed from a listing if the service
    left them out. A child is created only if every parent's row exists, or that parent is gone from
    ListShards. The write is conditional on the rows that exist.

    If another parent's row stays away for a failover and the children have rows, then the parent's
    row was deleted: it was there when they were created, and a live owner would have written it
    again [P2]. Then the shard ends; otherwise its children would wait for ever. A trimmed shard
    ends without children if a listing shows none any more. So does a shard that is read for a time
    range (`is_bounded` of the policy) that ends before the shard does: later records, in the shard
    or in its children, are not of the range.

    Call `exhaust` first, then `next_step`; after a `Deferred`, or a write that did not apply, call
    `begin_again`. All ids are lease keys: with several streams they are qualified before they come
    here.
    """

    def __init__(self, policy: LeasePolicy) -> None:
        self.key = policy.key
        self._has_state = policy.has_keyed_state
        self._is_bounded = policy.is_bounded
        self._is_expired = False
        self.children: tuple[ChildShard, ...] = ()
        self.not_before = Instant(0.0)
        self._listed: frozenset[str] | None = None
        self._is_trimmed = self._is_listing_old = False
        self._rows: Mapping[LeaseKey, Lease | None] | None = None
        self._child_rows: Mapping[LeaseKey, Lease | None] | None = None
        self._waits_since: Instant | None = None
        self._has_waited = False
        self._is_loss_reported = False
        self.is_looking = False

    def exhaust(self, children: Iterable[ChildShard], *, is_expired: bool) -> None:
        """The shard was read to its end, or it was trimmed (`is_expired`)."""
        self.children, self._is_expired = tuple(children), is_expired

    @property
    def child_ids(self) -> tuple[str, ...]:
        return tuple(child.shard_id for child in self.children)

    @property
    def _is_range_end(self) -> bool:
        """Whether a time range ends here, before the shard does. The end of a shard names children
        then."""
        return self._is_bounded and not self._is_expired and not self.children

    def next_step(
        self, own: Lease, now: Instant, failover_s: float
    ) -> writes.CreateChildren | ChildrenExist | ReadRows | ListShards | Deferred | None:
        """The next step now; None while an answer is awaited, or until the next look is due."""
        if now < self.not_before:
            return None
        self._count_waiting(now, failover_s)
        return self.look_up() or self.creation(own)

    def look_up(self) -> ReadRows | ListShards | None:
        """The next question to answer before the children can be created, one at a time."""
        question = self._question()
        if question is None or self.is_looking:
            return None
        self.is_looking = True
        return question

    def creation(self, own: Lease) -> writes.CreateChildren | ChildrenExist | Deferred | None:
        """The write; or why it must wait; or None while a look-up is under way."""
        if self.is_looking:
            return None
        if not self.children and (self._is_range_end or (self._is_expired and self._is_trimmed)):
            return ChildrenExist()
        if not self.children:
            return Deferred("the service names no children of the closed shard yet")
        rows = self._rows or {}
        missing = [key for key, row in rows.items() if row is None]
        waiting = self._waiting()
        if waiting and self._child_rows and None not in self._child_rows.values():
            return ChildrenExist()
        if waiting:
            return Deferred(f"the other parent {waiting[0]} has no lease yet")
        if missing and self._is_listing_old:
            return Deferred(f"ListShards shows neither the children yet, nor {missing[0]}")
        assert own.owner is not None, "the row at a shard's end is ours"
        held = writes.HeldParent(own.key, own.owner, own.counter, own.pause)
        others = tuple(writes.ExistingParent(key) for key in rows if key not in missing)
        parents = (own, *(row for row in rows.values() if row is not None))
        generation, pause = highest_generation(parents), inherited_pause(parents)
        children = tuple(
            _lease(child, own, generation, pause, has_state=self._has_state)
            for child in self.children
        )
        return writes.CreateChildren(children, (held, *others))

    def must_report_lost_children(self, own: Lease) -> bool:
        """Whether to report that children of this shard were trimmed, too. True once."""
        ranges = [child.hash_range for child in self.children]
        is_lost = self._is_expired and are_children_lost(own.hash_range, ranges)
        is_news = is_lost and self._listed is not None and not self._is_loss_reported
        self._is_loss_reported = self._is_loss_reported or is_news
        return is_news

    def list(self, shards: Collection[Shard], own: Lease) -> None:
        """Take in a complete listing. Of a stream of thousands of shards only the relatives of this
        one are kept."""
        self.is_looking = False
        if not self.children:
            self.children = tuple(
                ChildShard(shard.shard_id, shard.parents, shard.hash_range)
                for shard in shards
                if self.key in shard.parents
            )
        listed = frozenset(shard.shard_id for shard in shards)
        self._listed = listed & {self.key, *self.child_ids, *self._other_parents()}
        self._is_trimmed = bool(shards) and self.key not in listed
        # A listing that lags does not show the children. Then a parent that it does not show may be
        # too new for it and not gone; so may this shard, if it was split soon after it was made. If
        # the shard ended now, the child would be read too early.
        shows_children = all(child in listed for child in self.child_ids)
        absence = absence_of(shards, self.key, own.hash_range, own.parents)
        self._is_listing_old = not shows_children and absence in {Absence.LISTED, Absence.TOO_NEW}

    def read(self, rows: Iterable[tuple[LeaseKey, Lease | None]]) -> None:
        """Take in the other parents' rows; then, if they were requested, the children's."""
        self.is_looking = False
        if self._rows is None:
            self._rows = dict(rows)
        else:
            self._child_rows = dict(rows)

    def begin_again(self, not_before: Instant) -> None:
        """The answers are old: read and list again, not before this instant."""
        self.not_before = not_before
        self.is_looking = False
        self._listed = self._rows = self._child_rows = None
        self._is_trimmed = self._is_listing_old = False

    def _count_waiting(self, now: Instant, failover_s: float) -> None:
        """Count for how long every read has shown a listed parent without a row."""
        if self._rows is None or self.is_looking:
            return
        if not self._waiting():
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        self._has_waited = self._waits_since is not None and now >= self._waits_since + failover_s

    def _waiting(self) -> tuple[LeaseKey, ...]:
        """The other parents without a row that are not known to be gone."""
        rows = (self._rows or {}).items()
        missing = (key for key, row in rows if row is None)
        return tuple(key for key in missing if self._listed is None or key in self._listed)

    def _question(self) -> ReadRows | ListShards | None:
        others = self._other_parents()
        if not self.children:
            return ListShards() if self._listed is None and not self._is_range_end else None
        if self._rows is None and others:
            return ReadRows(others)
        has_missing = any(row is None for row in (self._rows or {}).values())
        if has_missing and self._listed is None:
            return ListShards()
        asks_for_children = self._has_waited and self._waiting() and self._child_rows is None
        return ReadRows(tuple(map(LeaseKey, self.child_ids))) if asks_for_children else None

    def _other_parents(self) -> tuple[LeaseKey, ...]:
        named = {parent for child in self.children for parent in child.parents}
        return tuple(LeaseKey(parent) for parent in sorted(named - {self.key}))


def _lease(
    child: ChildShard, own: Lease, generation: int, pause: Pause | None, *, has_state: bool
) -> Lease:
    """The row of a child. It is always read from its beginning, because its parents were read to
    their ends. It belongs to the stream of its parent, and to the generation of the parent that was
    reset last [K4]. With keyed state it says that it begins with that of its parents [K16]."""
    return Lease(
        key=LeaseKey(child.shard_id),
        checkpoint=TRIM_HORIZON,
        parents=frozenset(child.parents),
        hash_range=child.hash_range,
        stream_created_at=own.stream_created_at,
        generation=generation,
        pause=pause,
        outputs=StoredCursors(TRIM_HORIZON, ()) if has_state else None,
        state_version=OF_PARENTS if has_state else None,
    )


def records_expired(row: Lease) -> RecordsExpired:
    """The shard was trimmed while its lease was held [P13]. The processed position is on its way to
    the row, if it is not there yet, so the loss begins behind `row`'s position at the earliest."""
    return RecordsExpired(
        row.checkpoint,
        "the stream's retention passed before this shard was read to its end, and Kinesis has"
        f" deleted it: what it held after checkpoint {row.checkpoint} and was not processed is"
        " lost. The lease ends, and its children are read. To get the records back, replay them"
        " from their source; to prevent it, raise the retention above the longest time that a"
        " lease may be halted or behind",
    )


def children_expired(row: Lease) -> RecordsExpired:
    """Children of the trimmed shard were trimmed, too, before they had a lease [P13]."""
    return RecordsExpired(row.checkpoint, CHILDREN_EXPIRED)


class GracefulRelease:
    """Gives the lease away in good order [P16, P17, R8]: watches asks on the own row and makes the
    last write.

    The age of an ask is counted by this process: the same ask for 30 s by its own clock.
    `handoffAt` is another host's wall clock, and a wrong one must not stop balancing.
    """

    def __init__(self, own: LeaseWriter, *, others_in_sight: bool) -> None:
        self.others_in_sight = others_in_sight
        self.ask: Handoff | None = None
        self._own = own
        self._asked_since = Instant(0.0)

    def look_for_ask(self, state: State, now: Instant) -> bool:
        """Take in the ask on the row as last confirmed. Returns: whether to give the lease up
        because of it.

        An ask that the claim sees is answered at once, before any user code is called. At the end
        of a shard, and while the lease is halting, an ask is left to grow old.
        """
        found = None if self._own.row is None else self._own.row.handoff
        if found != self.ask:
            self.ask, self._asked_since = found, now
        return found is not None and state in ANSWERS_ASKS and self.asker(now) is not None

    def asker(self, now: Instant) -> OwnerId | None:
        """The owner that the handoff request names, while it is to be answered; else None. ANYBODY:
        an operator requested the lease for any owner."""
        ask = self.ask
        return None if ask is None or self.drops_ask(now) else ask.to

    def drops_ask(self, now: Instant) -> bool:
        """Whether the next renewal removes the ask: it is too old, or our own."""
        ask = self.ask
        if ask is None:
            return False
        return ask.to == self._own.me or now - self._asked_since >= ASK_STALE_AFTER_S

    def last_write(
        self, final: ExtendedSequenceNumber, commits: OutputCommits, now: Instant
    ) -> writes.ReleaseWrite:
        """The final checkpoint, at `final`, and the end of our ownership, in one write.

        A handover if a KCL 3 leader has named the next owner. An offer if another owner asked, or
        another owner is in sight. Else a release: the next owner finds it by a scan.
        """
        own, row = self._own, self._own.confirmed
        position = max(final, row.checkpoint)
        kept = commits.to_write(row, position)
        if own.next_owner is not None:
            return writes.HandOver(
                own.key, own.me, own.next_owner, own.counter, position, row.checkpoint, *kept
            )
        asker = self.asker(now)
        if asker is None and not self.others_in_sight:
            return writes.Release(own.key, own.me, own.counter, position, row.checkpoint, *kept)
        to = None if asker == ANYBODY else asker
        return writes.Offer(own.key, own.me, own.counter, position, row.checkpoint, to, None, *kept)


def given_away(change: writes.ReleaseWrite) -> LeaseReleased:
    """The report that the last write applied, with the receiver of the lease in words."""
    match change:
        case writes.HandOver(next_owner=next_owner):
            receiver = f"handed over to {next_owner}, as a KCL 3 leader asked"
        case writes.Offer(offered_to=str(to)):
            receiver = f"offered to {to}, who asked for it"
        case writes.Offer():
            receiver = "offered to any owner"
        case writes.Release():
            receiver = "released: no other owner is in sight"
        case _:
            assert_never(change)
    return LeaseReleased(change.position, receiver)


# How long a lost lease waits for the batch under way. Then the process ends, even if the batch is
# still running. Its results do not count any more; half a minute lets most work reach a clean end.
LOST_GRACE_S: Final = 30.0
# The next owner begins within a second or two of its take, and a late checkpoint after its first
# own one saves no work. A throttled table gets some four tries in this time.
LATE_CHECKPOINT_S: Final = 3.0
# A burst of temporary files is over by then. It is well below the usual `stall`, after which the
# stall watch would blame user code that waits for a checkpoint.
OUTPUT_WAIT_S: Final = 30.0


def late_checkpoint(
    own: LeaseWriter,
    commits: OutputCommits,
    position: ExtendedSequenceNumber,
    last: ExtendedSequenceNumber,
    policy: LeasePolicy,
) -> writes.LateCheckpoint | None:
    """The late checkpoint, at `position`, that a lost lease leaves for the next owner, if there is
    one [P19]. `last` is the last checkpoint that was acknowledged to us.

    None with keyed state (a snapshot belongs to each position), with letters above the last
    checkpoint (the next owner notes that they do not count), or if the row is gone. A row below
    `last`, or in another generation, was reset by an operator.
    """
    row = own.confirmed
    is_judged_again = policy.has_keyed_state or row.has_open_letters
    if is_judged_again or own.is_gone or position <= last:
        return None
    kept = (*commits.to_write(row, position), row.generation, row.letters_to)
    return writes.LateCheckpoint(own.key, own.me, last, position, *kept)


class LateWriting:
    """One late checkpoint: sent once, and again only while it surely was not applied [P19].

    An unknown outcome is left unknown: only the new owner's row could show it, and neither answer
    would change the next step. A failed condition is an answer, too: the owner is not a kclrun
    owner, the shard has ended, or the position is passed already.
    """

    def __init__(self, change: writes.LateCheckpoint, now: Instant) -> None:
        assert change.position != SHARD_END, "a late checkpoint never ends a shard (trace N6)"
        self.change = change
        self.until = Instant(now + LATE_CHECKPOINT_S)
        self.is_resolved = False
        self.has_applied = False
        self._attempts = 1

    def resolve(
        self, outcome: writes.Outcome, now: Instant, chance: float
    ) -> tuple[SendLateCheckpoint, ...]:
        """Take in the outcome; return the command to send again, if needed."""
        pause_s = backoff_s(self._attempts, chance, max_s=LATE_CHECKPOINT_S)
        is_unsent = isinstance(outcome, writes.Throttled | writes.Unavailable)
        if is_unsent and now + pause_s < self.until:
            self._attempts += 1
            return (SendLateCheckpoint(self.change, Instant(now + pause_s)),)
        self.is_resolved = True
        self.has_applied = isinstance(outcome, writes.Applied)
        return ()


class LostLease:
    """Why the lease was lost, and what the process still waits for before it ends.

    `is_host_fault`: the row is still ours, but this process cannot serve it. `begins_again`: the
    row may be ours, but nothing more of this process is saved: the next one begins from the row.
    """

    def __init__(
        self,
        reason: str,
        let_go_instant: Instant,
        *,
        is_host_fault: bool = False,
        begins_again: bool = False,
    ) -> None:
        self.reason = reason
        self.begins_again = begins_again
        self.is_host_fault = is_host_fault
        self.user_code_is_done = False
        self.late: LateWriting | None = None
        self._let_go_instant = let_go_instant

    def save_late(self, change: writes.LateCheckpoint, now: Instant) -> SendLateCheckpoint:
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
    def cause(self) -> ExitCause:
        """What ended the process: the lease, the host, or the row."""
        if self.is_host_fault:
            return ExitCause.HOST
        return ExitCause.REPLACED if self.begins_again else ExitCause.LOST

    @property
    def report(self) -> LeaseLost | ProcessBroke | ProcessReplaced:
        """The report of the end, by its cause."""
        if self.is_host_fault:
            return ProcessBroke(self.words)
        return ProcessReplaced(self.words) if self.begins_again else LeaseLost(self.words)

    @property
    def words(self) -> str:
        """The reason, and the effect of the late checkpoint on the row."""
        if self.late is None or not self.late.has_applied:
            return self.reason
        position = self.late.change.position
        return f"{self.reason}; what it had processed was checkpointed late, at {position}"


class OutputWatch:
    """Since when rows cannot be made durable, and when the host should give the lease up.

    Emitted rows are made durable before the checkpoint that covers them. While that fails (a full
    disk, a broken file), the process reads ahead as far as it may, then stands still and renews its
    lease. Most disks are cleared soon. But if another host could read the shard, the process waits
    for OUTPUT_WAIT_S only, and then gives the lease up as if it were lost.
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
