"""A manager's sample in the format of Prometheus.

All series are made anew from the last sample, so the series of a lease end when it leaves, and
labels never accumulate. As Prometheus requires, units are seconds and bytes, and counts only grow.
`metrics.METRICS` and `metrics.SERIES` have the names.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kclrun.model.text import escaped
from kclrun.observe.health import HealthVerdict
from kclrun.observe.metrics import COUNTED, MEANINGS, METRICS, labels_by_series
from kclrun.observe.sample import LeaseSample, ManagerSample

_LABELS = labels_by_series()


class Exposition(Collector):
    """The exposition of what `look` returns: the last sample (None before the first), and its
    verdict."""

    def __init__(
        self, look: Callable[[], tuple[ManagerSample | None, HealthVerdict]], version: str
    ):
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
        yield _one("kclrun_healthy", sample, float(verdict.is_healthy))
        yield from _of_fleet(sample)
        yield from _of_manager(sample)
        yield from _of_leases(sample)

    def _info(self, sample: ManagerSample) -> Metric:
        info = InfoMetricFamily("kclrun", MEANINGS["kclrun_info"])
        info.add_metric(
            (),
            {
                "application": escaped(sample.application),
                "stream": escaped(sample.stream),
                "owner": escaped(sample.owner),
                "version": self._version,
            },
        )
        return info


def _of_fleet(sample: ManagerSample) -> Iterator[Metric]:
    for name, value in sample.of_fleet.items():
        yield _one(METRICS[name].prometheus, sample, float(value))


def _of_manager(sample: ManagerSample) -> Iterator[Metric]:
    yield _one("kclrun_worker_leases_max", sample, float(sample.worker_leases_max))
    states = _family("kclrun_leases")
    for state, count in sorted(collections.Counter(one.state for one in sample.leases).items()):
        states.add_metric((sample.application, state), count)
    yield states
    yield _one("kclrun_outages", sample, float(len(sample.outages)))
    yield _one("kclrun_metrics_unpublished_total", sample, sample.unpublished_total)


def _of_leases(sample: ManagerSample) -> Iterator[Metric]:
    lag = _family(METRICS["millis_behind_latest"].prometheus)
    output_lag = _family(METRICS["output_lag"].prometheus)
    counters = {name: _family(METRICS[name].prometheus) for name in COUNTED}
    still = _family("kclrun_still_seconds")
    restarts = _family("kclrun_restarts_total")
    traffic = _TrafficFamilies()
    for lease in sample.leases:
        # A key of a row that another program wrote may hold any character.
        labels = (sample.application, escaped(lease.shard))
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


class _TrafficFamilies:
    """The traffic of the shards, where it is measured. A key is never a label: keys are the users'
    data, and their number has no bound."""

    def __init__(self) -> None:
        self.families = tuple(
            _family(name)
            for name in (
                "kclrun_hot",
                "kclrun_in_bytes_per_second",
                "kclrun_in_records_per_second",
                "kclrun_reads_throttled_ratio",
                "kclrun_heaviest_key_ratio",
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


def _family(name: str) -> GaugeMetricFamily | CounterMetricFamily:
    """A family of the catalogue; as Prometheus requires, the name of a counter ends in _total."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(name, MEANINGS[name], labels=_LABELS[name])


def _one(name: str, sample: ManagerSample, value: float) -> Metric:
    family = _family(name)
    family.add_metric((sample.application,), value)
    return family
