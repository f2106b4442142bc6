"""The shared memory of a manager: a segment with a status slot and an event ring for each process.

It also defines the start command of a lease process.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
import threading
import time
from typing import Any, Final
from zlib import crc32

import msgspec

from kclrun.errors import LimitExceeded, SegmentRefused, host_error
from kclrun.ipc.ring import RING_BYTES, EventRing
from kclrun.ipc.seqlock import NoValue, SeqlockCell
from kclrun.model.lease import Pause
from kclrun.model.letter import LetterDestination
from kclrun.model.output import OutputDestination, RowTrial
from kclrun.model.policies import (
    CheckpointPolicy,
    Concurrency,
    ErrorPolicy,
    FetchPolicy,
    LogPolicy,
    TracePolicy,
)
from kclrun.model.reading import Replay
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.state import StateDestination
from kclrun.model.time import Instant, WallTime
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.protocol.status import LeaseStatus, WorkerState


class StartSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The start command of one lease process: all that it needs, as plain values.

    Representations end up in logs, so none shows credentials, proxies (their URLs carry passwords)
    or the user's options.

    `seen_counter` is the row's counter after the manager's take: the claim expects it [P4].
    `expires_instant` is the end of the command, on CLOCK_BOOTTIME: after it, exit unclaimed.
    `failover_s` is the smallest of the fleet [P7]. `start_timestamp` is where AT_TIMESTAMP, or a
    pinned LATEST [P14], begins. `hash_range_start` and `_end` are decimal: they have 128 bits.
    With `consumer_arn` the shard is read by enhanced fan-out, else by polling.
    `source` is the endpoint of the stream, if it is not a stream of Kinesis. `glue_url` is the
    schema registry, if it is not AWS's own.
    `options` are values of the YAML types. `has_waited`: a failover has passed since a forced take
    [P18]; `others_in_sight`: another kclrun owner could take an offered lease [P17].
    `concurrency` is None where the settings have none. With `replay` a time range is read.
    `past_pause` is as in LeasePolicy. With `trial` a destination refused rows of the process
    before. `ends_at_tip`: the run ends once every shard is read to its tip.
    """

    application: str
    stream_name: str
    stream_arn: str | None = None
    consumer_arn: str | None = None
    lease_key: str
    shard_id: str
    owner: str
    seen_counter: int
    place: int
    incarnation: int
    expires_instant: Instant
    failover_s: float
    has_waited: bool = False
    past_pause: Pause | None = None
    others_in_sight: bool = False
    start_timestamp: WallTime | None = None
    hash_range_start: str | None = None
    hash_range_end: str | None = None
    processor: str
    import_paths: tuple[str, ...] = ()
    options: dict[str, Any] = {}
    fetch: FetchPolicy
    checkpoint: CheckpointPolicy
    on_error: ErrorPolicy
    letters: LetterDestination = LetterDestination()
    concurrency: Concurrency | None = None
    outputs: tuple[OutputDestination, ...] = ()
    state: StateDestination | None = None
    decode: str | None = None
    glue_url: str | None = None
    table_name: str
    kinesis: WireEndpoint
    dynamodb: WireEndpoint
    source: WireEndpoint | None = None
    credentials: WireCredentials
    lock_path: str
    log: LogPolicy
    traces: TracePolicy | None = None
    nice: int = 0
    replay: Replay | None = None
    trial: RowTrial | None = None
    ends_at_tip: bool = False

    def __repr__(self) -> str:
        return (
            f"StartSpec(lease_key={self.lease_key!r}, place={self.place},"
            f" incarnation={self.incarnation})"
        )

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("lease_key", self.lease_key)]


_NEVER: Final = Instant(0.0)
_I64_MAX: Final = 2**63 - 1


# Sequence numbers have at most 129 digits, all ASCII: 136 is the next multiple of eight. Fixed
# sizes and no native alignment make the layout the same on every machine and Python.
_LAYOUT: Final = struct.Struct("<qqqdqqqqdq" + "136sq" * 4 + "ddd?dd?dqqqdqdd")
# A cache line for the instant of the last send, so that no other store shares its line.
_SEND_BYTES: Final = 64
SLOT_BYTES: Final = _SEND_BYTES + SeqlockCell.size_bytes(_LAYOUT.size)


def boottime() -> Instant:
    """Now on the clock of fences and of the status: seconds on CLOCK_BOOTTIME [P7]. It runs through
    suspend and is the same for all processes of the host."""
    return Instant(time.clock_gettime(time.CLOCK_BOOTTIME))


