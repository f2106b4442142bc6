"""Whole batches of a lease: the host of `process_records` in a lease process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kclrun.calling.batches import PROCESS_RECORDS, BatchCalls, BatchHost, Raised
from kclrun.calling.delivery import RowScope
from kclrun.calling.retry_later import Waited
from kclrun.calling.tracebacks import Failure
from kclrun.ipc.board import boottime
from kclrun.model.policies import ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.protocol.reports import ProcessorRecovered, ProcessorWaited
from kclrun.worker.delivery_queue import Batch, CheckpointCalls, DeliveryQueue
from kclrun.worker.giving_up import GivingUp, Trouble
from kclrun.worker.progress import DeliveryHost, Progress

if TYPE_CHECKING:
    from kclrun.observe.traces import LeaseSpans


class BatchDelivery(BatchHost):
    """The `BatchHost` of a lease. Its methods are called on the main thread, within `deliver`, but
    `keep` by any thread of user code.

    `call` calls user code with some records of a batch.
    """

    def __init__(
        self,
        policy: ErrorPolicy,
        host: DeliveryHost,
        progress: Progress,
        *,
        queue: DeliveryQueue,
        checkpoints: CheckpointCalls,
        giving_up: GivingUp,
        call: Callable[[Batch, Sequence[Record]], None],
        spans: LeaseSpans | None,
    ) -> None:
        self._host = host
        self._progress = progress
        self._queue = queue
        self._checkpoints = checkpoints
        self._giving_up = giving_up
        self._call = call
        self._spans = spans
        self._batch: Batch
        self._trouble: Trouble | None = None  # once a call raised
        self._calls = BatchCalls(self, policy)

    def deliver(self, batch: Batch, rows: RowScope | None) -> bool:
        """Give a batch, of at least one record, until each record is processed or given up. False
        if delivery was stopped before that, or if the lease is halted."""
        self._batch, self._trouble = batch, None
        return self._calls.run(batch.records, batch.last, rows)

    @property
    def _troubled(self) -> Trouble:
        if self._trouble is None:
            self._trouble = Trouble(PROCESS_RECORDS)
        return self._trouble

    # As `BatchHost`.

    def now(self) -> Instant:
        return boottime()

    def call(self, records: Sequence[Record]) -> None:
        self._call(self._batch, records)

    def durable(self) -> ExtendedSequenceNumber | None:
        return self._progress.durable()

    def limit(self, last: ExtendedSequenceNumber | None) -> None:
        self._checkpoints.given = last
        self._checkpoints.before = None if last is None else self._calls.keep_held

    def raised(self, raised: Raised) -> None:
        if self._spans is not None:
            self._spans.raised(self._batch, raised.error)
        trouble, pause_s = self._troubled, raised.pause_s
        trouble.note(raised.failure, is_host_fault=raised.is_host_fault)
        if raised.waits:
            assert pause_s is not None, "user code asked for a pause"
            self._host.report(trouble.asked_to_wait(pause_s, raised.waits))
        elif pause_s is not None or raised.begins_search:
            self._host.report(trouble.raised(pause_s or 0.0))

    def waited(self, waited: Waited) -> None:
        self._host.report(ProcessorWaited(PROCESS_RECORDS, *waited))

    def rest(self, pause_s: float) -> bool:
        return self._queue.may_try_again(pause_s, is_batch=True)

    def may_go_on(self) -> bool:
        return self._queue.may_try_again(0.0, is_batch=True)

    def keep(self, record: Record, failure: Failure, calls: int) -> None:
        self._giving_up.keep(record, failure, calls)

    def let_go(self, record: Record, failure: Failure, calls: int) -> bool:
        return self._giving_up.let_go(record, failure, calls, self._troubled)

    def halt(self, reason: str, calls: int) -> None:
        self._queue.halt()
        self._host.post(self._troubled.given_up(reason))

    def settled(self, position: ExtendedSequenceNumber) -> None:
        self._progress.process(position)

    def recovered(self, calls: int) -> None:
        self._host.report(ProcessorRecovered(PROCESS_RECORDS, calls))
