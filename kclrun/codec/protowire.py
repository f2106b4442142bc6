"""How many fields a protobuf message has at its top level, counted without parsing it.

For large messages only: a hostile 10 MiB can hold five million empty sub-messages, which cost a
parser hundreds of megabytes before anybody can count them. Here they cost a bounded walk.
May not know: any schema. Look next: `kpl.py`.
"""

from __future__ import annotations

from typing import Final

from kclrun.errors import LimitExceeded, MalformedAggregate

__all__ = ["count_fields"]

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
# The tags of length-delimited fields with numbers below 16.
_SHORT_TAGS: Final = frozenset(range(_LENGTH_DELIMITED, 0x80, 8))
# 64 bits in groups of seven.
_VARINT_BYTES_MAX: Final = 10


def count_fields(message: bytes, most: int) -> int:
    """The number of top-level fields of a message.

    Raises: LimitExceeded as soon as there are more than `most`; MalformedAggregate if the bytes
    are no sequence of fields, or use groups (which no schema since proto2 began should).
    """
    position = count = 0
    end = len(message)
    while position < end:
        # The cheap case first: a tag and a length of one byte each, as small bombs are made of.
        if message[position] in _SHORT_TAGS and position + 1 < end and message[position + 1] < 0x80:
            position += 2 + message[position + 1]
        else:
            tag, position = _varint(message, position)
            position = _skip(message, position, wire_type=tag & 7)
        count += 1
        if count > most:
            raise LimitExceeded(f"a message has more than {most} fields")
    if position > end:
        raise MalformedAggregate("a message ends within a field")
    return count


def _skip(message: bytes, position: int, *, wire_type: int) -> int:
    """Where the value that starts at `position` ends; may lie past the end of the message."""
    if wire_type == _LENGTH_DELIMITED:
        length, position = _varint(message, position)
        return position + length
    if wire_type == _VARINT:
        return _varint(message, position)[1]
    if wire_type == _FIXED64:
        return position + 8
    if wire_type == _FIXED32:
        return position + 4
    raise MalformedAggregate(f"a message uses wire type {wire_type}")


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift, byte in enumerate(message[position : position + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position + shift + 1
    raise MalformedAggregate("a message has a varint without an end")
