"""Metrics as lines of the log, in CloudWatch's embedded metric format.

CloudWatch Logs makes metrics of such lines; no request is sent, and no permission is needed.
Implements `ports.MetricOutlet`. Source: "Specification: Embedded metric format", Amazon CloudWatch
User Guide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from kclrun.errors import OutcomeUnknown, Unavailable
from kclrun.model.record import Measurement, Statistics

# The format takes 100 values of a metric in a line. One metric a line also stays below the 4,096
# bytes that reach a pipe whole.
_VALUES_MAX: Final = 100
_MS: Final = 1000


class EmfOutlet:
    """Writes each measurement as lines under one namespace; `write` takes a whole line."""

    def __init__(self, write: Callable[[bytes], bool], namespace: str) -> None:
        self._write = write
        self._namespace = namespace

    def batches(self, measurements: Sequence[Measurement]) -> Iterator[Sequence[Measurement]]:
        """Batches of one measurement: a line that is dropped costs only that one."""
        for measurement in measurements:
            yield (measurement,)

    def put(self, batch: Sequence[Measurement]) -> None:
        """Raises: Unavailable if the log took no line; OutcomeUnknown if it took some of them: a
        repetition would count their values twice."""
        lines = [line for measurement in batch for line in _lines(measurement, self._namespace)]
        for number, line in enumerate(lines):
            if not self._write(line):
                kind = OutcomeUnknown if number else Unavailable
                raise kind("the log takes no line: its reader does not read")


def _lines(measurement: Measurement, namespace: str) -> Iterator[bytes]:
    values = _values(measurement.statistics)
    for first in range(0, len(values), _VALUES_MAX):
        line = {
            "_aws": {
                "Timestamp": round(measurement.measured_at * _MS),
                "CloudWatchMetrics": [
                    {
                        "Namespace": namespace,
                        "Dimensions": [[name for name, _ in measurement.dimensions]],
                        "Metrics": [{"Name": measurement.name, "Unit": measurement.unit}],
                    }
                ],
            },
            **dict(measurement.dimensions),
            measurement.name: values[first : first + _VALUES_MAX],
        }
        yield msgspec.json.encode(line) + b"\n"


def _values(of: Statistics) -> list[float]:
    """Values with the same count, sum, minimum and maximum: the format has no statistic sets.

    All values between minimum and maximum are the mean of the rest. So percentiles mean nothing, as
    in a statistic set.
    """
    if of.count == 1:
        return [of.total]
    between = of.count - 2
    if not between:
        return [of.minimum, of.maximum]
    mean = math.fsum((of.total, -of.minimum, -of.maximum)) / between
    return [of.minimum, *[min(max(mean, of.minimum), of.maximum)] * between, of.maximum]
