"""What the manager shows of itself, once a second: `observe.snapshot.Snapshot`, filled.

Rule: looking is cheap and never fails: a process that died between two system calls is shown
without its CPU and memory. Look next: `report.py` (totals over restarts).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import psutil

from kclrun.ipc.board import LeaseStatus, WorkerState
from kclrun.leases.custody import Custody, State
from kclrun.leases.manager import LeaseManager
from kclrun.manager.child import Child
from kclrun.manager.report import ReportWriter
from kclrun.model.lease import OFFERED, LeaseKey, OwnerId
from kclrun.model.time import Instant
from kclrun.observe.snapshot import LeaseView, Snapshot

__all__ = ["Gauge", "Snapshots", "note_of", "state_of"]

# Rates are over the last few looks: a number that a person can follow.
_LOOKS_KEPT: Final = 5
# Own memory is read from `smaps_rollup`, up to 1 ms each: so few a look, in turn.
_MEMORY_READS_MAX: Final = 8

_WORDS_OF_CUSTODY: Final = {
    State.TAKING: "starting",
    State.EXAMINING: "backing off",
    State.RESTING: "backing off",
    State.WAITING: "waiting",
    State.READYING: "starting",
    State.OUTWAITING: "waiting",
    State.STARTING: "starting",
    State.RUNNING: "running",
    State.DRAINING: "ending",
    State.LEAVING: "ending",
    State.HALTING: "halted",
    State.HALTED: "halted",
    State.RELEASING: "ending",
    State.GONE: "ended",
}


class Gauge:
    """CPU and memory of processes, kept between looks: a share of CPU needs two of them."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}
        self._memory: dict[int, int] = {}

    def look(self, pids: Iterable[int]) -> dict[int, tuple[float | None, int | None]]:
        """CPU percent and own bytes by pid; None for what could not be read."""
        alive = set(pids)
        for pid in set(self._processes) - alive:
            del self._processes[pid]
            self._memory.pop(pid, None)
        # Those never read, then those read the longest ago: a reading moves to the end.
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
        except psutil.Error:
            return None
        return None if is_first else percent

    def _own_bytes(self, pid: int) -> int | None:
        try:
            return int(psutil.Process(pid).memory_full_info().uss)
        except (psutil.Error, OSError):
            return None


class Snapshots:
    """Makes the snapshots of one manager."""

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
    ) -> None:
        self._application = application
        self._stream = stream
        self._owner = owner
        self._began_instant = began_instant
        self._core = core
        self._living = living
        self._report = report
        self._gauge = Gauge()
        self._looks: dict[LeaseKey, collections.deque[tuple[Instant, int]]] = {}

    def take(self, now: Instant) -> Snapshot:
        """A look at everything."""
        children = {child.key: child for child in self._living()}
        gauged = self._gauge.look(child.pid for child in children.values() if child.pid is not None)
        views = []
        for key in sorted({*self._core.held(), *children}):
            child = children.get(key)
            pid = child.pid if child is not None else None
            cpu, memory = gauged.get(pid, (None, None)) if pid is not None else (None, None)
            status = child.look() if child is not None else None
            view = self._view(key, status, now)
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
        )

    def _view(self, key: LeaseKey, status: LeaseStatus | None, now: Instant) -> LeaseView:
        custody = self._core.custody(key)
        totals = self._report.shard(key, status)
        behind = status.millis_behind_latest if status is not None else -1
        return LeaseView(
            shard=key,
            state=state_of(custody, status),
            owner=self._owner,
            records_total=totals.records or 0,
            records_per_s=self._rate(key, totals.records or 0, now),
            lag_ms=behind if behind >= 0 else None,
            restarts=totals.restarts,
            note=note_of(custody, now),
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


def state_of(custody: Custody | None, status: LeaseStatus | None) -> str:
    """One short word for what a lease does; `LeaseView.state` lists them."""
    word = _WORDS_OF_CUSTODY[custody.state] if custody is not None else "ending"
    if word == "running" and status is not None and status.state is not WorkerState.PROCESSING:
        return "ending"
    return word


def note_of(custody: Custody | None, now: Instant) -> str:
    """Why a lease stands still, or nothing."""
    if custody is None:
        return ""
    if custody.row is not None and custody.row.halt is not None:
        return custody.row.halt.reason
    if custody.failure is not None:
        return custody.failure
    if custody.state is State.RESTING and custody.rest_until > now:
        return f"restarts in {custody.rest_until - now:.0f} s"
    return "its parents are not ended" if custody.state is State.WAITING else ""
