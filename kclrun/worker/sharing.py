"""A process that several quiet leases share (`leases.per_process`).

It admits leases, runs each in threads of its own, and proves the end of each to the manager. It
does not know how a lease is consumed.
"""

from __future__ import annotations

import contextvars
import functools
import os
import random
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Hashable
from typing import Final, Protocol, TypeVar

from kclrun.errors import HostFailed
from kclrun.ipc import exit_codes
from kclrun.ipc.channel import Channel, NoMessage, NotSent, PeerGone
from kclrun.ipc.messages import Admit, Left, ToWorker, channel_of_worker
from kclrun.model.quotas import SHARD_READ_PAUSE_S
from kclrun.model.time import Instant
from kclrun.worker.delivery_queue import Turn

# From an instant and the pause wanted after it to the pause that is made.
RestS = Callable[[Instant, float], float]
Part = TypeVar("Part")

LEASE_THREAD: Final = "lease"
# A poll of the channel ends after this time and begins again.
_QUIET_S: Final = 3600.0
# Threads with shorter pauses do not wake together: they read a shard that is behind.
_PAUSE_TOGETHER_S: Final = 1.0
# A thread that has returned is listed by the kernel for some microseconds more.
_LOOKS: Final = 5
_LOOK_PAUSE_S: Final = 0.02


def daemon_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """A thread of a lease that has its process for itself."""
    return threading.Thread(target=target, name=name, daemon=True)


def rest_together_s(phase_s: float, since: Instant, pause_s: float) -> float:
    """The pause of a thread that has nothing to do: the idle threads of a process wake together.

    Then their code is in the caches. Idle leases of a shared process take two thirds of the CPU
    that they take one by one (`bin/bench idle`). A thread that is late does not shift the others.
    `phase_s` is drawn once a process, so that the processes of a host do not wake together.
    """
    if pause_s < _PAUSE_TOGETHER_S:
        return pause_s
    beats = (since + pause_s - phase_s) // pause_s
    rest_s = beats * pause_s + phase_s - since
    return rest_s if rest_s >= SHARD_READ_PAUSE_S else rest_s + pause_s


class LeaseThreads(Protocol):
    """The threads of one lease: in a process of its own, or beside other leases."""

    @property
    def rest_s(self) -> RestS:
        """How long a thread rests that has nothing to do."""
        ...

    def make_thread(self, target: Callable[[], None], name: str, /) -> threading.Thread:
        """A thread of the lease, not started yet."""
        ...

    def cpu_s(self) -> float:
        """The CPU seconds that the lease has used."""
        ...


class OwnThreads:
    """The threads of a lease that has its process for itself."""

    def __init__(self) -> None:
        self.rest_s: RestS = functools.partial(rest_together_s, random.random())

    def make_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        return daemon_thread(target, name)

    def cpu_s(self) -> float:
        return time.process_time()


_LEASE: contextvars.ContextVar[SharedLease | None] = contextvars.ContextVar("lease", default=None)


def shard_here() -> str:
    """The shard that the calling thread, or asyncio task, works for; empty if that is not known: in
    a thread that user code started itself."""
    lease = _LEASE.get()
    return "" if lease is None else lease.shard


class SharedLease:
    """One lease in a shared process: its threads, and their share of the CPU."""

    def __init__(self, process: SharedProcess) -> None:
        self.process = process
        self.rest_s = process.rest_s
        self.shard = ""
        self._threads: list[threading.Thread] = []
        # A thread's clock is known by a number that the kernel uses again after its end.
        self._clocks: set[int] = set()  # of threads that run
        self._ended_s = 0.0  # of those that have ended
        self._clocks_lock = threading.Lock()

    def make_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """A thread whose log lines name the shard, and whose CPU time counts for this lease."""

        def run() -> None:
            _LEASE.set(self)
            clock = time.pthread_getcpuclockid(threading.get_ident())
            with self._clocks_lock:
                self._clocks.add(clock)
            try:
                target()
            finally:
                with self._clocks_lock:
                    self._clocks.discard(clock)
                    self._ended_s += time.thread_time()

        thread = daemon_thread(run, name)
        self._threads.append(thread)
        self.process.own(thread)
        return thread

    def cpu_s(self) -> float:
        """CPU seconds of its threads, without those that user code started."""
        with self._clocks_lock:
            return self._ended_s + sum(map(time.clock_gettime, self._clocks))

    @property
    def may_write(self) -> bool:
        """Whether its lease thread runs, the only one that writes the row [P5]."""
        return any(thread.name == LEASE_THREAD and thread.is_alive() for thread in self._threads)


