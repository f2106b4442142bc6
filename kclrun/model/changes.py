"""Writes to the lease table, as values: what should change, and what must hold for it to apply.

Every change of an owner names the owner and the counter it last saw confirmed, and adds one to
the counter [P1, P2, I5]. The DynamoDB expression of each is spelled out in `aws/expressions.py`;
the in-memory table applies the same conditions in Python; one contract suite runs over both.
"""

from __future__ import annotations

import msgspec

from kclrun.model.lease import Halt, Handoff, Lease, LeaseKey, OwnerId
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.time import WallTime

__all__ = [
    "Amend",
    "Ask",
    "Checkpoint",
    "Claim",
    "CreateChildren",
    "CreateLease",
    "DeleteEnded",
    "DeleteTrimmed",
    "End",
    "EndedParent",
    "ExistingParent",
    "HaltLease",
    "HandOver",
    "HeldParent",
    "LateCheckpoint",
    "LeaseChange",
    "NameChildren",
    "Offer",
    "ParentCondition",
    "Release",
    "Renew",
    "ResumeLease",
    "Take",
    "keys_of",
]


class CreateLease(msgspec.Struct, frozen=True, tag=True):
    """A whole row, by the first sync, or by its live owner where the row vanished: applies only if
    there is none with this key."""

    lease: Lease


class HeldParent(msgspec.Struct, frozen=True, tag=True):
    """The parent's row exists, with this owner and counter: its owner ends it just now."""

    key: LeaseKey
    owner: OwnerId
    counter: int


class EndedParent(msgspec.Struct, frozen=True, tag=True):
    """The parent's row exists and is SHARD_END: the healer's condition."""

    key: LeaseKey


class ExistingParent(msgspec.Struct, frozen=True, tag=True):
    """The parent's row exists, in whatever state: the other parent of a merge."""

    key: LeaseKey


ParentCondition = HeldParent | EndedParent | ExistingParent


class CreateChildren(msgspec.Struct, frozen=True, tag=True):
    """The children of an ended shard, all or none, if every parent condition holds [P12].

    A child row that exists already is left as it is and does not stop the others.
    """

    children: tuple[Lease, ...]
    parents: tuple[ParentCondition, ...]


class Take(msgspec.Struct, frozen=True, tag=True):
    """A manager takes an unowned or expired lease: owner and counter as seen [P2, P15].

    Publishes `failover_s` and `start`; removes `checkpointOwner` and all of a hand-off; adds an
    owner switch when the owner seen was somebody else. `forced`: from a Java owner that renews;
    writes `takenFrom`, so that whoever starts on the row waits first [P18]. Without it a
    `takenFrom` that stands there stays.
    """

    key: LeaseKey
    owner: OwnerId
    seen_owner: OwnerId | None
    seen_counter: int
    failover_s: float
    start: str
    forced: bool = False


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A manager would like a lease that `asked` renews: notes it on the row [P16].

    Not an owner's write, so the counter is untouched. `seen` is the ask that stood there for too
    long and is replaced, None where there was none: else the condition fails.
    """

    key: LeaseKey
    owner: OwnerId
    asked: OwnerId
    asked_at: WallTime
    seen: Handoff | None = None


class Claim(msgspec.Struct, frozen=True, tag=True):
    """A lease process proves the lease before its first read; returns the whole row [P4].

    `has_waited`: a failover has passed since a take by force, so `takenFrom` goes [P18].
    """

    key: LeaseKey
    owner: OwnerId
    seen_counter: int
    has_waited: bool = False


class Renew(msgspec.Struct, frozen=True, tag=True):
    """The heartbeat: counter + 1, and the throughput since the last one.

    `drops_ask`: removes an ask that is too old to be answered [P16].
    """

    key: LeaseKey
    owner: OwnerId
    seen_counter: int
    throughput_kbps: float | None = None
    drops_ask: bool = False


class Checkpoint(msgspec.Struct, frozen=True, tag=True):
    """Everything up to `position` is processed. Also requires the row's position to be `last`.

    Sets owner switches to 0 and removes a pending checkpoint.
    """

    key: LeaseKey
    owner: OwnerId
    seen_counter: int
    position: ExtendedSequenceNumber
    last: ExtendedSequenceNumber


class NameChildren(msgspec.Struct, frozen=True, tag=True):
    """Write `childShardIds` on the parent, for the Java KCL's cleanup and ours [P12]."""

    key: LeaseKey
    owner: OwnerId
    seen_counter: int
    children: frozenset[str]


