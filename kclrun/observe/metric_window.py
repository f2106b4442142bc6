"""Samples of a minute, folded into one statistic set a metric.

Pure. Why a minute: CloudWatch keeps its metrics by the minute, and bills each request; what is
measured every 10 or 20 s keeps its count, sum, minimum and maximum in a set. Why so few dimensions:
each combination of a metric and its dimensions is billed by the month. All managers of an
application publish under the application alone, where CloudWatch adds their sets up; the eight
metrics then cost the same for 3 shards and for 3,000. Owners are no dimension, for their names are
new at every start. `by_shard` adds the metrics of leases by shard: three more for each shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kclrun.model.measurement import Measurement, Statistics
from kclrun.model.time import WallTime
from kclrun.observe.metrics import METRICS, LeaseCounts, LeaseSample, ManagerSample

__all__ = ["APPLICATION", "SHARD", "MetricWindow"]

APPLICATION: Final = "Application"
SHARD: Final = "Shard"

_Dimensions = tuple[tuple[str, str], ...]


class MetricWindow:
    """Takes samples in; `close` gives what came since the last time."""

    def __init__(
        self, application: str, dimensions: Mapping[str, str], *, by_shard: bool = False
    ) -> None:
        self._common: _Dimensions = ((APPLICATION, application), *sorted(dimensions.items()))
        self._by_shard = by_shard
        # Kept for leases that left, too: one that comes back goes on from the counts it left with.
        self._counted: dict[str, LeaseCounts] = {}
        self._open: dict[tuple[str, _Dimensions], Statistics] = {}

    def add_fleet(self, sample: ManagerSample) -> None:
        """The table and the manager, as they are now. What is not known is left out."""
        for name, value in sample.of_fleet.items():
            self._add(name, self._common, value)

    def add_leases(self, leases: Iterable[LeaseSample]) -> None:
        """The leases as they are now: their lag, and what they did since they were last added."""
        for lease in leases:
            if lease.lag_ms is not None:
                self._add_of_lease("millis_behind_latest", lease.shard, lease.lag_ms)
            self.add_counts(lease.shard, lease.counts)

    def add_counts(self, shard: str, counts: LeaseCounts) -> None:
        """What a lease did in all; of one that departed, too, or what it did last were lost."""
        before = self._counted.get(shard, LeaseCounts())
        self._counted[shard] = counts
        self._add_of_lease("records", shard, counts.records - before.records)
        self._add_of_lease("bytes", shard, counts.bytes - before.bytes)

    def close(self, now: WallTime) -> tuple[Measurement, ...]:
        """What was added since the last call."""
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
        if self._by_shard:
            self._add(name, (*self._common, (SHARD, shard)), value)

    def _add(self, name: str, dimensions: _Dimensions, value: float) -> None:
        before = self._open.get((name, dimensions))
        self._open[name, dimensions] = (
            before.with_value(value) if before is not None else Statistics.of(value)
        )
