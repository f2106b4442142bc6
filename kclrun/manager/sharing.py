"""The shared processes of a manager (`leases.per_process`): which lease joins which, when one is
too busy for it, and when such a process has to end.

It does not know why a lease is started, nor what it reports.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from kclrun.errors import MalformedFrame
from kclrun.ipc.channel import Channel, NoMessage, NotSent
from kclrun.ipc.exit_codes import LOST, REPLACED
from kclrun.ipc.messages import Admit, Left, ToWorker, channel_to_worker
from kclrun.lifecycle.stall import STALL_PATIENCE_S
from kclrun.manager.forks import ForkRefused, ProcessForked
from kclrun.manager.lease_session import session_members
from kclrun.manager.loop import Loop
from kclrun.manager.ring_reader import Child
from kclrun.model.stream import StreamKey, stream_of
from kclrun.model.time import Instant
from kclrun.observe.logs import EventLog

# The process reads its channel within milliseconds, but has to import nothing before.
_AGAIN_AFTER_S: Final = 0.05
# A lease is too busy once its user code ran for more than its part of half of such a time: ten
# polls of an idle shard, so that one long call does not decide alone.
_WINDOW_S: Final = 10.0
_HALF: Final = 0.5
_LOOK_EVERY_S: Final = 1.0


@dataclass
class SharedProcess:
    """One process for several leases of one stream.

    `members` are its leases by incarnation, `waiting` those whose channel it has not got yet.
    `forced` are the signals sent to it, by whichever lease's fault. `is_closed`: no lease joins.
    `is_ending`: it has to exit soon, since user code of a lease that ended runs on in it.
    `cause`: the lease, in words, for which the process was forced to end.
    """

    stream: StreamKey
    channel: Channel[ToWorker, Left]
    members: dict[int, Child] = field(default_factory=dict)
    waiting: collections.deque[tuple[Child, socket.socket]] = field(
        default_factory=collections.deque
    )
    forced: list[signal.Signals] = field(default_factory=list)
    pid: int | None = None
    pidfd: int | None = None
    is_closed: bool = False
    is_ending: bool = False
    cause: str = ""

    def kill(self) -> None:
        """End it, by its pidfd; nothing happens once it has exited."""
        if self.pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


class _BusyWindow(msgspec.Struct):
    """How long user code of a lease had run at the beginning of a window of time."""

    began_instant: Instant
    busy_s: float


class SharingHost(Protocol):
    """The lease processes that share. Its methods are called in the loop's thread."""

    def request_fork(self, number: int, theirs: socket.socket) -> None:
        """Called to ask for a fork under this number. `theirs`, the end of its channel, is closed
        once it was sent."""
        ...

    def admitted(self, child: Child) -> None:
        """Called for a lease whose process has its channel."""
        ...

    def not_admitted(self, child: Child, reason: str) -> None:
        """Called for a lease that gets no process."""
        ...

    def left(self, child: Child, left: Left) -> None:
        """Called for a lease that ended while its process goes on, which proved that no thread
        writes for it any more."""
        ...

    def leave(self, child: Child, force_instant: Instant | None) -> None:
        """Called for a lease that has to leave its process. From `force_instant` on it may be
        forced to; None: never."""
        ...


