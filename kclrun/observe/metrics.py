"""The metrics: what each means, and what a manager measures at one moment.

Holds: the table of metrics (names, units, meaning), `ManagerSample` and its leases. Filled by the
manager from the status board and the lease rows; read by `metric_window.py` (CloudWatch),
`prometheus.py` and `health.py`. Rule: None means "not known", never zero.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kclrun.model.measurement import Unit
from kclrun.model.time import WallTime

__all__ = [
    "FLEET_EVERY_S",
    "LEASE_EVERY_S",
    "METRICS",
    "LeaseCounts",
    "LeaseSample",
    "ManagerSample",
    "MetricKind",
    "Outage",
]

# How often a value is taken: of the table and of the manager, and of each lease.
FLEET_EVERY_S: Final = 20.0
LEASE_EVERY_S: Final = 10.0


class MetricKind(msgspec.Struct, frozen=True):
    """One metric. `prometheus` is its name there, where units are seconds and counts only grow."""

    meaning: str
    unit: Unit
    prometheus: str
    is_of_lease: bool = False


METRICS: Final[dict[str, MetricKind]] = {
    "total_leases": MetricKind(
        "rows of the lease table that can be read", "Count", "kclrun_total_leases"
    ),
    "total_shards": MetricKind(
        "shards of the stream that have a lease or should have one by now: not those that were read"
        " to their end and cleaned up, nor those whose parent is still read",
        "Count",
        "kclrun_total_shards",
    ),
    "unclaimed_leases": MetricKind(
        "leases that could be read and that nobody owns, or whose owner has fallen silent",
        "Count",
        "kclrun_unclaimed_leases",
    ),
    "worker_leases": MetricKind("leases of this manager", "Count", "kclrun_worker_leases"),
    # Beyond the KCL's: nobody else halts a lease, and a lease that nobody reads has no lag to see.
    "halted_leases": MetricKind(
        "leases of this manager that stand still until an operator resumes them",
        "Count",
        "kclrun_halted_leases",
    ),
    "millis_behind_latest": MetricKind(
        "age of the read position: MillisBehindLatest of the last GetRecords, and the time since"
        " if that was not 0",
        "Milliseconds",
        "kclrun_lag_seconds",
        is_of_lease=True,
    ),
    "bytes": MetricKind(
        "payload bytes of the records given to the processor",
        "Bytes",
        "kclrun_bytes_total",
        is_of_lease=True,
    ),
    "records": MetricKind(
        "user records (of opened aggregates) given to the processor",
        "Count",
        "kclrun_records_total",
        is_of_lease=True,
    ),
}


class LeaseCounts(msgspec.Struct, frozen=True):
    """What a lease's processor was given since this manager started, restarts included."""

    records: int = 0
    bytes: int = 0


class LeaseSample(msgspec.Struct, frozen=True, kw_only=True):
    """One lease in a manager's hands. `state` is the word of `snapshot.LeaseView`.

    `still_s` is for how long it has made no progress, None while none is to be expected (its
    parents are not ended, or it is halted). `note` says why it stands still, or is empty.
    """

    shard: str
    state: str
    counts: LeaseCounts = LeaseCounts()
    lag_ms: int | None = None
    still_s: float | None = None
    restarts: int = 0
    note: str = ""


class Outage(msgspec.Struct, frozen=True):
    """A request that fails and is repeated until it works, and for how long by now.

    Without what is vital, leases are lost; the rest is only slower.
    """

    operation: str
    error: str
    lasted_s: float
    is_vital: bool = True


class ManagerSample(msgspec.Struct, frozen=True, kw_only=True):
    """One manager at one moment. `uptime_s` counts from its start.

    The totals are those of the last scan and listing, None before. `draining_s` is for how long a
    stop has been under way, `launcher_away_s` for how long no lease process could be started; None
    where that is not so.
    """

    application: str
    stream: str
    owner: str
    measured_at: WallTime
    uptime_s: float
    total_leases: int | None = None
    total_shards: int | None = None
    unclaimed_leases: int | None = None
    worker_leases: int = 0
    worker_leases_max: int = 0
    leases: tuple[LeaseSample, ...] = ()
    outages: tuple[Outage, ...] = ()
    launcher_away_s: float | None = None
    draining_s: float | None = None
    # Points of metrics that could not be published, and were dropped.
    unpublished_total: int = 0

    @property
    def of_fleet(self) -> dict[str, int]:
        """The metrics that are of no single lease, as far as they are known."""
        values = {
            "total_leases": self.total_leases,
            "total_shards": self.total_shards,
            "unclaimed_leases": self.unclaimed_leases,
            "worker_leases": self.worker_leases,
            "halted_leases": sum(lease.state == "halted" for lease in self.leases),
        }
        return {name: value for name, value in values.items() if value is not None}
