"""The pieces of every write to the lease table: conditions and updates, each with its English.

Data only. `expressions.py` puts them together, `binding.py` fills in their values. Rules [P1, P2]:
an owner's update adds one to the counter; whatever writes a position drops a pending checkpoint.
"""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["Clause"]


class Clause(msgspec.Struct, frozen=True):
    """One piece of an expression and what it says."""

    code: str
    english: str


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
NOT_ENDED: Final = Clause("checkpoint <> :shardEnd", "it is not SHARD_END")

# Conditions of asks and hand-offs.

ASKED_OWNER: Final = Clause("leaseOwner = :asked", "its owner is the one asked")
NOT_ASKED: Final = Clause("attribute_not_exists(handoffTo)", "nobody has asked for it")
ASK_SEEN: Final = Clause(
    "handoffTo = :seenTo AND handoffAt = :seenAt", "the ask on it is the one seen"
)
ASK_SEEN_UNDATED: Final = Clause(
    "handoffTo = :seenTo AND (handoffAt = :seenAt OR attribute_not_exists(handoffAt))",
    "the ask on it is the one seen (a missing time is 0)",
)
NEXT_OWNER: Final = Clause("leaseOwner = :nextOwner", "its owner is the next one already")
MY_CHECKPOINTS: Final = Clause("checkpointOwner = :me", "its checkpoint owner is me")

# Conditions of the late checkpoint: nobody else's protocol is disturbed, and `:last` <= position
# < `:position` in the extended order. Sequence numbers are compared by their number of digits,
# then as text; that alone is wrong for sentinels (TRIM_HORIZON has 12 characters), so those go by
# name. `:after` and `:afterThat` are the sentinels above `:last`, the lowest first; SHARD_END,
# which the write refuses anyway, where there are fewer.

_SENTINEL: Final = "checkpoint IN (:atTimestamp, :trimHorizon, :latest)"
_ABOVE: Final = (
    "checkpoint IN (:after, :afterThat)"
    f" OR (NOT {_SENTINEL} AND (size(checkpoint) > :lastDigits"
    " OR (size(checkpoint) = :lastDigits AND checkpoint > :last)))"
)
_BELOW: Final = (
    f"{_SENTINEL} OR size(checkpoint) < :digits"
    " OR (size(checkpoint) = :digits AND checkpoint < :position)"
)
OURS_NOW: Final = Clause(
    "(attribute_not_exists(leaseOwner) OR attribute_type(leaseOwner, :null)"
    " OR (begins_with(leaseOwner, :prefix) AND leaseOwner <> :former))",
    "its owner is nobody, or a kclrun owner other than me",
)
FROM_LAST: Final = Clause(
    f"({_ABOVE} OR (checkpoint = :last AND checkpointSubSequenceNumber >= :lastSub))",
    "its position is not below the one last seen",
)
FROM_LAST_WHOLE: Final = Clause(
    f"({_ABOVE} OR checkpoint = :last)",
    "its position is not below the one last seen, which is sub 0",
)
BEFORE_NEW: Final = Clause(
    f"({_BELOW} OR (checkpoint = :position AND (checkpointSubSequenceNumber < :sub"
    " OR attribute_not_exists(checkpointSubSequenceNumber))))",
    "its position is below the new one",
)
BEFORE_NEW_WHOLE: Final = Clause(f"({_BELOW})", "its position is below the new one, which is sub 0")

# Updates.

_NO_HANDOFF: Final = "handoffTo, handoffAt, offeredTo, offeredBy"
_NO_PENDING: Final = "pendingCheckpoint, pendingCheckpointSubSequenceNumber, pendingCheckpointState"
_TO_POSITION: Final = (
    "checkpoint = :position, checkpointSubSequenceNumber = :sub,"
    " ownerSwitchesSinceCheckpoint = :zero"
)
_MOVE: Final = f"SET leaseCounter = :next, {_TO_POSITION}"
_OFFER: Final = "leaseOwner = :offered, offeredBy = :me"
_TAKE: Final = (
    "SET leaseCounter = :next, leaseOwner = :me, failoverMs = :failoverMs, startPosition = :start"
)
_TAKE_DROPS: Final = f"REMOVE checkpointOwner, {_NO_HANDOFF}"
_SWITCH: Final = "ADD ownerSwitchesSinceCheckpoint :one"
_MOVED: Final = "move the position, set owner switches to 0, drop a pending checkpoint"

