"""The lease processes of this manager: starts them, sends to them, reads their reports, proves
their exit.

It does not know why a process is started or drained.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import os
import signal
import socket
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Final, Protocol

import msgspec
import psutil

from kclrun.errors import MalformedFrame
from kclrun.ipc import messages
from kclrun.ipc.board import Segment, StartSpec, StatusSlot
from kclrun.ipc.channel import Channel, Doorbell, NotSent
from kclrun.ipc.ring import EventRing
from kclrun.leases.commands import StartProcess
from kclrun.leases.events import Event, ProcessExited, ProcessStarted, StartFailed
from kclrun.lifecycle.stopping import UNKILLABLE_AFTER_S, latest_fence, next_force
from kclrun.manager.forks import ForkRefused, Forks, Launcher, ProcessForked
from kclrun.manager.lease_session import end_session, is_unreaped
from kclrun.manager.loop import Loop
from kclrun.manager.ring_reader import Child, RingReader, exit_words, waiting_since
from kclrun.manager.sharing import SharedProcesses
from kclrun.model.lease import LeaseKey
from kclrun.model.time import Instant
from kclrun.observe.logs import EventLog


def reap_adopted(spared: AbstractSet[int]) -> tuple[int, ...] | None:
    """Reap orphaned children that have exited, except those in `spared`; the pids reaped.

    As process 1 of a container, or as the subreaper that we declare ourselves, we inherit the
    processes that programs of user code leave behind. Only children of another session are orphans:
    lease processes and the launcher have sessions of their own, and all processes that they start
    are in those. A child that the program around us started itself is for that program to reap.

    None if /proc could not be read to its end, because this process has no descriptor or memory
    left: some orphans may still wait, and only another call reaps them.
    """
    reaped = []
    session = os.getsid(0)
    try:
        for child in psutil.Process().children():
            if child.pid in spared or not _is_exited_orphan(child, session):
                continue
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(child.pid, os.WNOHANG)[0]:
                    reaped.append(child.pid)
    except (psutil.Error, OSError):
        return None
    return tuple(reaped)


def _is_exited_orphan(child: psutil.Process, session: int) -> bool:
    try:
        return child.status() == psutil.STATUS_ZOMBIE and os.getsid(child.pid) != session
    except (psutil.Error, ProcessLookupError):
        return False


class ProcessSlots:
    """The free places of a segment, the lowest first, so that few pages are ever written.

    A place is reused only once the exit of its process is proven. It is cleared then.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._free = list(range(segment.places))

    def take(self) -> tuple[int, StatusSlot, EventRing] | None:
        """A cleared place with its slot and ring, or None if all are taken."""
        if not self._free:
            return None
        place = heapq.heappop(self._free)
        self._segment.clear(place)
        return place, self._segment.slot(place), self._segment.ring(place)

    def give_back(self, place: int) -> None:
        """Free a place. The exit of its process is proven."""
        heapq.heappush(self._free, place)


# The launcher reports the exit status within a millisecond after the pidfd fires. A machine without
# CPU or memory to spare is late, and there the status names the reason of the death. Without a
# launcher the status may never come.
_STATUS_PATIENCE_S: Final = 1.0
_STATUS_PATIENCE_ALONE_S: Final = 0.1
_RESEND_AFTER_S: Final = 0.05
_ENDS: Final = "this manager ends all its processes"


class Specify(Protocol):
    """Makes the start command of a process in a place."""

    def __call__(self, start: StartProcess, place: int, incarnation: int) -> StartSpec: ...


Departed = Callable[[Child], None]
Tried = Callable[[ForkRefused | None], None]


