"""The event loop of the manager: passes events to the core and performs the core's commands.

It also runs the stop. It does not know how a process is made or how a row is written.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from typing import Final, assert_never

from kclrun.errors import HostRefused, InvariantViolation, ServiceError, host_error
from kclrun.ipc.messages import OthersInSight
from kclrun.leases import commands, events
from kclrun.leases.manager import LeaseManager
from kclrun.leases.restarts import FAILED_STARTS_MAX
from kclrun.lifecycle.stopping import STOP_SIGNALS, Stage, StopPlan, leave_at, left_undone
from kclrun.manager.children import LeaseProcesses
from kclrun.manager.forks import ForkRefused
from kclrun.manager.locks import Identity
from kclrun.manager.loop import Loop, SignalPipe
from kclrun.manager.orphans import OrphanReaper
from kclrun.manager.report_writer import ReportWriter
from kclrun.manager.ring_reader import Child
from kclrun.manager.service_calls import ServiceCalls
from kclrun.manager.world import ExitReason
from kclrun.model.lease import OwnerId
from kclrun.model.time import Instant, WallTime
from kclrun.observe.logs import EventLog
from kclrun.observe.sample import LEASES_COMMAND, how_to_resume
from kclrun.ports import Pump
from kclrun.protocol.reports import ShardEnded

# Only an operator ends these states, so their log lines name the command.
_HALTS: Final = frozenset({"lease_halted", "lease_still_halted"})

# Lease processes of a former manager release their lock when they notice that it has exited: a
# check each 100 ms costs some system calls. Later, only locks of other managers of this host can
# become free.
_SEIZE_EVERY_S: Final = 0.1
_SEIZE_SELDOM_EVERY_S: Final = 1.0
_SEIZE_OFTEN_FOR_S: Final = 60.0
_TRIAL_PAUSE_S: Final = 1.0


class FormerOwners:
    """Former managers of this host, by their lock files [P3]. `deliver` gets the owners that are
    proven gone."""

    def __init__(
        self,
        identity: Identity,
        loop: Loop,
        log: EventLog,
        deliver: Callable[[events.FormerOwnersProvenGone], None],
    ) -> None:
        self._identity = identity
        self._loop = loop
        self._log = log
        self._deliver = deliver
        self._began_instant = loop.now()
        self._is_lock_missed = False
        self._held_at_scan: frozenset[OwnerId] = frozenset()

    def seize(self) -> None:
        """Take the locks that are free now, and again after a pause."""
        gained = self._identity.seize_former()
        if gained:
            self._log.note("former_owners_gone", count=len(gained), owners=", ".join(gained))
            self._deliver(events.FormerOwnersProvenGone(gained))
        if not self._identity.lock.is_in_place and not self._is_lock_missed:
            self._is_lock_missed = True
            self._log.note("lock_file_removed", what=str(self._identity.lock.path))
        is_early = self._loop.now() < self._began_instant + _SEIZE_OFTEN_FOR_S
        self._loop.after(_SEIZE_EVERY_S if is_early else _SEIZE_SELDOM_EVERY_S, self.seize)

    def scan_begins(self) -> None:
        """A scan of the table begins."""
        self._held_at_scan = self._identity.folder.held

    def scanned(self, named: set[OwnerId | None]) -> None:
        """A complete scan found rows of these owners only: remove the lock files of the others."""
        self._identity.folder.forget(self._held_at_scan - named)


class Manager:
    """One run of one manager, in one thread. `service_calls` and `processes` are set before `run`.

    `stop_begins` is called once, when a stop was requested. `stop_signals` request one, and so does
    SIGQUIT.
    """

    service_calls: ServiceCalls
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
        leases_command: str | None = LEASES_COMMAND,
        stop_signals: Collection[signal.Signals] = STOP_SIGNALS,
    ) -> None:
        self.core = core
        self._loop = loop
        self._log = log
        self._report = report
        self.leases_command = leases_command
        self._stop = StopPlan(grace_s)
        self._stop_signals = frozenset({*stop_signals, signal.SIGQUIT})
        self._signals = SignalPipe()
        self._pump: Pump[events.Event, commands.Command] = Pump(self._handle, self._perform)
        self._broken: Exception | None = None
        # No lease is taken before a trial process was forked: results of scans wait for it.
        self._trials_failed = 0
        self._awaiting_trial: list[events.Event] | None = []
        self._is_finished = False
        self._is_cut_short = False
        self._has_undone = False
        self._is_table_gone = False
        # Whether another kclrun owner could take the leases that we offer [P17].
        self.others_in_sight = False
        # Whether work for this machine is left once all leases are given away; set by the shell.
        self.stays: Callable[[], bool] = lambda: False
        self._is_staying = False
        self._orphans = OrphanReaper(lambda: self.processes.pids, loop)
        self._has_scanned = False
        self._at_its_end = ExitReason.DRAINED
        self._former_owners = FormerOwners(identity, loop, log, self.deliver)
        self.stop_begins: Callable[[], None] = lambda: None

    def run(self, started_at: WallTime, introduce: Callable[[], None]) -> ExitReason:
        """Run until all leases are given away, or the stop's grace is over.

        `introduce` writes the first line of the log. It is called after the signal handlers are
        set, so that a stop is in good order even if it is sent as soon as that line is read.
        Raises: HostRefused, HostFailed if no process can be started here; any unexpected error of
        a job or of the core: our bug.
        """
        self._signals.open()
        self._loop.watch(self._signals.fileno(), self._signalled)
        try:
            introduce()
            self._former_owners.seize()
            self.processes.open()
            self._try_host()
            self.deliver(events.Started(started_at))
            while not self._is_over():
                self._turn()
            self._note_incomplete()
            self._stay()
        finally:
            self._loop.unwatch(self._signals.fileno())
            self._signals.close()
        return self._exit_reason

    # Events and commands.

    def deliver(self, event: events.Event) -> None:
        """Pass an event to the core, after the events that wait already."""
        if self._awaiting_trial is not None and isinstance(event, events.LeasesScanned):
            self._awaiting_trial.append(event)
            return
        # Without the lease table the core has no more decisions to make.
        if not self._is_table_gone:
            self._take_in(event)

    def _take_in(self, event: events.Event) -> None:
        self._pump.post(event)
        self._pump.run()

    def broke(self, error: Exception) -> None:
        """A job failed with an unexpected error: the next turn ends the run with that error."""
        self._broken = self._broken or error

    def _handle(self, event: events.Event) -> tuple[commands.Command, ...]:
        match event:
            case events.ProcessStarted(key):
                self._report.started(key)
            case events.ProcessReported(key, ShardEnded()):
                self._report.ended(key)
            case events.DrainRequested():
                self.stop_begins()
            case events.LeasesScanned(leases):
                self._has_scanned = True
                self._former_owners.scanned({lease.owner for lease in leases})
            case _:
                pass
        return self.core.handle(event, self._loop.now())

    def _perform(self, command: commands.Command) -> None:
        match command:
            case commands.StartProcess():
                self.processes.start(command)
            case commands.DrainProcess(key, reason):
                self.processes.drain(key, reason, self._force_instant())
            case commands.PublishOthersInSight(others):
                self.others_in_sight = others
                self.processes.broadcast(OthersInSight(others))
            case commands.StopRefused(reason):
                self.drain(reason, at_its_end=ExitReason.ANOTHER_STREAM)
            case commands.Note():
                self._note(command)
            case commands.Finish():
                self._is_finished = True
            case commands.ScanTable():
                self._former_owners.scan_begins()
                self.service_calls.perform(command)
            case (
                commands.ListShards()
                | commands.DescribeStream()
                | commands.ReadKcl3Mode()
                | commands.ReadRow()
                | commands.ReadParents()
                | commands.FindOffers()
                | commands.WriteRow()
            ):
                self.service_calls.perform(command)
            case _:
                assert_never(command)

    def _note(self, note: commands.Note) -> None:
        fields = note.fields
        if note.event in _HALTS and note.key is not None:
            fields = {**fields, "action": how_to_resume(self.leases_command, note.key)}
        self._log.write(note.event, fields, level=note.level, shard=note.key)

    def _turn(self) -> None:
        # Without the lease table the core has no deadline: only timers and exits are left.
        deadline = None if self._is_table_gone else self.core.next_deadline(self._loop.now())
        self._loop.turn(deadline)
        self._raise_if_broken()
        if deadline is not None and self._loop.now() >= deadline:
            self.deliver(events.Ticked())

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    # Whether this host can run lease processes at all.

    def _try_host(self) -> None:
        try:
            self.processes.try_start(self._tried)
        except OSError as error:
            words = f"a channel: {error.strerror}"
            self._tried(ForkRefused(0, words, error.errno or 0))

    def _tried(self, refusal: ForkRefused | None) -> None:
        if refusal is None:
            waiting, self._awaiting_trial = self._awaiting_trial, None
            for event in waiting or ():
                self.deliver(event)
            return
        if not self.is_running:
            return
        self._trials_failed += 1
        what = "Lease processes are forked, and their deaths proven by pidfds (Linux 5.3)."
        error = host_error(what, refusal.reason, refusal.errno)
        if isinstance(error, HostRefused) or self._trials_failed >= FAILED_STARTS_MAX:
            self.broke(error)
        else:
            self._log.note("start_failed", reason=f"as a trial: {refusal.reason}")
            self._loop.after(_TRIAL_PAUSE_S, self._try_host)

    # Stopping.

    @property
    def is_running(self) -> bool:
        """Whether no stop was requested yet."""
        return self._stop.stage is Stage.RUNNING

    @property
    def is_ready(self) -> bool:
        """Whether the lease table was read and lease processes can be started."""
        return self._has_scanned and self.processes.has_launcher

    def drain(
        self,
        reason: str,
        *,
        at_its_end: ExitReason = ExitReason.DRAINED,
        by: Instant | None = None,
    ) -> None:
        """Begin the stop in good order. `by` is a second bound beside the grace.

        A second call changes only that bound.
        """
        is_first = self._stop.drain(self._loop.now())
        if by is not None:
            self._stop.finish_by(by)
        if is_first:
            self._at_its_end = at_its_end
            self.deliver(events.DrainRequested(reason))
        elif by is not None:
            self.processes.hurry(self._force_instant())

    def departed(self, child: Child) -> None:
        """A lease process has exited. If it could not checkpoint records, the stop is incomplete.

        Without the lease table nothing can be checkpointed: the event `table_vanished` is logged.
        """
        status = child.last_status
        if self.is_running or status is None or not left_undone(status) or self._is_table_gone:
            return
        self._has_undone = True
        self._log.note(
            "checkpoint_missed",
            shard=child.key,
            position=str(status.processed),
            checkpoint=str(status.checkpointed),
            **({"warning": child.warning} if child.warning else {}),
        )

    def table_gone(self, error: ServiceError) -> None:
        """Ownership cannot be proven any more: no batch starts, user code gets two seconds."""
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
        # No release can be written, so the processes get no time to try.
        self._loop.at(self._force_instant(), self.processes.kill_all)
        self._take_in(events.DrainRequested(ExitReason.TABLE_GONE.value))

    def _signalled(self) -> None:
        for number in self._signals.take():
            if number is signal.SIGCHLD:
                self._orphans.reap()
            elif number in self._stop_signals:
                self._asked_to_stop(number)
            else:
                self._log.note("signal_ignored", signal=number.name)

    def _stay(self) -> None:
        """All leases are given away: only the answer to the autoscaling group is left. No hurry."""
        self._is_staying = True
        while self._stop.stage is Stage.DRAINING and self.stays():
            self._loop.turn()
            self._raise_if_broken()

    def _asked_to_stop(self, number: signal.Signals) -> None:
        if not self._stop.heeds(number):
            return
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
            self.deliver(events.DrainRequested(number.name))
        else:
            self._log.note("stop_hurried", signal=number.name, action="two more seconds")
            self.processes.hurry(self._force_instant())

    def _force_instant(self) -> Instant:
        """When the grace of a drain that begins now ends."""
        return self._stop.force_instant_from(self._loop.now())

    @property
    def _is_complete(self) -> bool:
        """Whether no lease can be proven to be ours any more, and all processes have exited."""
        return (self._is_finished or self._is_table_gone) and not len(self.processes)

    def _is_over(self) -> bool:
        """Whether the run is complete, or its time is over."""
        if self._is_complete:
            return True
        leave_instant = leave_at(self._stop.force_instant)
        if leave_instant is not None and self._loop.now() >= leave_instant:
            return True
        return self._stop.stage is Stage.QUITTING and not any(self.processes.living())

    def _note_incomplete(self) -> None:
        """The run is over: log it if leases are still ours."""
        if not self._is_complete and not self._is_finished:
            self._is_cut_short = True
            self._log.note("stop_incomplete", leases=len(self.core.held()))

    @property
    def _exit_reason(self) -> ExitReason:
        if self._is_table_gone:
            return ExitReason.TABLE_GONE
        if self._is_cut_short or self._has_undone or self.processes.has_forced:
            return ExitReason.CUT_SHORT
        if not self._is_finished:
            raise InvariantViolation("left without an end")
        return self._at_its_end
