"""Metrics as log lines: by the rules of the embedded metric format, with the sums of the API."""

import json
import math

import pytest

from kclrun.errors import OutcomeUnknown, Unavailable
from kclrun.model.record import Measurement, Statistics
from kclrun.observe.emf import EmfOutlet
from kclrun.observe.metrics import METRICS
from tests.support.tables import over_rows

UNITS = {"Count", "Bytes", "Milliseconds"}


def measured(name, *values, dimensions=(("Application", "orders"),)):
    statistics = Statistics.of(values[0])
    for value in values[1:]:
        statistics = statistics.with_value(value)
    return Measurement(
        name=name,
        unit=METRICS[name].unit,
        dimensions=dimensions,
        measured_at=1_800_000_000.25,
        statistics=statistics,
    )


def written(*measurements):
    lines = []
    outlet = EmfOutlet(lambda line: lines.append(line) is None, "shop/kclrun")
    for batch in outlet.batches(measurements):
        outlet.put(batch)
    return lines


@over_rows("name", METRICS)
@pytest.mark.parametrize("values", [[7], [1, 9], [0, 2.5, 4], [0.1] * 3, range(5000)])
def test_a_line_is_what_the_format_asks_for_and_adds_up_to_the_same(name, values):
    lines = written(measured(name, *values))

    kept = []
    for line in lines:
        # A whole line of a pipe, and no line break inside.
        assert len(line) <= 4096
        assert line.index(b"\n") == len(line) - 1
        reported = json.loads(line)
        [directive] = reported["_aws"]["CloudWatchMetrics"]
        assert reported["_aws"]["Timestamp"] == 1_800_000_000_250
        assert directive["Namespace"] == "shop/kclrun"
        # Each dimension and metric that the directive names is a member of the root.
        [dimensions] = directive["Dimensions"]
        assert {reported[each] for each in dimensions} == {"orders"}
        [metric] = directive["Metrics"]
        assert metric == {"Name": name, "Unit": METRICS[name].unit}
        assert metric["Unit"] in UNITS
        assert reported.keys() == {"_aws", *dimensions, name}
        assert 1 <= len(reported[name]) <= 100
        kept += reported[name]
    assert len(kept) == len(values)
    assert (min(kept), max(kept)) == (min(values), max(values))
    assert math.isclose(math.fsum(kept), math.fsum(values), rel_tol=1e-9)


def test_dimensions_are_members_beside_the_metric():
    dimensions = (("Application", "orders"), ("Environment", "prod"), ("Shard", "a"))
    [line] = written(measured("records", 3, dimensions=dimensions))

    reported = json.loads(line)
    assert reported["_aws"]["CloudWatchMetrics"][0]["Dimensions"] == [
        ["Application", "Environment", "Shard"]
    ]
    assert (reported["Environment"], reported["Shard"], reported["records"]) == ("prod", "a", [3])


def test_values_that_the_log_took_in_part_are_not_offered_again():
    lines = []

    def write(line):
        lines.append(line)
        return len(lines) != 2

    outlet = EmfOutlet(write, "kclrun")
    [batch] = outlet.batches([measured("records", *range(250))])  # three lines

    with pytest.raises(OutcomeUnknown, match="takes no line"):
        outlet.put(batch)
    assert len(lines) == 2


def test_a_log_that_takes_no_line_is_an_outage():
    outlet = EmfOutlet(lambda _: False, "kclrun")
    [batch] = outlet.batches([measured("records", 3)])

    with pytest.raises(Unavailable, match="takes no line"):
        outlet.put(batch)
