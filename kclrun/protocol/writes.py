"""Writes to the lease table as values: their changes, their conditions and their outcomes.

Must not know: pauses, clocks, why a row is written.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kclrun.model.lease import DiedOn, Halt, Handoff, Lease, LeaseKey, Load, OwnerId, Pause
from kclrun.model.output import Cursors
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.time import WallTime

# The code of a read or a write of a row that cannot be read as a lease, until a person repairs it.
BROKEN_ROW: Final = "BrokenRow"


class Applied(msgspec.Struct, frozen=True):
    """A success reply. `row` is the row after the write; None after a delete or a creation."""

    row: Lease | None = None


class ConditionFailed(msgspec.Struct, frozen=True):
    """The condition did not hold. `row` is the current row; None if there is none, or if the
    service did not return it (CreateChildren)."""

    row: Lease | None = None


class Throttled(msgspec.Struct, frozen=True):
    """Nothing happened; send again after a pause."""

    message: str


class Unavailable(msgspec.Struct, frozen=True):
    """The request did not reach the service (refused connection, no address): nothing happened."""

    message: str


class OutcomeUnknown(msgspec.Struct, frozen=True):
    """The write may have happened, or may still happen: time-out, broken connection, 5xx [P6]."""

    message: str


class Refused(msgspec.Struct, frozen=True):
    """The service refuses it, and repeating will not help (permission, missing table, …)."""

    code: str
    message: str


Outcome = Applied | ConditionFailed | Throttled | Unavailable | OutcomeUnknown | Refused


# `conditions.py` has the conditions and effects of each change, as data: `aws/expressions.py`
# renders them for DynamoDB, the in-memory table applies them to leases. One contract suite runs
# over both.
class OwnersWrite(msgspec.Struct, frozen=True):
    """A change of an owner names the owner and the counter that it last saw confirmed, and adds one
    to the counter [P1, P2, I5]."""

    key: LeaseKey
    owner: OwnerId
    seen_counter: int


class SeenRow(msgspec.Struct, frozen=True):
    """A change of a row that another program may own: it requires owner and counter as seen."""

    key: LeaseKey
    seen_owner: OwnerId | None
    seen_counter: int


class CreateLease(msgspec.Struct, frozen=True):
    """A whole row, by the first sync, or by its live owner if the row vanished. Applies only if
    there is not a row with this key."""

    lease: Lease


class HeldParent(msgspec.Struct, frozen=True):
    """The parent's row exists, with this owner and counter: its owner is ending it. `pause` is the
    pause that its children get. The parent must still have it, so an operator who pauses or resumes
    the parent meanwhile is not passed over."""

    key: LeaseKey
    owner: OwnerId
    counter: int
    pause: Pause | None = None


class EndedParent(msgspec.Struct, frozen=True):
    """The parent's row exists and is SHARD_END: the condition of a repair."""

    key: LeaseKey


class ExistingParent(msgspec.Struct, frozen=True):
    """The parent's row exists, in any state: the other parent of a merge."""

    key: LeaseKey


ParentCondition = HeldParent | EndedParent | ExistingParent


class CreateChildren(msgspec.Struct, frozen=True):
    """The children of an ended shard, all or none, if every parent condition holds [P12].

    A child row that exists already is left as it is and does not stop the others.
    """

    children: tuple[Lease, ...]
    parents: tuple[ParentCondition, ...]


class Take(msgspec.Struct, frozen=True):
    """A manager takes an unowned or expired lease: owner and counter as seen [P2, P15].

    Publishes `failover_s`, `start`, the creation time of the stream and the `endpoint` of the owner
    (None: not known, and the one on the row is removed). Removes `checkpointOwner` and all of a
    handoff. Adds an owner switch if the owner seen was another owner. `forced`: from a Java owner
    that renews; writes `takenFrom`, so that the next process on the row waits first [P18]. Without
    it an existing `takenFrom` stays. `latest_pinned_at`: given if the row is LATEST without its
    instant, as a Java worker makes it; an existing instant stays [P14].
    """

    key: LeaseKey
    owner: OwnerId
    seen_owner: OwnerId | None
    seen_counter: int
    failover_s: float
    start: str
    forced: bool = False
    latest_pinned_at: WallTime | None = None
    stream_created_at: WallTime | None = None
    endpoint: str | None = None


class Ask(msgspec.Struct, frozen=True):
    """A manager notes on the row that it would like a lease that `asked` renews [P16].

    Not an owner's write, so the counter is untouched. `seen` is the old ask that is replaced, None
    if there was none: otherwise the condition fails. An operator, and the manager of `asked` that
    gives a heavy lease away, write it in the name of `owner`.
    """

    key: LeaseKey
    owner: OwnerId
    asked: OwnerId
    asked_at: WallTime
    seen: Handoff | None = None


