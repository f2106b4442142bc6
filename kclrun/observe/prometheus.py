"""A manager's sample in the format of Prometheus.

All series are made anew from the last sample, so the series of a lease end when it leaves, and
labels never accumulate. As Prometheus requires, units are seconds and bytes, and counts only grow.
`metrics.METRICS` has the names.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kclrun.observe.health import Verdict
from kclrun.observe.metrics import COUNTED, METRICS
from kclrun.observe.sample import LeaseSample, ManagerSample

# All labels that a series may have, in this order; the values come from the lease table.
_LABELS = ("application",)
_LEASE_LABELS = ("application", "shard")


class Exposition(Collector):
    """Writes what `look` returns: the last sample (None before the first), and its verdict."""

    def __init__(self, look: Callable[[], tuple[ManagerSample | None, Verdict]], version: str):
        self._look = look
        self._version = version
        # Nothing is described in advance: that would call `look` before the first sample.
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """The whole exposition, in the text format 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, once for each exposition."""
        sample, verdict = self._look()
        if sample is None:
            return
        yield self._info(sample)
        yield _gauge(
            "kclrun_healthy",
            "1 while /health answers 200, 0 while it answers 503",
            (sample.application,),
            float(verdict.is_healthy),
        )
        yield from _of_fleet(sample)
        yield from _of_manager(sample)
        yield from _of_leases(sample)

    def _info(self, sample: ManagerSample) -> Metric:
        info = InfoMetricFamily("kclrun", "which manager this is")
        info.add_metric(
            (),
            {
                "application": sample.application,
                "stream": sample.stream,
                "owner": sample.owner,
                "version": self._version,
            },
        )
        return info


def _of_fleet(sample: ManagerSample) -> Iterator[Metric]:
    for name, value in sample.of_fleet.items():
        kind = METRICS[name]
        yield _gauge(kind.prometheus, kind.meaning, (sample.application,), float(value))


def _of_manager(sample: ManagerSample) -> Iterator[Metric]:
    yield _gauge(
        "kclrun_worker_leases_max",
        "most leases this manager takes: leases.max",
        (sample.application,),
        float(sample.worker_leases_max),
    )
    states = GaugeMetricFamily(
        "kclrun_leases",
        "leases of this manager, by what they do",
        labels=("application", "state"),
    )
    for state, count in sorted(collections.Counter(one.state for one in sample.leases).items()):
        states.add_metric((sample.application, state), count)
    yield states
    yield _gauge(
        "kclrun_outages",
        "requests to AWS that fail and are repeated, by operation counted once",
        (sample.application,),
        float(len(sample.outages)),
    )
    unpublished = CounterMetricFamily(
        "kclrun_metrics_unpublished",
        "points of metrics that CloudWatch did not get",
        labels=_LABELS,
    )
    unpublished.add_metric((sample.application,), sample.unpublished_total)
    yield unpublished


def _of_leases(sample: ManagerSample) -> Iterator[Metric]:
    lag = _family_of_lease(GaugeMetricFamily, "millis_behind_latest")
    output_lag = _family_of_lease(GaugeMetricFamily, "output_lag")
    counters = {name: _family_of_lease(CounterMetricFamily, name) for name in COUNTED}
    still = GaugeMetricFamily(
        "kclrun_still_seconds",
        "for how long a lease that should move has made no progress",
        labels=_LEASE_LABELS,
    )
    restarts = CounterMetricFamily(
        "kclrun_restarts", "restarts of the lease's process", labels=_LEASE_LABELS
    )
    traffic = _Traffic()
    for lease in sample.leases:
        labels = (sample.application, lease.shard)
        traffic.add(labels, lease)
        if lease.lag_ms is not None:
            lag.add_metric(labels, lease.lag_ms / 1000)
        if lease.output_lag_ms is not None:
            output_lag.add_metric(labels, lease.output_lag_ms / 1000)
        if lease.still_s is not None:
            still.add_metric(labels, lease.still_s)
        for name, total in lease.counted.items():
            counters[name].add_metric(labels, total)
        restarts.add_metric(labels, lease.restarts)
    yield from (lag, output_lag, *counters.values(), still, restarts)
    yield from traffic.families


class _Traffic:
    """The traffic of the shards, where it is measured. A key is never a label: keys are the users'
    data, and their number has no bound."""

    def __init__(self) -> None:
        self.families = tuple(
            GaugeMetricFamily(name, meaning, labels=_LEASE_LABELS)
            for name, meaning in (
                ("kclrun_hot", "1 while the shard is hot, else 0"),
                ("kclrun_in_bytes_per_second", "bytes put into the shard, over one or two minutes"),
                ("kclrun_in_records_per_second", "records put into the shard, as Kinesis counts"),
                ("kclrun_reads_throttled_ratio", "share of the reads that were throttled"),
                ("kclrun_heaviest_key_ratio", "least share of the bytes of the heaviest key"),
            )
        )

    def add(self, labels: tuple[str, str], lease: LeaseSample) -> None:
        heat = lease.heat
        if heat is None:
            return
        values = (
            float(lease.hot is not None),
            heat.in_bytes_per_s,
            heat.in_records_per_s,
            heat.throttled,
            heat.keys[0].share if heat.keys else 0.0,
        )
        for family, value in zip(self.families, values, strict=True):
            family.add_metric(labels, value)


def _family_of_lease(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str
) -> GaugeMetricFamily | CounterMetricFamily:
    kind = METRICS[name]
    return family(kind.prometheus, kind.meaning, labels=_LEASE_LABELS)


def _gauge(name: str, meaning: str, labels: tuple[str, ...], value: float) -> Metric:
    gauge = GaugeMetricFamily(name, meaning, labels=_LABELS)
    gauge.add_metric(labels, value)
    return gauge