class StatusSlot:
    """The status of one lease process, for every reader: at `offset` of a shared buffer.

    `offset` is a multiple of 64. One process writes at a time (any of its threads, but no signal
    handler); any number read. There are two fields. `publish` writes the whole status a few times a
    second. `note_send` is one store of eight bytes before each renewal [P5]: nothing else lies
    between the decision to send and the send.
    """

    def __init__(self, buffer: memoryview, offset: int) -> None:
        assert offset % _SEND_BYTES == 0, "a slot begins on a cache line"
        # An item store through a cast view is one memcpy of eight aligned bytes. CPython's
        # compilers make that one machine store: atomic on x86-64 and aarch64.
        self._send = buffer[offset : offset + 8].cast("d")
        self._cell = SeqlockCell(buffer, offset + _SEND_BYTES, _LAYOUT.size)
        # A lock between threads of one process: it ends with the process that holds it.
        self._lock = threading.Lock()

    def publish(self, status: LeaseStatus) -> None:
        """Replace the status. A kill during the call leaves the former one. About 3 µs."""
        payload = _pack(status)
        with self._lock:
            self._cell.store(payload)

    def note_send(self, instant: Instant) -> None:
        """Record that a write as owner is about to be sent at `instant` [P5]. Before each send."""
        self._send[0] = instant

    def read(self) -> LeaseStatus | NoValue:
        """The last status published, or why there is none now. Never raises, never waits.

        UNREADABLE also stands for bytes that are whole and are not a status: user code shares the
        address space of the writer and may have written anything.
        """
        payload = self._cell.load()
        return payload if isinstance(payload, NoValue) else _unpack(payload)

    def last_send_instant(self) -> Instant | None:
        """The last send noted since the slot was cleared; 0 if there was none.

        None if the memory does not hold an instant (see `read`): then assume a send just now.
        """
        instant = self._send[0]
        return Instant(instant) if math.isfinite(instant) and instant >= 0 else None

    def clear(self) -> None:
        """Reset it. Only while no process writes to it."""
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
        status.has_undone,
        status.unprocessed_since,
        status.retries_total,
        status.dead_letters_total,
        status.skipped_total,
        status.output_waiting_since_instant,
        status.passed_over_total,
        status.destination_since_instant,
        status.destination_waited_instant,
    )


def _packed(position: ExtendedSequenceNumber | None) -> tuple[bytes, int]:
    if position is None:
        return (b"", 0)
    # The table holds numbers of any size; a greater number is shown as the greatest that fits.
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
            has_undone=fields[24],
            unprocessed_since=fields[25],
            retries_total=fields[26],
            dead_letters_total=fields[27],
            skipped_total=fields[28],
            output_waiting_since_instant=fields[29],
            passed_over_total=fields[30],
            destination_since_instant=fields[31],
            destination_waited_instant=fields[32],
        )
    except (ValueError, LimitExceeded):
        return NoValue.UNREADABLE


def _position(padded: bytes, sub_sequence_number: int) -> ExtendedSequenceNumber | None:
    text = padded.rstrip(b"\0").decode("ascii")
    return ExtendedSequenceNumber(text, sub_sequence_number) if text else None


# Any change of a layout in `board.py`, `seqlock.py` or `ring.py`, and of the start message, needs a
# new version: manager and
# lease processes are of one installation, but an upgrade may happen under a running manager.
LAYOUT_VERSION: Final = 7
# `leases.max` is 64 by default and 1024 at most, and the manager keeps 16 places beyond it. So many
# places are 69 MiB of address space; only pages that were written take memory.
PLACES_MAX: Final = 1040
_MAGIC: Final = b"kclrun\0\0"
_HEADER: Final = struct.Struct("<8sIIII")
_CRC: Final = struct.Struct("<I")
_PAGE_BYTES: Final = 4096
_PLACE_BYTES: Final = -(-(SLOT_BYTES + EventRing.size_bytes()) // _PAGE_BYTES) * _PAGE_BYTES
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """One unnamed piece of shared memory for each manager, with a place for each lease process.

        header (a page)  | place 0                      | place 1 …
        magic, version,    status slot | event ring
        sizes, crc32

    It has no name, so nothing is left behind when the manager exits: only processes that got its
    descriptor have it. Its size is sealed, so no process can turn another's read into a SIGBUS.

    A place belongs to one lease process at a time. It is reused only after the exit of the former
    process is proven (pidfd): `clear` it for another lease; leave it as it is for a restart, whose
    ring continues at its end.

    Made by `create` or `attach`. `fd` is the descriptor to pass on; -1 if it was attached. Slots
    and rings taken from it keep its memory mapped.
    """

    def __init__(self, fd: int, places: int) -> None:
        self.fd = fd
        self.places = places
        self._buffer = memoryview(mmap.mmap(fd, _total_bytes(places)))

    @classmethod
    def create(cls, places: int) -> Segment:
        """A new segment of zeroed places; the manager has to `close` it.

        Raises: LimitExceeded for fewer than one place or more than PLACES_MAX; HostRefused,
        HostFailed if the kernel gives no memory without a name.
        """
        if not 1 <= places <= PLACES_MAX:
            raise LimitExceeded(f"a segment of {places} places: from 1 to {PLACES_MAX}")
        try:
            fd = os.memfd_create("kclrun", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            what = "Lease processes report through shared memory without a name."
            reason = f"memfd_create: {error.strerror}"
            raise host_error(what, reason, error.errno) from error
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
        """The segment behind a passed descriptor. The caller keeps the descriptor and may close it.

        Raises: SegmentRefused if it is not a segment of this layout, whole and sealed.
        """
        size = os.fstat(fd).st_size
        header = os.pread(fd, _HEADER.size + _CRC.size, 0)
        if len(header) < _HEADER.size + _CRC.size:
            raise SegmentRefused(f"{size} bytes of shared memory are not a kclrun segment")
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
        """The status slot of a place. Raises: LimitExceeded if the place does not exist."""
        return StatusSlot(self._buffer, self._offset(place))

    def ring(self, place: int) -> EventRing:
        """The event ring of a place. Keep the object: it remembers which entries were drained.

        Raises: LimitExceeded if the place does not exist.
        """
        return EventRing(self._buffer, self._offset(place) + SLOT_BYTES)

    def clear(self, place: int) -> None:
        """Reset a place for another lease. By the manager, with no process in the place.

        Slots and rings of the place taken earlier are void: take them again.
        """
        self.slot(place).clear()
        self.ring(place).clear()

    def close(self) -> None:
        """Close `fd`. The memory is freed with the last slot, ring and segment that hold it."""
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
        # Not a memfd, but an ordinary file with the right bytes.
        return False
