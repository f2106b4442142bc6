"""One thread's turn of events: descriptors, timers, and words from other threads.

Holds: `Loop`. May not know: leases, processes, AWS. Rule: callbacks run one after another in the
thread that calls `turn`, so what they share needs no lock; only `post` may be called from outside.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import queue
import selectors
import time
from collections.abc import Callable
from typing import Final

from kclrun.model.time import Instant

__all__ = ["Loop", "Timer"]

_Callback = Callable[[], None]
# What waits longer than a turn's share waits for the next one, after descriptors were served.
_POSTED_MAX: Final = 256
_TIMERS_MAX: Final = 256
# Nothing waits so long for its instant: a guard against a clock that was suspended meanwhile.
_WAIT_S_MAX: Final = 1.0


class Timer:
    """A callback at an instant; `cancel` it before."""

    __slots__ = ("callback", "instant")

    def __init__(self, instant: Instant, callback: _Callback) -> None:
        self.instant = instant
        self.callback: _Callback | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """Made, turned and closed by one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[Instant, int, Timer]] = []
        self._order = itertools.count()
        self._posted: queue.SimpleQueue[_Callback] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.watch(self._wake_read, self._awoken)

    @staticmethod
    def now() -> Instant:
        return Instant(time.clock_gettime(time.CLOCK_BOOTTIME))

    def watch(self, fd: int, callback: _Callback) -> None:
        """Call back whenever `fd` is readable, until `unwatch`."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def unwatch(self, fd: int) -> None:
        """Before `fd` is closed. Unknown descriptors are none of our business."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def at(self, instant: Instant, callback: _Callback) -> Timer:
        timer = Timer(instant, callback)
        heapq.heappush(self._timers, (instant, next(self._order), timer))
        return timer

    def after(self, delay_s: float, callback: _Callback) -> Timer:
        return self.at(Instant(self.now() + delay_s), callback)

    def post(self, callback: _Callback) -> None:
        """From any thread: run it in the loop's thread, soon. After `close` it is never run."""
        self._posted.put(callback)
        # A full pipe has woken the loop already; a closed one has none to wake.
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"!")

    def turn(self, deadline: Instant | None = None) -> None:
        """Wait for something, until `deadline` at the latest, then run what is due."""
        for key, _ in self._selector.select(self._wait_s(deadline)):
            # A callback may have unwatched a descriptor that was ready as well.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        self._run_posted()
        self._run_timers()

    def close(self) -> None:
        self._selector.close()
        os.close(self._wake_read)
        write_fd, self._wake_write = self._wake_write, -1
        os.close(write_fd)

    def _wait_s(self, deadline: Instant | None) -> float:
        if not self._posted.empty():
            return 0.0
        due = [instant for instant in (deadline, self._next_timer()) if instant is not None]
        return max(0.0, min([instant - self.now() for instant in due] + [_WAIT_S_MAX]))

    def _next_timer(self) -> Instant | None:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def _awoken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 65536)

    def _run_posted(self) -> None:
        for _ in range(_POSTED_MAX):
            try:
                callback = self._posted.get_nowait()
            except queue.Empty:
                return
            callback()

    def _run_timers(self) -> None:
        now = self.now()
        for _ in range(_TIMERS_MAX):
            if not self._timers or self._timers[0][0] > now:
                return
            timer = heapq.heappop(self._timers)[2]
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
