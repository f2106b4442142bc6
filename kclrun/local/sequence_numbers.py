"""Sequence numbers as AWS makes them: 56 digits, growing in a shard and from parent to child.

Observed on the service, not documented: 188 bits, from the top

    4 version (2) | 36 generation | 4 shard | 64 counter | 8 zero | 36 second | 32 shard | 4 version

The generation is the second the shard was made in, here at least one above its parents', so every
number of a child is above every number of its parents. The counter orders a shard's records; a
closed shard ends at counter 2**63 - 1, as the ranges in the AWS documentation's examples do.
Rule: nobody but this module takes such a number apart.
"""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["COUNTER_END", "Numbering", "ParsedNumber", "parse"]

COUNTER_END: Final = 2**63 - 1
_VERSION: Final = 2
_VERSION_SHIFT: Final = 184
_GENERATION_SHIFT: Final = 148
_NIBBLE_SHIFT: Final = 144
_COUNTER_SHIFT: Final = 80
_SECOND_SHIFT: Final = 36
_SHARD_SHIFT: Final = 4
_BITS_36: Final = 2**36 - 1
_BITS_32: Final = 2**32 - 1
# 188 bits have at most 57 digits; longer text is not one of ours and is not worth parsing.
_DIGITS_MAX: Final = 57


class ParsedNumber(msgspec.Struct, frozen=True):
    """What a sequence number says about where it came from."""

    value: int
    generation: int
    counter: int
    shard: int


class Numbering:
    """Makes the numbers of one shard."""

    __slots__ = ("_high", "_low", "generation", "shard")

    def __init__(self, generation: int, shard: int) -> None:
        self.generation = generation
        self.shard = shard
        self._high = (
            (_VERSION << _VERSION_SHIFT)
            | (generation << _GENERATION_SHIFT)
            | ((shard & 15) << _NIBBLE_SHIFT)
        )
        self._low = (shard << _SHARD_SHIFT) | _VERSION

    def number(self, counter: int, second: int) -> int:
        """The number of the record `counter` (from 1) that arrived in `second`; 0 is the start."""
        return self._high | (counter << _COUNTER_SHIFT) | (second << _SECOND_SHIFT) | self._low


def parse(text: str) -> ParsedNumber | None:
    """The parts of a number made by `Numbering`, or None for any other text."""
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        return None
    value = int(text)
    if value >> _VERSION_SHIFT != _VERSION or value & 15 != _VERSION:
        return None
    return ParsedNumber(
        value=value,
        generation=(value >> _GENERATION_SHIFT) & _BITS_36,
        counter=(value >> _COUNTER_SHIFT) & (2**64 - 1),
        shard=(value >> _SHARD_SHIFT) & _BITS_32,
    )
