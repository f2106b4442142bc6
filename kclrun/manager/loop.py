"""The event loop of one thread: descriptors, timers, signals, and calls posted by other threads.

It does not know leases, processes or AWS.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import queue
import selectors
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final, TypeVar

from kclrun.errors import HostRefused, KclrunError, Unavailable, is_host_shortage
from kclrun.ipc.board import boottime
from kclrun.model.time import Instant

Result = TypeVar("Result")
# Renewals of 64 leases without a process, every 3.3 s, at 5 ms each keep a tenth of one thread
# busy; eight threads leave room for a slow scan and a burst of reads at a start.
_THREADS: Final = 8


class IoPool:
    """Runs jobs that wait on the network, on a few threads, so that the loop never waits.

    Jobs start in order of arrival, on `threads` threads. A job returns or raises; `post` brings
    either back as a call in the loop's thread. The threads are daemons: a request that hangs when
    the manager exits delays nothing.

    Raises: HostRefused if no thread can be started.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None], threads: int = _THREADS) -> None:
        self._post = post
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"kclrun-io-{number}", daemon=True)
            for number in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self.close()
            raise HostRefused(
                f"no thread can be started here: {error}. kclrun needs {threads} in its manager and"
                " three in each lease process: raise the limit of processes and threads (ulimit -u,"
                " the cgroup's pids.max, TasksMax=)"
            ) from error

    def run(
        self,
        job: Callable[[], Result],
        then: Callable[[Result], None],
        otherwise: Callable[[Exception], None],
    ) -> None:
        """Run `job` on a thread, then `then(result)` or `otherwise(error)` in the loop.

        A job that fails because this host is out of a resource, as the kernel or Python reports it,
        counts as Unavailable: the way to a service is blocked on this side, and may be free in a
        moment.
        """

        def work() -> None:
            try:
                result = job()
            except Exception as error:  # noqa: BLE001 - carried to the loop, which judges it
                failure = _named(error)
                self._post(lambda: otherwise(failure))
            else:
                self._post(lambda: then(result))

        self._jobs.put(work)

    def close(self, patience_s: float = 0.0) -> None:
        """Take no more jobs; wait at most `patience_s` for the jobs under way."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread.ident is None:  # it could not be started
                continue
            thread.join(patience_s / len(self._threads))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _named(error: Exception) -> Exception:
    if isinstance(error, KclrunError) or not is_host_shortage(error):
        return error
    return Unavailable(f"this host has no more to give: {type(error).__name__}: {error}")


# A pipe holds 4096 numbers; more signals than that carry no new information.
_READ_BYTES: Final = 4096
_LISTENED: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGCHLD,
)
_Handler = Callable[[int, FrameType | None], object] | int | None


class SignalPipe:
    """The signals that we listen to, in order of arrival. Main thread only, `open` to `close`.

    A handler runs between any two instructions, so it may take no lock, write no log and decide
    nothing. Here the handlers do nothing: Python itself writes the signal's number to the wakeup
    descriptor, a pipe, and the loop reads it. A SIGHUP that was ignored at the start (`nohup`)
    stays ignored.
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._former: dict[signal.Signals, _Handler] = {}
        self._former_wakeup_fd = -1

    def open(self) -> None:
        """Install our handlers. Raises: ValueError outside the main thread."""
        self._former_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in _LISTENED:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._former[number] = signal.signal(number, _only_enqueue)

    def fileno(self) -> int:
        return self._read_fd

    def take(self) -> tuple[signal.Signals, ...]:
        """The signals since the last call; a burst of one signal may count as fewer."""
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self._read_fd, _READ_BYTES)
            return tuple(signal.Signals(number) for number in numbers if number in _LISTENED)
        return ()

    def close(self) -> None:
        """Restore the former handlers."""
        for number, former in self._former.items():
            signal.signal(number, signal.SIG_DFL if former is None else former)
        if self._former:
            signal.set_wakeup_fd(self._former_wakeup_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)


def _only_enqueue(_number: int, _frame: object) -> None:
    """Python has already written the number to the wakeup descriptor."""


_Callback = Callable[[], None]
# Calls beyond these numbers wait for the next turn, so that descriptors are served in between.
_POSTED_MAX: Final = 256
_TIMERS_MAX: Final = 256
# The longest wait of a turn: a guard against a clock that was suspended meanwhile.
_WAIT_S_MAX: Final = 1.0


class LoopTimer:
    """A callback at an instant. `cancel` prevents the call."""

    __slots__ = ("callback", "instant")

    def __init__(self, instant: Instant, callback: _Callback) -> None:
        self.instant = instant
        self.callback: _Callback | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """The event loop: made, turned and closed by one thread.

    Callbacks run one after another in the thread that calls `turn`, so their shared data needs no
    lock. Only `post` may be called from another thread.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[Instant, int, LoopTimer]] = []
        self._order = itertools.count()
        self._posted: queue.SimpleQueue[_Callback] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.watch(self._wake_read, self._awoken)

    @staticmethod
    def now() -> Instant:
        return boottime()

    def watch(self, fd: int, callback: _Callback) -> None:
        """Call back whenever `fd` is readable, until `unwatch`."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def unwatch(self, fd: int) -> None:
        """Call it before `fd` is closed. An unknown descriptor is ignored."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def at(self, instant: Instant, callback: _Callback) -> LoopTimer:
        timer = LoopTimer(instant, callback)
        heapq.heappush(self._timers, (instant, next(self._order), timer))
        return timer

    def after(self, delay_s: float, callback: _Callback) -> LoopTimer:
        return self.at(Instant(self.now() + delay_s), callback)

    def post(self, callback: _Callback) -> None:
        """From any thread: run it in the loop's thread, soon. After `close` it is never run."""
        self._posted.put(callback)
        # A full pipe has woken the loop already; after `close` the pipe is closed.
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"!")

    def turn(self, deadline: Instant | None = None) -> None:
        """Wait for an event, until `deadline` at the latest, then run all due callbacks."""
        for key, _ in self._selector.select(self._wait_s(deadline)):
            # An earlier callback may have unwatched a descriptor that was ready as well.
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
