"""What Prometheus reads: names, units and labels; and no label that outlives its lease."""

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kclrun.observe.health import HealthReason, HealthVerdict
from kclrun.observe.metrics import labels_by_series
from kclrun.observe.prometheus import Exposition
from kclrun.observe.sample import LeaseSample, ManagerSample, OutageSample
from kclrun.traffic.hot_keys import HotKey, ShardHeat
from kclrun.traffic.hot_shards import HotShard

OK = HealthVerdict("ok")


def sample(*leases, **fields):
    return ManagerSample(
        application="orders",
        stream="flights",
        owner="kclrun::h:n",
        uptime_s=1.0,
        leases=leases,
        **fields,
    )


def lease(shard, **fields):
    fields = {"records_total": 7, "bytes_total": 700, "lag_ms": 1500, "still_s": 0.5} | fields
    return LeaseSample(shard=shard, state=fields.pop("state", "running"), **fields)


def read(shown, verdict=OK):
    """Every series as Prometheus' own parser understands it: {(name, labels): value}."""
    text = Exposition(lambda: (shown, verdict), "0.1.0").text().decode()
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def value(series, name, **labels):
    return series[name, tuple(sorted(({"application": "orders"} | labels).items()))]


def test_before_the_first_sample_there_is_nothing_to_read():
    assert read(None) == {}


def test_counts_are_read_as_they_are_and_lag_in_seconds():
    series = read(
        sample(
            lease("a"),
            total_leases=4,
            total_shards=5,
            unclaimed_leases=1,
            worker_leases=1,
            worker_leases_max=64,
        )
    )

    assert value(series, "kclrun_total_leases") == 4
    assert value(series, "kclrun_total_shards") == 5
    assert value(series, "kclrun_unclaimed_leases") == 1
    assert value(series, "kclrun_worker_leases") == 1
    assert value(series, "kclrun_worker_leases_max") == 64
    assert value(series, "kclrun_lag_seconds", shard="a") == 1.5
    assert value(series, "kclrun_records_total", shard="a") == 7
    assert value(series, "kclrun_bytes_total", shard="a") == 700
    assert value(series, "kclrun_still_seconds", shard="a") == 0.5


def test_restarts_outages_and_points_that_were_lost_are_counted():
    shown = sample(
        lease("a", restarts=3),
        outages=(OutageSample("scan", "no", 1.0), OutageSample("list", "no", 1.0)),
        unpublished_total=5,
    )

    series = read(shown)

    assert value(series, "kclrun_restarts_total", shard="a") == 3
    assert value(series, "kclrun_outages") == 2
    assert value(series, "kclrun_metrics_unpublished_total") == 5


def test_the_series_and_their_labels_are_those_of_the_catalogue():
    fleet = {"total_leases": 1, "total_shards": 1, "unclaimed_leases": 0, "needed_workers": 1}
    heat = ShardHeat(90.0, 9e5, 312.0, 9e5, 0.25, 0, 0.05, "keys", (HotKey("77", 0.5),))

    series = read(sample(lease("a", output_lag_ms=2500, heat=heat), **fleet, worker_leases=1))

    assert value(series, "kclrun_output_lag_seconds", shard="a") == 2.5
    labels = {name: {label for label, _ in labelled} for name, labelled in series}
    assert labels == {name: set(known) for name, known in labels_by_series().items()}


def test_what_is_not_known_has_no_series():
    series = read(sample(lease("a", lag_ms=None, still_s=None)))

    names = {name for name, _ in series}
    assert names.isdisjoint({"kclrun_total_leases", "kclrun_lag_seconds", "kclrun_still_seconds"})


def test_the_series_of_a_lease_end_with_it():
    looks = iter([(sample(lease("a"), lease("b")), OK), (sample(lease("b")), OK)])
    exposition = Exposition(lambda: next(looks), "0.1.0")

    first, second = exposition.text(), exposition.text()

    assert b'shard="a"' in first
    assert b'shard="a"' not in second
    assert b'shard="b"' in second


def test_leases_are_counted_by_what_they_do():
    series = read(sample(lease("a"), lease("b"), lease("c", state="halted")))

    assert value(series, "kclrun_leases", state="running") == 2
    assert value(series, "kclrun_leases", state="halted") == 1
    assert value(series, "kclrun_halted_leases") == 1


def test_the_verdict_is_a_number_too():
    failing = HealthVerdict("failing", (HealthReason(text="x", is_failing=True),))

    assert value(read(sample()), "kclrun_healthy") == 1
    assert value(read(sample(), failing), "kclrun_healthy") == 0


def test_who_it_is_stands_on_one_series_and_on_no_other():
    series = read(sample(lease("a")))

    carrying = [name for name, labels in series if "owner" in dict(labels)]
    assert carrying == ["kclrun_info"]
    [labels] = [dict(labels) for name, labels in series if name == "kclrun_info"]
    assert labels == {
        "application": "orders",
        "stream": "flights",
        "owner": "kclrun::h:n",
        "version": "0.1.0",
    }


def test_the_traffic_of_a_shard_has_its_series_and_a_key_is_no_label():
    heat = ShardHeat(90.0, 9e5, 312.0, 9e5, 0.25, 0, 0.05, "keys", (HotKey("77", 0.5),))
    shown = sample(
        lease("a", heat=heat, hot=HotShard("full", "split")),
        lease("b", heat=msgspec.structs.replace(heat, keys=())),
        lease("c"),
    )
    series = read(shown)

    assert [value(series, "kclrun_hot", shard=shard) for shard in "ab"] == [1, 0]
    assert value(series, "kclrun_in_bytes_per_second", shard="a") == 9e5
    assert value(series, "kclrun_in_records_per_second", shard="a") == 312
    assert value(series, "kclrun_reads_throttled_ratio", shard="a") == 0.25
    assert [value(series, "kclrun_heaviest_key_ratio", shard=s) for s in "ab"] == [0.5, 0]
    assert value(series, "kclrun_hot_leases") == 1
    labels = {name for _, labelled in series for name, _ in labelled}
    assert labels <= {"application", "shard", "state", "stream", "owner", "version"}
    assert ("kclrun_hot", (("application", "orders"), ("shard", "c"))) not in series


def test_a_control_character_of_a_foreign_key_is_escaped_in_labels():
    text = Exposition(lambda: (sample(lease("a\x1b[2J\x07")), OK), "0.1.0").text()

    assert b"\x1b" not in text
    assert b"\x07" not in text
    assert b'shard="a\\\\x1b[2J' in text
