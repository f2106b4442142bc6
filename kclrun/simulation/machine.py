"""One machine: its clocks, the processes that run on it, its lock files, and its faults.

A manager and each lease process are an `OsProcess`. It does not know leases.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from kclrun.model.lease import OwnerId
from kclrun.model.time import Instant
from kclrun.simulation.clocks import Alarm, HostClock, Scheduler
from kclrun.simulation.table import SimulatedTable
from kclrun.simulation.uplink import Uplink


# The lock files of one machine, one for each start of a manager [P3].
class NonceLocks:
    """Like the kernel's `flock` on the files of `manager/locks.py`; does not know rows.

    A nonce's lock is held shared by its manager and by each of its lease processes, or exclusively
    by a later manager, which keeps it. The kernel releases exactly the locks of an ended process.
    `holder` is any object that stands for a process, known by its identity.
    """

    def __init__(self) -> None:
        self._shared: dict[OwnerId, list[object]] = {}
        self._seized: dict[OwnerId, object] = {}

    def make(self, owner: OwnerId, holder: object) -> None:
        """A manager starts: the file of its nonce, held shared."""
        self._shared[owner] = [holder]

    def share(self, owner: OwnerId, holder: object) -> bool:
        """A lease process takes the lock of its manager's nonce; False where it cannot."""
        if owner in self._seized or owner not in self._shared:
            return False
        self._shared[owner].append(holder)
        return True

    def seize_former(self, own: OwnerId, holder: object) -> frozenset[OwnerId]:
        """Lock every other nonce without a holder: the owners newly proven gone."""
        gained = frozenset(
            owner
            for owner, holders in self._shared.items()
            if owner != own and not holders and owner not in self._seized
        )
        self._seized.update(dict.fromkeys(sorted(gained), holder))
        return gained

    def seized_by(self, holder: object) -> frozenset[OwnerId]:
        return frozenset(owner for owner, by in self._seized.items() if by is holder)

    def are_others(self, own: OwnerId) -> bool:
        """Whether a nonce is left to seize."""
        return any(owner != own and owner not in self._seized for owner in self._shared)

    def forget(self, owners: Iterable[OwnerId]) -> None:
        """Remove the files of former owners that no row names any more."""
        for owner in owners:
            self._shared.pop(owner, None)
            self._seized.pop(owner, None)

    def release(self, holder: object) -> None:
        """The process has ended: release its locks."""
        for holders in self._shared.values():
            if holder in holders:
                holders.remove(holder)
        for owner in [owner for owner, by in self._seized.items() if by is holder]:
            del self._seized[owner]

    def retire(self, owner: OwnerId, holder: object, *, is_named: bool) -> None:
        """A manager ends: delete the file if no other process holds it and no row names it."""
        self.release(holder)
        if not is_named and not self._shared.get(owner):
            self._shared.pop(owner, None)


# The threads of a machine, or a process, that stood still are all awake within this time.
_WAKING_S: Final = 0.01
# Actions at an instant run this much after it: the conversion to world time and back rounds.
_LATE_S: Final = 1e-6


def _nothing() -> None:
    """The default callback."""


class Machine:
    """A machine from one boot to its end. `refuses_forks`: no process can be started."""

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
        """A new process; the callbacks run when it stands still, by itself or with the machine, and
        when it has died."""
        self._processes = [process for process in self._processes if not process.is_dead]
        process = OsProcess(self, on_still, on_death)
        self._processes.append(process)
        return process

    @property
    def is_cut(self) -> bool:
        """Whether its requests cannot leave the machine."""
        return self.uplink.is_cut

    def power_off(self) -> None:
        """All its processes die at once."""
        self.is_dead = True
        for process in self._processes:
            process.die()

    def freeze(self) -> None:
        """All its processes stand still; its clocks go on."""
        self.is_frozen = True
        for process in self._processes:
            process.on_still()

    def connect(self) -> None:
        """Its requests leave the machine again."""
        self.uplink.is_cut = False

    def allow_forks(self) -> None:
        self.refuses_forks = False

    def repair(self) -> None:
        """End all its faults."""
        self.connect()
        self.allow_forks()
        if self.is_frozen:
            self.thaw()

    def thaw(self) -> None:
        self.is_frozen = False
        for process in self._processes:
            process.wake()


class OsProcess:
    """One process of the operating system: it runs, stands still, or has died, by itself or with
    its machine. Actions of a process that stands still run when it wakes, in any order. Actions of
    a process that has died never run."""

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
        """Run the action now; when the process is awake again; or never."""
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
        """The waiting actions run, in any order: each belongs to another thread, and the first
        thread that wakes runs first."""
        if self.is_stopped or self.machine.is_frozen:
            return
        held, self._held_back = self._held_back, []
        for action in held:
            self.after(_WAKING_S * self.machine.waking.random(), action)

    def die(self) -> None:
        """The process ends, and the kernel releases its locks."""
        if not self.is_dead:
            self.is_dead = True
            self._held_back.clear()
            self.machine.locks.release(self)
            self._on_death()
