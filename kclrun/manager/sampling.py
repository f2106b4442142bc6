"""Samples one manager for the live table, the metrics and /health; computes each figure once.

A sample reads status slots and the state of the core. It never waits.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil

from kclrun.leases.held_lease import HeldLease
from kclrun.leases.manager import LeaseManager
from kclrun.leases.shard_sync import TableTotals
from kclrun.leases.transitions import State
from kclrun.manager.gauge import Gauge
from kclrun.manager.manager import Manager
from kclrun.manager.report_writer import ReportWriter
from kclrun.manager.ring_reader import Child
from kclrun.manager.service_calls import LOOK_FOR_OFFERS, READ_KCL3_MODE
from kclrun.manager.unread import UNREAD_S, unread_note, unread_s
from kclrun.manager.world import RunNames
from kclrun.model.lease import OFFERED, LeaseKey
from kclrun.model.time import Instant, WallTime
from kclrun.observe.metrics import FLEET_EVERY_S
from kclrun.observe.sample import LeaseSample, ManagerSample, OutageSample, ShardReport
from kclrun.protocol.status import LeaseStatus, WorkerState
from kclrun.traffic.hot_keys import ShardHeat
from kclrun.traffic.hot_shards import Change, HotShards
from kclrun.traffic.scaling import MachineLook, WorkersNeeded

# Rates are averages over the last few samples, so that a reader can follow the number.
_LOOKS_KEPT: Final = 5

CGROUPS: Final = Path("/sys/fs/cgroup")

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
    State.PAUSED: "paused",
    State.RELEASING: "ending",
    State.GONE: "ended",
}


class HostCpu:
    """The share of CPU that was used since the last look: of the container's limit if it has one
    (cgroup v2), else of the whole machine, whatever runs on it."""

    def __init__(self, process: Path = Path("/proc/self"), mount: Path = CGROUPS) -> None:
        self._group = _own_group(process, mount)
        self._before: tuple[float, float] | None = None

    def share(self) -> float | None:
        """From 0 to 1; None at the first look, and where no counter moved or could be read."""
        before, self._before = self._before, self._used_and_had()
        if before is None or self._before is None or self._before[1] <= before[1]:
            return None
        used = (self._before[0] - before[0]) / (self._before[1] - before[1])
        return min(1.0, max(0.0, used))

    def _used_and_had(self) -> tuple[float, float] | None:
        """CPU seconds used, and those that could have been, both since a moment of the past."""
        try:
            quota, _, period = (self._group / "cpu.max").read_text().partition(" ")
            if quota != "max":
                words = (self._group / "cpu.stat").read_text().split()
                used_s = int(words[words.index("usage_usec") + 1]) / 1e6
                return used_s, time.monotonic() * int(quota) / int(period)
        except (OSError, ValueError, IndexError):
            pass  # no cgroup v2, or its root, which has no limit
        try:
            times = psutil.cpu_times()
        except (psutil.Error, OSError):
            return None
        # CPU that the hypervisor gave to others (`steal`) was not free for us: it counts as used.
        return sum(times) - times.idle - times.iowait, sum(times)


def _own_group(process: Path, mount: Path) -> Path:
    """The folder of a process's cgroup v2, as in cgroups(7)."""
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return mount
    (path,) = [line[3:] for line in lines if line.startswith("0::")] or ["/"]
    return mount / path.lstrip("/")


def state_of(
    held_lease: HeldLease | None, status: LeaseStatus | None, trouble: str = "", awaited: str = ""
) -> str:
    """One short word for the activity of a lease; `LeaseSample.state` lists the words.

    `trouble` is the exception of user code, in words, while the call is retried; `awaited` the
    error of the destination that a call waits for.
    """
    word = _WORDS_OF_STATES[held_lease.state] if held_lease is not None else "ending"
    if word == "running" and status is not None and status.state is not WorkerState.PROCESSING:
        word = "ending" if status.state not in _BEFORE_READING else "starting"
    if word not in {"running", "starting", "ending"}:
        return word
    return "waiting" if awaited else "failing" if trouble else word


def awaited_note(awaited: str, away_s: float | None) -> str:
    """What a call waits for, and for how long; empty if it waits for no destination."""
    if not awaited:
        return ""
    since = "" if away_s is None else f" for {away_s:.0f} s"
    return f"waits for a destination{since}: {awaited}"


