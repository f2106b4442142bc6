"""The desk between the threads: pages fetched ahead, the gate, and calls for user code.

The fetch thread puts pages down and waits while the desk is full; the lease thread opens and
shuts the gate and asks for calls; the main thread takes its next task. What lies on it is bounded
in bytes and records [I12]. One lock, one condition:
what the main thread sees is consistent, and once the gate is shut no batch starts [P7, P17].
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kclrun.consuming.commands import (
    CallInitialize,
    CallLeaseLost,
    CallShardEnded,
    CallShutdownRequested,
    OpenGate,
)
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import ChildShard
from kclrun.model.time import Instant

__all__ = [
    "Batch",
    "Call",
    "Desk",
    "DeskClosed",
    "DeskLimits",
    "DeskView",
    "Exhausted",
    "GateFound",
    "Page",
    "Task",
]

Call = CallInitialize | CallShardEnded | CallShutdownRequested | CallLeaseLost

# The Java KCL stops fetching ahead at 30,000 records (`maxRecordsCount`).
RECORDS_AHEAD_MAX: Final = 30_000


class DeskLimits(msgspec.Struct, frozen=True):
    """`buffer_bytes` payload bytes ahead (one page may pass it), `batch_max` records a batch."""

    buffer_bytes: int
    batch_max: int


class Page(msgspec.Struct, frozen=True, gc=False):
    """User records of one answer. `last` is the position they end at, also when there are none."""

    records: Sequence[Record]
    last: ExtendedSequenceNumber
    payload_bytes: int
    millis_behind_latest: int | None


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Records for one call of user code; none where a page held no user record."""

    records: Sequence[Record]
    last: ExtendedSequenceNumber
    payload_bytes: int
    millis_behind_latest: int | None


class Exhausted(msgspec.Struct, frozen=True):
    """All pages were taken, and the shard ends here."""

    children: tuple[ChildShard, ...]


class GateFound(msgspec.Struct, frozen=True):
    """The main thread found the gate shut, with no user code running."""


class DeskClosed(msgspec.Struct, frozen=True):
    """The process ends."""


class DeskView(msgspec.Struct, frozen=True):
    """What the status slot shows of the desk."""

    is_empty: bool
    busy_since: Instant
    records_total: int
    bytes_total: int
    batches_total: int
    processing_s_total: float
    first_delivered: ExtendedSequenceNumber | None
    last_batch_instant: Instant


Task = Batch | Call | Exhausted | GateFound | DeskClosed