class SharedProcesses:
    """All calls in the loop's thread. Rule: a lease is in one process, and stays there until it
    ends; a process is left, never joined again, once it is closed.

    `per_process` is the most leases in one; `patience_s` is how long a process may take to end in
    good order.
    """

    def __init__(
        self, host: SharingHost, per_process: int, *, patience_s: float, loop: Loop, log: EventLog
    ) -> None:
        self._host = host
        self._per_process = per_process
        self._patience_s = patience_s
        self._loop = loop
        self._log = log
        # By the number of their fork request: below 0, for incarnations are above.
        self._processes: dict[int, SharedProcess] = {}
        self._numbers = itertools.count(-1, -1)
        self._of: dict[int, SharedProcess] = {}
        self._windows: dict[int, _BusyWindow] = {}
        self._too_busy: set[int] = set()
        if per_process > 1:
            loop.after(_LOOK_EVERY_S, self._look)

    # Joining.

    def join(self, child: Child, theirs: socket.socket) -> None:
        """Let a lease join a process of its stream that has room, or a new one. Takes over
        `theirs`. Raises: OSError if no channel can be opened; the lease has joined none then."""
        shared = self._with_room(stream_of(child.key)) or self._fork(stream_of(child.key))
        shared.members[child.incarnation] = child
        self._of[child.incarnation] = shared
        child.forced = shared.forced
        shared.waiting.append((child, theirs))
        self._admit(shared)

    def _with_room(self, stream: StreamKey) -> SharedProcess | None:
        for shared in self._processes.values():
            has_room = not shared.is_closed and len(shared.members) < self._per_process
            if has_room and shared.stream == stream:
                return shared
        return None

    def _fork(self, stream: StreamKey) -> SharedProcess:
        ours, theirs = Channel.pair()
        number = next(self._numbers)
        shared = SharedProcess(stream, channel_to_worker(ours))
        self._processes[number] = shared
        self._host.request_fork(number, theirs)
        return shared

    def forked(self, report: ProcessForked) -> bool:
        """Whether the fork was asked for here; then its process admits the leases that wait."""
        shared = self._processes.get(report.request_id)
        if shared is None:
            return False
        shared.pid, shared.pidfd = report.pid, report.pidfd
        self._loop.watch(report.pidfd, lambda: self._died(report.request_id))
        self._admit(shared)
        return True

    def fork_refused(self, refusal: ForkRefused) -> bool:
        """Whether the fork was asked for here; then no lease that waits for it gets a process."""
        if refusal.request_id not in self._processes:
            return False
        self._remove(refusal.request_id, refusal.reason)
        return True

    def _admit(self, shared: SharedProcess) -> None:
        """Pass on the channels that wait; again later if the process has not read the former."""
        while shared.waiting and shared.pidfd is not None:
            child, theirs = shared.waiting[0]
            if isinstance(shared.channel.send(Admit(), (theirs.fileno(),)), NotSent):
                self._loop.after(_AGAIN_AFTER_S, lambda: self._admit(shared))
                return
            shared.waiting.popleft()
            theirs.close()
            try:
                child.pidfd = os.dup(shared.pidfd)
            except OSError as error:
                self._drop(child, f"no descriptor for it: {error.strerror}")
                continue
            child.pid = shared.pid
            self._loop.watch(child.channel.fileno(), functools.partial(self._read_channel, child))
            self._host.admitted(child)

    def _drop(self, child: Child, reason: str) -> None:
        """The process sees the end of the lease's channel: the lease begins nothing there."""
        self.forget(child)
        self._host.not_admitted(child, reason)

    # Leaving.

    def _read_channel(self, child: Child) -> None:
        """A lease has left in good order, or its process exits: then the pidfd proves the end."""
        try:
            got = child.channel.receive()
        except MalformedFrame as error:
            self._log.note("process_condemned", shard=child.key, error=str(error))
            self._loop.unwatch(child.channel.fileno())
            child.send_signal(signal.SIGKILL)
            return
        if isinstance(got, NoMessage):
            return
        self._loop.unwatch(child.channel.fileno())
        if not isinstance(got, Left):
            return
        shared = self._of[child.incarnation]
        self._host.left(child, got)
        remains = [got.remains] if got.remains else []
        if shared.pid is not None and (members := session_members(shared.pid)):
            remains.append(f"processes ({', '.join(map(str, members))})")
        if remains and not shared.is_ending:
            is_over = got.code in {LOST, REPLACED}
            patience_s = STALL_PATIENCE_S if is_over else self._patience_s
            self._end(shared, child, " and ".join(remains), patience_s)

    def _end(self, shared: SharedProcess, child: Child, remains: str, patience_s: float) -> None:
        """User code of an ended lease may run on, and only the end of its process ends that. The
        other leases finish their batches first [I8], but do not get long where the lease was lost:
        what it left may write beside the next owner."""
        self._log.note(
            "shared_process_ended", shard=child.key, process=shared.pid, reason=f"it left {remains}"
        )
        shared.is_closed = shared.is_ending = True
        shared.cause = f"{child.key} left {remains}"
        force_instant = Instant(self._loop.now() + patience_s)
        for member in tuple(shared.members.values()):
            self._host.leave(member, force_instant)
        self._loop.at(force_instant, shared.kill)

    def forget(self, child: Child) -> None:
        """Its end is proven. A process without leases is closed, and exits."""
        self._windows.pop(child.incarnation, None)
        self._too_busy.discard(child.incarnation)
        shared = self._of.pop(child.incarnation, None)
        if shared is None:
            return
        if child.channel.fileno() >= 0:
            self._loop.unwatch(child.channel.fileno())
        del shared.members[child.incarnation]
        if not shared.members and shared.pidfd is not None:
            shared.is_closed = True
            shared.channel.close()

    def _died(self, number: int) -> None:
        shared = self._processes[number]
        assert shared.pidfd is not None, "a pidfd that fired is one we hold"
        self._loop.unwatch(shared.pidfd)
        self._remove(number, "the process that it was to share has died")

    def _remove(self, number: int, reason: str) -> None:
        shared = self._processes.pop(number)
        shared.is_closed = True
        if shared.pidfd is not None:
            os.close(shared.pidfd)
            shared.pidfd = None
        shared.channel.close()
        waiting = tuple(shared.waiting)
        shared.waiting.clear()
        for child, theirs in waiting:
            theirs.close()
            self._drop(child, reason)

    # Looking.

    def _look(self) -> None:
        """Give a lease that is too busy a process of its own, at its next commit."""
        self._loop.after(_LOOK_EVERY_S, self._look)
        now = self._loop.now()
        for shared in self._processes.values():
            for child in tuple(shared.members.values()):
                share = self._busy_share(child, now)
                if share <= _HALF / self._per_process:
                    continue
                if len(shared.members) == 1:
                    shared.is_closed = True  # its process stays its own
                    continue
                if child.incarnation not in self._too_busy:
                    self._too_busy.add(child.incarnation)
                    reason = f"its user code ran for {share:.0%} of {_WINDOW_S:.0f} s"
                    self._log.note("lease_too_busy", shard=child.key, reason=reason)
                self._host.leave(child, None)

    def _busy_share(self, child: Child, now: Instant) -> float:
        """The share of the last window for which its user code ran; 0 before a window is over."""
        status = child.look()
        if status is None:
            return 0.0
        since = status.processing_since_instant
        busy_s = status.processing_s_total + (now - since if since else 0.0)
        window = self._windows.setdefault(child.incarnation, _BusyWindow(now, busy_s))
        passed_s = now - window.began_instant
        if passed_s < _WINDOW_S:
            return 0.0
        self._windows[child.incarnation] = _BusyWindow(now, busy_s)
        return max(0.0, busy_s - window.busy_s) / passed_s

    def neighbours(self, child: Child) -> Iterator[Child]:
        """The leases in the same process, and itself; only itself in a process of its own."""
        shared = self._of.get(child.incarnation)
        return iter((child,) if shared is None else tuple(shared.members.values()))

    def note_cause(self, child: Child, words: str) -> None:
        """For this lease its process is forced to end."""
        if (shared := self._of.get(child.incarnation)) is not None:
            shared.is_closed = True
            shared.cause = f"{child.key}: {words}"

    def cause_of(self, child: Child) -> str:
        """For which lease its process was forced to end, in words; empty if for none."""
        shared = self._of.get(child.incarnation)
        return "" if shared is None else shared.cause

    @property
    def empty(self) -> int:
        """Processes without leases that have not exited yet."""
        return sum(1 for process in self._processes.values() if not process.members)

    def close(self) -> None:
        """Release all resources. A process that still runs drains when its channels end."""
        for shared in self._processes.values():
            for child in shared.members.values():
                self._loop.unwatch(child.channel.fileno())
            for _, theirs in shared.waiting:
                theirs.close()
            if shared.pidfd is not None:
                self._loop.unwatch(shared.pidfd)
                os.close(shared.pidfd)
            shared.channel.close()
        self._processes.clear()
        self._of.clear()
