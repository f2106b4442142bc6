"""Publishes metrics to CloudWatch: batched PutMetricData over botocore's own client.

It uses botocore and not the wire client: one request a minute need not be fast, and botocore
compresses the body (gzip, from 10 KiB on). Each request is sent once; the caller decides whether
to repeat it. Implements `ports.MetricOutlet`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from kclrun.aws.control import ControlPlane, RenewedClient, asking
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.operations import PUT_METRIC_DATA
from kclrun.model.quotas import METRICS_MAX, METRICS_REQUEST_BYTES_MAX
from kclrun.model.record import Measurement
from kclrun.model.wire import WireCredentials

# The rest of the request is a reserve for bytes that the estimate below does not count.
_REQUEST_BYTES_MAX: Final = METRICS_REQUEST_BYTES_MAX * 9 // 10
# In a form body, the most verbose of the protocols that botocore may choose: name, unit, time and
# four numbers, each under a key such as MetricData.member.1000.StatisticValues.SampleCount.
_METRIC_BYTES: Final = 600
_DIMENSION_BYTES: Final = 120
# A character that is neither a letter nor a digit is sent as three.
_BYTES_A_CHARACTER: Final = 3


class CloudWatchOutlet:
    """Publishes under one namespace. For one thread; makes its client there at the first `put`.

    `credentials` is called before each request, so that renewed keys are used; it may do I/O.
    The constructor raises SettingsError for an unknown profile.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        namespace: str,
        credentials: Callable[[], WireCredentials],
    ) -> None:
        self._client = RenewedClient(settings, credentials, ControlPlane.cloudwatch)
        self._namespace = namespace

    def batches(self, measurements: Sequence[Measurement]) -> Iterator[Sequence[Measurement]]:
        """The measurements, in batches that each fit into one PutMetricData."""
        batch: list[Measurement] = []
        batch_bytes = 0
        for measurement in measurements:
            size = _size_max(measurement)
            if len(batch) == METRICS_MAX or batch_bytes + size > _REQUEST_BYTES_MAX:
                yield batch
                batch, batch_bytes = [], 0
            batch.append(measurement)
            batch_bytes += size
        if batch:
            yield batch

    def put(self, batch: Sequence[Measurement]) -> None:
        """One PutMetricData, sent once.

        Raises: Throttled, Unavailable, OutcomeUnknown (the metrics may be stored already),
        AccessDenied, InvalidRequest; and the errors of `credentials`.
        """
        data = [_datum(measurement) for measurement in batch]
        with asking(PUT_METRIC_DATA):
            self._client().put_metric_data(Namespace=self._namespace, MetricData=data)

    def close(self) -> None:
        """Close the client's connections."""
        self._client.close()


def _datum(measurement: Measurement) -> Mapping[str, Any]:
    statistics = measurement.statistics
    return {
        "MetricName": measurement.name,
        "Unit": measurement.unit,
        "Timestamp": datetime.fromtimestamp(measurement.measured_at, UTC),
        "Dimensions": [{"Name": name, "Value": value} for name, value in measurement.dimensions],
        "StatisticValues": {
            "SampleCount": float(statistics.count),
            "Sum": float(statistics.total),
            "Minimum": float(statistics.minimum),
            "Maximum": float(statistics.maximum),
        },
    }


def _size_max(measurement: Measurement) -> int:
    return _METRIC_BYTES + sum(
        _DIMENSION_BYTES + _BYTES_A_CHARACTER * (len(name) + len(value))
        for name, value in measurement.dimensions
    )