class Desk:
    """See the module. `now` is the fence's clock."""

    def __init__(self, limits: DeskLimits, now: Callable[[], Instant]) -> None:
        self._limits = limits
        self._records_max = max(RECORDS_AHEAD_MAX, limits.batch_max)
        self._now = now
        self._changed = threading.Condition()
        self._pages: deque[Page] = deque()
        self._offset = 0
        self._bytes_ahead = 0
        self._records_ahead = 0
        self._exhausted: Exhausted | None = None
        self._gate: OpenGate | None = None
        self._shut_asked = False
        self._call: Call | None = None
        self._closed = False
        self._is_halted = False
        self._busy_since = Instant(0.0)
        self._delivered_total = 0
        self._bytes_total = 0
        self._batches_total = 0
        self._processing_s_total = 0.0
        self._first_delivered: ExtendedSequenceNumber | None = None
        self._last_batch_instant = Instant(0.0)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def put(self, page: Page) -> bool:
        """Lay a page down, waiting while the desk is full. False once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._is_full())
            if self._closed:
                return False
            self._pages.append(page)
            self._bytes_ahead += page.payload_bytes
            self._records_ahead += len(page.records)
            self._changed.notify_all()
            return True

    def finish(self, children: tuple[ChildShard, ...]) -> None:
        """There will be no further page: the shard ends."""
        with self._changed:
            self._exhausted = Exhausted(children)
            self._changed.notify_all()

    def pause(self, pause_s: float) -> bool:
        """Wait, unless the desk closes meanwhile; False once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, timeout=pause_s)
            return not self._closed

    def open_gate(self, gate: OpenGate) -> None:
        with self._changed:
            self._gate = gate
            self._changed.notify_all()

    def shut_gate(self) -> None:
        """No batch starts from here on; the main thread answers with GateFound when it is idle.

        A call that was asked for and has not begun is withdrawn: it would come after GateFound.
        """
        with self._changed:
            self._gate = None
            self._call = None
            self._shut_asked = True
            self._changed.notify_all()

    def halt(self) -> None:
        """Start no batch any more, whatever the gate says: one was given up [I9], or asked for the
        lease to be given away after it."""
        with self._changed:
            self._is_halted = True

    def call(self, call: Call) -> None:
        """Ask for a call of user code; the main thread is idle or about to be."""
        with self._changed:
            assert self._call is None, "one call at a time"
            self._call = call
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def view(self) -> DeskView:
        with self._changed:
            return DeskView(
                is_empty=not self._pages,
                busy_since=self._busy_since,
                records_total=self._delivered_total,
                bytes_total=self._bytes_total,
                batches_total=self._batches_total,
                processing_s_total=self._processing_s_total,
                first_delivered=self._first_delivered,
                last_batch_instant=self._last_batch_instant,
            )

    def next_task(self) -> Task:
        """Wait for the next thing to do. Calling it says that no user code runs."""
        with self._changed:
            self._rest()
            while True:
                task = self._ready_task()
                if task is not None:
                    if isinstance(task, Batch | Call):
                        self._busy_since = self._now()
                    return task
                self._changed.wait()  # a fence that passes starts nothing: no need to look

    def may_try_again(self, pause_s: float, *, is_batch: bool) -> bool:
        """Wait before user code is given the same thing again; False if the gate shut meanwhile.

        A batch is a start like any other: past the fence it waits for the next renewal. For
        `initialize` and `shard_ended` the gate is not open; only a wish to shut it says no.
        """
        with self._changed:
            self._rest()
            self._changed.wait_for(self._must_stop, timeout=pause_s)
            if is_batch:
                self._changed.wait_for(lambda: self._must_stop() or self._is_open())
            if self._must_stop():
                return False
            self._busy_since = self._now()
            return True

    def _must_stop(self) -> bool:
        return self._closed or self._shut_asked

    def _is_open(self) -> bool:
        return self._gate is not None and self._now() < self._gate.fence

    def _ready_task(self) -> Task | None:
        if self._closed:
            return DeskClosed()
        if self._shut_asked:
            self._shut_asked = False
            return GateFound()
        if self._call is not None:
            call, self._call = self._call, None
            return call
        if self._gate is None or self._is_halted or not self._is_open():
            return None
        if self._pages:
            return self._cut_batch(self._gate)
        exhausted, self._exhausted = self._exhausted, None
        return exhausted

    def _cut_batch(self, gate: OpenGate) -> Batch | None:
        page = self._pages[0]
        if not page.records:
            self._drop_page()
            return Batch((), page.last, 0, page.millis_behind_latest)
        if self._delivered_total >= gate.start_below:
            return None
        room = gate.delivered_max - self._delivered_total
        size = min(self._limits.batch_max, room, len(page.records) - self._offset)
        batch = self._slice(page, size)
        self._delivered_total += size
        self._bytes_total += batch.payload_bytes
        self._batches_total += 1
        self._first_delivered = self._first_delivered or batch.records[0].position
        return batch

    def _slice(self, page: Page, size: int) -> Batch:
        """The next `size` records of the page at hand; the whole page without a copy."""
        start, end = self._offset, self._offset + size
        if start == 0 and end == len(page.records):
            self._drop_page()
            return Batch(page.records, page.last, page.payload_bytes, page.millis_behind_latest)
        records = page.records[start:end]
        self._offset = end
        is_rest = end == len(page.records)
        last = page.last if is_rest else records[-1].position
        if is_rest:
            self._drop_page()
        payload_bytes = sum(len(record.data) for record in records)
        return Batch(records, last, payload_bytes, page.millis_behind_latest)

    def _drop_page(self) -> None:
        page = self._pages.popleft()
        self._offset = 0
        self._bytes_ahead -= page.payload_bytes
        self._records_ahead -= len(page.records)
        self._changed.notify_all()

    def _rest(self) -> None:
        if self._busy_since:
            self._last_batch_instant = self._now()
            self._processing_s_total += self._last_batch_instant - self._busy_since
            self._busy_since = Instant(0.0)

    def _is_full(self) -> bool:
        return bool(self._pages) and (
            self._bytes_ahead >= self._limits.buffer_bytes
            or self._records_ahead >= self._records_max
        )
