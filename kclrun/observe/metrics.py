"""The metrics: their names, units and meanings, and the values of a minute.

It does not know where metrics are published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from kclrun.model.record import Measurement, Statistics, Unit
from kclrun.model.time import WallTime
from kclrun.observe.sample import LeaseSample, ManagerSample

APPLICATION: Final = "Application"
SHARD: Final = "Shard"

# The labels of a series; their values come from the lease table.
OF_MANAGER: Final = ("application",)
OF_LEASE: Final = ("application", "shard")

# The counts of the 10,000 shards that a report names (`manager.py`), ten metrics each.
_COUNTED_MAX: Final = 100_000

_Dimensions = tuple[tuple[str, str], ...]


class MetricWindow:
    """Collects samples of a minute into one statistic set for each metric.

    `close` returns the values since the last call. Pure. Why a minute: CloudWatch keeps its metrics
    by the minute, and bills each request; the values that are measured every 10 or 20 s keep their
    count, sum, minimum and maximum in a set. Why so few dimensions: each combination of a metric
    and its dimensions is billed by the month. All managers of an application publish under the
    application alone, where CloudWatch adds their sets up. So the fourteen metrics cost the same
    for 3 shards and for 3,000. Owners are not a dimension, because their names are new at every
    start. `by_shard` adds lag, records and bytes by shard: three more for each shard.
    """

    def __init__(
        self, application: str, dimensions: Mapping[str, str], *, by_shard: bool = False
    ) -> None:
        self._common: _Dimensions = ((APPLICATION, application), *sorted(dimensions.items()))
        self._by_shard = by_shard
        # Also kept for leases that left: if one comes back, its counts continue from there. In the
        # order in which they were last added.
        self._counted: dict[tuple[str, str], int] = {}
        self._open: dict[tuple[str, _Dimensions], Statistics] = {}

    def add_fleet(self, sample: ManagerSample) -> None:
        """Add the current values of the table and the manager. Unknown values are left out."""
        for name, value in sample.of_fleet.items():
            self._add(name, self._common, value)

    def add_leases(self, leases: Iterable[LeaseSample]) -> None:
        """Add the current lag of the leases, and their counts since they were last added."""
        for lease in leases:
            if lease.lag_ms is not None:
                self._add_of_lease("millis_behind_latest", lease.shard, lease.lag_ms)
            if lease.output_lag_ms is not None:
                self._add_of_lease("output_lag", lease.shard, lease.output_lag_ms)
            self.add_counts(lease.shard, lease.counted)

    def add_counts(self, shard: str, counted: Mapping[str, int]) -> None:
        """Add the totals of a lease, by metric. Call it for departed leases too, or their last
        counts would be lost."""
        for name, total in counted.items():
            before = self._counted.pop((shard, name), 0)
            self._counted[shard, name] = total
            # A report that has forgotten the shard counts it from 0 again.
            self._add_of_lease(name, shard, total - before if total >= before else total)
        while len(self._counted) > _COUNTED_MAX:
            del self._counted[next(iter(self._counted))]

    def close(self, now: WallTime) -> tuple[Measurement, ...]:
        """The values that were added since the last call."""
        closed = tuple(
            Measurement(
                name=name,
                unit=METRICS[name].unit,
                dimensions=dimensions,
                measured_at=now,
                statistics=statistics,
            )
            for (name, dimensions), statistics in self._open.items()
        )
        self._open.clear()
        return closed

    def _add_of_lease(self, name: str, shard: str, value: float) -> None:
        self._add(name, self._common, value)
        if self._by_shard and METRICS[name].is_by_shard:
            self._add(name, (*self._common, (SHARD, shard)), value)

    def _add(self, name: str, dimensions: _Dimensions, value: float) -> None:
        before = self._open.get((name, dimensions))
        self._open[name, dimensions] = (
            before.with_value(value) if before is not None else Statistics.of(value)
        )


# The intervals of the values: for the table and the manager, and for each lease.
FLEET_EVERY_S: Final = 20.0
LEASE_EVERY_S: Final = 10.0


class MetricKind(msgspec.Struct, frozen=True):
    """One metric. `prometheus` is its name there: units are seconds, and counts only grow."""

    meaning: str
    unit: Unit
    prometheus: str
    is_of_lease: bool = False
    is_by_shard: bool = False


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
        "leases that could be read and have no owner, or whose owner stopped renewing",
        "Count",
        "kclrun_unclaimed_leases",
    ),
    "worker_leases": MetricKind("leases of this manager", "Count", "kclrun_worker_leases"),
    # Not a metric of the KCL, which halts no lease.
    "halted_leases": MetricKind(
        "leases of this manager that stand still until an operator resumes them",
        "Count",
        "kclrun_halted_leases",
    ),
    "paused_leases": MetricKind(
        "leases of this manager that an operator has paused",
        "Count",
        "kclrun_paused_leases",
    ),
    # Nor does the KCL know which of its shards are hot.
    "hot_leases": MetricKind(
        "leases of this manager whose shard is hot: near a limit of Kinesis, throttled, or far"
        " above the others",
        "Count",
        "kclrun_hot_leases",
    ),
    # Not a metric of the KCL either.
    "needed_workers": MetricKind(
        "workers that the application needs, by CPU, the slope of its lag and its leases, as this"
        " manager reckons by its own machine; the average over all managers is that of the fleet",
        "Count",
        "kclrun_needed_workers",
    ),
    "millis_behind_latest": MetricKind(
        "age of the read position: MillisBehindLatest of the last GetRecords, and the time since"
        " if that was not 0; of a lease that is not read, halted, paused or between two processes,"
        " the age of the oldest record known to wait (it may be older)",
        "Milliseconds",
        "kclrun_lag_seconds",
        is_of_lease=True,
        is_by_shard=True,
    ),
    "bytes": MetricKind(
        "payload bytes of the records that the processor returned for",
        "Bytes",
        "kclrun_bytes_total",
        is_of_lease=True,
        is_by_shard=True,
    ),
    "records": MetricKind(
        "user records (of opened aggregates) that the processor returned for",
        "Count",
        "kclrun_records_total",
        is_of_lease=True,
        is_by_shard=True,
    ),
    "retries": MetricKind(
        "calls of the processor that raised and were repeated, or parted to find the record",
        "Count",
        "kclrun_retries_total",
        is_of_lease=True,
    ),
    "dead_letters": MetricKind(
        "records that were given up and kept as dead letters",
        "Count",
        "kclrun_dead_letters_total",
        is_of_lease=True,
    ),
    "skipped": MetricKind(
        "records that were given up and skipped",
        "Count",
        "kclrun_skipped_total",
        is_of_lease=True,
    ),
    "output_lag": MetricKind(
        "time for which rows of processed records wait for an output; the age of a file or an"
        " object is part of it",
        "Milliseconds",
        "kclrun_output_lag_seconds",
        is_of_lease=True,
    ),
}
# The metrics of a lease that only grow.
COUNTED: Final = tuple(
    name
    for name, kind in METRICS.items()
    if kind.is_of_lease and kind.prometheus.endswith("_total")
)


class SeriesKind(msgspec.Struct, frozen=True):
    """A series that only Prometheus and OTLP get, for CloudWatch bills each by the month."""

    meaning: str
    labels: tuple[str, ...] = OF_MANAGER


SERIES: Final[dict[str, SeriesKind]] = {
    "kclrun_healthy": SeriesKind("1 while /health answers 200, 0 while it answers 503"),
    "kclrun_worker_leases_max": SeriesKind("most leases this manager takes: leases.max"),
    "kclrun_leases": SeriesKind(
        "leases of this manager, by what they do", ("application", "state")
    ),
    "kclrun_outages": SeriesKind(
        "requests to AWS that fail and are repeated, by operation counted once"
    ),
    "kclrun_metrics_unpublished_total": SeriesKind("points of metrics that CloudWatch did not get"),
    "kclrun_still_seconds": SeriesKind(
        "for how long a lease that should move has made no progress", OF_LEASE
    ),
    "kclrun_restarts_total": SeriesKind("restarts of the lease's process", OF_LEASE),
    "kclrun_hot": SeriesKind("1 while the shard is hot, else 0", OF_LEASE),
    "kclrun_in_bytes_per_second": SeriesKind(
        "bytes put into the shard, over one or two minutes", OF_LEASE
    ),
    "kclrun_in_records_per_second": SeriesKind(
        "records put into the shard, as Kinesis counts", OF_LEASE
    ),
    "kclrun_reads_throttled_ratio": SeriesKind("share of the reads that were throttled", OF_LEASE),
    "kclrun_heaviest_key_ratio": SeriesKind(
        "least share of the bytes of the heaviest key", OF_LEASE
    ),
    "kclrun_info": SeriesKind(
        "which manager this is", ("application", "stream", "owner", "version")
    ),
}


# The meaning of each series that a manager has, by its name in Prometheus.
MEANINGS: Final = {kind.prometheus: kind.meaning for kind in METRICS.values()} | {
    name: kind.meaning for name, kind in SERIES.items()
}


def labels_by_series() -> dict[str, tuple[str, ...]]:
    """Every series that a manager has, with its labels."""
    named = {
        kind.prometheus: OF_LEASE if kind.is_of_lease else OF_MANAGER for kind in METRICS.values()
    }
    return named | {name: kind.labels for name, kind in SERIES.items()}
