"""One unnamed piece of shared memory per manager, with a place for each lease process.

Holds: `Segment`. May not know: which lease sits in which place.
Rule: it has no name, so nothing is left behind when the manager dies: who got its descriptor has
it, nobody else. Its size is sealed, so no process can turn another's read into a SIGBUS.

    header (a page)  | place 0                      | place 1 …
    magic, version,    status slot | event ring
    sizes, crc32

A place is given to one lease process at a time, and again only once the former one is proven dead
(pidfd): `clear` it for another lease; leave it for a restart, whose ring goes on where it was.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from typing import Final
from zlib import crc32

from kclrun.errors import LimitExceeded, SegmentRefused
from kclrun.ipc.board import SLOT_BYTES, StatusSlot
from kclrun.ipc.ring import RING_BYTES, EventRing

__all__ = ["LAYOUT_VERSION", "PLACES_MAX", "Segment"]

# Any change of a layout in `segment`, `board`, `twin` or `ring` is a new version: manager and
# lease processes are of one installation, but an upgrade may happen under a running manager.
LAYOUT_VERSION: Final = 2
# `leases.max` is 64 by default and 1024 at most, and the manager keeps 16 places beyond it; so many
# are 69 MiB of address space. Memory is taken only by the pages that were written.
PLACES_MAX: Final = 1040
_MAGIC: Final = b"kclrun\0\0"
_HEADER: Final = struct.Struct("<8sIIII")
_CRC: Final = struct.Struct("<I")
_PAGE_BYTES: Final = 4096
_PLACE_BYTES: Final = -(-(SLOT_BYTES + EventRing.size_bytes()) // _PAGE_BYTES) * _PAGE_BYTES
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """The segment as one process has it mapped. Made by `create` or `attach`.

    `fd` is the descriptor to pass on, -1 where it was attached. Slots and rings taken from it keep
    its memory mapped.
    """

    def __init__(self, fd: int, places: int) -> None:
        self.fd = fd
        self.places = places
        self._buffer = memoryview(mmap.mmap(fd, _total_bytes(places)))

    @classmethod
    def create(cls, places: int) -> Segment:
        """A new segment of zeroed places; the manager's to `close`.

        Raises: LimitExceeded for fewer than one place or more than PLACES_MAX.
        """
        if not 1 <= places <= PLACES_MAX:
            raise LimitExceeded(f"a segment of {places} places: from 1 to {PLACES_MAX}")
        fd = os.memfd_create("kclrun", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _total_bytes(places))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            segment = cls(fd, places)
        except BaseException:
            os.close(fd)
            raise
        header = _header(places)
        segment._buffer[: len(header)] = header
        return segment

    @classmethod
    def attach(cls, fd: int) -> Segment:
        """The segment behind a passed descriptor, which stays the caller's and may be closed.

        Raises: SegmentRefused if it is not a segment of this layout, whole and sealed.
        """
        size = os.fstat(fd).st_size
        header = os.pread(fd, _HEADER.size + _CRC.size, 0)
        if len(header) < _HEADER.size + _CRC.size:
            raise SegmentRefused(f"{size} bytes of shared memory are no kclrun segment")
        magic, version, places, _, _ = _HEADER.unpack_from(header)
        if magic != _MAGIC or version != LAYOUT_VERSION:
            raise SegmentRefused(
                f"shared memory with the mark {magic!r}, layout {version}; this is layout"
                f" {LAYOUT_VERSION}: was kclrun upgraded under a running manager? Restart it"
            )
        if not 1 <= places <= PLACES_MAX or header != _header(places):
            raise SegmentRefused("the header of the shared memory is damaged")
        if size != _total_bytes(places) or not _is_sealed(fd):
            raise SegmentRefused(f"shared memory of {size} bytes for {places} places, or unsealed")
        segment = cls(fd, places)
        segment.fd = -1
        return segment

    def slot(self, place: int) -> StatusSlot:
        """The status slot of a place. Raises: LimitExceeded if there is no such place."""
        return StatusSlot(self._buffer, self._offset(place))

    def ring(self, place: int) -> EventRing:
        """The event ring of a place. Keep the object: it remembers what was drained.

        Raises: LimitExceeded if there is no such place.
        """
        return EventRing(self._buffer, self._offset(place) + SLOT_BYTES)

    def clear(self, place: int) -> None:
        """Make a place as new, for another lease. By the manager, with no process in the place.

        Slots and rings of the place taken earlier are void: take them again.
        """
        self.slot(place).clear()
        self.ring(place).clear()

    def close(self) -> None:
        """Close `fd`. The memory goes with the last slot, ring and segment that hold it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _offset(self, place: int) -> int:
        if not 0 <= place < self.places:
            raise LimitExceeded(f"place {place} of a segment with {self.places} places")
        return _PAGE_BYTES + place * _PLACE_BYTES


def _header(places: int) -> bytes:
    fields = _HEADER.pack(_MAGIC, LAYOUT_VERSION, places, SLOT_BYTES, RING_BYTES)
    return fields + _CRC.pack(crc32(fields))


def _total_bytes(places: int) -> int:
    return _PAGE_BYTES + places * _PLACE_BYTES


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        # Not a memfd at all, but an ordinary file with the right bytes.
        return False
