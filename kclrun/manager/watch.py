"""Looks at one manager, twice a second, on its one timer.

It has its lease processes checked and its samples taken, passes on the fleet's failover, and ends a
run that has caught up. A look reads status slots and the state of the core. It never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kclrun.ipc.messages import FailoverChanged
from kclrun.lifecycle.caught_up import CaughtUp, is_at_tip
from kclrun.manager.loop import Loop
from kclrun.manager.manager import Manager
from kclrun.manager.sampling import Sampler
from kclrun.manager.tips import why_not_caught_up
from kclrun.manager.watchdog import Watchdog
from kclrun.manager.world import ExitReason
from kclrun.model.lease import Lease
from kclrun.model.time import Instant
from kclrun.observe.logs import EventLog
from kclrun.observe.sample import ManagerSample
from kclrun.protocol.status import LeaseStatus
from kclrun.traffic.hot_shards import Heated

SampleReader = Callable[[ManagerSample], None]
# Every 5 s. A process reports its traffic six times a window: every 10 s by default.
_LOOKS_PER_TRAFFIC: Final = 10
# Twice a second: two checks that are a second apart end a run at most half a second late.
_LOOK_EVERY_S: Final = 0.5


class EndWhenCaughtUp:
    """Ends a run that is to end once the fleet has caught up (`until: caught-up`).

    `source_is_done` comes from the caller. `are_read`: whether the leases that other owners read
    are read to their tips.
    """

    def __init__(
        self,
        manager: Manager,
        log: EventLog,
        *,
        source_is_done: Callable[[], bool],
        are_read: Callable[[Sequence[Lease]], bool] = lambda leases: not leases,
    ) -> None:
        self._manager = manager
        self._log = log
        self._source_is_done = source_is_done
        self._are_read = are_read
        self._caught_up = CaughtUp()
        self._is_waiting = False

    def look(self, now: Instant, statuses: list[LeaseStatus | None]) -> None:
        """Check whether the fleet has caught up; then the stop begins."""
        if not self._manager.is_running:
            return
        reasons = why_not_caught_up(self._manager.core.caught_up, now, self._are_read)
        self._note_waiting(reasons, statuses)
        is_caught_up = self._caught_up.look(
            now, is_source_done=self._source_is_done(), blockers=reasons, statuses=statuses
        )
        if is_caught_up:
            halted = self._manager.core.caught_up.halted()
            self._log.note("caught_up", halted=len(halted))
            reason = ExitReason.HALTED if halted else ExitReason.CAUGHT_UP
            self._manager.drain(reason.value, at_its_end=reason)

    def _note_waiting(self, reasons: Sequence[str], statuses: list[LeaseStatus | None]) -> None:
        """Log once that only other owners' work is waited for: this machine has nothing to do."""
        if self._is_waiting or not reasons or not all(map(is_at_tip, statuses)):
            return
        if any(self._manager.core.caught_up.read_elsewhere()):
            self._is_waiting = True
            self._log.note("waiting_for_others", reason=reasons[0])


class ManagerTimer:
    """The one timer of a manager: its checks, and the samples for the live table and the metrics.

    `readers` get the samples; each is named with the seconds between two of its samples. `end` is
    None for a run that goes on until it is stopped.
    """

    def __init__(
        self,
        manager: Manager,
        sampler: Sampler,
        *,
        loop: Loop,
        log: EventLog,
        watchdog: Watchdog,
        failover_s: float,
        readers: Sequence[tuple[float, SampleReader]],
        end: EndWhenCaughtUp | None = None,
    ) -> None:
        self._manager = manager
        self._sampler = sampler
        self._loop = loop
        self._log = log
        self._watchdog = watchdog
        self._own_failover_s = failover_s
        self._readers = [(round(each_s / _LOOK_EVERY_S), reader) for each_s, reader in readers]
        self._end = end
        self._looks = 0
        self.failover_s = failover_s

    def look(self) -> None:
        """Check now, and again after a pause."""
        now = self._loop.now()
        statuses = self._look_at_processes(now)
        self._look_at_failover()
        self._look_at_traffic(now)
        self._sample(now)
        if self._end is not None:
            self._end.look(now, statuses)
        self._loop.after(_LOOK_EVERY_S, self.look)

    def _sample(self, now: Instant) -> None:
        due = [reader for every, reader in self._readers if self._looks % every == 0]
        self._looks += 1
        if due:
            sample = self._sampler.take(now)
            for reader in due:
                reader(sample)

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

    def _look_at_traffic(self, now: Instant) -> None:
        if self._looks % _LOOKS_PER_TRAFFIC:
            return
        for change in self._sampler.look_at_traffic(now):
            if isinstance(change, Heated):
                hot = change.hot
                self._log.note("shard_hot", shard=change.key, reason=hot.reason, advice=hot.advice)
            else:
                self._log.note("shard_cooled", shard=change.key, reason=change.reason)


def fleet_failover_s(manager: Manager, own_s: float) -> float:
    """The smallest failover that a live owner has published, or our own if that is smaller."""
    core = manager.core
    owners = core.owners
    published = (
        row.failover_s
        for row in core.leases.values()
        if row.failover_s is not None and row.owner in owners and not row.is_ended
    )
    return min(own_s, min(published, default=own_s))
