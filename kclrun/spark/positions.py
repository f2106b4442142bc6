"""Positions in a shard as Spark's offsets store them [A1]. Pure."""

from __future__ import annotations

import enum
import re
from typing import Final

import msgspec

from kclrun.errors import OffsetRefused
from kclrun.model.sequence import SEQUENCE_DIGITS_MAX

_TIMESTAMP: Final = re.compile(r"TS:(0|[1-9][0-9]{0,15})\Z")
_NUMBER: Final = re.compile(
    rf"(@?)((?:0|[1-9][0-9]{{0,{SEQUENCE_DIGITS_MAX - 1}}}))(?:/([0-9]{{1,9}}))?\Z"
)


class PositionKind(enum.IntEnum):
    """The kind of a position; the order of the kinds is their order in a shard."""

    TRIM_HORIZON = 0
    TIMESTAMP = 1
    RECORD = 2
    SHARD_END = 3


class Position(msgspec.Struct, frozen=True):
    """One position. Ordered along the shard; a timestamp sorts before every record.

    A bound is the position of a record that GetRecords returned, or the end of a closed shard. The
    other two kinds are beginnings for a shard of which no record has been seen yet. As text:

        TRIM_HORIZON   before the oldest record
        TS:1700000000  before the first record that arrived at or after (milliseconds)
        @4959…         just before that record: away from the tip
        4959…          just after it: at the tip
        4959…/3        after the fourth user record of that aggregate: only where a range begins
        SHARD_END      after the last record of a closed shard

    `is_before` means before record `number`, otherwise after it, or after its user record
    `sub_sequence_number` where that is given.
    """

    kind: PositionKind
    number: str = ""
    is_before: bool = False
    sub_sequence_number: int | None = None
    timestamp_ms: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether the same records follow it whenever it is read."""
        return self.kind in {PositionKind.RECORD, PositionKind.SHARD_END}

    @property
    def sort_key(self) -> tuple[int, int, int, str, int]:
        """A plain tuple in the order of the shard."""
        past = 0 if self.is_before else 1 + (self.sub_sequence_number or 0)
        if not self.is_before and self.sub_sequence_number is None:
            past = 2**31  # after the whole record, also if it is an aggregate
        return (self.kind, self.timestamp_ms, len(self.number), self.number, past)

    def __lt__(self, other: Position) -> bool:
        return self.sort_key < other.sort_key

    def __le__(self, other: Position) -> bool:
        return self.sort_key <= other.sort_key

    def __gt__(self, other: Position) -> bool:
        return self.sort_key > other.sort_key

    def __ge__(self, other: Position) -> bool:
        return self.sort_key >= other.sort_key

    def covers(self, number: str) -> bool:
        """Whether the whole record with this sequence number lies before the position."""
        if self.kind is not PositionKind.RECORD:
            return self.kind is PositionKind.SHARD_END
        if self.number == number:
            return not self.is_before and self.sub_sequence_number is None
        return (len(number), number) < (len(self.number), self.number)

    def __str__(self) -> str:
        if self.kind is PositionKind.TIMESTAMP:
            return f"TS:{self.timestamp_ms}"
        if self.kind is not PositionKind.RECORD:
            return self.kind.name
        sub = "" if self.sub_sequence_number is None else f"/{self.sub_sequence_number}"
        return f"{'@' if self.is_before else ''}{self.number}{sub}"


TRIM_HORIZON: Final = Position(PositionKind.TRIM_HORIZON)
SHARD_END: Final = Position(PositionKind.SHARD_END)


def before(number: str) -> Position:
    """Just before a record: the text `@n`."""
    return Position(PositionKind.RECORD, number, is_before=True)


def after(number: str, sub_sequence_number: int | None = None) -> Position:
    """Just after a record, or after one user record of an aggregate."""
    return Position(PositionKind.RECORD, number, sub_sequence_number=sub_sequence_number)


def at_timestamp(timestamp_ms: int) -> Position:
    """Before the first record that arrived at or after this time."""
    return Position(PositionKind.TIMESTAMP, timestamp_ms=timestamp_ms)


def parse_position(text: str) -> Position:
    """The position that a text names. Raises: OffsetRefused for anything else."""
    if text == TRIM_HORIZON.kind.name:
        return TRIM_HORIZON
    if text == SHARD_END.kind.name:
        return SHARD_END
    if match := _TIMESTAMP.match(text):
        return at_timestamp(int(match[1]))
    match = _NUMBER.match(text)
    if match is None or (match[1] and match[3]):
        raise OffsetRefused(
            f"{text[:60]!r} is not a position: expected TRIM_HORIZON, SHARD_END, TS:<milliseconds>,"
            " a sequence number, or @ and a sequence number"
        )
    sub = None if match[3] is None else int(match[3])
    return Position(PositionKind.RECORD, match[2], bool(match[1]), sub)
