"""Single records in a test: calls of `process_record` that end in an order drawn from a seed.

A call of a `def` runs whole when it is its turn: races of threads within calls are not simulated.
Calls of an `async def` interleave at each `await`, on an event loop whose time is its own: a sleep
of an hour takes no time.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, TextIO

from kclrun.calling.records import CallTerms, RecordCalls, RecordHost, Records, Stop
from kclrun.calling.runners import Call, Ended, InlineRunner, LoopRunner, MakeThread, Runner
from kclrun.calling.tracebacks import describe
from kclrun.errors import ProcessorError, RetryLater
from kclrun.model.policies import Concurrency
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.processor import KeptRow, RecordContext, RecordProcessor, is_asynchronous
from kclrun.state.keyed import Undoable
from kclrun.testing.crashes import ends_test

# A processor that raises RetryLater each time would never end its test.
RESTS_MAX: Final = 100
# A call begins so much later than it could, on the loop's own clock: longer and shorter than usual
# pauses of user code.
_DELAYS_S: Final = (0.0, 0.001, 0.01, 0.1, 1.0)


class SeededRunner:
    """Calls of a `def`: the seed decides which of the running calls returns next."""

    is_inline = True

    def __init__(self, call: Callable[..., Any], chance: random.Random) -> None:
        self._inline = InlineRunner(call)
        self._waiting: list[Call] = []
        self._chance = chance

    def start(self, calls: Sequence[Call]) -> None:
        self._waiting += calls

    def take(self) -> list[Ended]:
        if self._waiting:
            self._inline.start([self._waiting.pop(self._chance.randrange(len(self._waiting)))])
        return self._inline.take()

    def cancel(self) -> None: ...

    def close(self) -> None: ...

    def write_coroutines(self, file: TextIO) -> None: ...


class _OwnTime(selectors.DefaultSelector):
    """Time passes only while the loop has nothing to do."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready


class _OwnTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.own = _OwnTime()
        super().__init__(self.own)

    def time(self) -> float:
        return self.own.now


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


class SeededLoopRunner(InlineLoopRunner):
    """Calls of an `async def`, in a time of its own: each begins after a pause that the seed
    decides."""

    def __init__(
        self, call: Callable[..., Any], timeout_s: float | None, chance: random.Random
    ) -> None:
        super().__init__(call, timeout_s, _OwnTimeLoop())
        self._chance = chance

    async def _one(self, record: Record, context: RecordContext) -> BaseException | None:
        await asyncio.sleep(self._chance.random() * self._chance.choice(_DELAYS_S))
        return await super()._one(record, context)


def _no_thread(_target: Callable[[], None], name: str) -> Any:
    raise AssertionError(f"a test has no thread {name}")


class Places(Protocol):
    """The rows, the state and the checkpoints of a test."""

    def settle(
        self,
        position: ExtendedSequenceNumber,
        rows: Sequence[KeptRow],
        changes: Sequence[Undoable],
    ) -> None: ...


class RecordKit(RecordHost):
    """The `RecordHost` of a test. Without a `seed` calls take their time, and one that returns
    first is done first. `given_up` and `note_error` are called with a record that is given up,
    and with the words of an error; `called` at each call, `returned` once it returned."""

    def __init__(
        self,
        terms: CallTerms,
        *,
        seed: int | None,
        places: Places,
        given_up: Callable[[Record], None],
        note_error: Callable[[str], None],
        called: Callable[[], None],
        returned: Callable[[], None],
        is_released: Callable[[], bool],
    ) -> None:
        self.position: ExtendedSequenceNumber | None = None
        self._places = places
        self._given_up = given_up
        self._note_error = note_error
        self._called = called
        self._returned = returned
        self._is_released = is_released
        self._now = Instant(0.0)
        self._rests = 0
        self._errors: dict[int, BaseException] = {}
        self._halt: BaseException | None = None
        self.calls = RecordCalls(
            terms,
            host=self,
            make_thread=_no_thread,
            make_runner=partial(self._runner, None if seed is None else random.Random(seed)),
            wait=self._wait,
            report_s=0.0,
        )

    def process(self, batch: Records) -> None:
        """Raises: the error for which the lease would halt."""
        self._errors.clear()
        self.calls.run(batch)
        if self._halt is not None:
            raise self._halt

    def _runner(
        self,
        chance: random.Random | None,
        processor: RecordProcessor,
        concurrency: Concurrency,
        _wake: Callable[[], None],
        _make_thread: MakeThread,
    ) -> Runner:
        if is_asynchronous(processor):
            waiting = partial(self._await, processor)
            if chance is None:
                return InlineLoopRunner(waiting, concurrency.timeout_s)
            return SeededLoopRunner(waiting, concurrency.timeout_s, chance)
        call = partial(self._call, processor)
        if concurrency.records == 1 or chance is None:
            return InlineRunner(call)
        return SeededRunner(call, chance)

    def _call(self, processor: RecordProcessor, record: Record, context: RecordContext) -> object:
        self._called()
        result = processor.process_record(record, context)
        self._returned()
        return result

    async def _await(
        self, processor: RecordProcessor, record: Record, context: RecordContext
    ) -> object:
        self._called()
        call: Any = processor.process_record(record, context)
        result: object = await call
        self._returned()
        return result

    # As `RecordHost`.

    def now(self) -> Instant:
        return self._now

    def stop(self) -> Stop | None:
        return Stop() if self._is_released() else None

    def raised(self, number: int, record: Record, error: BaseException) -> None:
        if ends_test(error):
            raise error
        self._errors[number] = error
        self._note_error(describe(error, [record]).error)

    def decided(self, number: int, pause_s: float | None) -> None:
        if pause_s is not None and isinstance(self._errors[number], RetryLater):
            self._rests += 1
            if self._rests > RESTS_MAX:
                raise self._errors[number]

    def let_go(self, number: int, record: Record, calls: int) -> bool:  # noqa: ARG002
        self._given_up(record)
        return True

    def halt(self, number: int, reason: str) -> None:
        error = self._errors[number]
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
