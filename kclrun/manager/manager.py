"""The core's hands: each event to the core, each of its commands to the one who performs it.

Holds: `Manager`, the pump between core and shell, and how it stops. May not know: how a process is
made or a row written. Rule: events are taken one after another, each with all its commands, so the
core never sees the consequence of a command before the command itself was performed.
Look next: `runtime.py` (who makes it), `children.py`, `performing.py`.
"""

from __future__ import annotations

import collections
import signal
from collections.abc import Callable
from typing import Final

from kclrun.errors import InvariantViolation, ServiceError
from kclrun.ipc.messages import OthersInSight
from kclrun.leases import commands as do
from kclrun.leases.events import (
    DrainRequested,
    Event,
    FormerOwnersProvenGone,
    LeasesScanned,
    ProcessStarted,
    ShardEnded,
    Started,
    Ticked,
)
from kclrun.leases.manager import LeaseManager
from kclrun.manager.adopted import reap_adopted
from kclrun.manager.children import LeaseProcesses
from kclrun.manager.identity import Identity
from kclrun.manager.loop import Loop
from kclrun.manager.performing import Performer
from kclrun.manager.report import ReportWriter
from kclrun.manager.signals import SignalPipe
from kclrun.manager.stopping import leave_at
from kclrun.manager.world import ExitReason
from kclrun.model.lease import OwnerId
from kclrun.model.time import Instant, WallTime
from kclrun.observe.logs import EventLog
from kclrun.stopping import Stage, StopPlan

__all__ = ["Manager"]

# Former lease processes let go of their lock as they notice their manager's death: a look each
# 100 ms costs some system calls. Later, only other managers of this host can come to die.
_SEIZE_EVERY_S: Final = 0.1
_SEIZE_SELDOM_EVERY_S: Final = 1.0
_SEIZE_OFTEN_FOR_S: Final = 60.0


