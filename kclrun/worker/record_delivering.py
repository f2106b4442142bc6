"""Single records of a lease process: what surrounds the calls of `process_record`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kclrun.consuming.concurrency import Concurrency
from kclrun.consuming.delivery import ErrorPolicy, RowScope, host_fault
from kclrun.consuming.failures import Breaker
from kclrun.errors import SinkError
from kclrun.model.record import Decoding, Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant, WallTime
from kclrun.observe.failures import Failure, describe
from kclrun.processor import Context, KeptRow, RecordProcessor
from kclrun.protocol.reports import OUTPUT, ProcessorFailed, ProcessorRecovered, Report
from kclrun.record_calls.calls import RecordCalls, Records, Stop
from kclrun.record_calls.runners import PROCESS_RECORD, MakeThread
from kclrun.state.keyed import Undoable
from kclrun.worker.clock import boottime
from kclrun.worker.delivery_queue import Batch, DeliveryQueue
from kclrun.worker.giving_up import GivingUp, Trouble

# While a stop waits for the calls under way, it looks so often whether the lease was renewed or
# lost; and in a shared process, whether it is this lease's turn.
_LOOK_S: Final = 0.5


class RowPlaces(RowScope, Protocol):
    """Where rows and changes of the state go that records kept until they were done."""

    def place(self, row: KeptRow, /) -> None: ...

    def place_changes(self, changes: Sequence[Undoable], /) -> None: ...


class RecordDelivery:
    """The `RecordHost` of a lease. Its methods are called on the main thread, within `deliver`.

    `more` gives a batch that may join those under way, `processed` is told how far every record is
    done, `returned` each batch that is. `fence`: until when the lease is proven ours; None once it
    is lost.
    """

    def __init__(
        self,
        processor: RecordProcessor,
        context: Context,
        concurrency: Concurrency,
        policy: ErrorPolicy,
        breaker: Breaker,
        *,
        queue: DeliveryQueue,
        rows: RowPlaces,
        post: Callable[[ProcessorFailed], None],
        report: Callable[[Report], None],
        giving_up: GivingUp,
        decoding: Decoding | None,
        more: Callable[[], Batch | None],
        processed: Callable[[ExtendedSequenceNumber], None],
        returned: Callable[[Batch], None],
        fence: Callable[[], Instant | None],
        make_thread: MakeThread,
    ) -> None:
        self._queue = queue
        self._rows = rows
        self._post = post
        self._report = report
        self._giving_up = giving_up
        self._more = more
        self._processed = processed
        self._returned = returned
        self._fence = fence
        self._troubles: dict[int, tuple[Trouble, Failure]] = {}
        self._batches: list[Batch] = []
        self.calls = RecordCalls(
            *(processor, context, concurrency, policy, breaker),
            host=self,
            decoding=decoding,
            make_thread=make_thread,
            wait=self._wait,
        )
        queue.tell_changes(self.calls.wake)

    def deliver(self, batch: Batch) -> bool:
        """Process a batch, and those that may join it; False if some records are left."""
        self._troubles.clear()
        self._batches = [batch]
        return self.calls.run(batch)

    # As `RecordHost`.

    def now(self) -> Instant:
        return boottime()

    def wall(self) -> WallTime:
        return WallTime(time.time())

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

    def raised(self, number: int, record: Record, error: BaseException) -> None:
        failure = describe(error, [record])
        trouble, _ = self._troubles.get(number) or (Trouble(PROCESS_RECORD), failure)
        trouble.note(failure, is_host_fault=host_fault(error) is not None)
        self._troubles[number] = (trouble, failure)

    def decided(self, number: int, pause_s: float | None) -> None:
        if pause_s is not None:
            self._report(self._troubles[number][0].raised(pause_s))

    def recovered(self, number: int, calls: int) -> None:
        del self._troubles[number]
        self._report(ProcessorRecovered(PROCESS_RECORD, calls))

    def let_go(self, number: int, record: Record, calls: int) -> bool:
        trouble, failure = self._troubles.pop(number)
        return self._giving_up.let_go(record, failure, calls, trouble)

    def halt(self, number: int, reason: str) -> None:
        self._queue.halt()
        self._post(self._troubles[number][0].given_up(reason))

    def settled(
        self,
        position: ExtendedSequenceNumber,
        rows: Sequence[KeptRow],
        changes: Sequence[Undoable],
    ) -> bool:
        failed = 0
        while rows or changes:
            self._rows.begin_batch()
            try:
                for row in rows:
                    self._rows.place(row)
                # Last: changes cannot be refused, so a batch that is taken back has none.
                self._rows.place_changes(changes)
                self._rows.end_batch(position)
                break
            except SinkError as error:
                self._rows.take_back_batch(None)
                failed += 1
                if not self._giving_up.rests(OUTPUT, error, failed):
                    return False
        if failed:
            self._report(ProcessorRecovered(OUTPUT, failed + 1))
        self._processed(position)
        return True

    def done_with(self, batch: Records) -> None:
        done = self._batches.pop(0)
        assert done is batch, "batches end in their order"
        self._returned(done)

    def _wait(self, pause_s: float | None) -> None:
        if self._queue.is_ending() or self._queue.is_shared:
            pause_s = _LOOK_S if pause_s is None else min(pause_s, _LOOK_S)
        self.calls.changed.wait(pause_s)
