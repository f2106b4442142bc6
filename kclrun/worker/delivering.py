"""The main thread of a lease process: it runs user code and nothing else.

It takes tasks from the queue, calls the processor and posts the results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final, Protocol, TextIO

from kclrun.calling.batches import PROCESS_RECORDS, Raised
from kclrun.calling.delivery import Call, ConfirmStop, RowScope, host_fault
from kclrun.calling.records import CallTerms, Failing, RecordCalls, RecordHost, Records, Stop
from kclrun.calling.retry_later import Waited
from kclrun.calling.runners import PROCESS_RECORD
from kclrun.calling.timer_run import TimerRun
from kclrun.calling.tracebacks import Failure
from kclrun.errors import HostFailed, SinkError
from kclrun.ipc.board import boottime
from kclrun.lease import commands, events
from kclrun.methods import call_method
from kclrun.model.lease import Lease
from kclrun.model.policies import ErrorPolicy
from kclrun.model.record import Decoding, Record, RecordBatch
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.processor import KeptRow, RecordProcessor
from kclrun.protocol.reports import (
    OUTPUT,
    ProcessorRecovered,
    ProcessorWaited,
)
from kclrun.state.keyed import Undoable
from kclrun.worker.batch_delivering import BatchDelivery
from kclrun.worker.delivery_queue import (
    Batch,
    CheckpointCalls,
    DeliveryQueue,
    Exhausted,
    FireTimers,
    QueueClosed,
)
from kclrun.worker.giving_up import GivingUp, Trouble
from kclrun.worker.method_delivering import INITIALIZE, MethodDelivery
from kclrun.worker.progress import DeliveryHost, Progress
from kclrun.worker.timer_delivering import Parts, TimerClocks, TimerDelivery

if TYPE_CHECKING:
    from kclrun.observe.traces import LeaseSpans

# How often the wait for the calls under way ends: during a stop to see whether the lease was
# renewed or lost, and in a shared process to see whether it is the turn of this lease.
_LOOK_S: Final = 0.5


class Deliverer:
    """Runs `serve` on the main thread until the queue closes.

    If user code raises, the error policy decides: repeat the same call after a pause, give records
    up, or halt the lease. Nothing is skipped unless the settings say so [I9]. Rows emitted by a
    failed call are discarded before the call is repeated.

    A lack of resources while records are processed is reported as a failure of the processor: a
    record may need more than any host has. `spans` traces the batches; None without traces.
    """

    def __init__(
        self,
        queue: DeliveryQueue,
        host: DeliveryHost,
        policy: ErrorPolicy,
        checkpoints: CheckpointCalls,
        spans: LeaseSpans | None = None,
    ) -> None:
        self.progress = Progress(host, checkpoints)
        self._queue = queue
        self._host = host
        self._checkpoints = checkpoints
        self._giving_up = GivingUp(queue, host, policy.then)
        self._spans = spans
        self._batches = BatchDelivery(
            policy,
            host,
            self.progress,
            queue=queue,
            checkpoints=checkpoints,
            giving_up=self._giving_up,
            call=self._call_batch,
            spans=spans,
        )
        self._methods = MethodDelivery(policy, host, self.progress, queue).calls
        self._processor: RecordProcessor | None = None
        self._records: RecordDelivery | None = None
        self._timers: TimerDelivery | None = None
        self._parts = Parts()
        self._rows: RowScope | None = None
        self._decoding: Decoding | None = None
        self._token = 0

    def serve(self) -> None:
        """Perform one task after the other."""
        while True:
            match self._queue.next_task():
                case Batch() as batch:
                    self._deliver(batch)
                case QueueClosed():
                    if self._records is not None:
                        self._records.calls.close()
                    return
                case ConfirmStop():
                    self._host.post(events.DeliveryStopped())
                case Exhausted(children, is_expired):
                    self._host.post(events.ShardExhausted(children, is_expired))
                case FireTimers(upcoming):
                    assert self._timers is not None, "the queue looks at timers"
                    self._timers.fire(upcoming)
                case call:
                    self._call(call)

    def take_records(self, terms: CallTerms, rows: RowPlaces) -> None:
        """From here on user code gets single records. Called by `prepare`."""
        self._records = RecordDelivery(
            terms,
            self._host,
            self.progress,
            queue=self._queue,
            rows=rows,
            giving_up=self._giving_up,
            more=self._more_records,
            returned=self._returned,
        )

    def take_timers(
        self, run: TimerRun, processor: RecordProcessor, rows: RowScope, clocks: TimerClocks
    ) -> None:
        """From here on `on_timer` is called. Called by `prepare`."""
        self._timers = TimerDelivery(
            run,
            processor,
            rows,
            self._checkpoints,
            self.progress,
            queue=self._queue,
            methods=self._methods,
            clocks=clocks,
        )
        self._queue.look_at_timers(self._timers.wait_s)

    @property
    def runs_records(self) -> bool:
        """Whether calls of `process_record` may run now."""
        return self._records is not None and self._records.calls.is_running

    def write_coroutines(self, file: TextIO) -> None:
        """As `Runner.write_coroutines`; any thread."""
        if self._records is not None:
            self._records.calls.write_coroutines(file)

    def _deliver(self, batch: Batch) -> None:
        if self._timers is not None:
            is_done = self._deliver_parts(batch, self._timers)
        else:
            self.progress.deliver(batch)
            is_done = self._is_done_with(batch)
        if not is_done:
            # A checkpoint from here on, in shutdown_requested, covers the processed records only.
            self._checkpoints.given = self.progress.done

    def _deliver_parts(self, batch: Batch, timers: TimerDelivery) -> bool:
        """Give a batch, and the batches that join it, in parts that end where the watermark moves,
        and fire the timers after each part. False if a part was given up, or if delivery was
        stopped before the last part."""
        self._parts = Parts()
        self._parts.join(batch)
        is_first = True
        while self._parts.are_left:
            if not is_first and not self._queue.may_try_again(0.0, is_batch=True):
                return False
            is_first = False
            if not self._is_done_with(self._next_part(timers)):
                return False
            assert self.progress.done is not None, "a part is done"
            if not timers.calls.arrive(self.progress.done):
                return False
        last = self._parts.last
        if self.progress.done is None or self.progress.done < last:
            self.progress.deliver(Batch((), last, 0, None))
            self.progress.process(last)
            timers.calls.done = last
        return True

    def _next_part(self, timers: TimerDelivery) -> Batch:
        assert self.progress.done is not None, "the lease has begun"
        part = self._parts.next(timers.run)
        timers.calls.note(self.progress.done)
        timers.arrived_at = part.records[-1].approximate_arrival_timestamp
        self.progress.deliver(part)
        return part

    def _more_records(self) -> Batch | None:
        """Records that may be processed beside those under way; None if none may."""
        timers = self._timers
        if timers is not None and not timers.run.may_join:
            return None
        batch = self._queue.more()
        if batch is None:
            return None
        if timers is None or not batch.records:
            self.progress.deliver(batch)
        else:
            self._parts.join(batch)
            batch = self._next_part(timers)
        if self._spans is not None:
            self._spans.began(batch)
        return batch

    def _returned(self, batch: Batch) -> None:
        """A batch, or a part of one, is done."""
        whole = batch if self._timers is None else self._parts.returned(batch)
        if whole is not None:
            self._queue.note_returned(whole)
        if self._spans is not None:
            self._spans.done(batch)

    def _call(self, call: Call) -> None:
        checkpointer = self._checkpoints.checkpointer
        match call:
            case commands.CallInitialize(row):
                done = self._is_begun(row)
            case commands.CallShardEnded():
                self._checkpoints.covers_rows = False
                done = self._attempt_method("shard_ended", checkpointer, covers=SHARD_END)
            case commands.CallShutdownRequested():
                done = self._attempt_method("shutdown_requested", checkpointer)
            case commands.CallLeaseLost():
                done = self._attempt_method("lease_lost")
        if done:
            self._host.post(events.CallReturned())

    def _is_begun(self, row: Lease) -> bool:
        try:
            return self._methods.run(INITIALIZE, lambda: self._begin(row))
        except BaseException as error:
            fault = host_fault(error)
            if fault is not None:
                # No wait here: the manager starts the next process after a pause that grows, or
                # gives the lease to another host.
                self._queue.halt()
                self._host.broke(HostFailed(f"{INITIALIZE} failed: {fault}"))
                return False
            raise

    def _begin(self, row: Lease) -> None:
        self._token, self.progress.done = row.counter, row.checkpoint
        self._processor, self._rows, self._decoding = self._host.prepare(row)

    def _attempt_method(
        self, name: str, *arguments: object, covers: ExtendedSequenceNumber | None = None
    ) -> bool:
        call = functools.partial(call_method, self._user_code, name, *arguments)
        return self._methods.run(name, call, self._rows, covers)

    @property
    def _user_code(self) -> RecordProcessor:
        assert self._processor is not None, "no call before initialize"
        return self._processor

    # Batches.

    def _is_done_with(self, batch: Batch) -> bool:
        """Give a batch until each record is processed or given up. False if delivery was stopped
        before that, or if the lease is halted."""
        if self._spans is not None:
            self._spans.began(batch)
        if self._records is not None:
            is_done = self._records.deliver(batch)
        else:
            is_done = not batch.records or self._batches.deliver(batch, self._rows)
            if is_done:
                self._returned(batch)
                self.progress.process(batch.last)
        if not is_done and self._spans is not None:
            self._spans.leave_undone()
        return is_done

    def _call_batch(self, batch: Batch, records: Sequence[Record]) -> None:
        """One call of `process_records` with some records of the batch."""
        behind_ms = batch.millis_behind_latest
        given = RecordBatch(records, behind_ms, self._token, self._decoding)
        checkpointer = self._checkpoints.checkpointer
        with nullcontext() if self._spans is None else self._spans.calling(batch):
            call_method(self._user_code, PROCESS_RECORDS, given, checkpointer)


class RowPlaces(RowScope, Protocol):
    """Takes the rows and the changes of the state that records kept until they were done."""

    def place(self, row: KeptRow, /) -> None: ...

    def place_changes(self, changes: Sequence[Undoable], /) -> None: ...


class RecordDelivery(RecordHost):
    """The `RecordHost` of a lease. Its methods are called on the main thread, within `deliver`.

    `more` returns a batch that may join those under way. `returned` gets each batch that is done.
    """

    def __init__(
        self,
        terms: CallTerms,
        host: DeliveryHost,
        progress: Progress,
        *,
        queue: DeliveryQueue,
        rows: RowPlaces,
        giving_up: GivingUp,
        more: Callable[[], Batch | None],
        returned: Callable[[Batch], None],
    ) -> None:
        self._host = host
        self._progress = progress
        self._queue = queue
        self._rows = rows
        self._giving_up = giving_up
        self._more = more
        self._returned = returned
        self._fence = host.fence
        self._troubles: dict[int, Trouble] = {}
        self._batches: list[Batch] = []
        self.calls = RecordCalls(terms, host=self, make_thread=host.make_thread, wait=self._wait)
        queue.notify_of_changes(self.calls.wake)

    def deliver(self, batch: Batch) -> bool:
        """Process a batch, and those that may join it; False if some records are left."""
        self._troubles.clear()
        self._batches = [batch]
        return self.calls.run(batch)

    # As `RecordHost`.

    def now(self) -> Instant:
        return boottime()

    def stop(self) -> Stop | None:
        return Stop(self._fence() is None) if self._queue.is_ending() else None

    def may_start(self) -> bool:
        fence = self._fence()
        return fence is not None and self._queue.may_go_on(fence)

    def more(self) -> Batch | None:
        batch = self._more()
        if batch is not None:
            self._batches.append(batch)
        return batch

    def busy(self, since: Instant) -> None:
        self._queue.busy(since)

    def raised(self, number: int, record: Record, raised: Raised) -> None:
        trouble = self._troubles.setdefault(number, Trouble(PROCESS_RECORD))
        trouble.note(raised.failure, is_host_fault=raised.is_host_fault)
        if raised.pause_s is None:
            return
        if raised.waits:
            self._host.report(trouble.asked_to_wait(raised.pause_s, raised.waits))
        else:
            self._host.report(trouble.raised(raised.pause_s))

    def waited(self, waited: Waited) -> None:
        self._host.report(ProcessorWaited(PROCESS_RECORD, *waited))

    def recovered(self, number: int, calls: int) -> None:
        if self._troubles.pop(number).calls:
            self._host.report(ProcessorRecovered(PROCESS_RECORD, calls))

    def let_go(self, number: int, record: Record, failure: Failure, calls: int) -> bool:
        return self._giving_up.let_go(record, failure, calls, self._troubles.pop(number))

    def halt(self, number: int, record: Record, failing: Failing, reason: str) -> None:
        self._queue.halt()
        self._host.post(self._troubles[number].given_up(reason))

    def settled(
        self, position: ExtendedSequenceNumber, rows: Sequence[KeptRow], changes: Sequence[Undoable]
    ) -> bool:
        failed = 0
        while rows or changes:
            self._rows.begin_batch()
            try:
                for row in rows:
                    self._rows.place(row)
                # Last: changes are never refused, so a batch that is taken back has no changes.
                self._rows.place_changes(changes)
                self._rows.end_batch(position)
                break
            except SinkError as error:
                self._rows.take_back_batch(None)
                failed += 1
                if not self._giving_up.rests(OUTPUT, error, failed):
                    return False
        self._giving_up.answers(OUTPUT, failed)
        self._progress.process(position)
        return True

    def done_with(self, batch: Records) -> None:
        done = self._batches.pop(0)
        assert done is batch, "batches end in their order"
        self._returned(done)

    def _wait(self, pause_s: float | None) -> None:
        if self._queue.is_ending() or self._queue.is_shared:
            pause_s = _LOOK_S if pause_s is None else min(pause_s, _LOOK_S)
        self.calls.changed.wait(pause_s)
