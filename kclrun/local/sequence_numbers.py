"""Sequence numbers in AWS's format: 56 digits, increasing in a shard and from parent to child.

Observed on the service, not documented: 188 bits, from the top

4 version (2) | 36 generation | 4 shard | 64 counter | 8 zero | 36 second | 32 shard | 4 version

The generation is the second of the shard's creation. Here it is at least one above its parents', so
every number of a child is above every number of its parents. The counter orders a shard's records.
A closed shard ends at counter 2**63 - 1, like the ranges in the examples of the AWS documentation.
Only this module parses such a number.
"""

from __future__ import annotations

from typing import Final

import msgspec

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
# With this version in the uppermost of 188 bits: no text of another length is parsed.
_DIGITS: Final = 56


class ParsedNumber(msgspec.Struct, frozen=True):
    """A parsed sequence number."""

    value: int
    generation: int
    counter: int
    shard: int


class Numbering:
    """Makes the sequence numbers of one shard."""

    __slots__ = ("_high", "_low", "generation")

    def __init__(self, generation: int, shard: int) -> None:
        self.generation = generation
        self._high = (
            (_VERSION << _VERSION_SHIFT)
            | (generation << _GENERATION_SHIFT)
            | ((shard & 15) << _NIBBLE_SHIFT)
        )
        self._low = (shard << _SHARD_SHIFT) | _VERSION

    def number(self, counter: int, second: int) -> int:
        """The number of record `counter` (from 1) that arrived in `second`; counter 0 is the start
        of the shard."""
        return self._high | (counter << _COUNTER_SHIFT) | (second << _SECOND_SHIFT) | self._low


def parse(text: str) -> ParsedNumber | None:
    """The parts of a number made by `Numbering`, or None for any other text."""
    if not (text.isascii() and text.isdigit() and len(text) == _DIGITS):
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
