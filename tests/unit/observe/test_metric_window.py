"""Samples of a minute become one statistic set a metric: nothing lost, nothing counted twice."""

from __future__ import annotations

import pytest

from kclrun.model.record import Statistics
from kclrun.observe.metrics import METRICS, MetricWindow
from kclrun.observe.sample import LeaseSample, ManagerSample

APPLICATION = (("Application", "orders"),)


def sample(**fields):
    return ManagerSample(application="orders", stream="orders", owner="me", uptime_s=1.0, **fields)


def lease(shard, records=0, size=0, lag_ms=None):
    return LeaseSample(
        shard=shard, state="running", records_total=records, bytes_total=size, lag_ms=lag_ms
    )


def closed(window):
    return {(one.name, one.dimensions): one.statistics for one in window.close(60.0)}


def test_values_are_folded_into_count_sum_smallest_and_greatest():
    window = MetricWindow("orders", {})
    for total_leases in (4, 6, 5):
        window.add_fleet(sample(total_leases=total_leases, worker_leases=2))

    found = closed(window)

    assert found["total_leases", APPLICATION] == Statistics(3, 15, 4, 6)
    assert found["worker_leases", APPLICATION] == Statistics(3, 6, 2, 2)


def test_what_is_not_known_is_left_out_and_not_zero():
    window = MetricWindow("orders", {})
    window.add_fleet(sample())
    window.add_leases([lease("a")])

    names = {name for name, _ in closed(window)}

    assert names == {"worker_leases", "halted_leases", "records", "bytes"}


def test_counts_are_of_the_interval():
    window = MetricWindow("orders", {})
    for records, size in ((10, 1000), (10, 1000), (25, 2500)):
        window.add_leases([lease("a", records, size)])

    found = closed(window)

    assert found["records", APPLICATION] == Statistics(3, 25, 0, 15)
    assert found["bytes", APPLICATION] == Statistics(3, 2500, 0, 1500)


def test_a_hot_shard_shows_as_a_greatest_far_above_the_average():
    window = MetricWindow("orders", {})
    window.add_leases([lease("a", size=10), lease("b", size=10), lease("c", size=1000)])

    found = closed(window)["bytes", APPLICATION]

    assert (found.maximum, found.total / found.count) == (1000, 340)


def test_a_lease_that_leaves_takes_nothing_along_and_comes_back_without_a_past():
    window = MetricWindow("orders", {})
    window.add_leases([lease("a", 10)])
    window.add_counts("a", 17, 0)
    window.add_leases([lease("a", 20)])

    assert closed(window)["records", APPLICATION].total == 20


def test_a_window_that_was_closed_begins_anew():
    window = MetricWindow("orders", {})
    window.add_leases([lease("a", 10)])
    window.close(60.0)
    window.add_leases([lease("a", 11)])

    assert closed(window)["records", APPLICATION] == Statistics(1, 1, 1, 1)


def test_the_number_of_metrics_does_not_depend_on_the_number_of_shards():
    window = MetricWindow("orders", {"Environment": "prod"})
    window.add_fleet(sample(total_leases=3, total_shards=3, unclaimed_leases=0, worker_leases=3))
    window.add_leases([lease(f"shard-{number}", lag_ms=0) for number in range(300)])

    measurements = window.close(60.0)

    assert sorted(one.name for one in measurements) == sorted(METRICS)
    assert {one.dimensions for one in measurements} == {(*APPLICATION, ("Environment", "prod"))}
    assert {one.unit for one in measurements} == {"Count", "Bytes", "Milliseconds"}


def test_in_detail_each_shard_has_its_own_beside_those_of_all():
    window = MetricWindow("orders", {}, by_shard=True)
    window.add_leases([lease("a", lag_ms=5), lease("b", lag_ms=7)])

    found = closed(window)

    assert found["millis_behind_latest", APPLICATION] == Statistics(2, 12, 5, 7)
    assert found["millis_behind_latest", (*APPLICATION, ("Shard", "b"))] == Statistics(1, 7, 7, 7)


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_described_and_has_a_name_for_prometheus(name):
    assert METRICS[name].meaning
    assert METRICS[name].prometheus.startswith("kclrun_")
