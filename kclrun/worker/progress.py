"""How far the records of one lease are delivered, processed and durable; and the lease process as
the main thread sees it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kclrun.calling.delivery import RowScope
from kclrun.calling.tracebacks import Failure
from kclrun.lease import events
from kclrun.model.lease import Lease
from kclrun.model.record import Decoding, Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.processor import RecordProcessor
from kclrun.protocol.reports import Report
from kclrun.worker.delivery_queue import Batch, CheckpointCalls


class Prepared(NamedTuple):
    """A processor whose `initialize` has returned, where its rows go, and how records decode."""

    processor: RecordProcessor
    rows: RowScope | None
    decoding: Decoding | None


class DeliveryHost(Protocol):
    """The lease process around the main thread. Any thread of user code may call `report` and
    `keep_letter`; the rest is called on the main thread."""

    def post(self, event: events.Event, /) -> None:
        """Called with each event for the lease thread."""
        ...

    def report(self, report: Report, /) -> None:
        """Called with each report for the manager."""
        ...

    def prepare(self, row: Lease, /) -> Prepared:
        """Make a new processor and call its `initialize`, once the lease is claimed. Called again
        for each attempt, because a half-initialised instance cannot be used."""
        ...

    def broke(self, error: BaseException, /) -> None:
        """End the process: its host lacks a resource that `initialize` needs, so another try, or
        another host, may succeed."""
        ...

    def keep_letter(self, record: Record, failure: Failure, calls: int, /) -> None:
        """Keep a dead letter durably; `calls` raised with its record. Raises: SinkError."""
        ...

    def settled(self, position: ExtendedSequenceNumber, /) -> None:
        """Called once all records up to this position are processed or given up."""
        ...

    def sent(self) -> ExtendedSequenceNumber | None:
        """Up to which record the rows were given to their outputs."""
        ...

    def fence(self) -> Instant | None:
        """Until when the lease is proven ours; None once it is lost."""
        ...

    def make_thread(self, target: Callable[[], None], name: str, /) -> threading.Thread:
        """A thread for calls of single records."""
        ...


class Progress:
    """How far the lease is. `delivered` is the last position given to user code, and up to `done`
    everything is processed or given up; both are None before that."""

    def __init__(self, host: DeliveryHost, checkpoints: CheckpointCalls) -> None:
        self.delivered: ExtendedSequenceNumber | None = None
        self.done: ExtendedSequenceNumber | None = None
        self._post = host.post
        self._settled = host.settled
        self._sent = host.sent
        self._checkpoints = checkpoints

    def deliver(self, batch: Batch) -> None:
        """A batch is about to be given to user code."""
        self.delivered = batch.last
        self._post(events.BatchDelivered(batch.last, len(batch.records), batch.payload_bytes))

    def process(self, position: ExtendedSequenceNumber) -> None:
        """Everything up to this position is done."""
        self.done = position
        self._settled(position)
        self._post(events.BatchProcessed(position))

    def announce(self, at: ExtendedSequenceNumber) -> None:
        """A position of timers follows. The core has to know it before a checkpoint at it."""
        self._post(events.BatchDelivered(at, 0, 0))

    def reach(self, at: ExtendedSequenceNumber) -> None:
        """The timers of this position are done."""
        self.announce(at)
        self.delivered = at
        self.process(at)

    def durable(self) -> ExtendedSequenceNumber | None:
        """Records up to here are not given again: a checkpoint covers them, or their rows were
        given to the outputs for a checkpoint under way."""
        durable, sent = self._checkpoints.durable, self._sent()
        return sent if durable is None or (sent is not None and sent > durable) else durable
