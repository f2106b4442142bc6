"""Measures one manager: snapshots for the live table, samples for metrics and /health.

A snapshot or a sample reads status slots and the state of the core. It never waits.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec
import psutil

from kclrun.leases.held_lease import HeldLease, State
from kclrun.leases.manager import LeaseManager
from kclrun.leases.shard_sync import TableTotals
from kclrun.manager.manager import Manager, ReportWriter
from kclrun.manager.ring_reader import Child, lag_of, progressed_instant
from kclrun.manager.service_calls import LOOK_FOR_OFFERS, READ_KCL3_MODE
from kclrun.model.lease import OFFERED, LeaseKey, OwnerId
from kclrun.model.time import Instant, WallTime
from kclrun.observe.metrics import LeaseCounts, LeaseSample, ManagerSample, Outage
from kclrun.observe.snapshot import LEASES_COMMAND, LeaseView, Snapshot
from kclrun.protocol.status import LeaseStatus, WorkerState

# Rates are averages over the last few snapshots, so that a reader can follow the number.
_LOOKS_KEPT: Final = 5
# A process's own memory is read from `smaps_rollup`, up to 1 ms each: at most so many a snapshot,
# in turn.
_MEMORY_READS_MAX: Final = 8

_BEFORE_READING: Final = frozenset({WorkerState.STARTING, WorkerState.CLAIMING})
_WORDS_OF_STATES: Final = {
    State.TAKING: "starting",
    State.EXAMINING: "backing off",
    State.BACKING_OFF: "backing off",
    State.WAITING: "waiting",
    State.RENEWING_BEFORE_START: "starting",
    State.QUARANTINED: "waiting",
    State.STARTING: "starting",
    State.RUNNING: "running",
    State.DRAINING: "ending",
    State.EXITING: "ending",
    State.HALTING: "halted",
    State.HALTED: "halted",
    State.RELEASING: "ending",
    State.GONE: "ended",
}


class Gauge:
    """CPU and memory of processes, kept between snapshots: a share of CPU needs two readings."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}
        self._memory: dict[int, int] = {}

    def look(self, pids: Iterable[int]) -> dict[int, tuple[float | None, int | None]]:
        """CPU percent and own bytes by pid; None for a value that could not be read.

        It never fails: a process that exits between two system calls has neither value.
        """
        alive = set(pids)
        for pid in set(self._processes) - alive:
            del self._processes[pid]
            self._memory.pop(pid, None)
        # First the processes never read, then those read the longest ago: a reading moves to the
        # end.
        in_turn = [*(alive - self._memory.keys()), *self._memory]
        for pid in in_turn[:_MEMORY_READS_MAX]:
            self._memory.pop(pid, None)
            memory = self._own_bytes(pid)
            if memory is not None:
                self._memory[pid] = memory
        return {pid: (self._cpu_percent(pid), self._memory.get(pid)) for pid in alive}

    def _process(self, pid: int) -> psutil.Process:
        return self._processes.setdefault(pid, psutil.Process(pid))

    def _cpu_percent(self, pid: int) -> float | None:
        try:
            is_first = pid not in self._processes
            percent = self._process(pid).cpu_percent(None)
        except (psutil.Error, OSError):
            return None
        return None if is_first else percent

    def _own_bytes(self, pid: int) -> int | None:
        try:
            return int(psutil.Process(pid).memory_full_info().uss)
        except (psutil.Error, OSError):
            return None


class Snapshots:
    """Makes the snapshots (`observe.snapshot.Snapshot`) of one manager, one a second."""

    def __init__(
        self,
        *,
        application: str,
        stream: str,
        owner: OwnerId,
        began_instant: Instant,
        core: LeaseManager,
        living: Callable[[], Iterable[Child]],
        report: ReportWriter,
        leases_command: str | None = LEASES_COMMAND,
    ) -> None:
        self._application = application
        self._stream = stream
        self._owner = owner
        self._began_instant = began_instant
        self._core = core
        self._living = living
        self._report = report
        self._leases_command = leases_command
        self._gauge = Gauge()
        self._looks: dict[LeaseKey, collections.deque[tuple[Instant, int]]] = {}

    def take(self, now: Instant) -> Snapshot:
        """The state of all leases and their processes now."""
        children = {child.key: child for child in self._living()}
        gauged = self._gauge.look(child.pid for child in children.values() if child.pid is not None)
        views = []
        for key in sorted({*self._core.held(), *children}):
            child = children.get(key)
            pid = child.pid if child is not None else None
            cpu, memory = gauged.get(pid, (None, None)) if pid is not None else (None, None)
            status = child.look() if child is not None else None
            trouble = child.trouble if child is not None else ""
            view = self._view(key, status, trouble, now)
            views.append(
                msgspec.structs.replace(view, pid=pid, cpu_percent=cpu, memory_bytes=memory)
            )
        elsewhere, free = self._others({view.shard for view in views})
        return Snapshot(
            application=self._application,
            stream=self._stream,
            owner=self._owner,
            uptime_s=now - self._began_instant,
            leases=tuple(views),
            leases_elsewhere=elsewhere,
            leases_free=free,
            ended_total=self._report.ended_total,
            records_departed=self._report.records_besides({view.shard for view in views}),
            is_draining=self._core.is_draining,
            leases_command=self._leases_command,
        )

    def _view(
        self, key: LeaseKey, status: LeaseStatus | None, trouble: str, now: Instant
    ) -> LeaseView:
        held_lease = self._core.held_lease(key)
        totals = self._report.shard(key, status)
        return LeaseView(
            shard=key,
            state=state_of(held_lease, status, trouble),
            owner=self._owner,
            records_total=totals.records or 0,
            records_per_s=self._rate(key, totals.records or 0, now),
            lag_ms=lag_of(held_lease, status, now, self._core.wall_time(now)),
            restarts=totals.restarts,
            note=note_of(held_lease, now, trouble),
        )

    def _rate(self, key: LeaseKey, records: int, now: Instant) -> float:
        looks = self._looks.setdefault(key, collections.deque(maxlen=_LOOKS_KEPT))
        looks.append((now, records))
        (before, then), (_, latest) = looks[0], looks[-1]
        return max(0.0, (latest - then) / (now - before)) if now > before else 0.0

    def _others(self, ours: set[str]) -> tuple[int, int]:
        elsewhere = free = 0
        for key, row in self._core.leases.items():
            if row.is_ended or key in ours:
                continue
            if row.owner is None or row.owner == OFFERED:
                free += 1
            elsewhere += row.owner not in (None, OFFERED, self._owner)
        return elsewhere, free


