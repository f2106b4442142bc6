"""A ring of events from one lease process to its manager, in shared memory.

It does not know the meaning of the entries (`messages.py`) or which thread they wake.
"""

from __future__ import annotations

import struct
import threading
from typing import Final
from zlib import crc32

import msgspec

from kclrun.errors import LimitExceeded, SegmentRefused
from kclrun.ipc.seqlock import NoValue, SeqlockCell

_HEADER: Final = struct.Struct("<QQII")
_SEALED: Final = struct.Struct("<QQI")
_MARK: Final = struct.Struct("<QQQ")
_MARK_BYTES: Final = SeqlockCell.size_bytes(_MARK.size)
_MARK_MAX: Final = 2**63
_ALIGNMENT_BYTES: Final = 8
# A failure with its bounded texts takes at most 12 KiB (`messages.py`).
ENTRY_BYTES_MAX: Final = 16 * 1024
# A checkpoint takes about 150 bytes. A lease that checkpoints each of 100 batches a second, beside
# a manager that does not look for four seconds, writes 60 kB; four failures fit as well.
RING_BYTES: Final = 64 * 1024
# The manager looks into every ring in a turn; this limit keeps one busy ring from filling the turn.
_DRAIN_ENTRIES_MAX: Final = 256
# Stores of another CPU become visible within microseconds. A drain takes several microseconds, so
# an entry that is announced and still missing after eight drains has been destroyed (user code can
# write anywhere).
_DAMAGED_AFTER_DRAINS: Final = 8


class _Mark(msgspec.Struct, frozen=True):
    """A position in the stream: bytes and entries before it, and puts that were dropped."""

    position: int = 0
    ordinal: int = 0
    dropped: int = 0

    def past(self, payload_bytes: int) -> _Mark:
        return _Mark(self.position + _entry_bytes(payload_bytes), self.ordinal + 1, self.dropped)