class Withdraw(msgspec.Struct, frozen=True):
    """A draining manager removes its ask, so that it is not given the lease any more.

    Not an owner's write, so the counter is untouched. Applies while the ask there is `owner`'s.
    """

    key: LeaseKey
    owner: OwnerId


class Decline(msgspec.Struct, frozen=True):
    """The draining owner that a row is offered to offers it to any owner.

    Applies while the row is offered to `owner` with the counter as seen. `offeredBy` becomes
    `owner`, `offeredTo` goes; the position stays.
    """

    key: LeaseKey
    owner: OwnerId
    seen_counter: int


class Claim(OwnersWrite, frozen=True):
    """A lease process proves the lease before its first read; returns the whole row [P4].

    `has_waited`: a failover has passed since a take by force, so `takenFrom` goes [P18].
    """

    has_waited: bool = False


class Renew(OwnersWrite, frozen=True):
    """The heartbeat: counter + 1, and the throughput since the last one.

    `drops_ask`: removes an ask that is too old to be answered [P16]. `load`: given once the process
    has measured for long enough; until then the row keeps what a former process measured.
    """

    throughput_kbps: float | None = None
    drops_ask: bool = False
    load: Load | None = None


class Checkpoint(OwnersWrite, frozen=True):
    """All records up to `position` are processed. Also requires the row's position to be `last`.

    Sets owner switches to 0 and removes a pending checkpoint. `load`: as in a renewal, which a
    checkpoint stands for. `cursors`: how far the outputs have the rows, as in every write of a
    position; None leaves those of the row [K2]. `state_version`: the version of the keyed state at
    that position, likewise; empty removes the one on the row.
    """

    position: ExtendedSequenceNumber
    last: ExtendedSequenceNumber
    load: Load | None = None
    cursors: Cursors | None = None
    state_version: str | None = None


class NameChildren(OwnersWrite, frozen=True):
    """Write `childShardIds` on the parent, for the Java KCL's cleanup and ours [P12]."""

    children: frozenset[str]


class End(OwnersWrite, frozen=True):
    """Checkpoint SHARD_END: requires the row's position to be `last`, like any checkpoint."""

    last: ExtendedSequenceNumber
    cursors: Cursors | None = None
    state_version: str | None = None


class Release(OwnersWrite, frozen=True):
    """Final checkpoint and `leaseOwner` removed, in one write. `position` may equal `last`."""

    position: ExtendedSequenceNumber
    last: ExtendedSequenceNumber
    cursors: Cursors | None = None
    state_version: str | None = None


class Offer(OwnersWrite, frozen=True):
    """Final checkpoint, and the row given away, in one write [P17].

    The owner becomes `kclrun:offered`, `offeredBy` the giver, `offeredTo` the asker (None: any
    owner); any ask is removed. `position` may equal `last`. `died_on`: the slot of the giver,
    because the lease's processes die there without progress; then the offer is to any owner, and
    the position does not move.
    """

    position: ExtendedSequenceNumber
    last: ExtendedSequenceNumber
    offered_to: OwnerId | None = None
    died_on: DiedOn | None = None
    cursors: Cursors | None = None
    state_version: str | None = None


class HandOver(msgspec.Struct, frozen=True):
    """Answer a KCL 3 leader's handoff: final checkpoint, and `checkpointOwner` removed [R8].

    The row's owner is `next_owner` already and we are its `checkpointOwner`: those and the counter
    are the condition. The Java KCL's `assignLease`.
    """

    key: LeaseKey
    owner: OwnerId
    next_owner: OwnerId
    seen_counter: int
    position: ExtendedSequenceNumber
    last: ExtendedSequenceNumber
    cursors: Cursors | None = None
    state_version: str | None = None


class LateCheckpoint(msgspec.Struct, frozen=True):
    """The position up to which `former` had fully processed the shard when it lost the lease:
    written once, and only forward [P19].

    Applies if the row is there and not SHARD_END, it has no owner or a kclrun owner other than
    `former` (an offered row included), and `last` <= its position < `position` in the extended
    order. Owner and counter stay. `position` is never SHARD_END. `generation`: the row's when
    `former` had it. A reset since then may have moved the row to a sentinel at or above `last`.
    `letters_to`: the note of letters that the row must still have. The next owner relies on the
    note: no letters beyond it are committed [K20].
    """

    key: LeaseKey
    former: OwnerId
    last: ExtendedSequenceNumber
    position: ExtendedSequenceNumber
    cursors: Cursors | None = None
    state_version: str | None = None
    generation: int = 0
    letters_to: ExtendedSequenceNumber | None = None