class End(msgspec.Struct, frozen=True, tag=True):
    """Checkpoint SHARD_END: requires the row's position to be `last`, like any checkpoint."""

    key: LeaseKey
    owner: OwnerId
    seen_counter: int
    last: ExtendedSequenceNumber


class Release(msgspec.Struct, frozen=True, tag=True):
    """Final checkpoint and `leaseOwner` removed, in one write. `position` may equal `last`."""

    key: LeaseKey
    owner: OwnerId
    seen_counter: int
    position: ExtendedSequenceNumber
    last: ExtendedSequenceNumber


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Final checkpoint, and the row given away, in one write [P17].

    The owner becomes `kclrun:offered`, `offeredBy` the giver, `offeredTo` the one who asked (None:
    whoever comes); any ask is removed. `position` may equal `last`.
    """

    key: LeaseKey
    owner: OwnerId
    seen_counter: int
    position: ExtendedSequenceNumber
    last: ExtendedSequenceNumber
    offered_to: OwnerId | None = None


class HandOver(msgspec.Struct, frozen=True, tag=True):
    """Answer a KCL 3 leader's hand-off: final checkpoint, and `checkpointOwner` removed [R8].

    The row's owner is `next_owner` already and we are its `checkpointOwner`: those and the counter
    are the condition. The Java KCL's `assignLease`.
    """

    key: LeaseKey
    owner: OwnerId
    next_owner: OwnerId
    seen_counter: int
    position: ExtendedSequenceNumber
    last: ExtendedSequenceNumber


class LateCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """What `former` had fully processed when it lost the lease: once, and only forward [P19].

    Applies if the row is there and not SHARD_END, its owner is nobody or a kclrun owner other than
    `former` (an offered row included), and `last` <= its position < `position` in the extended
    order. Owner and counter stay. `position` is never SHARD_END.
    """

    key: LeaseKey
    former: OwnerId
    last: ExtendedSequenceNumber
    position: ExtendedSequenceNumber


class Amend(msgspec.Struct, frozen=True, tag=True):
    """The doctor, as its owner for a moment, puts right what owners never change: parents and range
    as the service lists them; and, where given, the instant that the row's LATEST stands for."""

    key: LeaseKey
    owner: OwnerId
    seen_counter: int
    parents: frozenset[str]
    hash_range: HashRange
    latest_pinned_at: WallTime | None = None


class HaltLease(msgspec.Struct, frozen=True, tag=True):
    """The owner's manager notes on the row why the lease stands still."""

    key: LeaseKey
    owner: OwnerId
    seen_counter: int
    halt: Halt


class ResumeLease(msgspec.Struct, frozen=True, tag=True):
    """An operator removes the halt: not an owner's write, so the counter is untouched."""

    key: LeaseKey


class DeleteEnded(msgspec.Struct, frozen=True, tag=True):
    """Delete a row that is SHARD_END [P13]."""

    key: LeaseKey


class DeleteTrimmed(msgspec.Struct, frozen=True, tag=True):
    """Delete the row of a shard proven trimmed: owner and counter as seen [P13]."""

    key: LeaseKey
    seen_owner: OwnerId | None
    seen_counter: int


LeaseChange = (
    CreateLease
    | CreateChildren
    | Take
    | Ask
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
    | DeleteEnded
    | DeleteTrimmed
)


def keys_of(change: LeaseChange) -> tuple[LeaseKey, ...]:
    """The rows that a change writes; conditions on other rows do not count."""
    if isinstance(change, CreateLease):
        return (change.lease.key,)
    if isinstance(change, CreateChildren):
        return tuple(child.key for child in change.children)
    return (change.key,)
