"""The calls of one processor, from records that came to effects that leave.

The thread of `RecordCalls.run` alone performs what the window decides; runners make the calls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TextIO

from kclrun.consuming.concurrency import Concurrency, RecordWindow, Settled
from kclrun.consuming.delivery import ErrorPolicy, host_fault
from kclrun.consuming.failures import Breaker, Halt, LetGo
from kclrun.model.record import Decoding, Record, RecordBatch
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant, WallTime
from kclrun.processor import Context, KeptRow, RecordContext, RecordProcessor, why_not_returned
from kclrun.record_calls.runners import (
    PROCESS_RECORD,
    Ended,
    InlineRunner,
    MakeRunner,
    MakeThread,
    runner_of,
)
from kclrun.state.keyed import LiveEntries, Undoable

# Effects and progress are passed on so often: a call a record would cost more than the record.
TELL_S: Final = 0.05
# ... or with so many bytes of them: a part of what an output holds before the lease waits (64 MiB).
TELL_BYTES: Final = 4 * 2**20


class Records(Protocol):
    """Records that arrived together; `last` is the position at which they end."""

    @property
    def records(self) -> Sequence[Record]: ...

    @property
    def last(self) -> ExtendedSequenceNumber: ...


class Stop(NamedTuple):
    """The calls are to end. `is_lost`: start none any more, cancel those that run."""

    is_lost: bool = False


class RecordHost(Protocol):
    """What surrounds the calls. All is called on the thread of `RecordCalls.run`.

    A host that inherits from it has no lease that could be lost, and no queue: nothing joins.
    """

    def now(self) -> Instant: ...

    def wall(self) -> WallTime:
        return WallTime(time.time())

    def stop(self) -> Stop | None:
        """Whether the calls are to end."""
        ...

    def may_start(self) -> bool:
        """Whether records may start now: the lease is proven ours [P7]. Else `wake` follows."""
        return True

    def more(self) -> Records | None:
        """Records behind those before that may join now."""
        return None

    def busy(self, since: Instant) -> None:  # noqa: ARG002
        """Since when the oldest call runs; 0 if none does."""
        return

    def raised(self, number: int, record: Record, error: BaseException) -> None:
        """A call raised; before it is decided what follows."""
        ...

    def decided(self, number: int, pause_s: float | None) -> None:
        """The call that raised is repeated after a pause, or is not repeated."""
        ...

    def recovered(self, number: int, calls: int) -> None:  # noqa: ARG002
        """A record is done whose calls raised before."""
        return

    def let_go(self, number: int, record: Record, calls: int) -> bool:
        """Keep its letter durably, or count it as skipped; False if that was called off."""
        ...

    def halt(self, number: int, reason: str) -> None:
        """Halt the lease. `reason` is empty: the error's own words are."""
        ...

    def settled(
        self,
        position: ExtendedSequenceNumber,
        rows: Sequence[KeptRow],
        changes: Sequence[Undoable],
    ) -> bool:
        """All records up to `position` are done; `rows` and `changes` of the state are theirs since
        the last call, in order. False if the rows could not be taken before a stop: the records
        count as not done."""
        ...

    def done_with(self, batch: Records) -> None:  # noqa: ARG002
        """All records of this batch are settled."""
        return


class _Batch(NamedTuple):
    """A batch in the window: its records have the numbers from `first` to before `end`; those that
    were done before have none."""

    batch: Records
    first: int
    end: int

    def position_before(self, number: int) -> ExtendedSequenceNumber:
        """The position of the record before this number, of the batch."""
        return self.batch.records[number - self.end - 1].position


class CallTerms(NamedTuple):
    """What the single records of one processor are called with, on either engine and in a test."""

    processor: RecordProcessor
    context: Context
    concurrency: Concurrency
    policy: ErrorPolicy
    decoding: Decoding | None