def state_of(held_lease: HeldLease | None, status: LeaseStatus | None, trouble: str = "") -> str:
    """One short word for the activity of a lease; `LeaseView.state` lists the words.

    `trouble` is the exception of user code, in words, while the call is retried.
    """
    word = _WORDS_OF_STATES[held_lease.state] if held_lease is not None else "ending"
    if word == "running" and status is not None and status.state is not WorkerState.PROCESSING:
        word = "ending" if status.state not in _BEFORE_READING else "starting"
    return "failing" if trouble and word in {"running", "starting", "ending"} else word


def note_of(held_lease: HeldLease | None, now: Instant, trouble: str = "") -> str:
    """Why a lease does not advance; empty if it advances."""
    if held_lease is None:
        return trouble
    if held_lease.row is not None and held_lease.row.halt is not None:
        return held_lease.row.halt.reason
    if held_lease.failure is not None or trouble:
        return held_lease.failure or trouble
    if held_lease.state is State.BACKING_OFF and held_lease.rest_until > now:
        return f"restarts in {held_lease.rest_until - now:.0f} s"
    return "its parents are not ended" if held_lease.state is State.WAITING else ""


_NOT_VITAL: Final = frozenset({LOOK_FOR_OFFERS, READ_KCL3_MODE})

# States in which a lease does not advance by design: until its parents are ended, until its former
# owner has surely stopped, until it is resumed.
_STANDING: Final = frozenset({State.WAITING, State.QUARANTINED, State.HALTING, State.HALTED})

# Counting a table of 10,000 leases takes 20 ms; scans bring a new count every 5 s at most.
_TOTALS_EVERY_S: Final = 10.0


class Sampler:
    """Makes the samples (`observe.metrics.ManagerSample`) of one manager, in its loop's thread."""

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
        # When each lease last advanced, over restarts of its process.
        self._progressed: dict[LeaseKey, Instant] = {}
        self._totals: TableTotals | None = None
        self._totals_instant = began_instant
        self._draining_since: Instant | None = None
        self._launcher_away_since: Instant | None = None

    def take(self, now: Instant) -> ManagerSample:
        """The measurements of this moment."""
        core, processes = self._manager.core, self._manager.processes
        children = {child.key: child for child in processes.living()}
        held = core.held()
        keys = sorted({*held, *children})
        self._progressed = {key: self._progressed.get(key, now) for key in keys}
        totals = self._totals_of(core, now)
        is_away = not processes.has_launcher
        # A stop that is finished may wait without limit for the end of the machine.
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
            native_mode=core.native_mode,
            host_short_s=_lasted(core.host_places.short_since, now),
            host_runs=core.host_places.proven,
            host_reason=core.host_places.reason,
            draining_s=_lasted(self._draining_since, now),
            leases_command=self._manager.leases_command,
        )

    @staticmethod
    def wall_time() -> WallTime:
        """The host's clock, as in the samples."""
        return WallTime(time.time())

    def take_departed(self, sample: ManagerSample) -> Mapping[str, LeaseCounts]:
        """Counts of leases not in `sample` whose process exited since the last call."""
        departed = self._report.take_departed() - {LeaseKey(one.shard) for one in sample.leases}
        return {key: self._counts(key, None) for key in sorted(departed)}

    def _totals_of(self, core: LeaseManager, now: Instant) -> TableTotals | None:
        is_whole = self._totals is not None and self._totals.shards is not None
        if not is_whole or now - self._totals_instant >= _TOTALS_EVERY_S:
            self._totals, self._totals_instant = core.totals(), now
        return self._totals

    def _lease(self, key: LeaseKey, child: Child | None, now: Instant) -> LeaseSample:
        held_lease = self._manager.core.held_lease(key)
        status = child.look() if child is not None else None
        trouble = child.trouble if child is not None else ""
        if held_lease is not None and held_lease.state in _STANDING:
            self._progressed[key] = now
            still_s = None
        else:
            still_s = self._still_s(key, status, now)
        return LeaseSample(
            shard=key,
            state=state_of(held_lease, status, trouble),
            counts=self._counts(key, status),
            lag_ms=lag_of(held_lease, status, now, self._manager.core.wall_time(now)),
            still_s=still_s,
            restarts=self._report.restarts(key),
            note=note_of(held_lease, now, trouble),
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
            Outage(operation, code, max(0.0, now - since), is_vital=operation not in _NOT_VITAL)
            for operation, (since, code) in self._manager.service_calls.outages.items()
        )


def _since(before: Instant | None, now: Instant, *, holds: bool) -> Instant | None:
    """When a condition that is checked again and again began to hold; None if it does not hold."""
    if not holds:
        return None
    return now if before is None else before


def _lasted(since: Instant | None, now: Instant) -> float | None:
    return now - since if since is not None else None
