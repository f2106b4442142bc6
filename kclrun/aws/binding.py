"""Chooses the DynamoDB expression of a lease change and fills in its values. Pure.

`expressions.py` is the catalogue of expressions. Some mistakes cannot be prevented by a condition.
They are refused before the write is sent: a take by force from a kclrun owner, and a late
checkpoint to a sentinel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kclrun.aws import expressions as catalogue
from kclrun.aws.expressions import BoundWrite, Expression, Values
from kclrun.aws.rows import bare_ids, died_on_text, milliseconds, number, text
from kclrun.errors import InvariantViolation
from kclrun.model.lease import OFFERED, OWNER_PREFIX, DiedOn
from kclrun.model.sequence import (
    AT_TIMESTAMP,
    LATEST,
    SENTINELS,
    SEQUENCE_DIGITS_MAX,
    SHARD_END,
    TRIM_HORIZON,
    ExtendedSequenceNumber,
)
from kclrun.protocol.writes import (
    Amend,
    Ask,
    Checkpoint,
    Claim,
    Decline,
    DeleteEnded,
    DeleteTrimmed,
    End,
    EndedParent,
    HaltLease,
    HandOver,
    HeldParent,
    LateCheckpoint,
    LeaseChange,
    NameChildren,
    Offer,
    ParentCondition,
    Release,
    Renew,
    ResumeLease,
    Take,
    Withdraw,
)

# The late checkpoint is the only write whose condition compares positions by their order [P19].
#
# DynamoDB does not know this order: it compares text as text, and `size()` counts characters. So
# sequence numbers are compared by their number of digits, then as text. Sentinels are compared by
# name: the condition lists those above the position last seen. (Text order alone would put
# TRIM_HORIZON above any short number, and SHARD_END below every long one.)
# The key: is the last position outside an aggregate ("whole"), and is the new one?
_LATE_CHECKPOINTS: Final = {
    (False, False): catalogue.LATE,
    (True, False): catalogue.LATE_FROM_WHOLE,
    (False, True): catalogue.LATE_TO_WHOLE,
    (True, True): catalogue.LATE_WHOLE,
}


def bind_late(change: LateCheckpoint) -> BoundWrite:
    """The expression and values of a late checkpoint.

    Raises: InvariantViolation for a sentinel as the position: at SHARD_END the children would
    start.
    """
    last, position = change.last, change.position
    if position.is_sentinel:
        raise InvariantViolation(f"{change.key}: a late checkpoint is never {position}")
    from_whole = last.sub_sequence_number == 0
    after, after_that = _sentinels_above(last)
    values = {
        ":null": text("NULL"),
        ":prefix": text(OWNER_PREFIX),
        ":former": text(change.former),
        ":atTimestamp": text(AT_TIMESTAMP.sequence_number),
        ":trimHorizon": text(TRIM_HORIZON.sequence_number),
        ":latest": text(LATEST.sequence_number),
        ":last": text(last.sequence_number),
        ":lastDigits": number(_digits_up_to(last)),
        ":after": text(after.sequence_number),
        ":afterThat": text(after_that.sequence_number),
        ":digits": number(len(position.sequence_number)),
    }
    values |= {":shardEnd": text(SHARD_END.sequence_number)} | to_position(position)
    if not from_whole:
        values[":lastSub"] = number(last.sub_sequence_number)
    return BoundWrite(
        _LATE_CHECKPOINTS[from_whole, position.sub_sequence_number == 0], change.key, values
    )


def _sentinels_above(
    last: ExtendedSequenceNumber,
) -> tuple[ExtendedSequenceNumber, ExtendedSequenceNumber]:
    """The next two sentinels; SHARD_END in place of a missing one."""
    names = [each.sequence_number for each in SENTINELS]
    start = names.index(last.sequence_number) + 1 if last.is_sentinel else len(names)
    above = (*SENTINELS[start:], SHARD_END, SHARD_END)
    return above[0], above[1]


def _digits_up_to(last: ExtendedSequenceNumber) -> int:
    """The most digits of a number that is not above `last` by its number of digits alone.

    Every number is above every sentinel except SHARD_END. No number is above SHARD_END.
    """
    if last.sequence_number == SHARD_END.sequence_number:
        return SEQUENCE_DIGITS_MAX
    return 0 if last.is_sentinel else len(last.sequence_number)


def to_position(position: ExtendedSequenceNumber) -> Values:
    """The values of every write that moves the position."""
    return {
        ":position": text(position.sequence_number),
        ":sub": number(position.sub_sequence_number),
        ":zero": number(0),
    }


_NOBODY: Final = {":null": text("NULL")}
_SHARD_END: Final = {":shardEnd": text(SHARD_END.sequence_number)}
_ONE: Final = {":one": number(1)}

# The key: does the position move, and is the last position outside an aggregate ("whole")?
_ByPosition = dict[tuple[bool, bool], Expression]
_RELEASES: Final[_ByPosition] = {
    (False, False): catalogue.RELEASE,
    (False, True): catalogue.RELEASE_WHOLE,
    (True, False): catalogue.RELEASE_MOVED,
    (True, True): catalogue.RELEASE_MOVED_WHOLE,
}
_OFFERS: Final[_ByPosition] = {
    (False, False): catalogue.OFFER,
    (False, True): catalogue.OFFER_WHOLE,
    (True, False): catalogue.OFFER_MOVED,
    (True, True): catalogue.OFFER_MOVED_WHOLE,
}
_OFFERS_TO: Final[_ByPosition] = {
    (False, False): catalogue.OFFER_TO,
    (False, True): catalogue.OFFER_TO_WHOLE,
    (True, False): catalogue.OFFER_TO_MOVED,
    (True, True): catalogue.OFFER_TO_MOVED_WHOLE,
}
# The key: does the shard have parents, and is the instant of LATEST recorded?
_AMENDS: Final = {
    (True, False): catalogue.AMEND,
    (False, False): catalogue.AMEND_ROOT,
    (True, True): catalogue.AMEND_AND_PIN,
    (False, True): catalogue.AMEND_ROOT_AND_PIN,
}
# The index: is the instant of LATEST recorded?
_TAKES_UNOWNED: Final = (catalogue.TAKE_UNOWNED, catalogue.TAKE_UNOWNED_AND_PIN)
_TAKES_EXPIRED: Final = (catalogue.TAKE_EXPIRED, catalogue.TAKE_EXPIRED_AND_PIN)
_TAKES_BY_FORCE: Final = (catalogue.TAKE_BY_FORCE, catalogue.TAKE_BY_FORCE_AND_PIN)
_TAKES_OWN: Final = (catalogue.TAKE_OWN, catalogue.TAKE_OWN_AND_PIN)
_HAND_OVERS: Final[_ByPosition] = {
    (False, False): catalogue.HAND_OVER,
    (False, True): catalogue.HAND_OVER_WHOLE,
    (True, False): catalogue.HAND_OVER_MOVED,
    (True, True): catalogue.HAND_OVER_MOVED_WHOLE,
}


def bind(change: LeaseChange) -> BoundWrite:
    """The expression and values of a change to one existing row.

    Raises: InvariantViolation for CreateLease and CreateChildren (they put whole rows), for a
    NameChildren without children (DynamoDB has no empty set), for a take by force from an unowned
    row or from a kclrun owner [P16], and for a late checkpoint to SHARD_END or another sentinel
    [P19].
    """
    bound = _BOUND.get(type(change))
    if bound is None:
        raise InvariantViolation(f"no expression for {type(change).__name__}")
    return bound(change)


def bind_parent(parent: ParentCondition) -> BoundWrite:
    """The condition check on one parent's row, inside the children's transaction."""
    match parent:
        case HeldParent():
            values = {":me": text(parent.owner), ":seen": number(parent.counter)}
            return BoundWrite(catalogue.PARENT_HELD, parent.key, values)
        case EndedParent():
            return BoundWrite(catalogue.PARENT_ENDED, parent.key, _SHARD_END)
        case _:
            return BoundWrite(catalogue.PARENT_EXISTS, parent.key, {})


def _held(
    change: Take
    | Claim
    | Decline
    | Renew
    | Checkpoint
    | NameChildren
    | End
    | Release
    | Offer
    | HandOver
    | Amend
    | HaltLease,
) -> Values:
    return {
        ":me": text(change.owner),
        ":seen": number(change.seen_counter),
        ":next": number(change.seen_counter + 1),
    }


def _take(change: Take) -> BoundWrite:
    values = _held(change) | {
        ":failoverMs": milliseconds(change.failover_s),
        ":start": text(change.start),
        ":createdAt": milliseconds(change.stream_created_at or 0.0),  # 0: not known
    }
    pins = change.latest_pinned_at is not None
    if change.latest_pinned_at is not None:
        values[":pinnedAt"] = milliseconds(change.latest_pinned_at)
    if change.forced:
        return _take_by_force(change, values, _TAKES_BY_FORCE[pins])
    if change.seen_owner is None:
        return BoundWrite(_TAKES_UNOWNED[pins], change.key, values | _NOBODY)
    values[":seenOwner"] = text(change.seen_owner)
    if change.seen_owner == change.owner:
        return BoundWrite(_TAKES_OWN[pins], change.key, values)
    return BoundWrite(_TAKES_EXPIRED[pins], change.key, values | _ONE)


def _take_by_force(change: Take, values: Values, expression: Expression) -> BoundWrite:
    if change.seen_owner is None or change.seen_owner.startswith(OWNER_PREFIX):
        raise InvariantViolation(
            f"{change.key}: only a Java owner is taken from by force, not {change.seen_owner}"
        )
    values |= {":seenOwner": text(change.seen_owner)} | _ONE
    return BoundWrite(expression, change.key, values)


def _ask(change: Ask) -> BoundWrite:
    values = {
        ":me": text(change.owner),
        ":askedAt": milliseconds(change.asked_at),
        ":asked": text(change.asked),
    } | _SHARD_END
    if change.seen is None:
        return BoundWrite(catalogue.ASK, change.key, values)
    seen_at = milliseconds(change.seen.asked_at)
    is_undated = seen_at == number(0)
    return BoundWrite(
        catalogue.ASK_AGAIN_UNDATED if is_undated else catalogue.ASK_AGAIN,
        change.key,
        values | {":seenTo": text(change.seen.to), ":seenAt": seen_at},
    )


def _withdraw(change: Withdraw) -> BoundWrite:
    return BoundWrite(catalogue.WITHDRAW, change.key, {":me": text(change.owner)})


def _decline(change: Decline) -> BoundWrite:
    values = _held(change) | {":offered": text(OFFERED)}
    return BoundWrite(catalogue.DECLINE, change.key, values)


def _claim(change: Claim) -> BoundWrite:
    expression = catalogue.CLAIM_WAITED if change.has_waited else catalogue.CLAIM
    return BoundWrite(expression, change.key, _held(change))


def _renew(change: Renew) -> BoundWrite:
    values = _held(change)
    if change.throughput_kbps is None:
        plain = catalogue.RENEW_UNASKED if change.drops_ask else catalogue.RENEW
        return BoundWrite(plain, change.key, values)
    values[":throughput"] = number(change.throughput_kbps)
    measured = catalogue.RENEW_MEASURED_UNASKED if change.drops_ask else catalogue.RENEW_MEASURED
    return BoundWrite(measured, change.key, values)


def _name_children(change: NameChildren) -> BoundWrite:
    if not change.children:
        raise InvariantViolation("no expression for NameChildren without children")
    values = _held(change) | {":children": bare_ids(change.children)}
    return BoundWrite(catalogue.NAME_CHILDREN, change.key, values)


def _halt(change: HaltLease) -> BoundWrite:
    halt = change.halt
    noted = {
        ":reason": text(halt.reason),
        ":haltedAt": milliseconds(halt.halted_at),
        ":waitingSince": milliseconds(halt.waiting_since or halt.halted_at),
    }
    return BoundWrite(catalogue.HALT_LEASE, change.key, _held(change) | noted)


def _amend(change: Amend) -> BoundWrite:
    pinned_at = change.latest_pinned_at
    values = _held(change) | {
        ":first": text(str(change.hash_range.start)),
        ":final": text(str(change.hash_range.end)),
    }
    if change.parents:
        values[":parents"] = bare_ids(change.parents)
    if pinned_at is not None:
        values[":pinnedAt"] = milliseconds(pinned_at)
    expression = _AMENDS[bool(change.parents), pinned_at is not None]
    return BoundWrite(expression, change.key, values)


def _move(change: Checkpoint | End) -> BoundWrite:
    is_whole = change.last.sub_sequence_number == 0
    if isinstance(change, End):
        position, whole, inside = SHARD_END, catalogue.END_WHOLE, catalogue.END
    else:
        position = change.position
        whole, inside = catalogue.CHECKPOINT_WHOLE, catalogue.CHECKPOINT
    values = _held(change) | _at(change.last) | to_position(position)
    return BoundWrite(whole if is_whole else inside, change.key, values)


def _give_away(change: Release | Offer | HandOver) -> BoundWrite:
    moves = change.position != change.last
    is_whole = change.last.sub_sequence_number == 0
    values = _held(change) | _at(change.last)
    if moves:
        values |= to_position(change.position)
    match change:
        case Release():
            expression = _RELEASES[moves, is_whole]
        case Offer(died_on=DiedOn() as died_on):
            if moves or change.offered_to is not None:
                raise InvariantViolation(
                    f"{change.key}: an offer after deaths has no position or receiver"
                )
            after, whole = catalogue.OFFER_AFTER_DEATHS, catalogue.OFFER_AFTER_DEATHS_WHOLE
            expression = whole if is_whole else after
            values |= {":offered": text(OFFERED), ":diedOn": text(died_on_text(died_on))}
        case Offer(offered_to=None):
            expression = _OFFERS[moves, is_whole]
            values[":offered"] = text(OFFERED)
        case Offer(offered_to=asker):
            assert asker is not None
            expression = _OFFERS_TO[moves, is_whole]
            values |= {":offered": text(OFFERED), ":to": text(asker)}
        case HandOver(next_owner=next_owner):
            expression = _HAND_OVERS[moves, is_whole]
            values[":nextOwner"] = text(next_owner)
            if not moves:
                values |= _ONE
    return BoundWrite(expression, change.key, values)


def _at(last: ExtendedSequenceNumber) -> Values:
    return {":last": text(last.sequence_number), ":lastSub": number(last.sub_sequence_number)}


def _delete(change: DeleteEnded | DeleteTrimmed) -> BoundWrite:
    if isinstance(change, DeleteEnded):
        return BoundWrite(catalogue.DELETE_ENDED, change.key, _SHARD_END)
    seen = {":seen": number(change.seen_counter)}
    if change.seen_owner is None:
        return BoundWrite(catalogue.DELETE_TRIMMED_UNOWNED, change.key, seen | _NOBODY)
    owner = {":seenOwner": text(change.seen_owner)}
    return BoundWrite(catalogue.DELETE_TRIMMED, change.key, seen | owner)


def _resume(change: ResumeLease) -> BoundWrite:
    return BoundWrite(catalogue.RESUME_LEASE, change.key, {})


_BOUND: Final[Mapping[type[Any], Callable[[Any], BoundWrite]]] = {
    Take: _take,
    Ask: _ask,
    Withdraw: _withdraw,
    Decline: _decline,
    Claim: _claim,
    Renew: _renew,
    NameChildren: _name_children,
    Amend: _amend,
    HaltLease: _halt,
    ResumeLease: _resume,
    Checkpoint: _move,
    End: _move,
    Release: _give_away,
    Offer: _give_away,
    HandOver: _give_away,
    LateCheckpoint: bind_late,
    DeleteEnded: _delete,
    DeleteTrimmed: _delete,
}
