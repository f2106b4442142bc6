"""Positions in a shard, and the one total order over them.

A position is a sequence number, a sub-sequence number inside a KPL aggregate, or one of the
four sentinels of the KCL (`kinesis.retrieval.kpl.ExtendedSequenceNumber`). The order is

    AT_TIMESTAMP < TRIM_HORIZON < LATEST < any number < SHARD_END

with numbers compared as numbers (their digit strings are up to 129 digits long, never zero
padded, so length first, then text), then the sub-sequence number, and the tick last.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from kclrun.errors import LimitExceeded

# `GetShardIterator` documents the pattern 0|([1-9]\d{0,128}): at most 129 digits.
SEQUENCE_DIGITS_MAX: Final = 129
_NUMBER: Final = re.compile(r"(?:0|[1-9][0-9]{0,128})\Z")
# As text, every number sorts before this, every sentinel's name after it.
_AFTER_DIGITS: Final = ":"
_RANK_OF_NUMBERS: Final = 0
_RANKS: Final = {"AT_TIMESTAMP": -3, "TRIM_HORIZON": -2, "LATEST": -1, "SHARD_END": 1}

SortKey = tuple[int, int, str, int, int]
# More timers than fire at one position: a thousand a second would take 49 days. Destinations keep
# ticks of 18 digits: the watermark may move 232 million times at one position, each second for
# seven years.
IDLE_TICKS: Final = 2**32


class ExtendedSequenceNumber(msgspec.Struct, frozen=True, gc=False):
    """A position: every record at or below it is accounted for. Ordered, hashable.

    `sequence_number` is a decimal number without leading zeros, or one of the words AT_TIMESTAMP,
    TRIM_HORIZON, LATEST (before every record) and SHARD_END (behind the last one).
    `sub_sequence_number` counts the user records of one KPL aggregate from 0; it is 0 for other
    records. `tick` counts the timers that fired since that record, because they change rows and
    state where no record does; the position of a record has tick 0.

    Raises: LimitExceeded for anything else.
    """

    sequence_number: str
    sub_sequence_number: int = 0
    tick: int = 0

    # The Java KCL writes sub-sequence number 0 with a word; kcl-rust writes milliseconds with
    # AT_TIMESTAMP, so any number is accepted. A watermark that moved without a record adds
    # `IDLE_TICKS` to the tick: so the cursor of an output shows of which kind its last round is
    # [K1, R2].

    def __post_init__(self) -> None:
        if self.sequence_number not in _RANKS and not _NUMBER.match(self.sequence_number):
            shown = self.sequence_number[:40]
            raise LimitExceeded(
                f"{shown!r} is not a sequence number: expected one of {', '.join(sorted(_RANKS))}"
                f" or a decimal number of at most {SEQUENCE_DIGITS_MAX} digits"
            )
        if self.sub_sequence_number < 0:
            raise LimitExceeded(f"sub-sequence number {self.sub_sequence_number} is negative")

    @property
    def is_sentinel(self) -> bool:
        """Whether it is one of the four words, and not the position of a record."""
        return self.sequence_number in _RANKS

    @property
    def sort_key(self) -> SortKey:
        """A plain tuple in the same order, for sorting many."""
        text = self.sequence_number
        rank = _RANKS.get(text, _RANK_OF_NUMBERS)
        if rank != _RANK_OF_NUMBERS:
            return (rank, 0, "", self.sub_sequence_number, self.tick)
        return (rank, len(text), text, self.sub_sequence_number, self.tick)

    @property
    def of_record(self) -> ExtendedSequenceNumber:
        """The position without its tick: that of the record."""
        if not self.tick:
            return self
        return ExtendedSequenceNumber(self.sequence_number, self.sub_sequence_number)

    def at_tick(self, tick: int) -> ExtendedSequenceNumber:
        """The position after so many timers since its record."""
        return ExtendedSequenceNumber(self.sequence_number, self.sub_sequence_number, tick)

    def __lt__(self, other: ExtendedSequenceNumber) -> bool:
        return _is_below(self, other)

    def __le__(self, other: ExtendedSequenceNumber) -> bool:
        return self is other or not _is_below(other, self)

    def __gt__(self, other: ExtendedSequenceNumber) -> bool:
        return _is_below(other, self)

    def __ge__(self, other: ExtendedSequenceNumber) -> bool:
        return not _is_below(self, other)

    def __str__(self) -> str:
        tick = f"+{self.tick}" if self.tick else ""
        if self.is_sentinel or self.sub_sequence_number == 0:
            return f"{self.sequence_number}{tick}"
        return f"{self.sequence_number}/{self.sub_sequence_number}{tick}"


def _is_below(one: ExtendedSequenceNumber, other: ExtendedSequenceNumber) -> bool:
    """Compare as the sort keys do, without building a key for two numbers: the ledger of a lease
    compares positions some ten times an event."""
    mine, theirs = one.sequence_number, other.sequence_number
    if mine == theirs:
        if one.sub_sequence_number == other.sub_sequence_number:
            return one.tick < other.tick
        return one.sub_sequence_number < other.sub_sequence_number
    if mine < _AFTER_DIGITS and theirs < _AFTER_DIGITS:
        return mine < theirs if len(mine) == len(theirs) else len(mine) < len(theirs)
    return one.sort_key < other.sort_key


AT_TIMESTAMP: Final = ExtendedSequenceNumber("AT_TIMESTAMP")
TRIM_HORIZON: Final = ExtendedSequenceNumber("TRIM_HORIZON")
LATEST: Final = ExtendedSequenceNumber("LATEST")
SHARD_END: Final = ExtendedSequenceNumber("SHARD_END")
SENTINELS: Final = (AT_TIMESTAMP, TRIM_HORIZON, LATEST, SHARD_END)
