"""Conditions and updates of the lease table's writes, each with its meaning in English. Data only.

`expressions.py` combines them, `binding.py` fills in their values. Rules [P1, P2]: an owner's
update adds one to the counter; every write of a position removes a pending checkpoint.
"""

from __future__ import annotations

from typing import Final

import msgspec


class Clause(msgspec.Struct, frozen=True):
    """One part of an expression and its meaning in English."""

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

# Conditions of handoff requests and handoffs.

ASKED_OWNER: Final = Clause("leaseOwner = :asked", "its owner is the one asked")
NOT_ASKED: Final = Clause("attribute_not_exists(handoffTo)", "nobody has asked for it")
ASK_SEEN: Final = Clause(
    "handoffTo = :seenTo AND handoffAt = :seenAt", "the ask on it is the one seen"
)
ASK_SEEN_UNDATED: Final = Clause(
    "handoffTo = :seenTo AND (handoffAt = :seenAt OR attribute_not_exists(handoffAt))",
    "the ask on it is the one seen (a missing time is 0)",
)
ASKED_BY_ME: Final = Clause("handoffTo = :me", "the ask on it is mine")
OFFERED_TO_ME: Final = Clause(
    "leaseOwner = :offered AND offeredTo = :me", "it is offered, and to me"
)
NEXT_OWNER: Final = Clause("leaseOwner = :nextOwner", "its owner is the next one already")
MY_CHECKPOINTS: Final = Clause("checkpointOwner = :me", "its checkpoint owner is me")

# Conditions of the late checkpoint. The row has no owner or a kclrun owner, so the write does not
# disturb a Java worker's protocol. And `:last` <= position < `:position` in the extended order.
# Sequence numbers are compared by their number of digits, then as text. This alone is wrong for
# sentinels (TRIM_HORIZON has 12 characters), so sentinels are compared by name. `:after` and
# `:afterThat` are the sentinels above `:last`, the lowest first. A missing one is replaced by
# SHARD_END, which the write refuses anyway.

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
_NO_PENDING: Final = (
    "pendingCheckpoint, pendingCheckpointSubSequenceNumber, pendingCheckpointState, diedOn"
)
_TO_POSITION: Final = (
    "checkpoint = :position, checkpointSubSequenceNumber = :sub,"
    " ownerSwitchesSinceCheckpoint = :zero"
)
_MOVE: Final = f"SET leaseCounter = :next, {_TO_POSITION}"
_OFFER: Final = "leaseOwner = :offered, offeredBy = :me"
_TAKE: Final = (
    "SET leaseCounter = :next, leaseOwner = :me, failoverMs = :failoverMs, startPosition = :start,"
    " streamCreatedAt = :createdAt"
)
_TAKE_DROPS: Final = f"REMOVE checkpointOwner, {_NO_HANDOFF}"
_SWITCH: Final = "ADD ownerSwitchesSinceCheckpoint :one"
_MOVED: Final = (
    "move the position, set owner switches to 0, drop a pending checkpoint and a note of deaths"
)

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
    "become its owner, publish failover, start and the stream's creation time, drop any hand-off,"
    " add one to the counter",
)
TAKE_FROM_OTHER: Final = Clause(
    f"{_TAKE} {_TAKE_DROPS} {_SWITCH}",
    f"{TAKE_OVER.english} and one to the owner switches",
)
TAKE_BY_FORCE: Final = Clause(
    f"{_TAKE}, takenFrom = :seenOwner {_TAKE_DROPS} {_SWITCH}",
    f"{TAKE_FROM_OTHER.english}, note whom it was taken from",
)
_PIN: Final = ", latestPinnedAt = if_not_exists(latestPinnedAt, :pinnedAt)"
_PINNED: Final = "note the instant of LATEST unless one stands there"
TAKE_OVER_AND_PIN: Final = Clause(f"{_TAKE}{_PIN} {_TAKE_DROPS}", f"{TAKE_OVER.english}, {_PINNED}")
TAKE_FROM_OTHER_AND_PIN: Final = Clause(
    f"{_TAKE}{_PIN} {_TAKE_DROPS} {_SWITCH}", f"{TAKE_FROM_OTHER.english}, {_PINNED}"
)
TAKE_BY_FORCE_AND_PIN: Final = Clause(
    f"{_TAKE}, takenFrom = :seenOwner{_PIN} {_TAKE_DROPS} {_SWITCH}",
    f"{TAKE_BY_FORCE.english}, {_PINNED}",
)
WITHDRAW: Final = Clause("REMOVE handoffTo, handoffAt", "drop the ask")
DECLINE: Final = Clause(
    "SET leaseCounter = :next, offeredBy = :me REMOVE offeredTo",
    "offer it to whoever comes, note who gave it, add one to the counter",
)
ASK: Final = Clause("SET handoffTo = :me, handoffAt = :askedAt", "ask for it")
MOVE: Final = Clause(f"{_MOVE} REMOVE {_NO_PENDING}", f"{_MOVED}, add one to the counter")
FINISH: Final = Clause(
    f"{_MOVE} REMOVE {_NO_PENDING}, {_NO_HANDOFF}",
    "set the position to SHARD_END, set owner switches to 0, drop a pending checkpoint, a note of"
    " deaths and any hand-off, add one to the counter",
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
OFFER_AFTER_DEATHS: Final = Clause(
    f"SET leaseCounter = :next, {_OFFER}, diedOn = :diedOn REMOVE offeredTo, handoffTo, handoffAt",
    "offer it to any owner, note who gave it and on which host its processes died, drop any"
    " ask, add one to the counter",
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
    "SET leaseCounter = :next, haltReason = :reason, haltedAt = :haltedAt,"
    " haltWaitingSince = :waitingSince",
    "note why it stands still, add one to the counter",
)
RESUME: Final = Clause(
    "REMOVE haltReason, haltedAt, haltWaitingSince, diedOn",
    "remove the halt and a note of deaths",
)
