"""The main thread of a lease process: it runs user code and nothing else.

It takes tasks from the queue, calls the processor and posts the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kclrun.codec.kpl import drop_until
from kclrun.consuming import events
from kclrun.consuming.commands import (
    CallInitialize,
    CallLeaseLost,
    CallShardEnded,
    CallShutdownRequested,
)
from kclrun.consuming.delivery import (
    Attempts,
    Call,
    ConfirmStop,
    ErrorPolicy,
    GiveUp,
    RetryAfter,
    RowScope,
    attempt,
    host_fault,
)
from kclrun.errors import HostFailed
from kclrun.model.lease import Lease
from kclrun.model.record import Record, RecordBatch
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.observe.failures import Failure, describe
from kclrun.processor import RecordProcessor, call_method
from kclrun.protocol.reports import ProcessorFailed, ProcessorRaised, ProcessorRecovered, Report
from kclrun.worker.delivery_queue import (
    Batch,
    CheckpointCalls,
    DeliveryQueue,
    Exhausted,
    QueueClosed,
)


class Deliverer:
    """Runs `serve` on the main thread until the queue closes.

    If user code raises, the error policy decides: repeat the same call after a pause, or halt the
    lease. Nothing is skipped [I9]. Rows emitted by a failed call are discarded before the call is
    repeated.

    `prepare` makes a new processor, ready for `initialize`, once the lease is claimed. It is called
    again for each attempt, because a half-initialised instance cannot be used. `broke` ends the
    process: its host lacks a resource that `initialize` needs, so another try, or another host, may
    succeed. A lack of resources while records are processed is reported as a failure of the
    processor: a record may need more than any host has.
    """

    def __init__(
        self,
        queue: DeliveryQueue,
        post: Callable[[events.Event], None],
        policy: ErrorPolicy,
        *,
        prepare: Callable[[Lease], tuple[RecordProcessor, RowScope | None]],
        checkpoints: CheckpointCalls,
        report: Callable[[Report], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        self._queue = queue
        self._post = post
        self._policy = policy
        self._prepare = prepare
        self._checkpoints = checkpoints
        self._report = report
        self._broke = broke
        self._processor: RecordProcessor | None = None
        self._rows: RowScope | None = None
        self._token = 0
        self.delivered: ExtendedSequenceNumber | None = None

    def serve(self) -> None:
        """Perform one task after the other."""
        while True:
            match self._queue.next_task():
                case Batch() as batch:
                    self._deliver(batch)
                case QueueClosed():
                    return
                case ConfirmStop():
                    self._post(events.DeliveryStopped())
                case Exhausted(children, is_expired):
                    self._post(events.ShardExhausted(children, is_expired))
                case call:
                    self._call(call)

    def _deliver(self, batch: Batch) -> None:
        self.delivered = batch.last
        self._post(events.BatchDelivered(batch.last, len(batch.records), batch.payload_bytes))
        if batch.records and not self._attempt_until_it_holds(
            "process_records", lambda: self._process(batch), batch.last, batch.records
        ):
            return
        self._queue.note_returned(batch)
        self._post(events.BatchProcessed(batch.last))

    def _process(self, batch: Batch) -> None:
        # A checkpoint inside the batch holds, even if the attempt that made it then raised: the
        # records that it covers are not delivered again.
        durable = self._checkpoints.durable
        records = batch.records if durable is None else drop_until(batch.records, durable)
        if records:
            handed = RecordBatch(records, batch.millis_behind_latest, self._token)
            call_method(self._user_code, "process_records", handed, self._checkpoints.checkpointer)

    def _call(self, call: Call) -> None:
        match call:
            case CallInitialize(row):
                done = self._attempt_until_it_holds("initialize", lambda: self._begin(row))
            case CallShardEnded():
                done = self._attempt_until_it_holds("shard_ended", self._end_shard, SHARD_END)
            case CallShutdownRequested():
                done = self._attempt_until_it_holds("shutdown_requested", self._shut_down)
            case CallLeaseLost():
                done = self._attempt_until_it_holds("lease_lost", self._lose)
        if done:
            self._post(events.CallReturned())

    def _begin(self, row: Lease) -> None:
        self._token = row.counter
        self._processor, self._rows = self._prepare(row)

    def _end_shard(self) -> None:
        call_method(self._user_code, "shard_ended", self._checkpoints.checkpointer)

    def _shut_down(self) -> None:
        call_method(self._user_code, "shutdown_requested", self._checkpoints.checkpointer)

    def _lose(self) -> None:
        call_method(self._user_code, "lease_lost")

    @property
    def _user_code(self) -> RecordProcessor:
        assert self._processor is not None, "no call before initialize"
        return self._processor

    def _attempt_until_it_holds(
        self,
        where: str,
        call: Callable[[], None],
        covers: ExtendedSequenceNumber | None = None,
        records: Sequence[Record] = (),
    ) -> bool:
        """Call until it returns; False if it was given up, or delivery was stopped meanwhile.

        `covers` is the position of the rows that the call emits; None if it emits none.
        `records` are the records of the call, for the description of a failure.
        """
        attempts: Attempts | None = None
        last: Failure | None = None
        while True:
            try:
                attempt(call, self._rows, covers, self._durable)
            except BaseException as error:  # noqa: BLE001 - user code: also asyncio's CancelledError
                attempts = attempts or Attempts(where, self._policy)
                failure = describe(error, records)
                if last is not None and failure.is_as(last):
                    # A repetition is reported in brief: its traceback was logged the first time.
                    failure = msgspec.structs.replace(failure, traceback_text="")
                if not self._may_repeat(error, attempts, failure):
                    return False
                last = failure
            else:
                if attempts is not None:
                    self._report(ProcessorRecovered(where, attempts.failed + 1))
                return True

    def _durable(self) -> ExtendedSequenceNumber | None:
        return self._checkpoints.durable

    def _may_repeat(self, error: BaseException, attempts: Attempts, failure: Failure) -> bool:
        decision, where = attempts.raised(error), attempts.where
        fault = host_fault(error)
        if fault is not None and where == "initialize":
            # No wait here: the manager starts the next process, ever later, or gives the lease to
            # another host.
            self._queue.halt()
            self._broke(HostFailed(f"{where} failed: {fault}"))
            return False
        match decision:
            case GiveUp():
                self._queue.halt()
                self._post(_given_up(attempts, failure, is_host_fault=fault is not None))
                return False
            case RetryAfter(pause_s):
                raised = ProcessorRaised(
                    where,
                    failure.error,
                    failure.raised_at,
                    failure.record,
                    failure.traceback_text,
                    attempts.failed,
                    pause_s,
                )
                self._report(raised)
                return self._queue.may_try_again(pause_s, is_batch=where == "process_records")


def _given_up(attempts: Attempts, failure: Failure, *, is_host_fault: bool) -> ProcessorFailed:
    return ProcessorFailed(
        attempts.where,
        failure.error,
        attempts.failed,
        failure.position,
        failure.traceback_text,
        failure.raised_at,
        failure.record,
        is_host_fault,
    )