class Amend(OwnersWrite, frozen=True):
    """The doctor, as a temporary owner, repairs fields that owners never change: parents and range
    as the service lists them."""

    parents: frozenset[str]
    hash_range: HashRange


class HaltLease(OwnersWrite, frozen=True):
    """The owner's manager notes on the row why the lease stands still."""

    halt: Halt


class ResumeLease(msgspec.Struct, frozen=True):
    """An operator removes the halt: not an owner's write, so the counter is untouched.

    `forgets_outputs`: the lease halted because its checkpoint was moved by another program; its
    outputs begin at that checkpoint [K2].
    """

    key: LeaseKey
    forgets_outputs: bool = False


class ChangePause(msgspec.Struct, frozen=True):
    """An operator pauses a lease, or resumes it (`pause` is None): not an owner's write, so the
    counter is untouched. Requires the pause that the operator saw: of two operators at once, one
    is refused."""

    key: LeaseKey
    pause: Pause | None
    seen: Pause | None


class NoteLetters(msgspec.Struct, frozen=True):
    """Written before an owner keeps dead letters of records up to `upto`: if the checkpoint is
    lower, the next owner sees that it does not cover these letters [K20].

    Not an owner's write: the counter is untouched, and so is a write of the owner under way.
    Requires the note that was seen, so that a late request does not take a later note back.
    """

    key: LeaseKey
    owner: OwnerId
    upto: ExtendedSequenceNumber
    seen: ExtendedSequenceNumber | None


class DeleteEnded(msgspec.Struct, frozen=True):
    """Delete a row that is SHARD_END [P13]."""

    key: LeaseKey


class DeleteTrimmed(SeenRow, frozen=True):
    """Delete the row of a shard proven trimmed: owner and counter as seen [P13]."""


class ResetLease(SeenRow, frozen=True):
    """A reset moves a row to a start sentinel, or to a position that was kept: owner, counter and
    position as seen [K4].

    The row is then as the first sync makes it, unowned, in the next `generation`, without the
    cursors of the outputs and the version of the keyed state. `halt` says that the reset is under
    way: until `FinishReset` no manager reads the shard. `latest_pinned_at`: what
    LATEST stands for, else None [P14]. `children` are named where the position is SHARD_END, and
    have rows by then [P12].
    """

    last: ExtendedSequenceNumber
    position: ExtendedSequenceNumber
    generation: int
    halt: Halt
    latest_pinned_at: WallTime | None = None
    children: frozenset[str] = frozenset()


class HaltForReset(SeenRow, frozen=True):
    """A reset halts a row that it will delete: owner and counter as seen. The row is then unowned,
    at its position. A child that waits for its parents does not begin when their rows go."""

    halt: Halt


class DeleteReset(SeenRow, frozen=True):
    """A reset deletes a row, because an ancestor's row comes in its place: owner and counter as
    seen. It is created again when its parents end [P12]."""


class FinishReset(msgspec.Struct, frozen=True):
    """A reset is complete: its halt goes. Counter and owner stay, so that a manager that took the
    row meanwhile begins at once. Applies while the row has the halt of this reset."""

    key: LeaseKey
    generation: int
    reason: str


# The changes of one row that exists.
RowChange = (
    Take
    | Ask
    | Withdraw
    | Decline
    | Claim
    | Renew
    | Checkpoint
    | NameChildren
    | End
    | Release
    | Offer
    | HandOver
    | LateCheckpoint
    | Amend
    | HaltLease
    | ResumeLease
    | ChangePause
    | NoteLetters
    | DeleteEnded
    | DeleteTrimmed
    | ResetLease
    | HaltForReset
    | DeleteReset
    | FinishReset
)
LeaseChange = CreateLease | CreateChildren | RowChange


def keys_of(change: LeaseChange) -> tuple[LeaseKey, ...]:
    """The rows that a change writes; conditions on other rows do not count."""
    if isinstance(change, CreateLease):
        return (change.lease.key,)
    if isinstance(change, CreateChildren):
        return tuple(child.key for child in change.children)
    return (change.key,)


# The last writes, which give the lease to others.
ReleaseWrite = Release | Offer | HandOver
Change = (
    Take
    | Claim
    | Renew
    | Checkpoint
    | NameChildren
    | HaltLease
    | End
    | ReleaseWrite
    | CreateChildren
    | CreateLease
)
