"""One machine: its clocks, the processes that run on it, its lock files, and what it suffers.

A manager and each lease process are an `OsProcess`: it runs, stands still, or is dead, by itself or
with its machine. May not know: leases. Rule: what would have happened to one that stands still
happens when it wakes, in any order; to a dead one never. Look next: `host.py`, `process.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Final

from kclrun.model.time import Instant
from kclrun.simulation.clocks import Alarm, HostClock
from kclrun.simulation.locks import NonceLocks
from kclrun.simulation.scheduler import Scheduler
from kclrun.simulation.table import SimulatedTable
from kclrun.simulation.uplink import Uplink

__all__ = ["Machine", "OsProcess"]

# Within which time the threads of a machine, or a process, that stood still are all awake.
_WAKING_S: Final = 0.01
# What is to happen at an instant happens this much after it: the way to world time and back rounds.
_LATE_S: Final = 1e-6


def _nothing() -> None:
    """For who does not mind."""


class Machine:
    """From one boot to its end. `refuses_forks`: no process can be started."""

    def __init__(
        self, name: str, scheduler: Scheduler, clock: HostClock, table: SimulatedTable
    ) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.locks = NonceLocks()
        self.uplink = Uplink(table, scheduler.after, scheduler.chance(f"{name}:uplink"))
        self.is_dead = self.is_frozen = self.refuses_forks = False
        self.waking: random.Random = scheduler.chance(f"{name}:waking")
        self._processes: list[OsProcess] = []

    def instant(self) -> Instant:
        return self.clock.instant(self.scheduler.now)

    def run(
        self, *, on_still: Callable[[], None] = _nothing, on_death: Callable[[], None] = _nothing
    ) -> OsProcess:
        """A new process; the callbacks say when it stands still, by itself or with the machine, and
        when it is dead."""
        self._processes = [each for each in self._processes if not each.is_dead]
        process = OsProcess(self, on_still, on_death)
        self._processes.append(process)
        return process

    @property
    def is_cut(self) -> bool:
        """No request gets out."""
        return self.uplink.is_cut

    def power_off(self) -> None:
        """All of it is gone at one stroke."""
        self.is_dead = True
        for process in self._processes:
            process.die()

    def freeze(self) -> None:
        """All of it stands still; its clocks do not."""
        self.is_frozen = True
        for process in self._processes:
            process.on_still()

    def connect(self) -> None:
        """Its requests get out again."""
        self.uplink.is_cut = False

    def allow_forks(self) -> None:
        self.refuses_forks = False

    def mend(self) -> None:
        """Whatever it suffers ends."""
        self.connect()
        self.allow_forks()
        if self.is_frozen:
            self.thaw()

    def thaw(self) -> None:
        self.is_frozen = False
        for process in self._processes:
            process.wake()


class OsProcess:
    """One process of the operating system."""

    def __init__(
        self, machine: Machine, on_still: Callable[[], None], on_death: Callable[[], None]
    ) -> None:
        self.machine = machine
        self.on_still = on_still
        self._scheduler = machine.scheduler
        self.is_dead = self.is_stopped = False
        self._on_death = on_death
        self._held_back: list[Callable[[], None]] = []

    def act(self, action: Callable[[], None]) -> None:
        """Now; once it is awake again; never."""
        if self.is_dead:
            return
        if self.is_stopped or self.machine.is_frozen:
            self._held_back.append(action)
        else:
            action()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._scheduler.after(delay_s, partial(self.act, action))

    def at(self, instant: Instant, action: Callable[[], None]) -> None:
        machine = self.machine
        due_s = machine.clock.time_of(instant) + _LATE_S
        self.after(due_s - machine.scheduler.now, action)

    def alarm(self, deadline: Callable[[Instant], Instant], ring: Callable[[], None]) -> Alarm:
        clock = self.machine.clock
        return Alarm(clock, self._scheduler, self.after, deadline=deadline, ring=ring)

    def stop(self) -> None:
        """SIGSTOP."""
        self.is_stopped = True
        self.on_still()

    def go_on(self) -> None:
        """SIGCONT."""
        self.is_stopped = False
        self.wake()

    def wake(self) -> None:
        """What waited happens, in any order: each is another thread's, and whoever wakes first goes
        first."""
        if self.is_stopped or self.machine.is_frozen:
            return
        held, self._held_back = self._held_back, []
        for action in held:
            self.after(_WAKING_S * self.machine.waking.random(), action)

    def die(self) -> None:
        """The kernel lets go of its locks."""
        if not self.is_dead:
            self.is_dead = True
            self._held_back.clear()
            self.machine.locks.let_go(self)
            self._on_death()
