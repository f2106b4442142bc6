"""One start of a manager on a machine: the real `LeaseManager`, its commands performed.

As the manager's shell does it: events are taken one after another, each with all its commands.
May not know: other hosts. Look next: `performing.py`, `children.py`, `machine.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final

from kclrun.consuming.events import OthersInSight
from kclrun.leases import commands as do
from kclrun.leases import events as on
from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import ManagerPolicy
from kclrun.manager.stopping import leave_at
from kclrun.model.lease import LeaseKey, OwnerId
from kclrun.simulation.children import Children
from kclrun.simulation.machine import Machine
from kclrun.simulation.performing import Performer
from kclrun.simulation.process import LeaseProcess
from kclrun.simulation.story import RuleBroken
from kclrun.simulation.world import World
from kclrun.stopping import StopPlan

__all__ = ["Host"]

# As the manager's shell in its first minute; later it looks once a second, which finds no more.
_SEIZE_EVERY_S: Final = 0.1


class Host:
    """`name` is `<group>:<slot>:<nonce>`. `core_kind` and `process_kind` are for planted bugs.

    `kill`, `freeze` and `thaw` are about the machine with all that runs on it; with `_manager`,
    about the manager alone.
    """

    def __init__(
        self,
        name: str,
        world: World,
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
            me=self.owner, failover_s=settings.failover_s, leases_max=settings.leases_max
        )
        chance = world.scheduler.chance(name).random
        self.core = core_kind(policy, chance)
        self._stop = StopPlan(settings.grace_s)
        self._events: deque[on.Event] = deque()
        self._is_pumping = self._is_seizing = False
        self._held_at_scan: frozenset[OwnerId] = frozenset()
        self._children = Children(self, process_kind)
        self._performer = Performer(
            name, world, self.os, feed=self.feed, chance=chance, check_write=self._check_write
        )
        self._alarm = self.os.alarm(self.core.next_deadline, lambda: self.feed(on.Ticked()))
        machine.locks.make(self.owner, self.os)

    # Its life.

    def start(self) -> None:
        self.seize()
        self._children.look()
        self.feed(on.Started(self.machine.clock.wall(self.world.scheduler.now)))

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
        """Its lease processes that are not proven dead yet."""
        return self._children.by_key

    def living(self) -> Iterator[LeaseProcess]:
        """Its lease processes that live, with it or without it."""
        return self._children.living()

    @property
    def is_dead(self) -> bool:
        return self.os.is_dead and not self.is_finished

    @property
    def is_frozen(self) -> bool:
        return self.machine.is_frozen

    @property
    def is_up(self) -> bool:
        """It takes part: neither gone nor going."""
        return not (self.os.is_dead or self.core.is_draining)

    # Its end.

    def _drain(self) -> None:
        if not self._stop.drain(self.machine.instant()):
            return
        self.feed(on.DrainRequested("SIGTERM"))
        leave_instant = leave_at(self._stop.force_instant)
        assert leave_instant is not None, "the patience of a drain has an end"
        self.os.at(leave_instant, self._leave)

    def _leave(self) -> None:
        """All is given up and everybody gone; or the time is, and rows of ours expire."""
        if not self.is_finished:
            self.is_finished = True
            self.machine.locks.retire(self.owner, self.os, is_named=bool(self.core.held()))
            self.kill_manager()

    def _stands_still(self) -> None:
        self._performer.stand_still()

    def _died(self) -> None:
        self._performer.cease()

    # Former owners [P3].

    def seize(self) -> None:
        """Look for those that are gone, for as long as any are left. Called again when there is a
        new one."""
        if not self._is_seizing:
            self._is_seizing = True
            self.os.act(self._seize)

    def _seize(self) -> None:
        locks = self.machine.locks
        gained = locks.seize_former(self.owner, self.os)
        if gained:
            self.world.oracles.cost.proven_gone()
            self.feed(on.FormerOwnersProvenGone(gained))
        self._is_seizing = locks.are_others(self.owner)
        if self._is_seizing:
            self.os.after(_SEIZE_EVERY_S, self._seize)

    # Events and commands.

    def feed(self, event: on.Event) -> None:
        """Give an event to the core, after those that wait already."""
        self._events.append(event)
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            while self._events:
                self._pump(self._events.popleft())
        finally:
            self._is_pumping = False
        if self.core.is_finished and not len(self._children):
            self._leave()
        else:
            self._alarm.set()

    def _pump(self, event: on.Event) -> None:
        if self._held_at_scan and isinstance(event, on.LeasesScanned):
            named = {lease.owner for lease in event.leases}
            self.machine.locks.forget(self._held_at_scan - named)
        for command in self.core.handle(event, self.machine.instant()):
            self._perform(command)
        self.core.check()

    def _perform(self, command: do.Command) -> None:
        match command:
            case do.ScanTable():
                self.world.oracles.cost.scanned(self.name, self.world.scheduler.now)
                self._held_at_scan = self.machine.locks.seized_by(self.os)
                self._performer.scan_table()
            case do.ListShards(with_start):
                self.world.oracles.cost.listed(self.name, self.world.scheduler.now)
                self._performer.list_shards(with_start=with_start)
            case do.ReadRow(key):
                self._performer.read_row(key)
            case do.ReadParents(key, parents):
                self._performer.read_parents(key, parents)
            case do.FindOffers(rows_max):
                self.world.oracles.cost.queried(self.name, self.world.scheduler.now)
                self._performer.find_offers(rows_max)
            case do.WriteRow(change, not_before):
                self._performer.write_row(change, not_before)
            case do.StartProcess():
                self._children.start(command)
            case do.DrainProcess(key, reason):
                patience = self._stop.force_instant_from(self.machine.instant())
                self._children.drain(key, reason, patience)
            case do.TellOthersInSight(others):
                self.others_in_sight = others
                self._children.tell(OthersInSight(others))
            case do.Note() | do.Finish():
                pass

    def _check_write(self, key: LeaseKey) -> None:
        if key in self.processes:
            raise RuleBroken("P5", key, f"{self.name} writes beside its lease process")
