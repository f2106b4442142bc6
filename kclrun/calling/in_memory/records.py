"""Single records in memory: the host of `process_record`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from kclrun.calling.batches import Raised
from kclrun.calling.in_memory.ends import RESTS_MAX, Ends
from kclrun.calling.records import CallTerms, Failing, RecordCalls, RecordHost, Records, Stop
from kclrun.calling.runners import Call, Ended, InlineRunner, LoopRunner, MakeThread, Runner
from kclrun.calling.tracebacks import Failure
from kclrun.errors import ProcessorError
from kclrun.methods import is_asynchronous
from kclrun.model.policies import Concurrency
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.processor import KeptRow, RecordContext, RecordProcessor
from kclrun.state.keyed import Undoable


class InlineLoopRunner(LoopRunner):
    """Calls of an `async def`, on this thread, in real time."""

    is_inline = True

    def __init__(
        self,
        call: Callable[..., Any],
        timeout_s: float | None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(call, lambda: None, _no_thread, timeout_s)
        self._own_loop = self._loop = loop or asyncio.new_event_loop()

    def start(self, calls: Sequence[Call]) -> None:
        self._begin(calls)

    def take(self) -> list[Ended]:
        if self._tasks and not self._ended:
            tasks = [task for _, task in self._tasks.values()]
            first = asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._own_loop.run_until_complete(first)
        return super().take()

    def close(self) -> None:
        left = asyncio.all_tasks(self._own_loop)
        for task in left:
            task.cancel()
        if left:
            self._own_loop.run_until_complete(asyncio.wait(left))
        self._own_loop.close()


def _no_thread(_target: Callable[[], None], name: str) -> Any:
    raise AssertionError(f"a run in memory has no thread {name}")


class MakeInline(Protocol):
    """Makes what runs the calls on the thread of the run."""

    def __call__(
        self, call: Callable[..., Any], concurrency: Concurrency, *, is_async: bool
    ) -> Runner: ...


def inline_runner(call: Callable[..., Any], concurrency: Concurrency, *, is_async: bool) -> Runner:
    """Calls take their time, and one that returns first is done first."""
    if is_async:
        return InlineLoopRunner(call, concurrency.timeout_s)
    return InlineRunner(call)


class Places(Protocol):
    """The rows, the state and the checkpoints of a run."""

    def settle(
        self,
        position: ExtendedSequenceNumber,
        rows: Sequence[KeptRow],
        changes: Sequence[Undoable],
    ) -> None: ...


class MemoryRecords(RecordHost):
    """The `RecordHost` of a run in memory. `make_runner` makes what runs the calls. `given_up` and
    `note_error` are called with a record that is given up, and with the words of an error; `called`
    at each call."""

    def __init__(
        self,
        terms: CallTerms,
        *,
        make_runner: MakeInline,
        places: Places,
        given_up: Callable[[Record], None],
        note_error: Callable[[str], None],
        called: Callable[[], None],
        is_released: Callable[[], bool],
        ends: Ends,
    ) -> None:
        self._make_inline = make_runner
        self._ends = ends
        self.position: ExtendedSequenceNumber | None = None
        self._places = places
        self._given_up = given_up
        self._note_error = note_error
        self._called = called
        self._is_released = is_released
        self._now = Instant(0.0)
        self._rests = 0
        self._halt: BaseException | None = None
        self.calls = RecordCalls(
            terms,
            host=self,
            make_thread=_no_thread,
            make_runner=self._runner,
            wait=self._wait,
            report_s=0.0,
        )

    def process(self, batch: Records) -> None:
        """Raises: the error for which the lease would halt."""
        self.calls.run(batch)
        if self._halt is not None:
            raise self._halt

    def _runner(
        self,
        processor: RecordProcessor,
        concurrency: Concurrency,
        _wake: Callable[[], None],
        _make_thread: MakeThread,
    ) -> Runner:
        is_async = is_asynchronous(processor)
        call = partial(self._await if is_async else self._call, processor)
        return self._make_inline(call, concurrency, is_async=is_async)

    def _call(self, processor: RecordProcessor, record: Record, context: RecordContext) -> object:
        self._called()
        result = processor.process_record(record, context)
        self._ends.returned()
        return result

    async def _await(
        self, processor: RecordProcessor, record: Record, context: RecordContext
    ) -> object:
        self._called()
        call: Any = processor.process_record(record, context)
        result: object = await call
        self._ends.returned()
        return result

    # As `RecordHost`.

    def now(self) -> Instant:
        return self._now

    def stop(self) -> Stop | None:
        return Stop() if self._is_released() else None

    def ends_run(self, error: BaseException) -> bool:
        return self._ends.are_reached_by(error)

    def raised(self, number: int, record: Record, raised: Raised) -> None:
        self._note_error(raised.failure.error)
        if raised.waits:
            self._rests += 1
            if self._rests > RESTS_MAX:
                raise raised.error

    def let_go(self, number: int, record: Record, failure: Failure, calls: int) -> bool:
        self._given_up(record)
        return True

    def halt(self, number: int, record: Record, failing: Failing, reason: str) -> None:
        error = failing.error
        self._halt = error
        if reason and str(error) != reason:
            self._halt = ProcessorError(reason)
            self._halt.__cause__ = error

    def settled(
        self,
        position: ExtendedSequenceNumber,
        rows: Sequence[KeptRow],
        changes: Sequence[Undoable],
    ) -> bool:
        self._places.settle(position, rows, changes)
        self.position = position
        return True

    def _wait(self, pause_s: float | None) -> None:
        assert pause_s is not None, "a call ends, or time passes"
        self._now = Instant(self._now + pause_s)