def note_of(held_lease: HeldLease | None, now: Instant, trouble: str = "") -> str:
    """Why a lease does not advance; empty if it advances."""
    if held_lease is None:
        return trouble
    if held_lease.standing:
        return held_lease.standing
    if held_lease.failure is not None or trouble:
        return held_lease.failure or trouble
    if held_lease.state is State.BACKING_OFF and held_lease.rest_until > now:
        return f"restarts in {held_lease.rest_until - now:.0f} s"
    return "its parents are not ended" if held_lease.state is State.WAITING else ""


def progressed_instant(status: LeaseStatus) -> Instant:
    """When this lease process last advanced; 0 if it has not yet.

    It advances when a batch returns, or when a read of the stream finds all records processed. An
    answer to a read is not progress while records wait: a process that is restarted again and again
    reads each time, and processes nothing.
    """
    fetched, processed = status.fetched, status.processed
    has_all = fetched is None or (processed is not None and processed >= fetched)
    is_idle = has_all and status.processing_since_instant == 0.0
    return max(status.last_batch_instant, status.last_fetch_instant if is_idle else Instant(0.0))


def lag_ms(status: LeaseStatus, now: Instant) -> int | None:
    """How far the read position is behind the present; None before the first read.

    MillisBehindLatest is of the moment of the read. If it was not 0, records waited behind the
    position, and each of them has grown older since. So a lease that reads no more (its buffer is
    full, its requests fail) does not look better than it is. At 0 no record is known to wait.
    """
    behind_ms = status.millis_behind_latest
    if behind_ms <= 0:
        return 0 if behind_ms == 0 else None
    return behind_ms + max(0, round((now - status.last_fetch_instant) * 1000))


def lag_of(
    held_lease: HeldLease | None, status: LeaseStatus | None, now: Instant, wall: WallTime
) -> int | None:
    """How far a lease is behind; None while nothing is known. `wall` is the service's `now`.

    The live table, the metrics and /health all use this value. If no process reads the lease
    (halted, paused, between two processes), it is at least the age of the oldest record known to
    wait. It keeps growing, so that alarms see a halted shard come near the loss of its records.
    """
    measured_ms = lag_ms(status, now) if status is not None else None
    since = held_lease.known_to_wait_since if held_lease is not None else None
    if measured_ms is not None or since is None:
        return measured_ms
    return max(0, round((wall - since) * 1000))


# A busy machine may be late with a read.
_HEAT_AGE_MIN_S: Final = 10.0


def heat_of(heat: ShardHeat | None, status: LeaseStatus | None, now: Instant) -> ShardHeat | None:
    """The last report of a shard's traffic; None without one, or if its process has not read for
    as long as the report covers."""
    if heat is None or status is None:
        return None
    is_of_now = now - status.last_fetch_instant <= max(heat.covered_s, _HEAT_AGE_MIN_S)
    return heat if is_of_now else None


_NOT_VITAL: Final = frozenset({LOOK_FOR_OFFERS, READ_KCL3_MODE})

# States in which a lease does not advance by design: until its parents are ended, until its former
# owner has surely stopped, until it is resumed.
_STANDING: Final = frozenset(
    {State.WAITING, State.QUARANTINED, State.HALTING, State.HALTED, State.PAUSED}
)

# Counting a table of 10,000 leases takes 20 ms; scans bring a new count every 5 s at most.
_TOTALS_EVERY_S: Final = 10.0


class _Progress(msgspec.Struct):
    """When a lease last advanced, over restarts of its process, and its last counts of records."""

    instant: Instant
    counts: collections.deque[tuple[Instant, int]] = msgspec.field(
        default_factory=lambda: collections.deque(maxlen=_LOOKS_KEPT)
    )

    def records_per_s(self, records: int, now: Instant) -> float:
        self.counts.append((now, records))
        (before, then), (_, latest) = self.counts[0], self.counts[-1]
        return max(0.0, (latest - then) / (now - before)) if now > before else 0.0


