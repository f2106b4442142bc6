"""One start of a manager on a machine: the real `LeaseManager`, and its commands performed.

The order of events, commands and requests is the one of the manager's shell. The module does not
know other hosts.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kclrun.lease import events as worker_events
from kclrun.lease.events import OthersInSight
from kclrun.leases import commands, events
from kclrun.leases.commands import Request, ServiceRequests
from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import ManagerPolicy
from kclrun.lifecycle.stall import STALL_PATIENCE_S, StallWatch
from kclrun.lifecycle.stopping import StopPlan, leave_at, next_force
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.stream import ONLY_STREAM
from kclrun.model.time import Instant, WallTime
from kclrun.ports import Pump
from kclrun.protocol.writes import Ask, LeaseChange, Outcome
from kclrun.simulation.clocks import WORLD_BEGAN_AT
from kclrun.simulation.machine import Machine, OsProcess
from kclrun.simulation.network import Failed
from kclrun.simulation.process import LeaseProcess
from kclrun.simulation.stories import RuleBroken
from kclrun.simulation.uplink import OfferPolls, Uplink
from kclrun.simulation.world import SimulatedWorld

# The lease processes of one manager: how they are forked, get messages, report, are forced to end
# and are proven gone.
#
# The order is that of `manager/children.py`. The manager's own code decides about a process that
# stands still, and about the limit of patience.
# The fork server forks one process at a time: 8 ms (measured), and half as much again until it
# runs.
_FORK_S: Final = 0.015
# The manager looks each half second. While no process stands still and no batch is long, that finds
# nothing, and a look each 15 s comes before any stall counts (20 s).
_LOOK_EVERY_S: Final = 0.5
_LOOK_SELDOM_S: Final = 15.0
# The time from an exit, or a SIGKILL, to the event of the pidfd.
_REAP_S: Final = 0.003


class Children:
    """New ones are sent the parent's `others_in_sight`. `process_kind` is for planted bugs."""

    def __init__(self, parent: Host, process_kind: type[LeaseProcess]) -> None:
        self.by_key: dict[LeaseKey, LeaseProcess] = {}
        self._parent = parent
        self._process_kind = process_kind
        self._starting: dict[LeaseKey, tuple[str, Instant] | None] = {}  # and how to drain them
        self._launcher_free_at = 0.0
        self._incarnations = 0
        self._watch = StallWatch(parent.world.settings.stall_s)

    def __len__(self) -> int:
        return len(self.by_key) + len(self._starting)

    def living(self) -> Iterator[LeaseProcess]:
        return (process for process in tuple(self.by_key.values()) if not process.is_over)

    # Starting.

    def start(self, command: commands.StartProcess) -> None:
        """The result is ProcessStarted or StartFailed."""
        parent, key = self._parent, command.key
        if key in self.by_key or key in self._starting:
            raise RuleBroken("P5", key, f"{parent.name} starts a second process")
        self._starting[key] = None
        now = parent.world.scheduler.now
        self._launcher_free_at = max(now, self._launcher_free_at) + _FORK_S
        parent.os.after(self._launcher_free_at - now, lambda: self._forked(command))

    def _forked(self, command: commands.StartProcess) -> None:
        parent, key = self._parent, command.key
        draining = self._starting.pop(key)
        if parent.machine.refuses_forks:
            parent.world.observer.coverage.seen("fork_failed")
            parent.feed(events.StartFailed(key, "the fork was refused"))
            return
        self._incarnations += 1
        process = self._process_kind(parent, command, incarnation=self._incarnations)
        self.by_key[key] = process
        process.begin(rung=self._rung, gone=self._gone)
        parent.feed(events.ProcessStarted(key, process.incarnation))
        if draining is not None:
            self.drain(key, *draining)

    # Messages to lease processes.

    def drain(self, key: LeaseKey, reason: str, force_instant: Instant) -> None:
        """Ask the process to finish; from `force_instant` on it is forced to end."""
        process = self.by_key.get(key)
        if process is not None:
            process.send(worker_events.DrainRequested(reason))
            self._force_from(process, force_instant)
        elif key in self._starting:
            self._starting[key] = (reason, force_instant)
            self._parent.world.observer.coverage.seen("drain_with_a_start_under_way")

    def send_to_all(self, message: worker_events.OthersInSight) -> None:
        """Send to all running processes; new ones get it with their start command."""
        for process in self.living():
            process.send(message)

    def orphan(self) -> None:
        """Their manager died: the kernel closes its ends of the channels, and the launcher's."""
        self._starting.clear()
        for process in self.living():
            process.send(worker_events.ManagerGone())

    def _force_from(self, process: LeaseProcess, force_instant: Instant) -> None:
        before = process.force_instant
        process.force_instant = min(before, force_instant) if before is not None else force_instant
        self._parent.os.at(process.force_instant, lambda: self._force(process))

    def _force(self, process: LeaseProcess) -> None:
        """First the stacks, then the end: ABRT, and KILL for a process that ignores ABRT."""
        following = next_force(process.force_instant, process.forced)
        if following is None or process.is_over:
            return
        number, due = following
        if self._parent.machine.instant() < due:
            self._parent.os.at(due, lambda: self._force(process))
            return
        process.forced.append(number)
        if number is signal.SIGKILL or not process.os.is_stopped:
            process.kill(number)
        self._force(process)

    # Stalls.

    def look(self) -> None:
        """Look now and repeatedly: end processes that stand still, as the watchdog does [L5]."""
        now = self._parent.machine.instant()
        suspects = any(process.may_stand_still for process in self.living())
        if suspects:
            self._judge_all(now)
        self._parent.os.after(_LOOK_EVERY_S if suspects else _LOOK_SELDOM_S, self.look)

    def _judge_all(self, now: Instant) -> None:
        living = list(self.living())
        self._watch.look([process.incarnation for process in living], now)
        failover_s = self._parent.world.settings.failover_s
        for process in living:
            stall = self._watch.judge(
                process.incarnation, process.status(), failover_s=failover_s, now=now
            )
            if stall is not None and process.force_instant is None:
                process.send(worker_events.DrainRequested(stall.what))
                self._force_from(process, Instant(now + STALL_PATIENCE_S))

    # Messages from lease processes.

    def _rung(self, process: LeaseProcess) -> None:
        """The process rang the doorbell: take its messages."""
        self._parent.os.act(lambda: self._empty(process))

    def _empty(self, process: LeaseProcess) -> None:
        while process.ring:
            self._parent.feed(process.ring.popleft())

    def _gone(self, process: LeaseProcess, reason: str) -> None:
        """It exited, or was killed: reported once that is proven, and after all its messages."""

        def reaped() -> None:
            self._empty(process)
            del self.by_key[process.key]
            self._parent.feed(events.ProcessExited(process.key, process.incarnation, reason))

        self._parent.os.after(_REAP_S, reaped)


