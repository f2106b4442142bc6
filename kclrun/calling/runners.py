"""Makes the calls of `process_record`: inline, on threads or on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any, Final, NamedTuple, Protocol, TextIO

from kclrun.methods import check_returned, is_asynchronous
from kclrun.model.policies import Concurrency
from kclrun.model.record import Record
from kclrun.processor import RecordContext, RecordProcessor

PROCESS_RECORD: Final = "process_record"
# `close` waits this long for the cancelled tasks of an event loop; tasks that still run then do not
# keep the process.
_CLOSE_WAIT_S: Final = 1.0

# The frames of one coroutine that are written: a deeper stack explains nothing more.
_FRAMES_MAX: Final = 50

MakeThread = Callable[[Callable[[], None], str], threading.Thread]
Call = tuple[int, Record, RecordContext]


class Ended(NamedTuple):
    """A call that is over. `error` is None if the call returned; `is_cancelled`: `cancel` ended
    it."""

    number: int
    error: BaseException | None
    is_cancelled: bool = False


class Runner(Protocol):
    """Makes the calls, and calls the `wake` of its constructor when one has ended. A runner that
    `is_inline` makes the calls within `start` or `take`."""

    is_inline: bool

    def start(self, calls: Sequence[Call]) -> None: ...

    def take(self) -> list[Ended]:
        """The calls that ended since the last `take`, in the order of their ends."""
        ...

    def cancel(self) -> None:
        """Cancel the calls that run, where that is possible."""
        ...

    def close(self) -> None:
        """No call will follow."""
        ...

    def write_coroutines(self, file: TextIO) -> None:
        """Write where coroutines wait: the stacks of the threads do not show it."""
        ...


def _called(call: Callable[..., Any], record: Record, context: RecordContext) -> None:
    result = call(record, context)
    if result is not None:
        check_returned(PROCESS_RECORD, result)


class InlineRunner:
    """One call after the other on the thread that starts it."""

    is_inline = True

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self._ended: list[Ended] = []

    def start(self, calls: Sequence[Call]) -> None:
        for number, record, context in calls:
            try:
                _called(self.call, record, context)
            except BaseException as error:  # noqa: BLE001 - user code
                self._ended.append(Ended(number, error))
            else:
                self._ended.append(Ended(number, None))

    def take(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    def cancel(self) -> None: ...

    def close(self) -> None: ...

    def write_coroutines(self, file: TextIO) -> None: ...


class ThreadRunner:
    """Makes each call on one of several threads. A thread cannot be cancelled: a call that does not
    return keeps the lease until the stall watch, or the end of the grace, ends the process."""

    is_inline = False

    def __init__(
        self, call: Callable[..., Any], wake: Callable[[], None], make_thread: MakeThread
    ) -> None:
        self._call = call
        self._wake = wake
        self._make_thread = make_thread
        # Bounded by `concurrency.records`: only so many calls are started and not taken.
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._ended: deque[Ended] = deque()
        self._threads: list[threading.Thread] = []
        self._running = 0

    def start(self, calls: Sequence[Call]) -> None:
        self._running += len(calls)
        while len(self._threads) < self._running:
            thread = self._make_thread(self._serve, f"record-{len(self._threads)}")
            self._threads.append(thread)
            thread.start()
        for call in calls:
            self._calls.put(call)

    def take(self) -> list[Ended]:
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        self._running -= len(ended)
        return ended

    def cancel(self) -> None: ...

    def close(self) -> None:
        for _ in self._threads:
            self._calls.put(None)

    def write_coroutines(self, file: TextIO) -> None: ...

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            number, record, context = call
            error: BaseException | None = None
            try:
                _called(self._call, record, context)
            except BaseException as raised:  # noqa: BLE001 - user code
                error = raised
            self._ended.append(Ended(number, error))
            self._wake()


class LoopRunner:
    """Makes each call as a task of one event loop, which has a thread of its own from the first
    call to `close`. So tasks that user code starts itself go on between its calls."""

    is_inline = False

    def __init__(
        self,
        call: Callable[..., Any],
        wake: Callable[[], None],
        make_thread: MakeThread,
        timeout_s: float | None = None,
    ) -> None:
        self._call = call
        self._wake = wake
        self._make_thread = make_thread
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: dict[int, tuple[Record, asyncio.Task[BaseException | None]]] = {}
        self._cancelled: set[int] = set()
        self._ended: deque[Ended] = deque()

    def start(self, calls: Sequence[Call]) -> None:
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = self._make_thread(partial(_run_loop, loop), "records")
            try:
                thread.start()
            except RuntimeError:  # this host has no thread left
                loop.close()
                raise
            self._loop, self._thread = loop, thread
        self._loop.call_soon_threadsafe(self._begin, calls)

    def take(self) -> list[Ended]:
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def cancel(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel_tasks)

    def close(self) -> None:
        """Cancel the tasks left on the loop, also those of user code, and close it."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_WAIT_S)
        self._loop = None

    def write_coroutines(self, file: TextIO) -> None:
        for record, task in tuple(self._tasks.values()):
            file.write(f"Coroutine of process_record for the record at {record.position}:\n")
            with contextlib.suppress(Exception):  # the coroutine runs on meanwhile
                frames = traceback.StackSummary.extract(_frames(task))
                file.writelines(frames.format())

    def _begin(self, calls: Sequence[Call]) -> None:
        assert self._loop is not None, "the loop runs"
        for number, record, context in calls:
            task = self._loop.create_task(self._one(record, context))
            self._tasks[number] = (record, task)
            task.add_done_callback(partial(self._over, number))

    async def _one(self, record: Record, context: RecordContext) -> BaseException | None:
        """The call. Its error is returned, because a SystemExit that is raised would end the
        loop."""
        try:
            if self._timeout_s is None:
                result = await self._call(record, context)
            else:
                result = await self._in_time(record, context, self._timeout_s)
            if result is not None:
                check_returned(PROCESS_RECORD, result)
        except BaseException as error:  # noqa: BLE001 - user code
            return error
        return None

    async def _in_time(self, record: Record, context: RecordContext, timeout_s: float) -> object:
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                return await self._call(record, context)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise TimeoutError(
                f"process_record did not return within {timeout_s:g} s (concurrency.timeout)"
            ) from error

    def _over(self, number: int, task: asyncio.Task[BaseException | None]) -> None:
        del self._tasks[number]
        error = asyncio.CancelledError() if task.cancelled() else task.result()
        is_asked = number in self._cancelled
        self._cancelled.discard(number)
        is_cancelled = is_asked and isinstance(error, asyncio.CancelledError)
        self._ended.append(Ended(number, error, is_cancelled))
        self._wake()

    def _cancel_tasks(self) -> None:
        for number, (_, task) in self._tasks.items():
            self._cancelled.add(number)
            task.cancel()


def _frames(task: asyncio.Task[Any]) -> Iterator[tuple[FrameType, int]]:
    """The frames in which a coroutine waits, the innermost last. `Task.get_stack` has only the
    outermost one."""
    waiting: Any = task.get_coro()
    for _ in range(_FRAMES_MAX):
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is None:
            return
        yield frame, frame.f_lineno
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_CLOSE_WAIT_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def runner_of(
    processor: RecordProcessor,
    concurrency: Concurrency,
    wake: Callable[[], None],
    make_thread: MakeThread,
) -> Runner:
    """The runner for the kind of the method: coroutines, one call at a time, or threads."""
    if is_asynchronous(processor):
        return LoopRunner(processor.process_record, wake, make_thread, concurrency.timeout_s)
    if concurrency.records == 1:
        return InlineRunner(processor.process_record)
    return ThreadRunner(processor.process_record, wake, make_thread)


MakeRunner = Callable[[RecordProcessor, Concurrency, Callable[[], None], MakeThread], Runner]
