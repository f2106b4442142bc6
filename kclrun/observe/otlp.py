"""The series of a manager as metrics of OpenTelemetry, over OTLP/HTTP.

They are those of `/metrics`, under the same names. It does not know when they are sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.metrics_core import Metric as Family

from kclrun.errors import Unavailable
from kclrun.observe.collector import session_for

_NS: Final = 1_000_000_000
# By the end of a name. A count has no unit: a collector would add it to the name for Prometheus.
_UNITS: Final = {"_seconds": "s", "_bytes_total": "By", "_bytes_per_second": "By/s"}
# A thread of its own waits for a request; after an outage the values of a later minute are sent.
_REQUEST_S: Final = 5.0


def as_metrics(families: Iterable[Family], uptime_s: float) -> Iterator[Metric]:
    """The families of Prometheus as metrics of now; counters grow since the manager's start."""
    now = time.time_ns()
    start = now - int(uptime_s * _NS)
    for family in families:
        is_counter = family.type == "counter"
        points = [
            NumberDataPoint(
                attributes=dict(sample.labels),
                start_time_unix_nano=start if is_counter else 0,
                time_unix_nano=now,
                value=sample.value,
            )
            for sample in family.samples
        ]
        if not points:
            continue
        name = family.samples[0].name
        unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
        data: Sum | Gauge = (
            Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
            if is_counter
            else Gauge(points)
        )
        yield Metric(name, family.documentation, unit, data)


class OtlpOutlet:
    """Implements `ports.MetricOutlet` for metrics of OpenTelemetry. Used by one thread."""

    def __init__(self, endpoint: str | None, *, application: str, owner: str) -> None:
        url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/metrics"
        self._exporter = OTLPMetricExporter(
            endpoint=url, timeout=_REQUEST_S, session=session_for(url, "METRICS")
        )
        self._resource = Resource.create(
            {"service.name": application, "service.instance.id": owner}
        )
        self._thread: str | None = None
        # The exporter logs each failure; the publisher warns once for each outage.
        logging.getLogger(OTLPMetricExporter.__module__).addFilter(self._is_not_ours)

    def batches(self, measurements: Sequence[Metric]) -> Iterator[Sequence[Metric]]:
        """All in one request: 3,000 leases have 36,000 points, some 5 MB of the 64 MB it takes."""
        yield measurements

    def put(self, batch: Sequence[Metric]) -> None:
        """One request, repeated by the exporter within its time. Raises: Unavailable."""
        self._thread = threading.current_thread().name
        scope = ScopeMetrics(InstrumentationScope("kclrun"), list(batch), "")
        data = MetricsData([ResourceMetrics(self._resource, [scope], "")])
        if self._exporter.export(data) is not MetricExportResult.SUCCESS:
            raise Unavailable("the collector of observe.otlp takes no metrics")

    def _is_not_ours(self, line: logging.LogRecord) -> bool:
        return line.threadName != self._thread
