"""The status slot of one lease process: what it is doing, for anyone who looks.

Holds: `StatusSlot`, `LeaseStatus`, `WorkerState`. May not know: what the manager makes of it.
Rule: two fields with two rhythms. `publish` writes the whole status a few times a second;
`note_send` is one store of eight bytes before each renewal [P5], so that nothing stands between
the decision to send and the send. Look next: `twin.py` (why nothing is seen torn), `ring.py`.
"""

from __future__ import annotations

import enum
import math
import struct
import threading
from typing import Final

import msgspec

from kclrun.errors import LimitExceeded
from kclrun.ipc.twin import NoValue, TwinCell
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant

__all__ = ["SLOT_BYTES", "LeaseStatus", "StatusSlot", "WorkerState"]

_NEVER: Final = Instant(0.0)
_I64_MAX: Final = 2**63 - 1


class WorkerState(enum.IntEnum):
    """Where a lease process is in its life; the numbers are what is stored."""

    STARTING = 1
    CLAIMING = 2
    PROCESSING = 3
    ENDING = 4
    OFFERING = 5
    HALTED = 6
    LOST = 7
    FINISHED = 8


class LeaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a lease process says of itself. Instants are CLOCK_BOOTTIME seconds, 0 for never.

    `counter` is the lease counter last confirmed; `fence_instant` the moment after which no batch
    starts [P7]. Totals count from the start of this incarnation. `fetched`, `processed` and
    `checkpointed` are the last positions of each kind, `first_delivered` the first one; None for
    not yet. `processing_since_instant` is 0 while user code is not running,
    `fetching_since_instant` while no answer of the stream is waited for. `published_instant` is
    when this was written: once a second while the lease thread lives.
    The last send is not in here: `StatusSlot.last_send_instant`.
    """

    pid: int
    incarnation: int
    state: WorkerState
    fence_instant: Instant = _NEVER
    counter: int = 0
    records_total: int = 0
    bytes_total: int = 0
    batches_total: int = 0
    processing_s_total: float = 0.0
    millis_behind_latest: int = -1
    fetched: ExtendedSequenceNumber | None = None
    processed: ExtendedSequenceNumber | None = None
    checkpointed: ExtendedSequenceNumber | None = None
    first_delivered: ExtendedSequenceNumber | None = None
    last_fetch_instant: Instant = _NEVER
    last_batch_instant: Instant = _NEVER
    processing_since_instant: Instant = _NEVER
    at_tip: bool = False
    fetching_since_instant: Instant = _NEVER
    published_instant: Instant = _NEVER


# Sequence numbers have at most 129 digits, all ASCII: 136 is the next multiple of eight. Fixed
# sizes and no native alignment, so the layout is the same on every machine and Python.
_LAYOUT: Final = struct.Struct("<qqqdqqqqdq" + "136sq" * 4 + "ddd?dd")
# A cache line for the last send, so that no other store shares its line.
_SEND_BYTES: Final = 64
SLOT_BYTES: Final = _SEND_BYTES + TwinCell.size_bytes(_LAYOUT.size)


class StatusSlot:
    """The slot at `offset` of a shared buffer; `offset` is a multiple of 64.

    One process writes at a time (any of its threads, but no signal handler); any number read.
    """

    def __init__(self, buffer: memoryview, offset: int) -> None:
        assert offset % _SEND_BYTES == 0, "a slot begins on a cache line"
        # An item store through a cast view is one memcpy of eight aligned bytes, which CPython's
        # compilers make one machine store: atomic on x86-64 and aarch64.
        self._send = buffer[offset : offset + 8].cast("d")
        self._cell = TwinCell(buffer, offset + _SEND_BYTES, _LAYOUT.size)
        # Between threads of one process, so it dies with the process that holds it.
        self._lock = threading.Lock()

    def publish(self, status: LeaseStatus) -> None:
        """Replace the status. A kill inside leaves the former one. About 3 µs."""
        payload = _pack(status)
        with self._lock:
            self._cell.store(payload)

    def note_send(self, instant: Instant) -> None:
        """Say that a write as owner is about to be sent at `instant` [P5]. Before each send."""
        self._send[0] = instant

    def read(self) -> LeaseStatus | NoValue:
        """The last status published, or why there is none now. Never raises, never waits.

        UNREADABLE also stands for bytes that are whole and make no status: user code shares the
        address space of the writer and may have written anything.
        """
        payload = self._cell.load()
        return payload if isinstance(payload, NoValue) else _unpack(payload)

    def last_send_instant(self) -> Instant | None:
        """The last send noted since the slot was cleared, 0 if none was.

        None if the memory holds no instant (see `read`): then assume that it was sent just now.
        """
        instant = self._send[0]
        return Instant(instant) if math.isfinite(instant) and instant >= 0 else None

    def clear(self) -> None:
        """Make it as new. Only while no process writes to it."""
        self._cell.clear()
        self._send[0] = _NEVER


def _pack(status: LeaseStatus) -> bytes:
    return _LAYOUT.pack(
        status.pid,
        status.incarnation,
        status.state,
        status.fence_instant,
        status.counter,
        status.records_total,
        status.bytes_total,
        status.batches_total,
        status.processing_s_total,
        status.millis_behind_latest,
        *_packed(status.fetched),
        *_packed(status.processed),
        *_packed(status.checkpointed),
        *_packed(status.first_delivered),
        status.last_fetch_instant,
        status.last_batch_instant,
        status.processing_since_instant,
        status.at_tip,
        status.fetching_since_instant,
        status.published_instant,
    )


def _packed(position: ExtendedSequenceNumber | None) -> tuple[bytes, int]:
    if position is None:
        return (b"", 0)
    # The table holds numbers of any size; what does not fit is shown as the greatest that does.
    return (position.sequence_number.encode(), min(position.sub_sequence_number, _I64_MAX))


def _unpack(payload: bytes) -> LeaseStatus | NoValue:
    fields = _LAYOUT.unpack(payload)
    if not all(math.isfinite(field) for field in fields if isinstance(field, float)):
        return NoValue.UNREADABLE
    try:
        return LeaseStatus(
            pid=fields[0],
            incarnation=fields[1],
            state=WorkerState(fields[2]),
            fence_instant=fields[3],
            counter=fields[4],
            records_total=fields[5],
            bytes_total=fields[6],
            batches_total=fields[7],
            processing_s_total=fields[8],
            millis_behind_latest=fields[9],
            fetched=_position(fields[10], fields[11]),
            processed=_position(fields[12], fields[13]),
            checkpointed=_position(fields[14], fields[15]),
            first_delivered=_position(fields[16], fields[17]),
            last_fetch_instant=fields[18],
            last_batch_instant=fields[19],
            processing_since_instant=fields[20],
            at_tip=fields[21],
            fetching_since_instant=fields[22],
            published_instant=fields[23],
        )
    except (ValueError, LimitExceeded):
        return NoValue.UNREADABLE


def _position(padded: bytes, sub_sequence_number: int) -> ExtendedSequenceNumber | None:
    text = padded.rstrip(b"\0").decode("ascii")
    return ExtendedSequenceNumber(text, sub_sequence_number) if text else None
