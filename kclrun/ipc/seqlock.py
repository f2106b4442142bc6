"""A value in shared memory that a reader never sees torn: two copies, written in turn.

It does not know the meaning of the bytes.
"""

from __future__ import annotations

import enum
import struct
from typing import Final
from zlib import crc32

_ORDINAL: Final = struct.Struct("<Q")
_SEAL: Final = struct.Struct("<IQ")
# A try fails only if the writer was inside both copies while they were read. Measured against a
# writer that writes without pause: 167 tries of 1.2 million failed, and no two in a row.
_READ_TRIES_MAX: Final = 8


class NoValue(enum.Enum):
    """The reasons why a cell gives no value now."""

    EMPTY = "nothing was stored yet"
    UNREADABLE = "no copy is whole now: keep the last good value and read again later"


class SeqlockCell:
    """One value of `payload_bytes` bytes at `offset` of a shared buffer.

        copy 0: ordinal 2n    | payload | crc32 | ordinal 2n         written by even stores
        copy 1: ordinal 2n+1  | payload | crc32 | ordinal 2n+1       written by odd stores

    A store touches only the copy that does not hold the current value. So a writer killed between
    any two instructions leaves the former value whole. A reader on a weakly ordered CPU may see the
    bytes of a store in any order; it refuses a mixture, because each copy is framed by its ordinal
    at both ends (a seqlock) and sealed by a CRC32 over ordinal and payload.

    One process writes at a time, with one thread; any number read. All-zero memory is EMPTY.
    A later writer (after the exit of the former one) continues from the last whole value.
    """

    __slots__ = ("_buffer", "_copy_bytes", "_offset", "_ordinal", "_payload_bytes")

    def __init__(self, buffer: memoryview, offset: int, payload_bytes: int) -> None:
        self._buffer = buffer
        self._offset = offset
        self._payload_bytes = payload_bytes
        self._copy_bytes = _ORDINAL.size + payload_bytes + _SEAL.size
        self._ordinal: int | None = None

    @staticmethod
    def size_bytes(payload_bytes: int) -> int:
        """The size of a cell for such a payload, rounded up to whole cache lines of 64 bytes."""
        both = 2 * (_ORDINAL.size + payload_bytes + _SEAL.size)
        return -(-both // 64) * 64

    def store(self, payload: bytes) -> None:
        """Make `payload` the value. It has the length of the cell; another length is our bug."""
        assert len(payload) == self._payload_bytes, "a cell's payload has one length"
        if self._ordinal is None:
            self._ordinal = max(self._whole(), default=(0, b""))[0]
        ordinal = self._ordinal + 1
        framed = _ORDINAL.pack(ordinal) + payload
        at = self._offset + (ordinal & 1) * self._copy_bytes
        self._buffer[at : at + self._copy_bytes] = framed + _SEAL.pack(crc32(framed), ordinal)
        self._ordinal = ordinal

    def load(self) -> bytes | NoValue:
        """The newest whole payload, never an older one than an earlier load returned. Never raises,
        never waits; bounded tries.

        If one copy is torn, the other is the newest only if it is still there: the writer may have
        replaced it since, and the tear in the first copy may be of a still later store.
        """
        for _ in range(_READ_TRIES_MAX):
            whole = self._whole()
            if len(whole) == 2 or (whole and self._stands(whole[0])):
                return max(whole)[1]
        # The first store goes to copy 1, the second to copy 0: an untouched copy 0 without a whole
        # copy 1 is a cell whose first store has not finished.
        untouched = not any(self._copy(0))
        return NoValue.EMPTY if untouched else NoValue.UNREADABLE

    def clear(self) -> None:
        """Make the cell EMPTY again. Only while no process writes to it."""
        size = 2 * self._copy_bytes
        self._buffer[self._offset : self._offset + size] = bytes(size)
        self._ordinal = None

    def _whole(self) -> list[tuple[int, bytes]]:
        """(ordinal, payload) of each copy that is neither torn nor untouched."""
        return [whole for index in (0, 1) if (whole := self._whole_copy(index)) is not None]

    def _stands(self, seen: tuple[int, bytes]) -> bool:
        """Whether that copy has not been written since it was read."""
        ordinal, _ = seen
        return self._whole_copy(ordinal & 1) == seen

    def _whole_copy(self, index: int) -> tuple[int, bytes] | None:
        copy = self._copy(index)
        (ordinal,) = _ORDINAL.unpack_from(copy)
        crc, ordinal_after = _SEAL.unpack_from(copy, self._copy_bytes - _SEAL.size)
        framed = copy[: -_SEAL.size]
        if ordinal == ordinal_after and crc == crc32(framed):
            return ordinal, framed[_ORDINAL.size :]
        return None

    def _copy(self, index: int) -> bytes:
        at = self._offset + index * self._copy_bytes
        return bytes(self._buffer[at : at + self._copy_bytes])