class Manager:
    """One run of one manager, in one thread. `performer` and `processes` are set before `run`.

    `stop_begins` is called once, when a stop was asked for.
    """

    performer: Performer
    processes: LeaseProcesses

    def __init__(
        self,
        core: LeaseManager,
        *,
        identity: Identity,
        loop: Loop,
        log: EventLog,
        report: ReportWriter,
        grace_s: float,
    ) -> None:
        self.core = core
        self._identity = identity
        self._loop = loop
        self._log = log
        self._report = report
        self._stop = StopPlan(grace_s)
        self._signals = SignalPipe()
        self._events: collections.deque[Event] = collections.deque()
        self._is_pumping = False
        self._broken: Exception | None = None
        self._is_finished = False
        self._is_cut_short = False
        self._is_table_gone = False
        # Whether another kclrun owner could take what is given away [P17].
        self.others_in_sight = False
        # What is left to do for the machine once all is given up; the shell's to set.
        self.stays: Callable[[], bool] = lambda: False
        self._is_staying = False
        self._has_scanned = False
        self._at_its_end = ExitReason.DRAINED
        self._held_at_scan: frozenset[OwnerId] = frozenset()
        self._began_instant = loop.now()
        self.stop_begins: Callable[[], None] = _nobody_is_told

    def run(self, started_at: WallTime, introduce: Callable[[], None]) -> ExitReason:
        """Until everything is given up, or the stop's patience is over.

        `introduce` says who we are; it is called once signals are listened to, so that a stop sent
        by whoever reads its words is one in good order.
        Raises: whatever a job or the core raised that nobody expects: our bug.
        """
        self._signals.open()
        self._loop.watch(self._signals.fileno(), self._signalled)
        try:
            introduce()
            self._seize()
            self.processes.open()
            self.deliver(Started(started_at))
            while not self._is_over():
                self._turn()
            self._stay()
        finally:
            self._loop.unwatch(self._signals.fileno())
            self._signals.close()
        return self._exit_reason

    # Events and commands.

    def deliver(self, event: Event) -> None:
        """Give an event to the core, after those that wait already."""
        # Without its table the core has nothing to decide about any more.
        if not self._is_table_gone:
            self._take_in(event)

    def _take_in(self, event: Event) -> None:
        self._events.append(event)
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            while self._events:
                self._pump(self._events.popleft())
        finally:
            self._is_pumping = False

    def broke(self, error: Exception) -> None:
        """A job failed in a way nobody expects: the next turn ends the run with it."""
        self._broken = self._broken or error

    def _pump(self, event: Event) -> None:
        match event:
            case ProcessStarted(key):
                self._report.started(key)
            case ShardEnded(key):
                self._report.ended(key)
            case DrainRequested():
                self.stop_begins()
            case LeasesScanned(leases):
                self._has_scanned = True
                self._forget_former({lease.owner for lease in leases})
            case _:
                pass
        for command in self.core.handle(event, self._loop.now()):
            self._perform(command)

    def _perform(self, command: do.Command) -> None:
        match command:
            case do.ScanTable():
                self._held_at_scan = self._identity.folder.held
                self.performer.scan_table()
            case do.ListShards(with_start, stream):
                self.performer.list_shards(stream, with_start=with_start)
            case do.ReadRow(key):
                self.performer.read_row(key)
            case do.ReadParents(key, parents):
                self.performer.read_parents(key, parents)
            case do.FindOffers(rows_max):
                self.performer.find_offers(rows_max)
            case do.WriteRow(change, not_before):
                self.performer.write_row(change, not_before)
            case do.StartProcess():
                self.processes.start(command)
            case do.DrainProcess(key, reason):
                self.processes.drain(key, reason, self._force_instant())
            case do.TellOthersInSight(others):
                self.others_in_sight = others
                self.processes.broadcast(OthersInSight(others))
            case do.Note(event, level, key, fields):
                self._log.write(event, fields, level=level, shard=key)
            case do.Finish():
                self._is_finished = True

    def _turn(self) -> None:
        # Without its table the core waits for nothing: what is left are timers and deaths.
        deadline = None if self._is_table_gone else self.core.next_deadline(self._loop.now())
        self._loop.turn(deadline)
        self._raise_if_broken()
        if deadline is not None and self._loop.now() >= deadline:
            self.deliver(Ticked())

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    # Former owners [P3].

    def _seize(self) -> None:
        gained = self._identity.seize_former()
        if gained:
            self._log.note("former_owners_gone", count=len(gained), owners=", ".join(gained))
            self.deliver(FormerOwnersProvenGone(gained))
        is_early = self._loop.now() < self._began_instant + _SEIZE_OFTEN_FOR_S
        self._loop.after(_SEIZE_EVERY_S if is_early else _SEIZE_SELDOM_EVERY_S, self._seize)

    def _forget_former(self, named: set[OwnerId | None]) -> None:
        """A whole scan names no row of theirs: their files have served."""
        self._identity.folder.forget(self._held_at_scan - named)

    # Stopping.

    @property
    def is_running(self) -> bool:
        """No stop was asked for yet."""
        return self._stop.stage is Stage.RUNNING

    @property
    def is_ready(self) -> bool:
        """The lease table was read, and lease processes can be started."""
        return self._has_scanned and self.processes.has_launcher

    def drain(
        self,
        reason: str,
        *,
        at_its_end: ExitReason = ExitReason.DRAINED,
        by: Instant | None = None,
    ) -> None:
        """Begin the stop in good order; `by` bounds it besides the grace.

        A second call changes nothing but that bound.
        """
        is_first = self._stop.drain(self._loop.now())
        if by is not None:
            self._stop.finish_by(by)
        if is_first:
            self._at_its_end = at_its_end
            self.deliver(DrainRequested(reason))
        elif by is not None:
            self.processes.hurry(self._force_instant())

    def table_gone(self, error: ServiceError) -> None:
        """Nothing can be proven ours any more: no batch starts, user code gets two seconds."""
        if self._is_table_gone:
            return
        self._is_table_gone = True
        self._log.note(
            "table_vanished",
            error=str(error),
            action="reading stops; restore the table, or let a new one begin at `start`",
        )
        now = self._loop.now()
        self._stop.hurry(now)
        # No release can be written, so nobody is given the time to try.
        self._loop.at(self._force_instant(), self.processes.kill_all)
        self._take_in(DrainRequested(ExitReason.TABLE_GONE.value))

    def _signalled(self) -> None:
        for number in self._signals.take():
            if number is signal.SIGCHLD:
                reap_adopted(self.processes.pids)
            elif number is signal.SIGHUP:
                self._log.note("signal_ignored", signal=number.name)
            else:
                self._asked_to_stop(number)

    def _stay(self) -> None:
        """All is given up: nothing but a word to this machine's group is left, and no hurry."""
        self._is_staying = True
        while self._stop.stage is Stage.DRAINING and self.stays():
            self._loop.turn()
            self._raise_if_broken()

    def _asked_to_stop(self, number: signal.Signals) -> None:
        if self._is_staying:
            self._stop.press(number, self._loop.now())
            self._log.note("stop_hurried", signal=number.name, action="the group is not awaited")
            return
        was_running = self.is_running
        stage = self._stop.press(number, self._loop.now())
        if stage is Stage.QUITTING:
            self._is_cut_short = True
            self._log.note("stop_hurried", signal=number.name, action="no more patience")
            self.processes.kill_all()
        elif was_running:
            self.deliver(DrainRequested(number.name))
        else:
            self._log.note("stop_hurried", signal=number.name, action="two more seconds")
            self.processes.hurry(self._force_instant())

    def _force_instant(self) -> Instant:
        """When the patience of a drain that begins now ends."""
        return self._stop.force_instant_from(self._loop.now())

    def _is_over(self) -> bool:
        """All is given up and everybody gone; or the time is."""
        if self._is_finished and not len(self.processes):
            return True
        is_quit = self._stop.stage is Stage.QUITTING and not any(self.processes.living())
        if self._is_table_gone and not len(self.processes):
            return True
        leave_instant = leave_at(self._stop.force_instant)
        is_late = leave_instant is not None and self._loop.now() >= leave_instant
        if (is_quit or is_late) and not self._is_finished:
            self._is_cut_short = True
            self._log.note("stop_incomplete", leases=len(self.core.held()))
        return is_quit or is_late

    @property
    def _exit_reason(self) -> ExitReason:
        if self._is_table_gone:
            return ExitReason.TABLE_GONE
        if self._is_cut_short or self.processes.has_forced:
            return ExitReason.CUT_SHORT
        if not self._is_finished:
            raise InvariantViolation("left without an end")
        return self._at_its_end


def _nobody_is_told() -> None:
    """Where nobody asked to be told of a stop."""
