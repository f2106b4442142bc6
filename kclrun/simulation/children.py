"""The lease processes of one manager: forked, spoken to, heard, forced to end, proven dead.

As `manager/children.py` does it. What to do with one that stands still, and when patience ends, is
decided by the manager's own code. May not know: the core. Look next: `host.py`, `process.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Final, Protocol

from kclrun.consuming import events as worker_events
from kclrun.leases import commands as do
from kclrun.leases import events as on
from kclrun.manager.stall import STALL_PATIENCE_S, StallWatch
from kclrun.manager.stopping import next_force
from kclrun.model.lease import LeaseKey, OwnerId
from kclrun.model.time import Instant
from kclrun.simulation.machine import Machine, OsProcess
from kclrun.simulation.process import LeaseProcess
from kclrun.simulation.story import RuleBroken
from kclrun.simulation.world import World

__all__ = ["Children", "Parent"]

# The fork server forks one at a time: 8 ms (DESIGN 6), and half as much again until it runs.
_FORK_S: Final = 0.015
# The manager looks each half second; while nobody stands still and no batch is long, that finds
# nothing, and a look each 15 s comes before any stall counts (20 s).
_LOOK_EVERY_S: Final = 0.5
_LOOK_SELDOM_S: Final = 15.0
# From an exit, or a SIGKILL, to what the pidfd says of it.
_REAP_S: Final = 0.003


class Parent(Protocol):
    """The manager, as far as its lease processes go. `others_in_sight` is told to new ones."""

    world: World
    machine: Machine
    os: OsProcess
    name: str
    owner: OwnerId
    others_in_sight: bool

    def feed(self, event: on.Event) -> None: ...


class Children:
    """`process_kind` is for planted bugs."""

    def __init__(self, parent: Parent, process_kind: type[LeaseProcess]) -> None:
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

    def start(self, command: do.StartProcess) -> None:
        """Comes back as ProcessStarted or StartFailed."""
        parent, key = self._parent, command.key
        if key in self.by_key or key in self._starting:
            raise RuleBroken("P5", key, f"{parent.name} starts a second process")
        self._starting[key] = None
        now = parent.world.scheduler.now
        self._launcher_free_at = max(now, self._launcher_free_at) + _FORK_S
        parent.os.after(self._launcher_free_at - now, lambda: self._forked(command))

    def _forked(self, command: do.StartProcess) -> None:
        parent, key = self._parent, command.key
        draining = self._starting.pop(key)
        if parent.machine.refuses_forks:
            parent.world.oracles.processes.fork_failed()
            parent.feed(on.StartFailed(key, "the fork was refused"))
            return
        self._incarnations += 1
        process = self._process_kind(parent, command, incarnation=self._incarnations)
        self.by_key[key] = process
        process.begin(rung=self._rung, gone=self._gone)
        parent.feed(on.ProcessStarted(key, process.incarnation))
        if draining is not None:
            self.drain(key, *draining)

    # Speaking.

    def drain(self, key: LeaseKey, reason: str, force_instant: Instant) -> None:
        """Ask it to finish; from `force_instant` on it is forced to."""
        process = self.by_key.get(key)
        if process is not None:
            process.tell(worker_events.DrainRequested(reason))
            self._force_from(process, force_instant)
        elif key in self._starting:
            self._starting[key] = (reason, force_instant)
            self._parent.world.oracles.processes.drained_before_it_began()

    def tell(self, message: worker_events.OthersInSight) -> None:
        """To all that run; new ones learn it from their start command."""
        for process in self.living():
            process.tell(message)

    def orphan(self) -> None:
        """Their manager is dead: the kernel closes its ends of the channels, and the launcher's."""
        self._starting.clear()
        for process in self.living():
            process.tell(worker_events.ManagerGone())

    def _force_from(self, process: LeaseProcess, force_instant: Instant) -> None:
        before = process.force_instant
        process.force_instant = min(before, force_instant) if before is not None else force_instant
        self._parent.os.at(process.force_instant, lambda: self._force(process))

    def _force(self, process: LeaseProcess) -> None:
        """First the stacks, then the end: ABRT, and KILL for who does not even hear that."""
        number, due = next_force(process.force_instant, process.forced)
        if number is None or due is None or process.is_over:
            return
        if self._parent.machine.instant() < due:
            self._parent.os.at(due, lambda: self._force(process))
            return
        process.forced.append(number)
        if number is signal.SIGKILL or not process.os.is_stopped:
            process.kill(number)
        self._force(process)

    # Standing still.

    def look(self) -> None:
        """Now and ever after: end those that stand still, as the watchdog does [L5]."""
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
                process.tell(worker_events.DrainRequested(stall.what))
                self._force_from(process, Instant(now + STALL_PATIENCE_S))

    # Hearing.

    def _rung(self, process: LeaseProcess) -> None:
        """The doorbell."""
        self._parent.os.act(lambda: self._empty(process))

    def _empty(self, process: LeaseProcess) -> None:
        while process.ring:
            self._parent.feed(process.ring.popleft())

    def _gone(self, process: LeaseProcess, reason: str) -> None:
        """It exited, or was killed: told once that is proven, and after all that it said."""

        def reaped() -> None:
            self._empty(process)
            del self.by_key[process.key]
            self._parent.feed(on.ProcessExited(process.key, process.incarnation, reason))

        self._parent.os.after(_REAP_S, reaped)
