"""The late checkpoint: the one write whose condition compares positions by their order [P19].

DynamoDB has no such order: text is compared as text, and `size()` counts characters. So numbers go
by their digits, then as text; sentinels by name, as those above the position last seen (text alone
would put TRIM_HORIZON above any short number, and SHARD_END below every long one).
"""

from __future__ import annotations

from typing import Final

from kclrun.aws import expressions as catalogue
from kclrun.aws.expressions import BoundWrite, Values
from kclrun.aws.rows import number, text
from kclrun.errors import InvariantViolation
from kclrun.model.changes import LateCheckpoint
from kclrun.model.lease import OWNER_PREFIX
from kclrun.model.sequence import (
    AT_TIMESTAMP,
    LATEST,
    SENTINELS,
    SEQUENCE_DIGITS_MAX,
    SHARD_END,
    TRIM_HORIZON,
    ExtendedSequenceNumber,
)

__all__ = ["bind_late", "to_position"]

# Chosen by: is the last position no part of an aggregate ("whole"), is the new one?
_LATE_CHECKPOINTS: Final = {
    (False, False): catalogue.LATE,
    (True, False): catalogue.LATE_FROM_WHOLE,
    (False, True): catalogue.LATE_TO_WHOLE,
    (True, True): catalogue.LATE_WHOLE,
}


def bind_late(change: LateCheckpoint) -> BoundWrite:
    """The expression and values of a late checkpoint.

    Raises: InvariantViolation for one to a sentinel: past SHARD_END the children would start.
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
    """The next two, or SHARD_END for those that there are not."""
    names = [each.sequence_number for each in SENTINELS]
    start = names.index(last.sequence_number) + 1 if last.is_sentinel else len(names)
    above = (*SENTINELS[start:], SHARD_END, SHARD_END)
    return above[0], above[1]


def _digits_up_to(last: ExtendedSequenceNumber) -> int:
    """How many digits a number may have and still not be above `last` for that alone.

    Every number is above a sentinel, but for SHARD_END: no number is above that.
    """
    if last.sequence_number == SHARD_END.sequence_number:
        return SEQUENCE_DIGITS_MAX
    return 0 if last.is_sentinel else len(last.sequence_number)


def to_position(position: ExtendedSequenceNumber) -> Values:
    """The values by which any write moves the position."""
    return {
        ":position": text(position.sequence_number),
        ":sub": number(position.sub_sequence_number),
        ":zero": number(0),
    }
