"""Samples of a minute become one statistic set a metric: nothing lost, nothing counted twice."""

import msgspec

from kclrun.model.record import Statistics
from kclrun.observe import metrics
from kclrun.observe.metrics import COUNTED, FLEET_EVERY_S, LEASE_EVERY_S, METRICS, MetricWindow
from kclrun.observe.sample import (
    LeaseSample,
    ManagerSample,
    OutageSample,
    ShardReport,
    how_to_resume,
)
from tests.support.tables import over_rows

APPLICATION = (("Application", "orders"),)


def sample(**fields):
    return ManagerSample(application="orders", stream="orders", owner="me", uptime_s=1.0, **fields)


def lease(shard, records=0, size=0, **more):
    return LeaseSample(
        shard=shard, state="running", records_total=records, bytes_total=size, **more
    )


def closed(window):
    measurements = window.close(60.0)
    assert {one.measured_at for one in measurements} <= {60.0}
    return {(one.name, one.dimensions): one.statistics for one in measurements}


def test_what_was_never_said_of_a_manager_a_lease_or_a_run_is_not_known_or_none_of_it():
    reported = msgspec.structs.asdict(sample())
    not_known = ("total_leases", "total_shards", "unclaimed_leases", "launcher_away_s")
    not_known += ("host_short_s", "draining_s", "native_mode", "needed_workers")
    none_of_it = {"leases": (), "outages": (), "host_reason": "", "is_draining": False, "doing": ""}

    assert {name: reported[name] for name in not_known} == dict.fromkeys(not_known)
    assert {name: reported[name] for name in none_of_it} == none_of_it
    assert reported["has_leases"] is True
    assert OutageSample("scan", "no", 1.0).is_vital
    zeros = [*reported, *msgspec.structs.asdict(LeaseSample(shard="a", state="x")).items()]
    assert {name for name, value in reported.items() if value == 0 and value is not False} == {
        "worker_leases", "worker_leases_max", "leases_elsewhere", "leases_free", "ended_total",
        "records_departed", "given_up_total", "host_runs", "unpublished_total",
    }  # fmt: skip
    assert zeros[len(reported) :] == [
        *[("shard", "a"), ("state", "x"), ("records_total", 0), ("bytes_total", 0)],
        *[("retries_total", 0), ("dead_letters_total", 0), ("skipped_total", 0)],
        ("output_lag_ms", None),
        *[("records_per_s", 0.0), ("lag_ms", None), ("still_s", None)],
        *[("destination_away_s", None), ("restarts", 0)],
        *[("pid", None), ("cpu_percent", None), ("memory_bytes", None), ("note", "")],
        *[("heat", None), ("hot", None)],
    ]
    report = msgspec.structs.asdict(ShardReport())
    assert list(report.values()) == [0, 0, 0, 0.0, None, None, None, 0, False, *[msgspec.UNSET] * 5]


def test_a_sample_sums_its_leases_with_those_that_left_and_shows_the_greatest_lag():
    shown = sample(
        leases=(
            LeaseSample(shard="a", state="halted", records_total=5, records_per_s=1.5, lag_ms=7),
            LeaseSample(shard="b", state="running", records_total=2, records_per_s=2.0, lag_ms=9),
            lease("c"),
        ),
        records_departed=100,
        worker_leases=3,
    )

    assert (shown.records_total, shown.records_per_s, shown.lag_ms_max) == (107, 3.5, 9)
    assert sample(leases=(lease("c"),)).lag_ms_max is None
    assert shown.of_fleet == {
        "worker_leases": 3,
        "halted_leases": 1,
        "paused_leases": 0,
        "hot_leases": 0,
    }


def test_the_table_is_measured_three_times_a_minute_and_a_lease_six_times():
    assert (FLEET_EVERY_S, LEASE_EVERY_S) == (20.0, 10.0)
    of_leases = {name for name, kind in METRICS.items() if kind.is_of_lease}
    assert of_leases == {"millis_behind_latest", "output_lag", *COUNTED}


def test_a_halted_shard_is_resumed_by_a_command_only_where_the_table_outlives_the_run():
    assert how_to_resume("kclrun leases -c x", "s") == (
        "fix the cause, then: kclrun leases -c x resume s --yes"
    )
    assert how_to_resume(None, "s") == "fix the cause, then run the application again"


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

    assert names == {"worker_leases", "halted_leases", "paused_leases", "hot_leases", *COUNTED}


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
    window.add_counts("a", {"records": 17, "bytes": 0})
    window.add_leases([lease("a", 20)])

    assert closed(window)["records", APPLICATION].total == 20


def test_counts_of_the_last_shards_are_kept_and_a_forgotten_one_counts_from_zero(monkeypatch):
    monkeypatch.setattr(metrics, "_COUNTED_MAX", 2)
    window = MetricWindow("orders", {})
    for shard in "abcd":
        window.add_counts(shard, {"records": 10})
    window.add_counts("c", {"records": 12})  # kept: two more
    window.add_counts("a", {"records": 3})  # forgotten, and so by the report

    assert closed(window)["records", APPLICATION].total == 45


def test_failures_are_counted_for_the_application_and_never_billed_by_shard():
    window = MetricWindow("orders", {}, by_shard=True)
    for letters in (1, 3):
        counts = {"retries_total": 7, "dead_letters_total": letters, "skipped_total": 2}
        window.add_leases([LeaseSample(shard="a", state="running", **counts)])

    found = closed(window)
    assert [found[name, APPLICATION].total for name in ("retries", "dead_letters", "skipped")] == [
        *(7, 3, 2),
    ]
    assert {name for name, dimensions in found if dimensions != APPLICATION} == {"records", "bytes"}


def test_a_window_that_was_closed_begins_anew():
    window = MetricWindow("orders", {})
    window.add_leases([lease("a", 10)])
    window.close(60.0)
    window.add_leases([lease("a", 11)])

    assert closed(window)["records", APPLICATION] == Statistics(1, 1, 1, 1)


def test_the_number_of_metrics_does_not_depend_on_the_number_of_shards():
    window = MetricWindow("orders", {"Environment": "prod"})
    fleet = {"total_leases": 3, "total_shards": 3, "unclaimed_leases": 0, "needed_workers": 1}
    window.add_fleet(sample(**fleet, worker_leases=3))
    leases = [lease(f"shard-{number}", lag_ms=0, output_lag_ms=1) for number in range(300)]
    window.add_leases(leases)

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


@over_rows("name", METRICS)
def test_a_metric_is_described_and_has_a_name_for_prometheus(name):
    assert METRICS[name].meaning
    assert METRICS[name].prometheus.startswith("kclrun_")
