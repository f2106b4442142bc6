"""Every write to the lease table as DynamoDB sees it, spelled out, with its English beside it.

Data, so that the README and the tests can print it. `bind` chooses the expression for a change
and fills in its values; `lease_table.py` sends it. Rules [P1, P2]: each write of an owner names
the owner and the counter last seen and adds one; a write that carries a position also names the
position last seen; only a creation may apply where there is no row.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kclrun.aws.rows import milliseconds, number, text
from kclrun.errors import InvariantViolation
from kclrun.model.changes import (
    Checkpoint,
    Claim,
    DeleteEnded,
    DeleteTrimmed,
    End,
    EndedParent,
    HaltLease,
    HeldParent,
    LeaseChange,
    NameChildren,
    ParentCondition,
    Release,
    Renew,
    ResumeLease,
    Take,
)
from kclrun.model.lease import LeaseKey
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber

__all__ = ["CATALOGUE", "BoundWrite", "Clause", "Expression", "bind", "bind_parent"]


class Clause(msgspec.Struct, frozen=True):
    """One piece of an expression and what it says."""

    code: str
    english: str


class Expression(msgspec.Struct, frozen=True):
    """What one write changes (None: it deletes, creates or only checks), and on what condition."""

    name: str
    update: Clause | None
    conditions: tuple[Clause, ...]

    @property
    def condition(self) -> str:
        return " AND ".join(clause.code for clause in self.conditions)

    @property
    def english(self) -> str:
        given = ", ".join(clause.english for clause in self.conditions)
        return f"{self.name}: {self.update.english if self.update else ''} if {given}"


class BoundWrite(msgspec.Struct, frozen=True):
    """An expression with its values, for one row."""

    expression: Expression
    key: LeaseKey
    values: dict[str, dict[str, Any]]


# Conditions.

EXISTS: Final = Clause("attribute_exists(leaseKey)", "the row exists")
ABSENT: Final = Clause("attribute_not_exists(leaseKey)", "there is no such row")
SEEN_COUNTER: Final = Clause("leaseCounter = :seen", "its counter is the one seen")
MINE: Final = Clause("leaseOwner = :me", "its owner is me")
SEEN_OWNER: Final = Clause("leaseOwner = :seenOwner", "its owner is the one seen")
UNOWNED: Final = Clause(
    "(attribute_not_exists(leaseOwner) OR attribute_type(leaseOwner, :null))",
    "it has no owner (some clients write NULL)",
)
AT_LAST: Final = Clause(
    "checkpoint = :last AND checkpointSubSequenceNumber = :lastSub",
    "its position is the one last seen",
)
AT_LAST_WHOLE: Final = Clause(
    "checkpoint = :last AND (checkpointSubSequenceNumber = :lastSub"
    " OR attribute_not_exists(checkpointSubSequenceNumber))",
    "its position is the one last seen (a missing sub-sequence number is 0)",
)
ENDED: Final = Clause("checkpoint = :shardEnd", "it is SHARD_END")
HELD: Final = (EXISTS, MINE, SEEN_COUNTER)

# Updates.

_NO_HANDOFF: Final = "handoffTo, handoffAt, offeredTo"
_NO_PENDING: Final = "pendingCheckpoint, pendingCheckpointSubSequenceNumber, pendingCheckpointState"
_MOVE: Final = (
    "SET leaseCounter = :next, checkpoint = :position, checkpointSubSequenceNumber = :sub,"
    " ownerSwitchesSinceCheckpoint = :zero"
)
_TAKE: Final = (
    "SET leaseCounter = :next, leaseOwner = :me, failoverMs = :failoverMs, startPosition = :start"
    f" REMOVE checkpointOwner, {_NO_HANDOFF}"
)

BUMP: Final = Clause("SET leaseCounter = :next", "add one to the counter")
BUMP_MEASURED: Final = Clause(
    "SET leaseCounter = :next, throughputKBps = :throughput",
    "add one to the counter, note the throughput",
)
TAKE_OVER: Final = Clause(
    _TAKE, "become its owner, publish failover and start, drop any hand-off, add one to the counter"
)
TAKE_FROM_OTHER: Final = Clause(
    f"{_TAKE} ADD ownerSwitchesSinceCheckpoint :one",
    f"{TAKE_OVER.english} and one to the owner switches",
)
MOVE: Final = Clause(
    f"{_MOVE} REMOVE {_NO_PENDING}",
    "move the position, set owner switches to 0, drop a pending checkpoint, add one to the counter",
)
FINISH: Final = Clause(
    f"{_MOVE} REMOVE {_NO_PENDING}, {_NO_HANDOFF}",
    "set the position to SHARD_END, set owner switches to 0, drop a pending checkpoint and any"
    " hand-off, add one to the counter",
)
LET_GO: Final = Clause(
    f"SET leaseCounter = :next REMOVE leaseOwner, {_NO_HANDOFF}",
    "remove the owner, drop any hand-off, add one to the counter",
)
MOVE_AND_LET_GO: Final = Clause(
    f"{_MOVE} REMOVE leaseOwner, {_NO_PENDING}, {_NO_HANDOFF}",
    "move the position, set owner switches to 0, drop a pending checkpoint, remove the owner, drop"
    " any hand-off, add one to the counter",
)
NAME: Final = Clause(
    "SET leaseCounter = :next, childShardIds = :children",
    "name the children, add one to the counter",
)
HALT: Final = Clause(
    "SET leaseCounter = :next, haltReason = :reason, haltedAt = :haltedAt",
    "note why it stands still, add one to the counter",
)
RESUME: Final = Clause("REMOVE haltReason, haltedAt", "remove the halt")

# The writes: what changes, on what condition.

CREATE: Final = Expression("create", None, (ABSENT,))
TAKE_UNOWNED: Final = Expression(
    "take an unowned lease", TAKE_OVER, (EXISTS, SEEN_COUNTER, UNOWNED)
)
TAKE_EXPIRED: Final = Expression(
    "take somebody else's lease", TAKE_FROM_OTHER, (EXISTS, SEEN_COUNTER, SEEN_OWNER)
)
TAKE_OWN: Final = Expression(
    "take a lease that is mine", TAKE_OVER, (EXISTS, SEEN_COUNTER, SEEN_OWNER)
)
CLAIM: Final = Expression("claim", BUMP, HELD)
RENEW: Final = Expression("renew", BUMP, HELD)
RENEW_MEASURED: Final = Expression("renew with throughput", BUMP_MEASURED, HELD)
CHECKPOINT: Final = Expression("checkpoint", MOVE, (*HELD, AT_LAST))
CHECKPOINT_WHOLE: Final = Expression("checkpoint from sub 0", MOVE, (*HELD, AT_LAST_WHOLE))
NAME_CHILDREN: Final = Expression("name children", NAME, HELD)
END: Final = Expression("end", FINISH, (*HELD, AT_LAST))
END_WHOLE: Final = Expression("end from sub 0", FINISH, (*HELD, AT_LAST_WHOLE))
RELEASE: Final = Expression("release", LET_GO, (*HELD, AT_LAST))
RELEASE_WHOLE: Final = Expression("release from sub 0", LET_GO, (*HELD, AT_LAST_WHOLE))
RELEASE_MOVED: Final = Expression("checkpoint and release", MOVE_AND_LET_GO, (*HELD, AT_LAST))
RELEASE_MOVED_WHOLE: Final = Expression(
    "checkpoint and release from sub 0", MOVE_AND_LET_GO, (*HELD, AT_LAST_WHOLE)
)
HALT_LEASE: Final = Expression("halt", HALT, HELD)
RESUME_LEASE: Final = Expression("resume", RESUME, (EXISTS,))
DELETE_ENDED: Final = Expression("delete an ended lease", None, (EXISTS, ENDED))
DELETE_TRIMMED: Final = Expression(
    "delete a trimmed shard's lease", None, (EXISTS, SEEN_COUNTER, SEEN_OWNER)
)
DELETE_TRIMMED_UNOWNED: Final = Expression(
    "delete a trimmed shard's unowned lease", None, (EXISTS, SEEN_COUNTER, UNOWNED)
)
PARENT_HELD: Final = Expression("the ending parent is held", None, HELD)
PARENT_ENDED: Final = Expression("the parent has ended", None, (EXISTS, ENDED))
PARENT_EXISTS: Final = Expression("the other parent has a row", None, (EXISTS,))

CATALOGUE: Final = (
    CREATE,
    TAKE_UNOWNED,
    TAKE_EXPIRED,
    TAKE_OWN,
    CLAIM,
    RENEW,
    RENEW_MEASURED,
    CHECKPOINT,
    CHECKPOINT_WHOLE,
    NAME_CHILDREN,
    END,
    END_WHOLE,
    RELEASE,
    RELEASE_WHOLE,
    RELEASE_MOVED,
    RELEASE_MOVED_WHOLE,
    HALT_LEASE,
    RESUME_LEASE,
    DELETE_ENDED,
    DELETE_TRIMMED,
    DELETE_TRIMMED_UNOWNED,
    PARENT_HELD,
    PARENT_ENDED,
    PARENT_EXISTS,
)

_NOBODY: Final = {":null": text("NULL")}
_SHARD_END: Final = {":shardEnd": text(SHARD_END.sequence_number)}


def bind(change: LeaseChange) -> BoundWrite:
    """The expression and values of a change to one existing row.

    Raises: InvariantViolation for CreateLease and CreateChildren (they put whole rows) and for
    naming no children (DynamoDB has no empty set).
    """
    match change:
        case Take():
            return _take(change)
        case Claim():
            return BoundWrite(CLAIM, change.key, _held(change))
        case Renew(throughput_kbps=None):
            return BoundWrite(RENEW, change.key, _held(change))
        case Renew(throughput_kbps=float(measured)):
            values = _held(change) | {":throughput": number(measured)}
            return BoundWrite(RENEW_MEASURED, change.key, values)
        case NameChildren(children=children) if children:
            values = _held(change) | {":children": {"SS": sorted(children)}}
            return BoundWrite(NAME_CHILDREN, change.key, values)
        case HaltLease(halt=halt):
            noted = {":reason": text(halt.reason), ":haltedAt": milliseconds(halt.halted_at)}
            return BoundWrite(HALT_LEASE, change.key, _held(change) | noted)
        case ResumeLease():
            return BoundWrite(RESUME_LEASE, change.key, {})
        case Checkpoint() | End() | Release():
            return _with_position(change)
        case DeleteEnded() | DeleteTrimmed():
            return _delete(change)
    raise InvariantViolation(f"no expression for {type(change).__name__}")


def bind_parent(parent: ParentCondition) -> BoundWrite:
    """The condition check on one parent's row, inside the children's transaction."""
    match parent:
        case HeldParent():
            values = {":me": text(parent.owner), ":seen": number(parent.counter)}
            return BoundWrite(PARENT_HELD, parent.key, values)
        case EndedParent():
            return BoundWrite(PARENT_ENDED, parent.key, _SHARD_END)
        case _:
            return BoundWrite(PARENT_EXISTS, parent.key, {})


def _held(
    change: Claim | Renew | Checkpoint | NameChildren | End | Release | HaltLease,
) -> dict[str, dict[str, Any]]:
    return {
        ":me": text(change.owner),
        ":seen": number(change.seen_counter),
        ":next": number(change.seen_counter + 1),
    }


def _take(change: Take) -> BoundWrite:
    values = {
        ":me": text(change.owner),
        ":seen": number(change.seen_counter),
        ":next": number(change.seen_counter + 1),
        ":failoverMs": milliseconds(change.failover_s),
        ":start": text(change.start),
    }
    if change.seen_owner is None:
        return BoundWrite(TAKE_UNOWNED, change.key, values | _NOBODY)
    values[":seenOwner"] = text(change.seen_owner)
    if change.seen_owner == change.owner:
        return BoundWrite(TAKE_OWN, change.key, values)
    return BoundWrite(TAKE_EXPIRED, change.key, values | {":one": number(1)})


def _with_position(change: Checkpoint | End | Release) -> BoundWrite:
    last = change.last
    values = _held(change) | {
        ":last": text(last.sequence_number),
        ":lastSub": number(last.sub_sequence_number),
    }
    position = SHARD_END if isinstance(change, End) else change.position
    moves = not isinstance(change, Release) or position != last
    if moves:
        values |= _new_position(position)
    from_whole = last.sub_sequence_number == 0
    match change:
        case Checkpoint():
            expression = CHECKPOINT_WHOLE if from_whole else CHECKPOINT
        case End():
            expression = END_WHOLE if from_whole else END
        case Release():
            staying, moving = (
                (RELEASE_WHOLE, RELEASE_MOVED_WHOLE) if from_whole else (RELEASE, RELEASE_MOVED)
            )
            expression = moving if moves else staying
    return BoundWrite(expression, change.key, values)


def _new_position(position: ExtendedSequenceNumber) -> dict[str, dict[str, Any]]:
    return {
        ":position": text(position.sequence_number),
        ":sub": number(position.sub_sequence_number),
        ":zero": number(0),
    }


def _delete(change: DeleteEnded | DeleteTrimmed) -> BoundWrite:
    if isinstance(change, DeleteEnded):
        return BoundWrite(DELETE_ENDED, change.key, _SHARD_END)
    seen = {":seen": number(change.seen_counter)}
    if change.seen_owner is None:
        return BoundWrite(DELETE_TRIMMED_UNOWNED, change.key, seen | _NOBODY)
    owner = {":seenOwner": text(change.seen_owner)}
    return BoundWrite(DELETE_TRIMMED, change.key, seen | owner)