class Sampler:
    """Makes the samples of one manager, in its loop's thread.

    CPU and memory of processes are measured with `has_gauge`. Without a page for `unread_max_s`
    the lag of a lease is not known."""

    def __init__(
        self,
        manager: Manager,
        report: ReportWriter,
        names: RunNames,
        *,
        leases_max: int,
        began_instant: Instant,
        has_gauge: bool = False,
        unread_max_s: float = UNREAD_S,
    ) -> None:
        self._manager = manager
        self._report = report
        self._names = names
        self._leases_max = leases_max
        self._began_instant = began_instant
        self._gauge = Gauge() if has_gauge else None
        self._host_cpu = HostCpu()
        self._workers_needed = WorkersNeeded()
        # A start imports modules and forks processes: its CPU is not that of the work.
        self._next_look_instant = Instant(began_instant + FLEET_EVERY_S)
        self._unread_max_s = unread_max_s
        self._progress: dict[LeaseKey, _Progress] = {}
        self._totals: TableTotals | None = None
        self._totals_instant = began_instant
        self._draining_since: Instant | None = None
        self._launcher_away_since: Instant | None = None
        self._hot_shards = HotShards(names.stream)

    def look_at_traffic(self, now: Instant) -> list[Change]:
        """Decide which shards are hot now; the changes since the last look."""
        living = self._manager.processes.living()
        heats = {child.key: heat_of(child.heat, child.look(), now) for child in living}
        return self._hot_shards.look(dict.fromkeys(self._manager.core.held()) | heats)

    def take(self, now: Instant) -> ManagerSample:
        """The measurements of this moment."""
        core, processes = self._manager.core, self._manager.processes
        children = {child.key: child for child in processes.living()}
        held = core.held()
        keys = sorted({*held, *children})
        self._progress = {key: self._progress.get(key) or _Progress(now) for key in keys}
        totals = self._totals_of(core, now)
        elsewhere, free = self._others(keys)
        leases = self._leases(keys, children, now)
        records_departed, given_up = self._report.besides(self._progress)
        self._look_at_need(leases, elsewhere + free, now)
        # A stop that is finished may wait without limit for the end of the machine.
        is_draining = core.is_draining and not core.is_finished
        self._launcher_away_since = _since(
            self._launcher_away_since, now, holds=not processes.has_launcher
        )
        self._draining_since = _since(self._draining_since, now, holds=is_draining)
        return ManagerSample(
            application=self._names.application,
            stream=self._names.stream,
            owner=self._names.owner,
            uptime_s=now - self._began_instant,
            total_leases=totals.leases if totals is not None else None,
            total_shards=totals.shards if totals is not None else None,
            unclaimed_leases=totals.unclaimed if totals is not None else None,
            worker_leases=len(held),
            worker_leases_max=self._leases_max,
            needed_workers=self._workers_needed.count,
            leases=leases,
            leases_elsewhere=elsewhere,
            leases_free=free,
            ended_total=self._report.ended_total,
            records_departed=records_departed,
            given_up_total=given_up + sum(lease.given_up_total for lease in leases),
            outages=self._outages(now),
            launcher_away_s=_lasted(self._launcher_away_since, now),
            native_mode=core.native_mode,
            host_short_s=_lasted(core.host_capacity.short_since, now),
            host_runs=core.host_capacity.proven,
            host_reason=core.host_capacity.reason,
            is_draining=core.is_draining,
            draining_s=_lasted(self._draining_since, now),
            leases_command=self._manager.leases_command,
        )

    def take_departed(self, sample: ManagerSample) -> Mapping[LeaseKey, ShardReport]:
        """Counts of leases not in `sample` whose process exited since the last call."""
        departed = self._report.take_departed() - {LeaseKey(one.shard) for one in sample.leases}
        return {key: self._report.shard(key, None) for key in sorted(departed)}

    def _totals_of(self, core: LeaseManager, now: Instant) -> TableTotals | None:
        is_whole = self._totals is not None and self._totals.shards is not None
        if not is_whole or now - self._totals_instant >= _TOTALS_EVERY_S:
            self._totals, self._totals_instant = core.totals(), now
        return self._totals

    def _others(self, ours: Iterable[LeaseKey]) -> tuple[int, int]:
        """The number of other leases that another owner has, and of those that no owner has."""
        besides = frozenset(ours)
        elsewhere = free = 0
        for key, row in self._manager.core.leases.items():
            if row.is_ended or key in besides:
                continue
            if row.owner is None or row.owner == OFFERED:
                free += 1
            elif row.owner != self._names.owner:
                elsewhere += 1
        return elsewhere, free

    def _look_at_need(self, leases: Sequence[LeaseSample], others: int, now: Instant) -> None:
        """Count the workers needed, as often as the fleet's metrics are measured."""
        if now < self._next_look_instant:
            return
        self._next_look_instant = Instant(now + FLEET_EVERY_S)
        core = self._manager.core
        self._workers_needed.take(
            MachineLook(
                now=now,
                cpu_share=self._host_cpu.share(),
                lags_ms={
                    lease.shard: lease.lag_ms
                    for lease in leases
                    if lease.state == "running" and lease.lag_ms is not None
                },
                workers=len(core.owners),
                leases=len(leases) + others,
                leases_max=self._leases_max,
            )
        )

    def _leases(
        self, keys: Iterable[LeaseKey], children: Mapping[LeaseKey, Child], now: Instant
    ) -> tuple[LeaseSample, ...]:
        gauged: Mapping[int, tuple[float | None, int | None]] = {}
        if self._gauge is not None:
            pids = (child.pid for child in children.values())
            gauged = self._gauge.look(pid for pid in pids if pid is not None)
        return tuple(self._lease(key, children.get(key), gauged, now) for key in keys)

    def _lease(
        self,
        key: LeaseKey,
        child: Child | None,
        gauged: Mapping[int, tuple[float | None, int | None]],
        now: Instant,
    ) -> LeaseSample:
        core = self._manager.core
        held_lease = core.held_lease(key)
        pid = child.pid if child is not None else None
        status = child.look() if child is not None else None
        trouble, awaited = (child.trouble, child.awaited) if child is not None else ("", "")
        away_s = status.destination_away_s(now) if status is not None else None
        counts = self._report.shard(key, status)
        cpu, memory = gauged.get(pid, (None, None)) if pid is not None else (None, None)
        still_s = self._still_s(self._progress[key], held_lease, status, now)
        unread = unread_s(status, still_s, self._unread_max_s)
        lag = lag_of(held_lease, status, now, core.wall_time(now))
        return LeaseSample(
            shard=key,
            state=state_of(held_lease, status, trouble, awaited),
            records_total=counts.records or 0,
            bytes_total=counts.bytes or 0,
            retries_total=counts.retries or 0,
            dead_letters_total=counts.dead_letters or 0,
            skipped_total=counts.skipped or 0,
            output_lag_ms=status.output_lag_ms(now) if status is not None else None,
            records_per_s=self._progress[key].records_per_s(counts.records or 0, now),
            lag_ms=lag if lag or unread is None else None,
            still_s=still_s,
            restarts=counts.restarts,
            pid=pid,
            cpu_percent=cpu,
            memory_bytes=memory,
            destination_away_s=away_s,
            note=note_of(held_lease, now, awaited_note(awaited, away_s) or trouble)
            or unread_note(unread),
            heat=heat_of(child.heat, status, now) if child is not None else None,
            hot=self._hot_shards.hot.get(key),
        )

    @staticmethod
    def _still_s(
        progress: _Progress, held_lease: HeldLease | None, status: LeaseStatus | None, now: Instant
    ) -> float | None:
        if held_lease is not None and held_lease.state in _STANDING:
            progress.instant = now
            return None
        if status is not None:
            progress.instant = max(progress.instant, progressed_instant(status))
        return max(0.0, now - progress.instant)

    def _outages(self, now: Instant) -> tuple[OutageSample, ...]:
        return tuple(
            OutageSample(
                operation, code, max(0.0, now - since), is_vital=operation not in _NOT_VITAL
            )
            for operation, (since, code) in self._manager.service_calls.outages.items()
        )


def _since(before: Instant | None, now: Instant, *, holds: bool) -> Instant | None:
    """When a condition that is checked again and again began to hold; None if it does not hold."""
    if not holds:
        return None
    return now if before is None else before


def _lasted(since: Instant | None, now: Instant) -> float | None:
    return now - since if since is not None else None