class RecordCalls:
    """The calls of one processor. `run` gives it records until all are settled.

    `wake` may be called from any thread: something changed that `run` waits for. `wait` waits for
    it, or for so many seconds. Rows and progress are passed on every `tell_s`, and at the end of a
    batch.
    """

    def __init__(
        self,
        terms: CallTerms,
        *,
        host: RecordHost,
        make_thread: MakeThread,
        make_runner: MakeRunner = runner_of,
        wait: Callable[[float | None], object] | None = None,
        tell_s: float = TELL_S,
    ) -> None:
        self._host = host
        self._context = context = terms.context
        self._entries = context._entries  # noqa: SLF001 - of the runtime's side of a context
        self._decoding = terms.decoding
        self._tell_s = tell_s
        self._concurrency = terms.concurrency
        self._policy = terms.policy
        self._breaker = Breaker(terms.policy.limit)
        self.changed = threading.Event()
        self.wake = self.changed.set
        self._wait = wait or self.changed.wait
        self._runner = make_runner(terms.processor, terms.concurrency, self.wake, make_thread)
        self.is_running = False
        self._window = RecordWindow(terms.concurrency, terms.policy, self._breaker)
        # Of the window: contexts of records that are not settled, when the calls under way began.
        self._contexts: dict[int, RecordContext] = {}
        self._began: dict[int, Instant] = {}
        self._batches: deque[_Batch] = deque()
        self._upto = 0
        self._kept_bytes = 0
        self._cancel_instant: Instant | None = None
        self._is_cancelled = False
        # Settled and not passed on yet.
        self._rows: list[KeptRow] = []
        self._changes: list[Undoable] = []
        self._rows_bytes = 0
        self._position: ExtendedSequenceNumber | None = None
        self._tell_at = 0.0
        self._is_called_off = False

    def close(self) -> None:
        """No call will follow."""
        self._runner.close()

    def tell_stacks(self, file: TextIO) -> None:
        """Where coroutines stand; any thread."""
        self._runner.tell_stacks(file)

    def run(self, batch: Records) -> bool:
        """Process these records, and those that the host lets join them. False if some are left: a
        stop, or the lease is halted."""
        self.is_running = True
        self._tell_at = time.monotonic() + self._tell_s
        self._rows, self._changes, self._rows_bytes, self._position = [], [], 0, None
        self._contexts = {}
        self._is_called_off = False
        if self._entries is not None:
            self._entries.is_of_records = True
        try:
            done, error = 0, None
            RecordBatch(batch.records, decoding=self._decoding)
            if isinstance(self._runner, InlineRunner):
                done, error = self._run_in_order(self._runner.call, batch.records)
            return self._run_window(batch, done, error)
        finally:
            self.is_running = False
            if self._entries is not None:
                self._take_back_unsettled(self._entries)

    def _take_back(self, context: RecordContext) -> None:
        """The call raised, or its record is left: nothing that it changed remains."""
        context.is_open = False
        if self._entries is not None and context.changes:
            self._entries.undo_all(context.changes)

    def _take_back_unsettled(self, entries: LiveEntries) -> None:
        """What records changed that are left to the next owner is gone, the last change first: the
        state is as of the last settled record for the calls that follow."""
        for _, context in sorted(self._contexts.items(), reverse=True):
            self._take_back(context)
        entries.undo_all(self._changes)
        self._changes = []
        entries.is_of_records = False

    def _run_in_order(
        self, call: Callable[..., Any], records: Sequence[Record]
    ) -> tuple[int, BaseException | None]:
        """The fast way for one call after the other: until one raises, or something changed.
        Returns how many records are done, and what the next one raised."""
        of, is_changed, monotonic = self._context, self.changed.is_set, time.monotonic
        self._host.busy(self._host.now())
        tell_at, done = self._tell_at, 0
        for record in records:
            if is_changed():
                self.changed.clear()
                if self._host.stop() is not None:
                    break
            context = RecordContext(of, record)
            try:
                result = call(record, context)
                if result is not None:
                    raise why_not_returned(PROCESS_RECORD, result)
            except BaseException as error:  # noqa: BLE001 - user code
                self._take_back(context)
                self._position = records[done - 1].position if done else None
                return done, error
            context.is_open = False
            done += 1
            if context.kept is not None or context.changes is not None:
                self._keep(context)
                if self._rows_bytes >= TELL_BYTES:
                    tell_at = 0.0
            if monotonic() >= tell_at:
                self._position = record.position
                if not self._tell() or not self._host.may_start():
                    break
                self._host.busy(self._host.now())
                tell_at = self._tell_at
        self._position = records[done - 1].position if done else None
        return done, None

    def _run_window(self, batch: Records, done: int, raised: BaseException | None) -> bool:
        """The calls as the window decides. The first `done` records are done already, and the call
        of the next one `raised`, if that is set."""
        host, runner = self._host, self._runner
        window = self._window = RecordWindow(self._concurrency, self._policy, self._breaker)
        self._contexts, self._began, self._batches = {}, {}, deque()
        self._upto = self._kept_bytes = 0
        self._cancel_instant, self._is_cancelled = None, False
        self._admit(batch, done)
        if raised is not None:
            for number in window.starts(host.now()):
                record = window.record(number)
                self._contexts[number] = RecordContext(self._context, record)
                self._ended(Ended(number, raised))
        while True:
            self.changed.clear()
            for ended in runner.take():
                self._ended(ended)
            if not self._settle():
                window.stop_at_once()  # a stop called it off
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
        return self._tell() and not window.unsettled

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
            context = self._contexts[number] = RecordContext(self._context, record)
            self._began[number] = now
            RecordBatch((record,), decoding=self._decoding)  # it decodes anew
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
        """Until something is due by time; None without such a thing."""
        due = [] if self._position is None else [self._tell_at - time.monotonic()]
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
            if raised:
                self._host.recovered(number, raised + 1)
            return
        del self._contexts[number]  # its rows go with it
        self._take_back(context)
        if ended.is_cancelled:
            window.abandoned(number)
            return
        error = window.checked(number, error)
        self._host.raised(number, window.record(number), error)
        pause_s = window.raised(
            number,
            error,
            self._host.now(),
            self._host.wall(),
            is_host_fault=host_fault(error) is not None,
        )
        self._host.decided(number, pause_s)

    def _settle(self) -> bool:
        """Perform what the window decides. False if a stop called it off."""
        window, host = self._window, self._host
        while (step := window.next_step(host.now())) is not None:
            match step:
                case Settled(upto):
                    if not self._pass_over(upto):
                        return False
                case LetGo(number, calls):
                    if not self._tell() or not host.let_go(number, window.record(number), calls):
                        return False
                    window.let_go(number)
                case Halt(reason):
                    if not self._tell():
                        return False
                    host.halt(window.first, reason)
        is_due = time.monotonic() >= self._tell_at or self._rows_bytes >= TELL_BYTES
        return self._pass_over(self._upto) and (not is_due or self._tell())

    def _pass_over(self, upto: int) -> bool:
        """The records below `upto` are settled. A batch is reported up to its own end: outputs
        drop the rows of whole batches [K12]. False if a stop called it off."""
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
            if not self._tell():
                return False
            self._host.done_with(batch.batch)
        return True

    def _keep(self, context: RecordContext) -> None:
        self._rows += context.kept or ()
        self._changes += context.changes or ()
        self._rows_bytes += context.kept_bytes

    def _tell(self) -> bool:
        """Pass effects and progress on. False if the rows could not be taken before a stop: the
        changes of the state are kept, to take them back."""
        self._tell_at = time.monotonic() + self._tell_s
        if self._position is None or self._is_called_off:
            return not self._is_called_off
        rows, changes, position = self._rows, self._changes, self._position
        self._rows, self._rows_bytes, self._position = [], 0, None
        self._is_called_off = not self._host.settled(position, rows, changes)
        if not self._is_called_off:
            self._changes = []
        return not self._is_called_off
