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
from typing import Any, Final, TextIO

from kclrun.calling.in_memory.records import InlineLoopRunner
from kclrun.calling.runners import Call, Ended, InlineRunner, Runner
from kclrun.model.policies import Concurrency
from kclrun.model.record import Record
from kclrun.processor import RecordContext

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


class SeededRunners:
    """Makes the runner of a test; `seed` decides about the order of its calls."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(
        self, call: Callable[..., Any], concurrency: Concurrency, *, is_async: bool
    ) -> Runner:
        chance = random.Random(self._seed)
        if is_async:
            return SeededLoopRunner(call, concurrency.timeout_s, chance)
        return InlineRunner(call) if concurrency.records == 1 else SeededRunner(call, chance)