class SharedProcess:
    """The main thread admits leases until the manager closes the channel; then it waits for them.

    `serve` runs one lease to its end on the calling thread and returns its exit code. User code of
    one lease runs at a time (`turn`).

    `Left` proves the end of a lease: it is sent when no thread writes for the lease any more. If it
    cannot be sent, the process ends instead, and the pidfd proves the end of all its leases.
    """

    def __init__(
        self,
        channel: Channel[Left, ToWorker],
        serve: Callable[[Channel[Left, ToWorker], SharedLease], int],
    ) -> None:
        self.turn = Turn()
        self._own_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._own_threads_lock = threading.Lock()  # no reading while another thread adds
        self.own(threading.current_thread())
        self._channel = channel
        self._serve = serve
        self.rest_s: RestS = functools.partial(rest_together_s, random.random())
        self._serving: list[threading.Thread] = []
        self._parts: dict[Hashable, object] = {}
        self._parts_lock = threading.Lock()
        self._of_modules: set[int] | None = None

    def serve(self, fds: tuple[int, ...]) -> int:
        """Serve all leases; `fds` came with the first message. Returns the exit code."""
        self._admit(fds)
        while True:
            got = self._channel.receive_with_fds(_QUIET_S)
            if isinstance(got, PeerGone):
                break
            if not isinstance(got, NoMessage) and isinstance(got[0], Admit):
                self._admit(got[1])
        for thread in self._serving:
            thread.join()
        return exit_codes.DONE

    def own(self, thread: threading.Thread) -> None:
        """A thread of ours: one that runs when a lease has ended was not left by user code."""
        with self._own_threads_lock:
            self._own_threads.add(thread)

    def part(self, name: Hashable, make: Callable[[], Part]) -> Part:
        """A part that the leases share: made once, for the first lease."""
        with self._parts_lock:
            if name not in self._parts:
                self._parts[name] = make()
            found: Part = self._parts[name]  # type: ignore[assignment]  # made by this `make`
            return found

    def modules_loaded(self) -> None:
        """The processor's module is imported: threads that the import started belong to no
        lease."""
        if self._of_modules is None:
            self._of_modules = self._others()

    def _admit(self, fds: tuple[int, ...]) -> None:
        lease, channel = SharedLease(self), channel_of_worker(fds[0])
        thread = lease.make_thread(lambda: self._run(lease, channel), "deliver")
        try:
            thread.start()
        except RuntimeError:  # this host has no thread left: the other leases go on
            channel.send(Left(exit_codes.HOST))
            channel.close()
            return
        self._serving = [serving for serving in self._serving if serving.is_alive()] + [thread]

    def _run(self, lease: SharedLease, channel: Channel[Left, ToWorker]) -> None:
        try:
            code = self._serve(channel, lease)
            assert not lease.may_write, "a lease ended while its thread may write"
            if isinstance(channel.send(Left(code, self._remains())), NotSent):
                raise HostFailed("the kernel has no room for the message that a lease has ended")
            channel.close()
        except BaseException:  # noqa: BLE001 - the thread's edge: its end must not stay unproven
            traceback.print_exc()
            os._exit(exit_codes.BUG)

    def _remains(self) -> str:
        """The threads that user code left running, in words; empty without any. They cannot be
        ended, nor assigned to a lease."""
        for _ in range(_LOOKS):
            others = self._others() - (self._of_modules or set())
            if not others:
                return ""
            time.sleep(_LOOK_PAUSE_S)
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        named = sorted({names.get(other, "not Python's") for other in others})
        return f"threads ({', '.join(named)})"

    def _others(self) -> set[int]:
        """The kernel's numbers of all threads of this process that are not ours."""
        with self._own_threads_lock:
            ours = {thread.native_id for thread in self._own_threads}
        return {int(name) for name in os.listdir("/proc/self/task")} - ours  # names