class EventRing:
    """The ring at `offset` of a shared buffer, with both its ends.

        mark of the writer | mark of the reader | the entries, wrapping round
          position           position             position, ordinal, length, crc, payload, padding
          ordinal            ordinal
          dropped

    Each entry proves itself. It contains its position in the endless stream of bytes, its ordinal,
    its length and a CRC32 over all of them, and the reader trusts nothing else. So a writer killed
    at any instruction has written an entry or has not. The bytes of a former lap never pass for a
    new entry (their position differs). No order of stores is relied on, because CPUs differ in it.

    The marks are seqlock cells. Bytes before the mark of the reader may be overwritten. The mark of
    the writer is where a later incarnation continues, and counts the puts that found no room.

    One process puts at a time (any of its threads, but no signal handler); one other process
    drains, with one thread. Neither waits for the other. A ring of zeros is empty.
    """

    def __init__(self, buffer: memoryview, offset: int, data_bytes: int = RING_BYTES) -> None:
        assert data_bytes % _ALIGNMENT_BYTES == 0, "entries are aligned, so is the ring"
        self._buffer = buffer
        self._head_cell = SeqlockCell(buffer, offset, _MARK.size)
        self._tail_cell = SeqlockCell(buffer, offset + _MARK_BYTES, _MARK.size)
        self._data_offset = offset + 2 * _MARK_BYTES
        self._data_bytes = data_bytes
        # A lock between threads of one process: it ends with the process that holds it.
        self._lock = threading.Lock()
        self._head: _Mark | None = None
        self._tail: _Mark | None = None
        self._free_until = 0
        self._skipped = 0
        self._gap_reported = 0
        self._damaged_drains = 0

    @staticmethod
    def size_bytes(data_bytes: int = RING_BYTES) -> int:
        """The size of a ring, its marks included."""
        return 2 * _MARK_BYTES + data_bytes

    def put(self, payload: bytes) -> bool:
        """Add an entry. False if it found no room: then it is dropped and counted (`gap`).

        Never waits. Once it returned True, a kill of the writer does not remove the entry.
        Raises: LimitExceeded above ENTRY_BYTES_MAX; SegmentRefused if the mark of a former writer
        is not readable.
        """
        if len(payload) > ENTRY_BYTES_MAX:
            raise LimitExceeded(f"an entry of {len(payload)} bytes; at most {ENTRY_BYTES_MAX}")
        with self._lock:
            head = self._head or self._recovered_head()
            after = head.past(len(payload))
            has_room = self._has_room(after.position)
            if has_room:
                self._write(head.position, _entry(head, payload))
            else:
                after = _Mark(head.position, head.ordinal, head.dropped + 1)
            self._store(self._head_cell, after)
            self._head = after
            return has_room

    def drain(self, entries_max: int = _DRAIN_ENTRIES_MAX) -> list[bytes]:
        """Take the available entries, oldest first, each once; at most `entries_max`."""
        tail = self._tail or self._loaded(self._tail_cell) or _Mark()
        payloads: list[bytes] = []
        while len(payloads) < entries_max:
            payload = self._entry_at(tail)
            if payload is None:
                break
            payloads.append(payload)
            tail = tail.past(len(payload))
        if not payloads and entries_max > 0:
            tail = self._past_damage(tail)
        if tail != self._tail:
            self._store(self._tail_cell, tail)
            self._tail = tail
        return payloads

    def gap(self) -> int:
        """The number of entries lost since the last call: they found no room, or were destroyed.

        A caller that gets more than 0 has missed reports and reads the row or the status slot
        instead.
        """
        head = self._loaded(self._head_cell)
        if head is None:
            return 0
        lost = head.dropped + self._skipped
        new, self._gap_reported = lost - self._gap_reported, lost
        return max(0, new)

    def clear(self) -> None:
        """Reset it. Only while no other process has an end of it."""
        head = self._loaded(self._head_cell)
        # One entry may have been written, in whole or in part, that the mark does not count. Bytes
        # that were never written are left alone: they take no memory yet.
        written = self._data_bytes if head is None else head.past(ENTRY_BYTES_MAX).position
        written = min(written, self._data_bytes)
        self._buffer[self._data_offset : self._data_offset + written] = bytes(written)
        self._head_cell.clear()
        self._tail_cell.clear()
        self._head = self._tail = None
        self._free_until = self._skipped = self._gap_reported = self._damaged_drains = 0

    def _recovered_head(self) -> _Mark:
        """The end of the former incarnation's entries: its mark, and an entry that it may not have
        counted.

        This is at most one entry, because it is counted here before the next one is put.
        """
        head = self._loaded(self._head_cell)
        if head is None:
            raise SegmentRefused("an event ring's mark is damaged: clear the place and start again")
        uncounted = self._entry_at(head)
        if uncounted is not None:
            head = head.past(len(uncounted))
            self._store(self._head_cell, head)
        return head

    def _has_room(self, position: int) -> bool:
        """Whether the writer may fill the ring up to `position`, by the entries already taken."""
        if position > self._free_until:
            tail = self._loaded(self._tail_cell)
            if tail is not None:
                self._free_until = tail.position + self._data_bytes
        return position <= self._free_until

    def _entry_at(self, mark: _Mark) -> bytes | None:
        """The payload of the entry at `mark`, or None while no whole entry is there."""
        position, ordinal, length, crc = _HEADER.unpack(self._read(mark.position, _HEADER.size))
        if (position, ordinal) != (mark.position, mark.ordinal) or length > ENTRY_BYTES_MAX:
            return None
        payload = self._read(position + _HEADER.size, length)
        return payload if crc == _crc(position, ordinal, payload) else None

    def _past_damage(self, tail: _Mark) -> _Mark:
        """Give up, after some drains, entries that the writer announced and that are missing."""
        head = self._loaded(self._head_cell)
        if head is None or head.position <= tail.position:
            self._damaged_drains = 0
            return tail
        self._damaged_drains += 1
        if self._damaged_drains < _DAMAGED_AFTER_DRAINS:
            return tail
        self._damaged_drains = 0
        self._skipped += max(0, head.ordinal - tail.ordinal)
        return _Mark(head.position, head.ordinal)

    def _write(self, position: int, data: bytes) -> None:
        at = position % self._data_bytes
        before_end = min(len(data), self._data_bytes - at)
        start = self._data_offset
        self._buffer[start + at : start + at + before_end] = data[:before_end]
        if before_end < len(data):
            self._buffer[start : start + len(data) - before_end] = data[before_end:]

    def _read(self, position: int, count: int) -> bytes:
        at = position % self._data_bytes
        start = self._data_offset
        data = bytes(self._buffer[start + at : start + min(at + count, self._data_bytes)])
        if len(data) < count:
            data += bytes(self._buffer[start : start + count - len(data)])
        return data

    @staticmethod
    def _store(cell: SeqlockCell, mark: _Mark) -> None:
        cell.store(_MARK.pack(mark.position, mark.ordinal, mark.dropped))

    @staticmethod
    def _loaded(cell: SeqlockCell) -> _Mark | None:
        payload = cell.load()
        if isinstance(payload, NoValue):
            return _Mark() if payload is NoValue.EMPTY else None
        fields = _MARK.unpack(payload)
        # No stream gets that far: only user code that writes into our memory makes such a mark.
        return None if max(fields) > _MARK_MAX else _Mark(*fields)


def _entry(mark: _Mark, payload: bytes) -> bytes:
    crc = _crc(mark.position, mark.ordinal, payload)
    return _HEADER.pack(mark.position, mark.ordinal, len(payload), crc) + payload


def _entry_bytes(payload_bytes: int) -> int:
    return -(-(_HEADER.size + payload_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _crc(position: int, ordinal: int, payload: bytes) -> int:
    return crc32(payload, crc32(_SEALED.pack(position, ordinal, len(payload))))
