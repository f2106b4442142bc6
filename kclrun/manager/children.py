"""The lease processes of this manager: starts them, sends to them, reads their reports, proves
their exit.

It does not know why a process is started or drained.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import msgspec

from kclrun.errors import MalformedFrame
from kclrun.ipc import messages
from kclrun.ipc.board import Segment, StartSpec
from kclrun.ipc.channel import Channel, Doorbell
from kclrun.leases.commands import StartProcess
from kclrun.leases.events import ProcessStarted, StartFailed
from kclrun.manager.exits import ProcessExits, ProcessHost
from kclrun.manager.forcing import Forcing
from kclrun.manager.forks import ForkRefused, Forks, Launcher, ProcessForked
from kclrun.manager.loop import Loop
from kclrun.manager.process_mail import ProcessMail
from kclrun.manager.process_slots import ProcessSlots
from kclrun.manager.ring_reader import Child, RingReader
from kclrun.manager.sharing import SharedProcesses
from kclrun.model.lease import LeaseKey
from kclrun.model.time import Instant
from kclrun.observe.logs import EventLog

_ENDS: Final = "this manager ends all its processes"


class Specify(Protocol):
    """Makes the start command of a process in a place."""

    def __call__(self, start: StartProcess, place: int, incarnation: int) -> StartSpec: ...


Tried = Callable[[ForkRefused | None], None]


class ProcessLimits(msgspec.Struct, frozen=True):
    """`places` is the most lease processes at a time, and `per_process` the most leases in one of
    them. A process that reported its end and does not exit within `exit_patience_s` is forced to.
    `failover_s` is the longest failover that a lease process may have received."""

    places: int
    exit_patience_s: float
    failover_s: float
    per_process: int = 1


class LeaseProcesses:
    """All calls in the loop's thread.

    A start command is sent only to a process whose pidfd we hold [P5]. With `per_process` above 1
    several leases share a process: what is sent, read and forced is of one lease all the same, but
    a signal ends the process for all of them. `lock_fd` is our descriptor of the lock file: each
    lease process opens the same file through it, even if the file lost its name.
    """

    def __init__(
        self,
        launcher: Launcher,
        host: ProcessHost,
        limits: ProcessLimits,
        *,
        specify: Specify,
        loop: Loop,
        log: EventLog,
        lock_fd: int | None = None,
    ) -> None:
        self._host = host
        self._limits = limits
        self._specify = specify
        self._loop = loop
        self._log = log
        self._lock_fds = () if lock_fd is None else (lock_fd,)
        self._segment = Segment.create(limits.places)
        self._slots = ProcessSlots(self._segment)
        self._doorbell = Doorbell.create()
        self._ring_reader = RingReader(log)
        self._mail = ProcessMail(loop)
        self._children: dict[int, Child] = {}
        self._incarnations = 0
        self._trials: dict[int, Tried] = {}
        self._is_closing = False
        self._unbegun: set[int] = set()  # pidfds of processes that came after `kill_all`
        patience_s = limits.exit_patience_s
        self._sharing = SharedProcesses(
            self, limits.per_process, patience_s=patience_s, loop=loop, log=log
        )
        self._forcing = Forcing(
            self._children,
            self._sharing,
            loop=loop,
            log=log,
            deliver=host.deliver,
            failover_s=limits.failover_s,
        )
        self._exits = ProcessExits(
            self._children,
            self._slots,
            self._sharing,
            self._ring_reader,
            host,
            loop=loop,
            log=log,
            has_launcher=lambda: self.has_launcher,
        )
        self._forks = Forks(
            launcher,
            loop=loop,
            log=log,
            forked=self._forked,
            refused=self._refused,
            exited=self._exits.reaped,
            answer_wait_s=limits.failover_s,
        )
        loop.watch(self._doorbell.fileno(), self._rung)

    # Starting.

    def open(self) -> None:
        """Start the launcher; starts of processes fail until it runs."""
        self._forks.open()

    def start(self, command: StartProcess) -> None:
        """Request a process. The answer is ProcessStarted or StartFailed."""
        place = self._slots.take()
        if place is None:
            reason = "all places for lease processes are taken"
            self._host.deliver(StartFailed(command.key, reason))
            return
        try:
            ours, theirs = Channel.pair()
        except OSError as error:
            self._slots.give_back(place.number)
            reason = f"this manager cannot open a channel: {error.strerror}"
            self._host.deliver(StartFailed(command.key, reason))
            return
        self._incarnations += 1
        child = Child(
            start=command,
            incarnation=self._incarnations,
            place=place.number,
            slot=place.slot,
            ring=place.ring,
            channel=messages.channel_to_worker(ours),
            is_sharing=self._limits.per_process > 1 and not command.is_alone,
        )
        self._children[child.incarnation] = child
        if not child.is_sharing:
            self.request_fork(child.incarnation, theirs)
            return
        try:
            self._sharing.join(child, theirs)
        except OSError as error:
            theirs.close()
            self.not_admitted(child, f"this manager cannot open a channel: {error.strerror}")

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
        self.admitted(child)

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
                self.not_admitted(child, _ENDS)

        if child is None:
            os.close(report.pidfd)
            self._sharing.fork_refused(ForkRefused(report.request_id, _ENDS))
        else:
            self._unbegun.add(report.pidfd)
            self._loop.watch(report.pidfd, died)

    def _refused(self, refusal: ForkRefused) -> None:
        tried = self._trials.pop(refusal.request_id, None)
        if tried is not None:
            tried(refusal)
        child = self._children.get(refusal.request_id)
        if child is not None:
            self.not_admitted(child, refusal.reason)
        else:
            self._sharing.fork_refused(refusal)

    def try_start(self, tried: Tried) -> None:
        """Fork one process as a trial: it gets no start command, and exits. `tried` is called with
        None, or with the refusal. Raises: OSError where no channel can be opened."""
        ours, theirs = Channel.pair()
        ours.close()
        self._incarnations += 1
        self._trials[self._incarnations] = tried
        self.request_fork(self._incarnations, theirs)

    # As `SharingHost`; a process of its own is admitted, too.

    def request_fork(self, number: int, theirs: socket.socket) -> None:
        self._forks.request(number, (self._segment.fd, self._doorbell.write_fd), theirs)

    def admitted(self, child: Child) -> None:
        """Its process runs: send the start command."""
        assert child.pid is not None, "a pidfd comes with its pid"
        self._exits.watch(child)
        # Not earlier: the start command contains the values broadcast since the request.
        spec = self._specify(child.start, child.place, child.incarnation)
        trial = self._ring_reader.row_trials.get(child.key)
        begin = messages.Begin(msgspec.structs.replace(spec, trial=trial))
        self._mail.send(child, begin, self._lock_fds)
        self._host.deliver(ProcessStarted(child.key, child.pid))
        if child.drain_reason is not None:
            self._mail.ask_to_drain(child, child.drain_reason)

    def not_admitted(self, child: Child, reason: str) -> None:
        del self._children[child.incarnation]
        child.channel.close()
        self._slots.give_back(child.place)
        self._host.deliver(StartFailed(child.key, reason))

    def left(self, child: Child, left: messages.Left) -> None:
        self._exits.left(child, left)

    def leave(self, child: Child, force_instant: Instant | None) -> None:
        """Ask a lease to checkpoint and to leave the process that it shares."""
        if child.drain_reason is None and child.pid is not None:
            self._mail.send(child, messages.Restart())
        if force_instant is not None:
            self._forcing.force_from(child, force_instant)

    # Sending.

    def drain(self, key: LeaseKey, reason: str, force_instant: Instant) -> None:
        """Ask the process of a lease to finish; from `force_instant` on it is forced to."""
        for child in [child for child in self._children.values() if child.key == key]:
            child.drain_reason = reason
            self._forcing.force_from(child, force_instant)
            if child.pid is not None:
                self._mail.ask_to_drain(child, reason)

    def hurry(self, force_instant: Instant) -> None:
        """Bring the end of patience forward for all processes, also those not asked to drain."""
        for child in self._children.values():
            self._forcing.force_from(child, force_instant)

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
        self._mail.send(child, messages.DumpStacks())
        self._mail.send(child, messages.Drain(stall, max(0.0, force_instant - self._loop.now())))
        self._forcing.force_from(child, force_instant)

    def broadcast(
        self, message: messages.RenewCredentials | messages.FailoverChanged | messages.OthersInSight
    ) -> None:
        """Send to all that run. Processes still being forked get it in their start command."""
        for child in self._children.values():
            if child.pid is not None:
                self._mail.send(child, message)

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
            forced_at = Instant(self._loop.now() + self._limits.exit_patience_s)
            self._forcing.force_from(child, forced_at)
        for event in events:
            self._host.deliver(event)

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

    @property
    def has_forced(self) -> bool:
        """Whether a process that was asked to drain had to be killed."""
        return self._forcing.has_forced

    def __len__(self) -> int:
        """Processes requested or alive, except those that never exit."""
        leases = sum(1 for child in self._children.values() if not child.is_written_off)
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