BUMP: Final = Clause("SET leaseCounter = :next", "add one to the counter")
BUMP_MEASURED: Final = Clause(
    "SET leaseCounter = :next, throughputKBps = :throughput",
    "add one to the counter, note the throughput",
)
BUMP_WAITED: Final = Clause(
    "SET leaseCounter = :next REMOVE takenFrom",
    "add one to the counter, forget whom it was taken from",
)
BUMP_UNASKED: Final = Clause(
    "SET leaseCounter = :next REMOVE handoffTo, handoffAt", "add one to the counter, drop the ask"
)
BUMP_MEASURED_UNASKED: Final = Clause(
    "SET leaseCounter = :next, throughputKBps = :throughput REMOVE handoffTo, handoffAt",
    "add one to the counter, note the throughput, drop the ask",
)
TAKE_OVER: Final = Clause(
    f"{_TAKE} {_TAKE_DROPS}",
    "become its owner, publish failover and start, drop any hand-off, add one to the counter",
)
TAKE_FROM_OTHER: Final = Clause(
    f"{_TAKE} {_TAKE_DROPS} {_SWITCH}",
    f"{TAKE_OVER.english} and one to the owner switches",
)
TAKE_BY_FORCE: Final = Clause(
    f"{_TAKE}, takenFrom = :seenOwner {_TAKE_DROPS} {_SWITCH}",
    f"{TAKE_FROM_OTHER.english}, note whom it was taken from",
)
ASK: Final = Clause("SET handoffTo = :me, handoffAt = :askedAt", "ask for it")
MOVE: Final = Clause(f"{_MOVE} REMOVE {_NO_PENDING}", f"{_MOVED}, add one to the counter")
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
    f"{_MOVED}, remove the owner, drop any hand-off, add one to the counter",
)
OFFER: Final = Clause(
    f"SET leaseCounter = :next, {_OFFER} REMOVE offeredTo, handoffTo, handoffAt",
    "offer it to whoever comes, note who gave it, drop any ask, add one to the counter",
)
OFFER_TO: Final = Clause(
    f"SET leaseCounter = :next, {_OFFER}, offeredTo = :to REMOVE handoffTo, handoffAt",
    "offer it to the one who asked, note who gave it, drop any ask, add one to the counter",
)
MOVE_AND_OFFER: Final = Clause(
    f"{_MOVE}, {_OFFER} REMOVE offeredTo, handoffTo, handoffAt, {_NO_PENDING}",
    f"{_MOVED}, {OFFER.english}",
)
MOVE_AND_OFFER_TO: Final = Clause(
    f"{_MOVE}, {_OFFER}, offeredTo = :to REMOVE handoffTo, handoffAt, {_NO_PENDING}",
    f"{_MOVED}, {OFFER_TO.english}",
)
HAND_OVER: Final = Clause(
    f"SET leaseCounter = :next REMOVE checkpointOwner, {_NO_HANDOFF} {_SWITCH}",
    "remove the checkpoint owner, drop any hand-off, add one to the counter and one to the owner"
    " switches",
)
MOVE_AND_HAND_OVER: Final = Clause(
    f"{_MOVE} REMOVE checkpointOwner, {_NO_PENDING}, {_NO_HANDOFF}",
    f"{_MOVED}, remove the checkpoint owner, drop any hand-off, add one to the counter",
)
MOVE_LATE: Final = Clause(f"SET {_TO_POSITION} REMOVE {_NO_PENDING}", _MOVED)
NAME: Final = Clause(
    "SET leaseCounter = :next, childShardIds = :children",
    "name the children, add one to the counter",
)
_AMEND: Final = "SET leaseCounter = :next, startingHashKey = :first, endingHashKey = :final"
_AMENDED: Final = "put parents and hash range right"
AMEND: Final = Clause(f"{_AMEND}, parentShardId = :parents", f"{_AMENDED}, add one to the counter")
AMEND_ROOT: Final = Clause(
    f"{_AMEND} REMOVE parentShardId",
    "put the hash range right, remove the parents, add one to the counter",
)
AMEND_AND_PIN: Final = Clause(
    f"{_AMEND}, parentShardId = :parents, latestPinnedAt = :pinnedAt",
    f"{_AMENDED}, note the instant of LATEST, add one to the counter",
)
AMEND_ROOT_AND_PIN: Final = Clause(
    f"{_AMEND}, latestPinnedAt = :pinnedAt REMOVE parentShardId",
    "put the hash range right, remove the parents, note the instant of LATEST, add one to the"
    " counter",
)
HALT: Final = Clause(
    "SET leaseCounter = :next, haltReason = :reason, haltedAt = :haltedAt",
    "note why it stands still, add one to the counter",
)
RESUME: Final = Clause("REMOVE haltReason, haltedAt", "remove the halt")
