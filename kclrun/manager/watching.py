"""Once a second, a look at everything: snapshot, stalls, the fleet's failover, caught up or not.

Holds: `Watch`. Rule: a look reads slots and what the core shows, and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kclrun.ipc.board import LeaseStatus
from kclrun.ipc.messages import FailoverChanged
from kclrun.manager.caught_up import CaughtUp
from kclrun.manager.loop import Loop
from kclrun.manager.manager import Manager
from kclrun.manager.snapshots import Snapshots
from kclrun.manager.watchdog import Watchdog
from kclrun.manager.world import ExitReason
from kclrun.model.time import Instant
from kclrun.observe.logs import EventLog
from kclrun.observe.snapshot import Snapshot

__all__ = ["Watch", "fleet_failover_s"]

# Twice a second: two looks that are a second apart end a run at most half a second late.
_LOOK_EVERY_S: Final = 0.5


class Watch:
    """The looks of one manager. `on_snapshot` and `source_is_done` come from the caller."""

    def __init__(
        self,
        manager: Manager,
        snapshots: Snapshots,
        *,
        loop: Loop,
        log: EventLog,
        watchdog: Watchdog,
        failover_s: float,
        on_snapshot: Callable[[Snapshot], None] | None,
        is_until_caught_up: bool,
        source_is_done: Callable[[], bool],
    ) -> None:
        self._manager = manager
        self._snapshots = snapshots
        self._loop = loop
        self._log = log
        self._watchdog = watchdog
        self._own_failover_s = failover_s
        self._on_snapshot = on_snapshot
        self._is_until_caught_up = is_until_caught_up
        self._source_is_done = source_is_done
        self._caught_up = CaughtUp()
        self._looks = 0
        self.failover_s = failover_s

    def look(self) -> None:
        """Look now, and again after a while."""
        now = self._loop.now()
        statuses = self._look_at_processes(now)
        self._look_at_failover()
        if self._looks % 2 == 0 and self._on_snapshot is not None:
            self._on_snapshot(self._snapshots.take(now))
        self._looks += 1
        if self._is_until_caught_up and self._manager.is_running:
            self._look_for_the_end(now, statuses)
        self._loop.after(_LOOK_EVERY_S, self.look)

    def _look_at_processes(self, now: Instant) -> list[LeaseStatus | None]:
        living = tuple(self._manager.processes.living())
        self._watchdog.look(living, now)
        return [child.look() for child in living]

    def _look_at_failover(self) -> None:
        """The smallest failover of the fleet bounds every fence [P7]."""
        failover_s = fleet_failover_s(self._manager, self._own_failover_s)
        if failover_s != self.failover_s:
            self.failover_s = failover_s
            self._manager.processes.broadcast(FailoverChanged(failover_s))

    def _look_for_the_end(self, now: Instant, statuses: list[LeaseStatus | None]) -> None:
        is_caught_up = self._caught_up.look(
            now,
            is_source_done=self._source_is_done(),
            blockers=self._manager.core.caught_up_blockers(),
            statuses=statuses,
        )
        if is_caught_up:
            halted = self._manager.core.halted()
            self._log.note("caught_up", halted=len(halted))
            reason = ExitReason.HALTED if halted else ExitReason.CAUGHT_UP
            self._manager.drain(reason.value, at_its_end=reason)


def fleet_failover_s(manager: Manager, own_s: float) -> float:
    """The smallest failover that a live owner has published, or ours."""
    core = manager.core
    owners = core.owners
    published = (
        row.failover_s
        for row in core.leases.values()
        if row.failover_s is not None and row.owner in owners and not row.is_ended
    )
    return min(own_s, min(published, default=own_s))
