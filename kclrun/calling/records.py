"""The calls of `process_record` of one processor, and the effects of the records that are done.

The thread of `RecordCalls.run` alone performs what the `RecordWindow` decides; a runner makes the
calls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TextIO

from kclrun.calling.batches import Raised
from kclrun.calling.concurrency import RecordWindow, Settled
from kclrun.calling.delivery import host_fault
from kclrun.calling.failures import Breaker, Halt, LetGo
from kclrun.calling.retry_later import RetryLaters, Waited
from kclrun.calling.runners import (
    PROCESS_RECORD,
    Ended,
    InlineRunner,
    MakeRunner,
    MakeThread,
    runner_of,
)
from kclrun.calling.tracebacks import Failure, describe
from kclrun.errors import RetryLater
from kclrun.methods import check_returned
from kclrun.model.policies import Concurrency, ErrorPolicy
from kclrun.model.record import Decoding, Record, RecordBatch
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant, WallTime
from kclrun.processor import Context, KeptRow, NoState, RecordCall, RecordProcessor
from kclrun.state.keyed import LiveEntries, Undoable

# Effects and progress are reported to the host after this time: a report for each record would cost
# more than the record.
REPORT_S: Final = 0.05
# ... or with so many bytes of rows: a sixteenth of what an output holds before the lease waits.
REPORT_BYTES: Final = 4 * 2**20


class Records(Protocol):
    """Records that arrived together; `last` is the position at which they end."""

    @property
    def records(self) -> Sequence[Record]: ...

    @property
    def last(self) -> ExtendedSequenceNumber: ...


class Stop(NamedTuple):
    """The calls have to end. `is_lost`: start no further call, and cancel those that run."""

    is_lost: bool = False


class Failing(NamedTuple):
    """A record whose calls raised: the last error, in words too, and how many calls there were."""

    error: BaseException
    failure: Failure
    calls: int


class RecordHost(Protocol):
    """What `RecordCalls` needs of its shell, on the thread of `RecordCalls.run`.

    The bodies are those of a shell without a queue and without a lease that could be lost.
    """

    def now(self) -> Instant: ...

    def wall(self) -> WallTime:
        return WallTime(time.time())

    def stop(self) -> Stop | None:
        """Whether the calls have to end; None while they go on."""
        ...

    def may_start(self) -> bool:
        """Whether records may start now, because the lease is proven ours [P7]. After False the
        shell calls `wake` once they may."""
        return True

    def more(self) -> Records | None:
        """The next records of the shard, if they may join the calls under way now."""
        return None

    def busy(self, since: Instant) -> None:
        """The oldest call has run since this instant; 0 if no call runs."""
        return

    def ends_run(self, error: BaseException) -> bool:
        """Whether this error is not one of user code, so that `run` raises it."""
        return False

    def raised(self, number: int, record: Record, raised: Raised) -> None:
        """A call raised."""
        ...

    def waited(self, waited: Waited) -> None:
        """User code asks for no more time for any record."""
        return

    def recovered(self, number: int, calls: int) -> None:
        """A record is done after some of its calls raised. `calls` counts the attempts, which a
        call that raised RetryLater is not."""
        return

    def let_go(self, number: int, record: Record, failure: Failure, calls: int) -> bool:
        """Keep the letter of a record durably, or count the record as skipped. False if a stop came
        before that was done."""
        ...

    def halt(self, number: int, record: Record, failing: Failing, reason: str) -> None:
        """Halt the lease at this record. If `reason` is empty, its last error is the reason."""
        ...

    def settled(
        self, position: ExtendedSequenceNumber, rows: Sequence[KeptRow], changes: Sequence[Undoable]
    ) -> bool:
        """All records up to `position` are done. `rows` and `changes` (of the state) are those of
        the records since the last call, in order. False if a stop came before the rows were taken:
        then the records count as not done."""
        ...

    def done_with(self, batch: Records) -> None:
        """All records of this batch are settled."""
        return


class _Batch(NamedTuple):
    """A batch in the window. Its records have the numbers from `first` to before `end`; records
    that were done before the batch was admitted have no number."""

    batch: Records
    first: int
    end: int

    def position_before(self, number: int) -> ExtendedSequenceNumber:
        """The position of the record of this batch that comes before the record `number`."""
        return self.batch.records[number - self.end - 1].position


class CallTerms(NamedTuple):
    """What `process_record` of one processor is called with, on either engine and in a test."""

    processor: RecordProcessor
    context: Context
    concurrency: Concurrency
    policy: ErrorPolicy
    decoding: Decoding | None


class RecordCalls:
    """The calls of one processor. `run` gives records to it until all are settled.

    Any thread may call `wake` when something has changed that `run` waits for. `wait` waits for
    that, for so many seconds at most. Rows and progress are reported to the host every `report_s`
    seconds, and at the end of a batch.
    """

    def __init__(
        self,
        terms: CallTerms,
        *,
        host: RecordHost,
        make_thread: MakeThread,
        make_runner: MakeRunner = runner_of,
        wait: Callable[[float | None], object] | None = None,
        report_s: float = REPORT_S,
    ) -> None:
        self._host = host
        self._context = context = terms.context
        live = context._live  # noqa: SLF001 - of the runtime's side of a context
        self._entries = None if isinstance(live, NoState) else live
        self._decoding = terms.decoding
        self._report_s = report_s
        self._concurrency = terms.concurrency
        self._policy = terms.policy
        self._breaker = Breaker(terms.policy.limit)
        self._retry_laters = RetryLaters()
        self.changed = threading.Event()
        self.wake = self.changed.set
        self._wait = wait or self.changed.wait
        self._runner = make_runner(terms.processor, terms.concurrency, self.wake, make_thread)
        self.is_running = False
        # Of the run under way; those of its window by number: the contexts of the records that are
        # not settled, the records whose calls raised, and when the calls under way began.
        self._window: RecordWindow
        self._contexts: dict[int, RecordCall]
        self._failing: dict[int, Failing]
        self._began: dict[int, Instant]
        self._batches: deque[_Batch]
        self._upto: int
        self._kept_bytes: int
        self._cancel_instant: Instant | None
        self._is_cancelled: bool
        # Effects and the last position of the records that are settled and not reported yet.
        self._rows: list[KeptRow]
        self._changes: list[Undoable]
        self._rows_bytes: int
        self._position: ExtendedSequenceNumber | None
        self._report_at: float
        self._is_refused: bool

    def close(self) -> None:
        """No call will follow."""
        self._runner.close()

    def write_coroutines(self, file: TextIO) -> None:
        """As `Runner.write_coroutines`; any thread."""
        self._runner.write_coroutines(file)

    def run(self, batch: Records) -> bool:
        """Process these records, and those that the host lets join them. False if some records are
        left, because of a stop or because the lease is halted."""
        self.is_running = True
        self._report_at = time.monotonic() + self._report_s
        self._rows, self._changes, self._rows_bytes, self._position = [], [], 0, None
        self._contexts, self._failing = {}, {}
        self._retry_laters.forget()  # waits of a run that was stopped
        self._is_refused = False
        if self._entries is not None:
            self._entries.is_of_records = True
        try:
            done, error = 0, None
            RecordBatch(batch.records, _decoding=self._decoding)
            if isinstance(self._runner, InlineRunner):
                done, error = self._run_in_order(self._runner.call, batch.records)
            return self._run_window(batch, done, error)
        finally:
            self.is_running = False
            if self._entries is not None:
                self._take_back_unsettled(self._entries)

    def _take_back(self, context: RecordCall) -> None:
        """The call raised, or its record is left undone: undo its changes of the state."""
        context.is_open = False
        if self._entries is not None and context.changes:
            self._entries.undo_all(context.changes)

    def _take_back_unsettled(self, entries: LiveEntries) -> None:
        """Undo the changes of the records that are left undone, the last change first. The calls
        that follow see the state after the last settled record."""
        for _, context in sorted(self._contexts.items(), reverse=True):
            self._take_back(context)
        entries.undo_all(self._changes)
        self._changes = []
        entries.is_of_records = False

    def _run_in_order(
        self, call: Callable[..., Any], records: Sequence[Record]
    ) -> tuple[int, BaseException | None]:
        """The fast way to make one call after the other, until a call raises or a stop comes.
        Returns: how many records are done, and the error of the next one."""
        of, is_changed, monotonic = self._context, self.changed.is_set, time.monotonic
        self._host.busy(self._host.now())
        report_at, done = self._report_at, 0
        for record in records:
            if is_changed():
                self.changed.clear()
                if self._host.stop() is not None:
                    break
            context = RecordCall(of, record)
            try:
                result = call(record, context)
                if result is not None:
                    check_returned(PROCESS_RECORD, result)
            except BaseException as error:  # noqa: BLE001 - user code
                self._take_back(context)
                self._position = records[done - 1].position if done else None
                return done, error
            context.is_open = False
            done += 1
            if context.kept is not None or context.changes is not None:
                self._keep(context)
                if self._rows_bytes >= REPORT_BYTES:
                    report_at = 0.0
            if monotonic() >= report_at:
                self._position = record.position
                if not self._report() or not self._host.may_start():
                    break
                self._host.busy(self._host.now())
                report_at = self._report_at
        self._position = records[done - 1].position if done else None
        return done, None

    def _run_window(self, batch: Records, done: int, raised: BaseException | None) -> bool:
        """Make the calls as the window decides. The first `done` records are done already; `raised`
        is the error of the next one, if its call was made."""
        host, runner = self._host, self._runner
        window = self._window = RecordWindow(self._concurrency, self._policy, self._breaker)
        self._contexts, self._began, self._batches = {}, {}, deque()
        self._upto = self._kept_bytes = 0
        self._cancel_instant, self._is_cancelled = None, False
        self._admit(batch, done)
        if raised is not None:
            for number in window.starts(host.now()):
                record = window.record(number)
                self._contexts[number] = RecordCall(self._context, record)
                self._ended(Ended(number, raised))
        while True:
            self.changed.clear()
            for ended in runner.take():
                self._ended(ended)
            if not self._settle():
                window.stop_at_once()  # a stop came before the rows or the letter were kept
            now, stop = host.now(), host.stop()
            if stop is not None:
                self._stop(stop, now)
            elif not runner.is_inline and window.may_admit and (more := host.more()) is not None:
                self._admit(more)
                continue
            if host.may_start():
                self._start(now)
            if window.is_over:
                break
            if runner.is_inline and window.running:
                continue
            host.busy(next(iter(self._began.values()), Instant(0.0)))
            self._wait(self._pause_s(now))
        return self._report() and not window.unsettled

    def _admit(self, batch: Records, done: int = 0) -> None:
        first = self._window.end
        self._window.admit(batch.records[done:] if done else batch.records)
        self._batches.append(_Batch(batch, first, self._window.end))

    def _start(self, now: Instant) -> None:
        numbers = self._window.starts(now, self._kept_bytes)
        if not numbers:
            return
        calls = []
        for number in numbers:
            record = self._window.record(number)
            context = self._contexts[number] = RecordCall(self._context, record)
            self._began[number] = now
            RecordBatch((record,), _decoding=self._decoding)  # decodes anew
            calls.append((number, record, context))
        if self._runner.is_inline:
            self._host.busy(now)
        self._runner.start(calls)

    def _stop(self, stop: Stop, now: Instant) -> None:
        self._window.stop()
        if self._cancel_instant is None:
            self._cancel_instant = Instant(now + self._concurrency.cancel_after_s)
        if (stop.is_lost or now >= self._cancel_instant) and not self._is_cancelled:
            self._is_cancelled = True
            self._window.stop_at_once()
            self._runner.cancel()

    def _pause_s(self, now: Instant) -> float | None:
        """The seconds until the next report, repetition or cancellation is due; None if none is."""
        due = [] if self._position is None else [self._report_at - time.monotonic()]
        if (rests_until := self._window.wake_instant) is not None:
            due.append(rests_until - now)
        if self._cancel_instant is not None and not self._is_cancelled:
            due.append(self._cancel_instant - now)
        return max(0.0, min(due)) if due else None

    def _ended(self, ended: Ended) -> None:
        window, number, error = self._window, ended.number, ended.error
        context = self._contexts[number]
        context.is_open = False
        self._began.pop(number, None)
        if error is None:
            self._kept_bytes += context.kept_bytes
            raised = window.returned(number)
            if raised is not None:
                del self._failing[number]
                self._waits_no_more(number)
                self._host.recovered(number, raised + 1)
            return
        del self._contexts[number]  # with the rows that it keeps
        self._take_back(context)
        if ended.is_cancelled:
            window.abandoned(number)
            return
        self._raised(number, window.checked(number, error))

    def _raised(self, number: int, error: BaseException) -> None:
        host, window = self._host, self._window
        if host.ends_run(error):
            raise error
        record = window.record(number)
        failure, before = describe(error, [record]), self._failing.get(number)
        calls = 1 if before is None else before.calls + 1
        self._failing[number] = Failing(error, failure, calls)
        is_host_fault, now = host_fault(error) is not None, host.now()
        pause_s = window.raised(number, error, now, host.wall(), is_host_fault=is_host_fault)
        waits = 0
        if isinstance(error, RetryLater) and pause_s is not None:
            waits = self._retry_laters.asked(number, now)
        else:
            self._waits_no_more(number)
        raised = Raised(error, failure, is_host_fault, pause_s, waits, begins_search=False)
        host.raised(number, record, raised)

    def _waits_no_more(self, number: int) -> None:
        """The call with this record returned, or failed in another way than by RetryLater."""
        waited = self._retry_laters.over(number, self._host.now)
        if waited is not None:
            self._host.waited(waited)

    def _settle(self) -> bool:
        """Perform what the window decides. False if a stop came before that was done."""
        window, host = self._window, self._host
        while (step := window.next_step(host.now())) is not None:
            match step:
                case Settled(upto):
                    if not self._collect_settled(upto):
                        return False
                case LetGo(number, calls):
                    if not self._report() or not self._is_let_go(number, calls):
                        return False
                    window.let_go(number)
                case Halt(reason):
                    if not self._report():
                        return False
                    number = window.first
                    host.halt(number, window.record(number), self._failing[number], reason)
        is_due = time.monotonic() >= self._report_at or self._rows_bytes >= REPORT_BYTES
        return self._collect_settled(self._upto) and (not is_due or self._report())

    def _is_let_go(self, number: int, calls: int) -> bool:
        """Give a record up. False if a stop came before that was done."""
        record, failure = self._window.record(number), self._failing[number].failure
        is_kept = self._host.let_go(number, record, failure, calls)
        if is_kept:
            del self._failing[number]
        return is_kept

    def _collect_settled(self, upto: int) -> bool:
        """The records below the number `upto` are settled: keep their effects for the next report.
        The end of each batch is reported, because outputs drop the rows of whole batches [K12].
        False if a stop came before the rows were taken."""
        while self._batches and self._upto <= upto:
            batch = self._batches[0]
            end = min(upto, batch.end)
            for number in range(self._upto, end):
                context = self._contexts.pop(number, None)
                if context is not None:
                    self._kept_bytes -= context.kept_bytes
                    self._keep(context)
            if end > self._upto:
                self._position = batch.position_before(end)
            self._upto = end
            if end < batch.end:
                break
            self._position = batch.batch.last
            self._batches.popleft()
            if not self._report():
                return False
            self._host.done_with(batch.batch)
        return True

    def _keep(self, context: RecordCall) -> None:
        self._rows += context.kept or ()
        self._changes += context.changes or ()
        self._rows_bytes += context.kept_bytes

    def _report(self) -> bool:
        """Report effects and progress to the host. False if a stop came before the rows were taken:
        then the changes of the state are kept here, to be undone."""
        self._report_at = time.monotonic() + self._report_s
        if self._position is None or self._is_refused:
            return not self._is_refused
        rows, changes, position = self._rows, self._changes, self._position
        self._rows, self._rows_bytes, self._position = [], 0, None
        self._is_refused = not self._host.settled(position, rows, changes)
        if not self._is_refused:
            self._changes = []
        return not self._is_refused
