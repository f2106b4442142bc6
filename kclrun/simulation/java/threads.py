"""Threads of a JVM in virtual time: a generator that yields what it waits for.

Java's threads block, so their code reads from top to bottom; here a yield is where one blocks. What
is yielded is called with the way to go on. May not know: leases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from kclrun.simulation.machine import OsProcess

__all__ = ["Monitor", "Steps", "sleep", "start", "together"]

Result = TypeVar("Result")
GoOn = Callable[[Any], None]
Wait = Callable[[GoOn], None]
Steps = Generator[Wait, Any, Result]


def start(jvm: OsProcess, steps: Steps[object], ended: Callable[[], None] | None = None) -> None:
    """Run a thread from its first step; `ended` when it has returned."""

    def go_on(answer: Any) -> None:
        try:
            wait = steps.send(answer)
        except StopIteration:
            if ended is not None:
                ended()
            return
        wait(lambda answer: jvm.act(lambda: go_on(answer)))

    go_on(None)


def sleep(jvm: OsProcess, duration_s: float) -> Steps[None]:
    """For so long by the machine's clock."""
    pause_s = max(0.0, duration_s) / jvm.machine.clock.rate

    def wait(go_on: GoOn) -> None:
        jvm.after(pause_s, lambda: go_on(None))

    yield wait


def together(jvm: OsProcess, threads: Sequence[Steps[object]]) -> Steps[None]:
    """Run threads beside each other, and wait for all."""
    left = len(threads)

    def wait(go_on: GoOn) -> None:
        def ended() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                go_on(None)

        for steps in threads:
            start(jvm, steps, ended)

    if threads:
        yield wait


class Monitor:
    """`synchronized`: one thread at a time, the others wait in the order they came."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: deque[GoOn] = deque()

    def enter(self) -> Steps[None]:
        if self._is_held:
            yield self._waiting.append
        self._is_held = True

    def leave(self) -> None:
        if self._waiting:
            self._waiting.popleft()(None)
        else:
            self._is_held = False
