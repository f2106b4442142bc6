"""What a manager measures of itself at one moment: `observe.metrics.ManagerSample`, filled.

Rule: a sample reads slots and what the core shows, and waits for nothing. Look next:
`metering.py` (who asks for samples), `snapshots.py` (the same for people).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from kclrun.ipc.board import LeaseStatus
from kclrun.leases.custody import State
from kclrun.leases.manager import LeaseManager
from kclrun.leases.totals import TableTotals
from kclrun.manager.child import Child
from kclrun.manager.manager import Manager
from kclrun.manager.performing import LOOK_FOR_OFFERS
from kclrun.manager.progress import lag_ms, progressed_instant
from kclrun.manager.report import ReportWriter
from kclrun.manager.snapshots import note_of, state_of
from kclrun.model.lease import LeaseKey, OwnerId
from kclrun.model.time import Instant, WallTime
from kclrun.observe.metrics import LeaseCounts, LeaseSample, ManagerSample, Outage

__all__ = ["Sampler"]

# States in which a lease stands still rightly: until its parents are ended, until who had it before
# has surely stopped, until it is resumed.
_STANDING: Final = frozenset({State.WAITING, State.OUTWAITING, State.HALTING, State.HALTED})

# Counting a table of 10,000 leases takes 20 ms; scans bring another count every 5 s at most.
_TOTALS_EVERY_S: Final = 10.0


class Sampler:
    """Makes the samples of one manager, in its loop's thread."""

    def __init__(
        self,
        manager: Manager,
        report: ReportWriter,
        *,
        application: str,
        stream: str,
        owner: OwnerId,
        leases_max: int,
        began_instant: Instant,
    ) -> None:
        self._manager = manager
        self._report = report
        self._application = application
        self._stream = stream
        self._owner = owner
        self._leases_max = leases_max
        self._began_instant = began_instant
        # When each lease last got on, over restarts of its process.
        self._progressed: dict[LeaseKey, Instant] = {}
        self._totals: TableTotals | None = None
        self._totals_instant = began_instant
        self._draining_since: Instant | None = None
        self._launcher_away_since: Instant | None = None

    def take(self, now: Instant) -> ManagerSample:
        """A sample of everything."""
        core, processes = self._manager.core, self._manager.processes
        children = {child.key: child for child in processes.living()}
        held = core.held()
        keys = sorted({*held, *children})
        self._progressed = {key: self._progressed.get(key, now) for key in keys}
        totals = self._totals_of(core, now)
        is_away = not processes.has_launcher
        # A stop that has come to its end may wait for the end of the machine as long as it likes.
        is_draining = core.is_draining and not core.is_finished
        self._launcher_away_since = _since(self._launcher_away_since, now, holds=is_away)
        self._draining_since = _since(self._draining_since, now, holds=is_draining)
        return ManagerSample(
            application=self._application,
            stream=self._stream,
            owner=self._owner,
            measured_at=self.wall_time(),
            uptime_s=now - self._began_instant,
            total_leases=totals.leases if totals is not None else None,
            total_shards=totals.shards if totals is not None else None,
            unclaimed_leases=totals.unclaimed if totals is not None else None,
            worker_leases=len(held),
            worker_leases_max=self._leases_max,
            leases=tuple(self._lease(key, children.get(key), now) for key in keys),
            outages=self._outages(now),
            launcher_away_s=_lasted(self._launcher_away_since, now),
            draining_s=_lasted(self._draining_since, now),
        )

    @staticmethod
    def wall_time() -> WallTime:
        """The host's clock, as on samples."""
        return WallTime(time.time())

    def take_departed(self, sample: ManagerSample) -> Mapping[str, LeaseCounts]:
        """What leases did that are not in `sample` and had a process since the last call."""
        departed = self._report.take_departed() - {LeaseKey(one.shard) for one in sample.leases}
        return {key: self._counts(key, None) for key in sorted(departed)}

    def _totals_of(self, core: LeaseManager, now: Instant) -> TableTotals | None:
        is_whole = self._totals is not None and self._totals.shards is not None
        if not is_whole or now - self._totals_instant >= _TOTALS_EVERY_S:
            self._totals, self._totals_instant = core.totals(), now
        return self._totals

    def _lease(self, key: LeaseKey, child: Child | None, now: Instant) -> LeaseSample:
        custody = self._manager.core.custody(key)
        status = child.look() if child is not None else None
        if custody is not None and custody.state in _STANDING:
            self._progressed[key] = now
            still_s = None
        else:
            still_s = self._still_s(key, status, now)
        return LeaseSample(
            shard=key,
            state=state_of(custody, status),
            counts=self._counts(key, status),
            lag_ms=lag_ms(status, now) if status is not None else None,
            still_s=still_s,
            restarts=self._report.restarts(key),
            note=note_of(custody, now),
        )

    def _still_s(self, key: LeaseKey, status: LeaseStatus | None, now: Instant) -> float:
        if status is not None:
            self._progressed[key] = max(self._progressed[key], progressed_instant(status))
        return max(0.0, now - self._progressed[key])

    def _counts(self, key: LeaseKey, status: LeaseStatus | None) -> LeaseCounts:
        shard = self._report.shard(key, status)
        return LeaseCounts(shard.records or 0, shard.bytes or 0)

    def _outages(self, now: Instant) -> tuple[Outage, ...]:
        return tuple(
            Outage(operation, code, max(0.0, now - since), is_vital=operation != LOOK_FOR_OFFERS)
            for operation, (since, code) in self._manager.performer.outages.items()
        )


def _since(before: Instant | None, now: Instant, *, holds: bool) -> Instant | None:
    """Since when something holds that is looked at again and again."""
    if not holds:
        return None
    return now if before is None else before


def _lasted(since: Instant | None, now: Instant) -> float | None:
    return now - since if since is not None else None
