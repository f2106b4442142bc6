"""The lease processes of this manager: started, spoken to, heard, and proven dead.

Holds: `LeaseProcesses`. May not know: why a process is started or drained. Rule [P5]: an exit is
reported only after the pidfd proved it and the ring was emptied, or, of one that no signal ends,
after the latest fence it could reach; a start command is sent only to a process whose pidfd we
hold. Look next: `forks.py`, `child.py`, `hearing.py`.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from kclrun.errors import MalformedFrame
from kclrun.ipc.channel import Channel, NotSent
from kclrun.ipc.doorbell import Doorbell
from kclrun.ipc.messages import (
    Begin,
    Drain,
    DumpStacks,
    Exited,
    FailoverChanged,
    OthersInSight,
    RenewCredentials,
    ToWorker,
    channel_to_worker,
)
from kclrun.ipc.segment import Segment
from kclrun.ipc.spec import StartSpec
from kclrun.leases.commands import StartProcess
from kclrun.leases.events import Event, ProcessExited, ProcessStarted, StartFailed
from kclrun.manager.child import Child, exit_words
from kclrun.manager.forks import Forks
from kclrun.manager.hearing import Listener
from kclrun.manager.launching import Launcher, ProcessForked
from kclrun.manager.loop import Loop
from kclrun.manager.places import Places
from kclrun.manager.stopping import UNKILLABLE_AFTER_S, latest_fence, next_force
from kclrun.model.lease import LeaseKey
from kclrun.model.time import Instant
from kclrun.observe.logs import EventLog

__all__ = ["Departed", "LeaseProcesses", "Specify"]

# The launcher reaps within a millisecond of the pidfd's word; without a launcher nobody may.
_STATUS_PATIENCE_S: Final = 0.1
_RESEND_AFTER_S: Final = 0.05


class Specify(Protocol):
    """Makes the start command of a process in a place."""

    def __call__(self, start: StartProcess, place: int, incarnation: int) -> StartSpec: ...


Departed = Callable[[Child], None]


class LeaseProcesses:
    """All calls in the loop's thread. `deliver` takes events; `departed` sees each dead child.

    A process that said its farewell and does not exit within `farewell_patience_s` is forced to.
    `failover_s` is the longest that a lease process may have been told.
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
        farewell_patience_s: float,
        failover_s: float,
    ) -> None:
        self._forks = Forks(
            launcher,
            loop=loop,
            log=log,
            forked=self._forked,
            refused=self._refused,
            exited=self._exited,
        )
        self._specify = specify
        self._loop = loop
        self._log = log
        self._deliver = deliver
        self._departed = departed
        self._segment = Segment.create(places)
        self._places = Places(self._segment)
        self._doorbell = Doorbell.create()
        self._listener = Listener(log)
        self._children: dict[int, Child] = {}
        self._incarnations = 0
        self._farewell_patience_s = farewell_patience_s
        self._failover_s = failover_s
        self._is_closing = False
        # Whether a process had to be ended that was asked to drain.
        self.has_forced = False
        loop.watch(self._doorbell.fileno(), self._rung)

    # Starting.

    def open(self) -> None:
        """Start the launcher; starts fail until there is one."""
        self._forks.open()

    def start(self, command: StartProcess) -> None:
        """Ask for a process. Comes back as ProcessStarted or StartFailed."""
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
            channel=channel_to_worker(ours),
        )
        self._children[child.incarnation] = child
        self._forks.request(child.incarnation, (self._segment.fd, self._doorbell.write_fd), theirs)

    def _forked(self, report: ProcessForked) -> None:
        child = self._children.get(report.request_id)
        if child is None or self._is_closing:
            # Never told to begin: it sees the end of its channel and exits unclaimed.
            os.close(report.pidfd)
            return
        child.pid, child.pidfd = report.pid, report.pidfd
        self._loop.watch(report.pidfd, lambda: self._pidfd_fired(child))
        # Not before: what was broadcast since the request is in it.
        self._send(child, Begin(self._specify(child.start, child.place, child.incarnation)))
        self._deliver(ProcessStarted(child.key, report.pid))
        if child.drain_reason is not None:
            self._send_drain(child)

    def _refused(self, request_id: int, reason: str) -> None:
        child = self._children.pop(request_id, None)
        if child is None:
            return
        child.channel.close()
        self._places.give_back(child.place)
        self._deliver(StartFailed(child.key, reason))

    # Speaking.

    def drain(self, key: LeaseKey, reason: str, force_instant: Instant) -> None:
        """Ask the process of a lease to finish; from `force_instant` on it is forced to."""
        for child in self._of(key):
            child.drain_reason = reason
            self.force_from(child, force_instant)
            if child.pid is not None:
                self._send_drain(child)

    def hurry(self, force_instant: Instant) -> None:
        """Bring the end of patience forward for everyone; those not asked to drain included."""
        for child in self._children.values():
            self.force_from(child, force_instant)

    def force_from(self, child: Child, force_instant: Instant) -> None:
        """Force this one from `force_instant` on, if it is not to be forced sooner."""
        before = child.force_instant
        child.force_instant = min(before, force_instant) if before is not None else force_instant
        self._loop.at(child.force_instant, self.force)

    def force(self) -> None:
        """Force those whose time is over: first a dump of their stacks, then the end."""
        for child in tuple(self._children.values()):
            number, due = next_force(child.force_instant, child.forced)
            if number is None or due is None or child.is_dead or child.pidfd is None:
                continue
            if self._loop.now() < due:
                self._loop.at(due, self.force)
                continue
            if child.stall is None:  # else the watchdog tells the whole story
                self._log.note("process_killed", shard=child.key, signal=number.name)
            self.has_forced = self.has_forced or child.drain_reason is not None
            child.send_signal(number)
            self._loop.after(0.0, self.force)
            if number is signal.SIGKILL:
                self._loop.after(UNKILLABLE_AFTER_S, functools.partial(self._write_off, child))

    def _write_off(self, child: Child) -> None:
        """KILL does not end it: report its end once it can start no batch any more [P5]."""
        if child.is_dead or child.incarnation not in self._children:
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
            ProcessExited(child.key, child.pid, "no signal ends it, and its fence has passed")
        )

    def kill_all(self) -> None:
        """End every process now and start no other; deaths are reported as always."""
        self._is_closing = True
        for child in self._children.values():
            child.send_signal(signal.SIGKILL)

    def end_stalled(self, child: Child, stall: str, force_instant: Instant) -> None:
        """End one that stands still: its stacks to stderr, a word, then force.

        The word stands for TERM, which lease processes ignore: with it one that can still hear
        checkpoints what it processed, so nothing comes twice.
        """
        child.stall = stall
        self._send(child, DumpStacks())
        self._send(child, Drain(stall, max(0.0, force_instant - self._loop.now())))
        self.force_from(child, force_instant)

    def broadcast(self, message: RenewCredentials | FailoverChanged | OthersInSight) -> None:
        """To all that run. Those still being forked learn it from their start command."""
        for child in self._children.values():
            if child.pid is not None:
                self._send(child, message)

    def _send_drain(self, child: Child) -> None:
        left_s = max(0.0, (child.force_instant or self._loop.now()) - self._loop.now())
        self._send(child, Drain(child.drain_reason or "", left_s))

    def _send(self, child: Child, message: ToWorker) -> None:
        """A process that does not read is tried again; one that is gone is told by its pidfd."""
        if child.is_dead:
            return
        if isinstance(child.channel.send(message), NotSent):
            self._loop.after(_RESEND_AFTER_S, lambda: self._send(child, message))

    # Hearing.

    def _rung(self) -> None:
        """Before the rings are read, so that a press meanwhile is not missed."""
        self._doorbell.answer()
        for child in tuple(self._children.values()):
            if child.pid is not None and not child.is_dead and not child.is_written_off:
                self._hear(child)

    def _hear(self, child: Child) -> None:
        try:
            events = self._listener.hear(child)
        except MalformedFrame as error:
            self._log.note("process_condemned", shard=child.key, error=str(error))
            child.send_signal(signal.SIGKILL)
            return
        if child.farewell and child.force_instant is None:
            self.force_from(child, Instant(self._loop.now() + self._farewell_patience_s))
        for event in events:
            self._deliver(event)

    # Dying.

    def _exited(self, report: Exited) -> None:
        """The launcher reaped one; its status may come before its pidfd fires, or after."""
        for child in tuple(self._children.values()):
            if child.pid == report.pid and child.status is None:
                child.status = report.status
                if child.is_dead:
                    self._bury(child)

    def _pidfd_fired(self, child: Child) -> None:
        """It is dead, proven. Its exit status comes from the launcher, or from us as its reaper."""
        assert child.pidfd is not None, "a pidfd that fired is one we hold"
        self._loop.unwatch(child.pidfd)
        child.is_dead = True
        if child.status is None:
            child.status = _reaped(child.pidfd)
        if child.status is not None:
            self._bury(child)
        else:
            self._loop.after(_STATUS_PATIENCE_S, lambda: self._bury(child))

    def _bury(self, child: Child) -> None:
        if self._children.pop(child.incarnation, None) is None:
            return
        assert child.pidfd is not None, "only a process whose pidfd we held is buried"
        assert child.pid is not None, "a pidfd comes with its pid"
        for event in self._listener.hear_last(child):
            if not child.is_written_off:  # its lease is another process's by now
                self._deliver(event)
        child.look()
        os.close(child.pidfd)
        child.pidfd = None
        child.channel.close()
        self._departed(child)
        self._places.give_back(child.place)
        words = exit_words(child.status, child.forced)
        if child.stall is not None:
            words = f"{child.stall}, so its manager ended it; {words}"
        self._log.note("process_exited", shard=child.key, process=child.pid, reason=words)
        if not child.is_written_off:
            self._deliver(ProcessExited(child.key, child.pid, words))

    # Looking.

    def living(self) -> Iterator[Child]:
        """Those that run, as far as we know, and are worth looking at."""
        return (
            child
            for child in tuple(self._children.values())
            if child.pid is not None and not child.is_dead and not child.is_written_off
        )

    @property
    def pids(self) -> frozenset[int]:
        """Those whose end is ours to reap or to hear of, and the launcher."""
        own = {child.pid for child in self._children.values()} | {self._forks.launcher_pid}
        return frozenset(pid for pid in own if pid is not None)

    @property
    def has_launcher(self) -> bool:
        """Whether processes can be started now."""
        return self._forks.has_launcher

    def _of(self, key: LeaseKey) -> list[Child]:
        return [child for child in self._children.values() if child.key == key]

    def __len__(self) -> int:
        """Processes asked for or alive, but for those that will never end."""
        return sum(not child.is_written_off for child in self._children.values())

    def close(self) -> None:
        """Let go of all; a process still alive sees the end of its channel and drains itself."""
        self._is_closing = True
        self._forks.close()
        self._loop.unwatch(self._doorbell.fileno())
        for child in self._children.values():
            child.channel.close()
            if child.pidfd is not None:
                self._loop.unwatch(child.pidfd)
                os.close(child.pidfd)
        self._children.clear()
        self._doorbell.close()
        self._segment.close()


def _reaped(pidfd: int) -> int | None:
    """The wait status of an orphan that was handed to us; None if it is another's to reap."""
    try:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    if info is None:
        return None
    if info.si_code == os.CLD_EXITED:
        return info.si_status << 8
    return int(info.si_status)