class LeaseProcesses:
    """All calls in the loop's thread. `deliver` takes events; `departed` gets each exited child.

    An exit is reported only after the pidfd proved it and the ring was emptied. The exit of a
    process that no signal ends is reported after the latest fence that it could reach. A start
    command is sent only to a process whose pidfd we hold [P5].

    A process that reported its end and does not exit within `exit_patience_s` is forced to.
    With `per_process` above 1 several leases share a process: what is sent, read and forced is of
    one lease all the same, but a signal ends the process for all of them.
    `failover_s` is the longest failover that a lease process may have received. `lock_fd` is our
    descriptor of the lock file: each lease process opens the same file through it, even if the file
    lost its name.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        places: int,
        specify: Specify,
        loop: Loop,
        log: EventLog,
        deliver: Callable[[Event], None],
        departed: Departed,
        exit_patience_s: float,
        failover_s: float,
        lock_fd: int | None = None,
        per_process: int = 1,
    ) -> None:
        self._forks = Forks(
            launcher,
            loop=loop,
            log=log,
            forked=self._forked,
            refused=self._refused,
            exited=self._exited,
            answer_wait_s=failover_s,
        )
        self._trials: dict[int, Tried] = {}
        self._specify = specify
        self._loop = loop
        self._log = log
        self._deliver = deliver
        self._departed = departed
        self._segment = Segment.create(places)
        self._places = ProcessSlots(self._segment)
        self._doorbell = Doorbell.create()
        self._ring_reader = RingReader(log)
        self._children: dict[int, Child] = {}
        self._incarnations = 0
        self._exit_patience_s = exit_patience_s
        self._failover_s = failover_s
        self._lock_fds = () if lock_fd is None else (lock_fd,)
        self._is_closing = False
        self._unbegun: set[int] = set()  # pidfds of processes that came after `kill_all`
        self._per_process = per_process
        self._sharing = SharedProcesses(
            per_process,
            patience_s=exit_patience_s,
            loop=loop,
            log=log,
            request=self._request,
            admitted=self._begin,
            refused=self._not_started,
            left=self._left,
            leave=self._restart,
        )
        # Whether a process that was asked to drain had to be killed.
        self.has_forced = False
        loop.watch(self._doorbell.fileno(), self._rung)

    # Starting.

    def open(self) -> None:
        """Start the launcher; starts of processes fail until it runs."""
        self._forks.open()

    def start(self, command: StartProcess) -> None:
        """Request a process. The answer is ProcessStarted or StartFailed."""
        place = self._places.take()
        if place is None:
            self._deliver(StartFailed(command.key, "all places for lease processes are taken"))
            return
        number, slot, ring = place
        try:
            ours, theirs = Channel.pair()
        except OSError as error:
            self._places.give_back(number)
            reason = f"this manager cannot open a channel: {error.strerror}"
            self._deliver(StartFailed(command.key, reason))
            return
        self._incarnations += 1
        child = Child(
            start=command,
            incarnation=self._incarnations,
            place=number,
            slot=slot,
            ring=ring,
            channel=messages.channel_to_worker(ours),
            is_sharing=self._per_process > 1 and not command.is_alone,
        )
        self._children[child.incarnation] = child
        if not child.is_sharing:
            self._request(child.incarnation, theirs)
            return
        try:
            self._sharing.join(child, theirs)
        except OSError as error:
            theirs.close()
            self._not_started(child, f"this manager cannot open a channel: {error.strerror}")

    def _request(self, number: int, theirs: socket.socket) -> None:
        self._forks.request(number, (self._segment.fd, self._doorbell.write_fd), theirs)

    def _forked(self, report: ProcessForked) -> None:
        tried = self._trials.pop(report.request_id, None)
        if tried is not None:
            tried(None)
        if not self._is_closing and self._sharing.forked(report):
            return
        child = self._children.get(report.request_id)
        if self._is_closing:
            self._end_unbegun(report, child)
            return
        if child is None:
            # It gets no start command: it sees the end of its channel and exits unclaimed.
            os.close(report.pidfd)
            return
        child.pid, child.pidfd = report.pid, report.pidfd
        self._begin(child)

    def _end_unbegun(self, report: ProcessForked, child: Child | None) -> None:
        """It was forked after all processes were to end, and has begun nothing: end it, too. It
        counts until its death is proven."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(report.pidfd, signal.SIGKILL)

        def died() -> None:
            self._loop.unwatch(report.pidfd)
            self._unbegun.discard(report.pidfd)
            os.close(report.pidfd)
            if child is not None and child.incarnation in self._children:
                self._not_started(child, _ENDS)

        if child is None:
            os.close(report.pidfd)
            self._sharing.fork_refused(ForkRefused(report.request_id, _ENDS))
        else:
            self._unbegun.add(report.pidfd)
            self._loop.watch(report.pidfd, died)

    def _begin(self, child: Child) -> None:
        """Its process runs: send the start command."""
        assert child.pidfd is not None, "a process that runs is one whose pidfd we hold"
        assert child.pid is not None, "a pidfd comes with its pid"
        self._loop.watch(child.pidfd, lambda: self._pidfd_fired(child))
        # Not earlier: the start command contains the values broadcast since the request.
        spec = self._specify(child.start, child.place, child.incarnation)
        trial = self._ring_reader.row_trials.get(child.key)
        begin = messages.Begin(msgspec.structs.replace(spec, trial=trial))
        self._send(child, begin, self._lock_fds)
        self._deliver(ProcessStarted(child.key, child.pid))
        if child.drain_reason is not None:
            self._send_drain(child)

    def _refused(self, refusal: ForkRefused) -> None:
        tried = self._trials.pop(refusal.request_id, None)
        if tried is not None:
            tried(refusal)
        child = self._children.get(refusal.request_id)
        if child is not None:
            self._not_started(child, refusal.reason)
        else:
            self._sharing.fork_refused(refusal)

    def _not_started(self, child: Child, reason: str) -> None:
        del self._children[child.incarnation]
        child.channel.close()
        self._places.give_back(child.place)
        self._deliver(StartFailed(child.key, reason))

    def try_start(self, tried: Tried) -> None:
        """Fork one process as a trial: it gets no start command, and exits. `tried` is called with
        None, or with the refusal. Raises: OSError where no channel can be opened."""
        ours, theirs = Channel.pair()
        ours.close()
        self._incarnations += 1
        self._trials[self._incarnations] = tried
        self._request(self._incarnations, theirs)

    # Sending.

    def drain(self, key: LeaseKey, reason: str, force_instant: Instant) -> None:
        """Ask the process of a lease to finish; from `force_instant` on it is forced to."""
        for child in self._of(key):
            child.drain_reason = reason
            self.force_from(child, force_instant)
            if child.pid is not None:
                self._send_drain(child)

    def hurry(self, force_instant: Instant) -> None:
        """Bring the end of patience forward for all processes, also those not asked to drain."""
        for child in self._children.values():
            self.force_from(child, force_instant)

    def force_from(self, child: Child, force_instant: Instant) -> None:
        """Force this process from `force_instant` on, unless it is to be forced sooner."""
        before = child.force_instant
        child.force_instant = min(before, force_instant) if before is not None else force_instant
        self._loop.at(child.force_instant, self.force)

    def force(self) -> None:
        """Force processes whose time is over: first a dump of their stacks, then the end."""
        for child in tuple(self._children.values()):
            number, due = next_force(child.force_instant, child.forced)
            if number is None or due is None or child.has_exited or child.pidfd is None:
                continue
            if self._loop.now() < due:
                self._loop.at(due, self.force)
                continue
            if child.stall is None:  # else the watchdog logs it
                self._log.note("process_killed", shard=child.key, signal=number.name)
            self.has_forced = self.has_forced or child.drain_reason is not None
            child.send_signal(number)
            self._loop.after(0.0, self.force)
            if number is signal.SIGKILL:
                for neighbour in self._sharing.neighbours(child):
                    self._loop.after(
                        UNKILLABLE_AFTER_S, functools.partial(self._write_off, neighbour)
                    )

    def _write_off(self, child: Child) -> None:
        """KILL does not end it: report its exit once it can start no batch any more [P5]."""
        if child.has_exited or child.incarnation not in self._children:
            return
        now = self._loop.now()
        fence_instant = latest_fence(
            child.slot.last_send_instant(),
            expires_instant=child.start.expires_instant,
            failover_s=self._failover_s,
            now=now,
        )
        if now < fence_instant:
            self._loop.at(fence_instant, lambda: self._write_off(child))
            return
        assert child.pid is not None, "only a process with a pid is sent signals"
        child.is_written_off = True
        self._log.note("process_unkillable", shard=child.key, process=child.pid)
        self._deliver(
            ProcessExited(
                child.key,
                child.pid,
                "no signal ends it, and its fence has passed",
                is_shared=child.is_sharing,
            )
        )

    def kill_all(self) -> None:
        """End every process now and start no other; exits are reported as usual."""
        self._is_closing = True
        for child in self._children.values():
            child.send_signal(signal.SIGKILL)

    def end_stalled(self, child: Child, stall: str, force_instant: Instant) -> None:
        """End a stalled process: its stacks to stderr, a drain message, then force.

        The drain message replaces TERM, which lease processes ignore. A process that can still read
        it checkpoints its processed records, so no record comes twice.
        """
        child.stall = stall
        self._sharing.note_cause(child, stall)
        self._send(child, messages.DumpStacks())
        self._send(child, messages.Drain(stall, max(0.0, force_instant - self._loop.now())))
        self.force_from(child, force_instant)

    def broadcast(
        self, message: messages.RenewCredentials | messages.FailoverChanged | messages.OthersInSight
    ) -> None:
        """Send to all that run. Processes still being forked get it in their start command."""
        for child in self._children.values():
            if child.pid is not None:
                self._send(child, message)

    def _send_drain(self, child: Child) -> None:
        left_s = max(0.0, (child.force_instant or self._loop.now()) - self._loop.now())
        self._send(child, messages.Drain(child.drain_reason or "", left_s))

    def _send(self, child: Child, message: messages.ToWorker, fds: tuple[int, ...] = ()) -> None:
        """Send now, or in order once the process reads again. The pidfd reports a process that
        exited."""
        is_first = not child.unsent
        child.unsent[type(message)] = message, fds
        if is_first:
            self._flush(child)

    def _flush(self, child: Child) -> None:
        while child.unsent and not child.has_exited:
            kind, (message, fds) = next(iter(child.unsent.items()))
            if isinstance(child.channel.send(message, fds), NotSent):
                self._loop.after(_RESEND_AFTER_S, lambda: self._flush(child))
                return
            del child.unsent[kind]

    # Receiving.

    def _rung(self) -> None:
        """Answer the doorbell before the rings are read, so that a later press is not missed."""
        self._doorbell.answer()
        for child in tuple(self._children.values()):
            if child.pid is not None and not child.has_exited and not child.is_written_off:
                self._read_ring(child)

    def _read_ring(self, child: Child) -> None:
        try:
            events = self._ring_reader.read(child)
        except MalformedFrame as error:
            self._log.note("process_condemned", shard=child.key, error=str(error))
            self._sharing.note_cause(child, "it wrote invalid data to its manager")
            child.send_signal(signal.SIGKILL)
            return
        if child.has_reported_end and child.force_instant is None:
            self.force_from(child, Instant(self._loop.now() + self._exit_patience_s))
        for event in events:
            self._deliver(event)

    # Exits.

    def _exited(self, report: messages.Exited) -> None:
        """The launcher reaped a process; its status may come before its pidfd fires, or after."""
        for child in tuple(self._children.values()):
            if child.pid == report.pid and child.status is None:
                child.status = report.status
                if child.has_exited:
                    self._note_exit(child)

    def _pidfd_fired(self, child: Child) -> None:
        """The exit is proven. The exit status comes from the launcher, or from us as its reaper."""
        pid, pidfd = child.pid, child.pidfd
        assert pidfd is not None, "a pidfd that fired is one we hold"
        assert pid is not None, "a pidfd comes with its pid"
        self._loop.unwatch(pidfd)
        child.has_exited = True
        if child.status is None:
            # The launcher ends a session before it reaps its leader. Without a launcher, the
            # processes that user code started end here, before the next start.
            end_session(pid, lambda: is_unreaped(pidfd))
            status = _reaped(pidfd)
            for neighbour in self._sharing.neighbours(child):
                neighbour.status = neighbour.status if status is None else status
        if child.status is not None:
            self._note_exit(child)
        else:
            has_launcher = self._forks.has_launcher
            patience_s = _STATUS_PATIENCE_S if has_launcher else _STATUS_PATIENCE_ALONE_S
            self._loop.after(patience_s, lambda: self._note_exit(child))

    def _left(self, child: Child, left: messages.Left) -> None:
        """It ended in a shared process, which proved that no thread writes for it any more."""
        assert child.pidfd is not None, "only an admitted lease can leave"
        self._loop.unwatch(child.pidfd)
        child.has_exited = child.has_left = True
        child.status = left.code << 8
        self._note_exit(child)

    def _restart(self, child: Child, force_instant: Instant | None) -> None:
        """Ask a lease to checkpoint and to leave the process that it shares."""
        if child.drain_reason is None and child.pid is not None:
            self._send(child, messages.Restart())
        if force_instant is not None:
            self.force_from(child, force_instant)

    def _note_exit(self, child: Child) -> None:
        if self._children.pop(child.incarnation, None) is None:
            return
        assert child.pidfd is not None, "only a process whose pidfd we held is waited for"
        assert child.pid is not None, "a pidfd comes with its pid"
        for event in self._ring_reader.read_last(child):
            if not child.is_written_off:  # another process has its lease by now
                self._deliver(event)
        child.look()
        os.close(child.pidfd)
        child.pidfd = None
        cause = self._sharing.cause_of(child)
        self._sharing.forget(child)
        child.channel.close()
        self._departed(child)
        self._places.give_back(child.place)
        words = exit_words(child.status, child.forced, is_vouched=child.has_reported_end)
        if child.stall is not None:
            words = f"{child.stall}, so its manager ended it; {words}"
        elif cause and not child.has_left:
            words = f"it shared its process with {cause}; {words}"
        self._log.note("process_exited", shard=child.key, process=child.pid, reason=words)
        if not child.is_written_off:
            since = waiting_since(child.last_status)
            has_shared = child.is_sharing and not child.has_left
            self._deliver(ProcessExited(child.key, child.pid, words, since, is_shared=has_shared))

    # State.

    def living(self) -> Iterator[Child]:
        """The processes that run, as far as we know, without those written off."""
        return (
            child
            for child in tuple(self._children.values())
            if child.pid is not None and not child.has_exited and not child.is_written_off
        )

    @property
    def pids(self) -> frozenset[int]:
        """The pids of our lease processes and of the launcher: their exits are handled here."""
        own = {child.pid for child in self._children.values()} | {self._forks.launcher_pid}
        return frozenset(pid for pid in own if pid is not None)

    @property
    def has_launcher(self) -> bool:
        """Whether processes can be started now."""
        return self._forks.has_launcher

    def _of(self, key: LeaseKey) -> list[Child]:
        return [child for child in self._children.values() if child.key == key]

    def __len__(self) -> int:
        """Processes requested or alive, except those that never exit."""
        leases = sum(not child.is_written_off for child in self._children.values())
        return leases + self._sharing.empty

    def close(self) -> None:
        """Release all resources. A process that still runs drains when its channel ends."""
        self._is_closing = True
        self._forks.close()
        self._sharing.close()
        self._loop.unwatch(self._doorbell.fileno())
        for child in self._children.values():
            child.channel.close()
            if child.pidfd is not None:
                self._loop.unwatch(child.pidfd)
                os.close(child.pidfd)
        for pidfd in self._unbegun:
            self._loop.unwatch(pidfd)
            os.close(pidfd)
        self._unbegun.clear()
        self._children.clear()
        self._doorbell.close()
        self._segment.close()


def _reaped(pidfd: int) -> int | None:
    """The wait status of an orphan that we inherited; None if another process has to reap it."""
    try:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    if info is None:
        return None
    if info.si_code == os.CLD_EXITED:
        return info.si_status << 8
    return int(info.si_status)
