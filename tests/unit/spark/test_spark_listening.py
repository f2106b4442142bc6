"""What a listener of lag makes of Spark's progress events."""

import json
from types import SimpleNamespace

import pytest

from kclrun.spark.listening import LagListener, SourceLag

REPORT = {
    "stream": "orders",
    "shards": {"shardId-000000000000": {"lagMs": 1200}},
    "shardsTotal": 300,
    "recordsPerSecond": 5.0,
    "bytesPerSecond": 100.0,
    "throttles": 2,
    "lagMsMax": 1200,
}
LAG = SourceLag(
    query="q",
    batch_id=7,
    stream="orders",
    shards=300,
    lag_ms_max=1200,
    records_per_second=5.0,
    bytes_per_second=100.0,
    throttles=2,
)


def event(*reports):
    sources = [SimpleNamespace(latestOffset=each) for each in reports]
    return SimpleNamespace(progress=SimpleNamespace(name="q", id="1", batchId=7, sources=sources))


@pytest.mark.parametrize("report", [REPORT, json.dumps(REPORT)], ids=["decoded", "JSON"])
def test_the_lag_of_each_source_is_published(report):
    reported = []

    LagListener(reported.append).onQueryProgress(event(report, report))

    assert reported == [LAG, LAG]


def test_of_several_streams_each_has_its_own_lag():
    reported = []
    totals = {key: REPORT[key] for key in REPORT if key not in {"stream", "shards"}}
    streams = {"orders": totals, "returns": totals | {"lagMsMax": 5}}

    LagListener(reported.append).onQueryProgress(event(REPORT | {"streams": streams}))

    assert [(each.stream, each.lag_ms_max) for each in reported] == [
        ("orders", 1200),
        ("returns", 5),
    ]


@pytest.mark.parametrize("other", [None, "{not JSON", '{"topic": {"0": 5}}', "17"])
def test_sources_of_other_kinds_are_passed_over(other):
    reported = []

    LagListener(reported.append).onQueryProgress(event(other, REPORT))

    assert reported == [LAG]


def test_what_the_publisher_raises_stays_with_it(caplog):
    def publish(lag):
        raise OSError("no network")

    LagListener(publish).onQueryProgress(event(REPORT))

    assert "the lag of q was not published" in caplog.text