# A round trip to Kinesis' control plane.
_DESCRIBED_AFTER_S: Final = 0.05


class ServiceCalls(ServiceRequests):
    """Performs the requests of one manager, in its process. `check_write` may refuse a write."""

    def __init__(
        self,
        name: str,
        world: SimulatedWorld,
        os: OsProcess,
        *,
        feed: Callable[[events.Event], None],
        chance: Callable[[], float],
        check_write: Callable[[LeaseKey], None],
    ) -> None:
        machine = os.machine
        super().__init__(
            now=machine.instant,
            at=lambda instant, action: os.after(
                machine.clock.time_of(instant) - world.scheduler.now, action
            ),
            after=os.after,
            chance=chance,
            deliver=feed,
        )
        self._name = name
        self._world = world
        self._os = os
        self._uplink: Uplink = machine.uplink
        self._check_write = check_write
        self._offer_polls = OfferPolls(
            self._uplink,
            now=world.scheduler.clock,
            after=os.after,
            looked=lambda rows: os.act(lambda: feed(events.OffersFound(rows))),
        )

    def stand_still(self) -> None:
        """The process stands still: it looks for offers when due, or as soon as it can."""
        self._uplink.wake(self._offer_polls)

    def cease(self) -> None:
        """The process has died: stop its polls."""
        self._uplink.idle_no_more(self._offer_polls)

    def _send(self, request: Request, attempt: int) -> None:
        uplink, cost, now = self._uplink, self._world.observer.cost, self._world.scheduler.now

        def came(event: events.Event) -> None:
            self._os.act(lambda: self._deliver(event))

        def failed(_: str) -> None:
            self._failed(request, attempt)

        match request:
            case commands.ScanTable(consistent):
                if attempt == 1:
                    cost.scanned(self._name, now)
                uplink.scan(
                    lambda leases: came(events.LeasesScanned(leases)), failed, consistent=consistent
                )
            case commands.ListShards(with_start):
                if attempt == 1:
                    cost.listed(self._name, now)
                uplink.ask_kinesis(lambda: self._listed(with_start=with_start), came, failed)
            case commands.ReadRow(key):
                uplink.read(key, lambda row: came(events.RowRead(key, row)), failed)
            case commands.ReadParents():
                self._read_parents(request, (), failed)
            case commands.FindOffers(rows_max):
                cost.queried(self._name, now)
                self._offer_polls.look(rows_max)
            case commands.DescribeStream():
                self._os.after(_DESCRIBED_AFTER_S, lambda: self._described(request))
            case commands.ReadKcl3Mode() | commands.WriteRow():
                raise AssertionError("not asked by this core, or sent by `_send_write`")

    def _listed(self, *, with_start: bool) -> events.ShardsListed:
        stream, now = self._world.stream, self._world.scheduler.now
        at_start = stream.at_trim_horizon(now) if with_start else None
        return events.ShardsListed(stream.listing(now), WallTime(WORLD_BEGAN_AT + now), at_start)

    def _described(self, request: commands.DescribeStream) -> None:
        """Rare, and a part only of promise P13: the answer comes at once, or after a repetition."""
        if self._os.machine.is_cut:
            self._send(request, 2)
        else:
            self._deliver(events.StreamDescribed(self._world.stream.created_at))

    def _read_parents(
        self,
        request: commands.ReadParents,
        found: tuple[Lease | None, ...],
        failed: Failed,
    ) -> None:
        """One after the other; after a failure, all again."""
        if len(found) == len(request.parents):
            self._deliver(events.ParentsRead(request.key, found))
            return

        def read(row: Lease | None) -> None:
            self._os.act(lambda: self._read_parents(request, (*found, row), failed))

        self._uplink.read(request.parents[len(found)], read, failed)

    def _send_write(self, key: LeaseKey, change: LeaseChange) -> None:
        if not isinstance(change, Ask):  # not a write of the owner, and it leaves the counter alone
            self._check_write(key)

        def answered(outcome: Outcome) -> None:
            self._os.act(lambda: self._resolved(key, change, outcome))

        self._uplink.write(self._name, change, answered)


# As the manager's shell in its first minute; later it looks once a second, which finds no more.
_SEIZE_EVERY_S: Final = 0.1


class Host:
    """`name` is `<group>:<slot>:<nonce>`. `core_kind` and `process_kind` are for planted bugs.

    `kill`, `freeze` and `thaw` act on the machine with all its processes; the methods with
    `_manager` act on the manager alone.
    """

    def __init__(
        self,
        name: str,
        world: SimulatedWorld,
        machine: Machine,
        *,
        core_kind: type[LeaseManager] = LeaseManager,
        process_kind: type[LeaseProcess] = LeaseProcess,
    ) -> None:
        self.name = name
        self.world = world
        self.machine = machine
        self.os = machine.run(on_still=self._stands_still, on_death=self._died)
        self.owner: OwnerId = world.settings.owner_id(name)
        self.group = name.split(":", maxsplit=1)[0]
        self.others_in_sight = False
        self.is_finished = False
        settings = world.settings
        policy = ManagerPolicy(
            me=self.owner,
            failover_s=settings.failover_s,
            leases_max=settings.leases_max,
            balance=settings.balance,
            created={ONLY_STREAM: world.stream.created_at},
            described_instant=machine.instant(),
        )
        chance = world.scheduler.chance(name).random
        self.core = core_kind(policy, chance)
        self._stop = StopPlan(settings.grace_s)
        self._pump: Pump[events.Event, commands.Command] = Pump(self._handle, self._perform)
        self._is_seizing = False
        self._held_at_scan: frozenset[OwnerId] = frozenset()
        self.is_refused = False  # because the stream under its name is another one
        self._children = Children(self, process_kind)
        self._service_calls = ServiceCalls(
            name, world, self.os, feed=self.feed, chance=chance, check_write=self._check_write
        )
        self._alarm = self.os.alarm(self.core.next_deadline, lambda: self.feed(events.Ticked()))
        machine.locks.make(self.owner, self.os)

    # Start, faults and state.

    def start(self) -> None:
        self.seize()
        self._children.look()
        self.feed(events.Started(WallTime(WORLD_BEGAN_AT + self.world.scheduler.now)))

    def drain(self) -> None:
        """SIGTERM."""
        self.os.act(self._drain)

    def kill(self) -> None:
        """Power off."""
        self.machine.power_off()

    def freeze(self) -> None:
        self.machine.freeze()

    def thaw(self) -> None:
        self.machine.thaw()

    def kill_manager(self) -> None:
        """SIGKILL: its lease processes see the end of their channels."""
        self.os.die()
        self._children.orphan()

    def kill_process(self, key: LeaseKey) -> None:
        """SIGKILL of one lease process."""
        self.processes[key].kill()

    @property
    def processes(self) -> Mapping[LeaseKey, LeaseProcess]:
        """Its lease processes that are not proven gone yet."""
        return self._children.by_key

    def living(self) -> Iterator[LeaseProcess]:
        """Its living lease processes, whether or not the manager lives."""
        return self._children.living()

    @property
    def is_dead(self) -> bool:
        return self.os.is_dead and not self.is_finished

    @property
    def is_frozen(self) -> bool:
        return self.machine.is_frozen

    @property
    def is_up(self) -> bool:
        """It takes part: it has not ended and does not drain."""
        return not (self.os.is_dead or self.core.is_draining)

    # End.

    def _drain(self) -> None:
        if not self._stop.drain(self.machine.instant()):
            return
        self.feed(events.DrainRequested("SIGTERM"))
        leave_instant = leave_at(self._stop.force_instant)
        assert leave_instant is not None, "the patience of a drain has an end"
        self.os.at(leave_instant, self._leave)

    def _leave(self) -> None:
        """All leases are given away and all processes have ended; or the time is over, and rows of
        ours expire."""
        if not self.is_finished:
            self.is_finished = True
            self.machine.locks.retire(self.owner, self.os, is_named=bool(self.core.held()))
            self.kill_manager()

    def _stands_still(self) -> None:
        self._service_calls.stand_still()

    def _died(self) -> None:
        self._service_calls.cease()

    # Former owners [P3].

    def seize(self) -> None:
        """Look for former owners that are gone, as long as any are left. Called again for each new
        one."""
        if not self._is_seizing:
            self._is_seizing = True
            self.os.act(self._seize)

    def _seize(self) -> None:
        locks = self.machine.locks
        gained = locks.seize_former(self.owner, self.os)
        if gained:
            self.world.observer.cost.proven_gone()
            self.feed(events.FormerOwnersProvenGone(gained))
        self._is_seizing = locks.are_others(self.owner)
        if self._is_seizing:
            self.os.after(_SEIZE_EVERY_S, self._seize)

    # Events and commands.

    def feed(self, event: events.Event) -> None:
        """Give an event to the core, after the events that already wait."""
        self._pump.post(event)
        if not self._pump.run():
            return
        if self.core.is_finished and not len(self._children):
            self._leave()
        else:
            self._alarm.set()

    def _handle(self, event: events.Event) -> tuple[commands.Command, ...]:
        if self._held_at_scan and isinstance(event, events.LeasesScanned):
            named = {lease.owner for lease in event.leases}
            self.machine.locks.forget(self._held_at_scan - named)
        following = self.core.handle(event, self.machine.instant())
        self.core.check()
        return following

    def _perform(self, command: commands.Command) -> None:
        match command:
            case commands.StartProcess():
                self._children.start(command)
            case commands.DrainProcess(key, reason):
                patience = self._stop.force_instant_from(self.machine.instant())
                self._children.drain(key, reason, patience)
            case commands.PublishOthersInSight(others):
                self.others_in_sight = others
                self._children.send_to_all(OthersInSight(others))
            case commands.StopRefused():
                self.is_refused = True
                self.world.observer.coverage.seen("stream_recreated")
                self._drain()
            case commands.Note() | commands.Finish() | commands.ReadKcl3Mode():
                pass
            case request:
                if isinstance(request, commands.ScanTable):
                    self._held_at_scan = self.machine.locks.seized_by(self.os)
                self._service_calls.perform(request)

    def _check_write(self, key: LeaseKey) -> None:
        if key in self.processes:
            raise RuleBroken("P5", key, f"{self.name} writes beside its lease process")
