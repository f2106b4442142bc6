"""Progress as Spark 4.3 reports it, and what is made of it."""

from typing import Any

import pytest

from kclrun.model.time import Instant
from kclrun.spark.offsets import Offset, StreamIs, encode_offset
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, Position, after
from kclrun.spark.running.progress import (
    BatchDone,
    RunCounts,
    ShardBatch,
    ShardCount,
    read_lags,
    read_progress,
)
from tests.support.tables import over_rows

A, B, C = (f"shardId-{n:012}" for n in range(3))


def offset(began: dict[str, Position] | None = None, **shards: Position) -> dict[str, Any]:
    named = {"a": A, "b": B, "c": C}
    return encode_offset(
        Offset(
            streams={"": StreamIs("arn:aws:kinesis:us-east-1:123456789012:stream/s", 1)},
            shards={named[name]: position for name, position in shards.items()},
            began={named[name]: position for name, position in (began or {}).items()},
        )
    )


def progress(
    batch: int, start: Any, end: Any, observed: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "batchId": batch,
        "numInputRows": 7,
        "durationMs": {"addBatch": 100, "triggerExecution": 250},
        "sources": [
            {"startOffset": None, "endOffset": {"n": 1}},
            {"startOffset": start, "endOffset": end, "latestOffset": None},
        ],
        "observedMetrics": {} if observed is None else {"kclrun": observed},
    } | more


def test_a_first_batch_begins_where_its_end_offset_says():
    batch = read_progress(
        progress(
            0,
            None,
            offset({"a": TRIM_HORIZON}, a=after("5"), b=after("9")),
            {"records": 3, "bytes": 30, "by_shard": [{"item": A, "count": 3}]},
        )
    )

    assert batch is not None
    assert (batch.batch_id, batch.records, batch.bytes, batch.seconds) == (0, 3, 30, 0.25)
    assert batch.shards == {A: ShardBatch(begin=TRIM_HORIZON, end=after("5"), records=3)}
    assert batch.bounds == {A: after("5"), B: after("9")}


def test_a_shard_that_stood_still_is_no_part_of_the_batch():
    start, end = offset(a=after("5"), b=after("9")), offset(a=after("6"), b=after("9"))

    batch = read_progress(progress(1, start, end, {"records": 0, "bytes": None, "by_shard": []}))

    assert batch is not None
    assert batch.shards == {A: ShardBatch(begin=after("5"), end=after("6"), records=0)}
    assert (batch.records, batch.bytes) == (0, 0)


def test_an_idle_trigger_is_no_batch_and_still_tells_the_lag():
    idle = progress(1, offset(a=after("5")), offset(a=after("5")), durationMs={"latestOffset": 9})
    idle["sources"][1]["latestOffset"] = {"shards": {A: {"lagMs": 12.4}, B: {"lagMs": None}}}

    assert read_progress(idle) is None
    assert read_lags(idle) == {A: 12}


def run_of_three_batches() -> RunCounts:
    counts = RunCounts(Instant(100.0))
    offsets = [
        None,
        offset({"a": TRIM_HORIZON}, a=after("5")),
        offset(a=SHARD_END),
        offset({"b": TRIM_HORIZON, "c": TRIM_HORIZON}, b=after("7"), c=after("8")),
    ]
    rows = [{A: 2}, {A: 3}, {B: 4, C: 1}]
    for number, by_shard in enumerate(rows):
        counted = [{"item": shard_id, "count": n} for shard_id, n in by_shard.items()]
        observed = {"records": sum(by_shard.values()), "bytes": 10, "by_shard": counted}
        batch = read_progress(progress(number, offsets[number], offsets[number + 1], observed))
        assert batch is not None
        ended = counts.add(batch, Instant(101.0 + number))
        assert ended == ((A,) if number == 1 else ())
    counts.lagged({A: 5, B: 1_000, C: 0})
    return counts


def test_the_report_adds_batches_up_by_shard_and_in_all():
    report = run_of_three_batches().report(
        application="x", stream="s", owner="o", exit_reason="drained", seconds=3.0
    )

    assert (report.totals.records, report.totals.batches, report.totals.ended) == (10, 3, 1)
    assert report.totals.bytes == 30
    first, child = report.shards[A], report.shards[B]
    assert (first.records, first.batches, first.is_ended) == (5, 2, True)
    assert (first.first_position, first.checkpoint) == ("TRIM_HORIZON", "SHARD_END")
    assert (child.records, child.last_position, child.lag_ms) == (4, "7", 1_000)


def test_the_picture_shows_living_shards_and_keeps_the_records_of_ended_ones():
    sample = run_of_three_batches().sample(
        application="x", stream="s", owner="o", is_draining=False, now=Instant(104.0)
    )

    assert [view.shard for view in sample.leases] == [B, C]
    assert (sample.records_total, sample.ended_total, sample.lag_ms_max) == (10, 1, 1_000)
    assert sample.leases[0].records_per_s == 1.0  # four, in the four seconds of the run


def test_a_rate_falls_to_nothing_when_nothing_comes():
    sample = run_of_three_batches().sample(
        application="x", stream="s", owner="o", is_draining=False, now=Instant(120.0)
    )

    assert sample.records_per_s == 0.0


def test_before_the_first_batch_a_person_is_told_what_is_waited_for():
    place = {"application": "a", "stream": "s", "owner": "o", "is_draining": False}

    waiting = RunCounts(Instant(100.0)).sample(**place, now=Instant(101.0))
    running = run_of_three_batches().sample(**place, now=Instant(105.0))

    assert "Spark is starting" in waiting.doing
    assert (waiting.uptime_s, waiting.has_leases, waiting.is_draining) == (1.0, False, False)
    assert running.doing == ""


def counted(records: int, *, end: Position = SHARD_END, size: int | None = 10) -> BatchDone:
    part = ShardBatch(
        begin=after("1"), end=end, records=records, bytes=size, processing_s=0.0000004
    )
    return BatchDone(
        batch_id=1, records=records, bytes=size, seconds=0.0004, shards={A: part}, bounds={A: end}
    )


@over_rows(("now", "rate"), [(101.0, 10.0), (102.0, 5.0), (105.0, 2.0), (106.0, 2.0), (106.1, 0.0)])
def test_a_rate_is_that_of_the_last_five_seconds_or_of_the_whole_run(now, rate):
    counts = RunCounts(Instant(100.0))
    counts.add(counted(10, end=after("7")), Instant(101.0))

    sample = counts.sample(
        application="x", stream="s", owner="o", is_draining=True, now=Instant(now)
    )

    assert [view.records_per_s for view in sample.leases] == [pytest.approx(rate)]
    assert [view.records_total for view in sample.leases] == [10]
    assert sample.uptime_s == pytest.approx(now - 100.0)
    assert sample.records_departed == 0
    assert (sample.is_draining, sample.has_leases, sample.doing) == (True, False, "")
    at_once = RunCounts(Instant(100.0))
    at_once.add(counted(1, end=after("7")), Instant(100.0))
    (view,) = at_once.sample(
        application="x", stream="s", owner="o", is_draining=False, now=Instant(100.0)
    ).leases
    assert view.records_per_s == 1_000.0, "a run is at least a millisecond old"


def test_a_run_that_nobody_looks_at_keeps_the_batches_of_five_seconds_only():
    counts = RunCounts(Instant(100.0))
    for second in range(1, 1_000):
        counts.add(counted(10, end=after("7")), Instant(100.0 + second))

    assert counts.batches == 999
    assert len(counts._recent) == 6


def test_a_shard_whose_records_were_not_counted_once_has_no_count():
    counts, end = RunCounts(Instant(100.0)), after("7")
    for records, seconds in ((None, 0.25), (3, 0.5)):
        part = ShardBatch(begin=after("1"), end=end, records=records, processing_s=seconds)
        counts.add(
            BatchDone(
                batch_id=1, records=3, bytes=None, seconds=0.0, shards={A: part}, bounds={A: end}
            ),
            Instant(101.0),
        )
    sample = counts.sample(
        application="x", stream="s", owner="o", is_draining=False, now=Instant(102.0)
    )
    shard = counts.report(
        application="x", stream="s", owner="o", exit_reason="", seconds=1.0
    ).shards[A]

    assert [(view.records_total, view.records_per_s) for view in sample.leases] == [(0, 1.5)]
    assert (shard.records, shard.processing_seconds) == (None, 0.75)


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (ShardCount(), ShardCount(2), ShardCount(2)),
        (ShardCount(2, 5, 1.0), ShardCount(), ShardCount(2, 5, 1.0)),
        (ShardCount(1, 5), ShardCount(2, 3, 0.5), ShardCount(3, 8, 0.5)),
    ],
)
def test_what_was_not_counted_adds_nothing(one, other, both):
    assert one.plus(other) == both


def test_a_report_has_its_times_to_the_millisecond_and_unknown_counts_as_none():
    counts = RunCounts(Instant(100.0))
    for _ in range(3):
        counts.add(counted(2, end=after("7")), Instant(101.0))
    counts.lagged({A: 7, B: 8})
    report = counts.report(
        application="x", stream="s", owner="o", exit_reason="drained", seconds=1.23456
    )

    assert report.seconds == 1.235
    assert (report.totals.processing_seconds, report.totals.restarts) == (0.001, 0)
    shard = report.shards[A]
    assert (shard.records, shard.bytes, shard.batches) == (6, 30, 3)
    assert (shard.processing_seconds, shard.lag_ms) == (0.0, 7)
    assert (shard.first_position, shard.last_position, shard.checkpoint) == ("1", "7", "7")
    counts.add(counted(2, size=None), Instant(102.0))
    ended = counts.report(application="x", stream="s", owner="o", exit_reason="", seconds=1.0)
    assert (ended.totals.bytes, ended.shards[A].bytes) == (None, None)
    assert (ended.shards[A].is_ended, ended.shards[A].lag_ms) == (True, None)
    counts.lagged({A: 7})
    again = counts.report(application="x", stream="s", owner="o", exit_reason="", seconds=1.0)
    assert again.shards[A].lag_ms is None, "a shard that was read to its end has no lag"


@over_rows(
    ("reported", "lags"),
    [
        (None, {}),
        ("{not JSON", {}),
        ("[]", {}),
        ({"shards": []}, {}),
        ({"shards": {A: {"lagMs": 12.6}, B: 7, C: {"lagMs": "x"}}}, {A: 13}),
        (f'{{"shards": {{"{A}": {{"lagMs": 5}}}}}}', {A: 5}),
    ],
)
def test_a_lag_is_a_number_of_the_sources_report(reported, lags):
    sources = [{"latestOffset": {"topic": 1}}, {"latestOffset": reported}]

    assert read_lags({"sources": sources}) == lags
    assert read_lags({}) == {}


def test_a_batch_counts_what_its_metric_says_and_without_one_the_rows_of_spark():
    start, end = offset(a=after("5"), b=after("5")), offset(a=after("6"), b=after("6"))
    done = read_progress(progress(3, start, end, {"records": None, "bytes": None}))
    assert done is not None
    assert (done.records, done.bytes) == (0, 0), "a sum over no rows is null"
    assert done.shards[A].records is None, "this Spark does not count by shard"

    done = read_progress(progress(3, start, end))
    assert done is not None
    assert (done.records, done.bytes) == (7, None), "as Spark counts them"
    accounts = [
        {"item": A, "count": 2, "bytes": 5, "processingS": 0.5},
        {"item": A, "count": 1, "processingS": 0.25},
    ]
    done = read_progress(progress(3, start, end, {"records": 3, "bytes": 5, "by_shard": accounts}))
    assert done is not None
    assert done.shards[A] == ShardBatch(
        begin=after("5"), end=after("6"), records=3, bytes=5, processing_s=0.75
    )
    assert done.shards[B] == ShardBatch(begin=after("5"), end=after("6"), records=0)
    plain = progress(3, None, None)
    del plain["numInputRows"]
    plain["durationMs"] = {"addBatch": 1}
    assert read_progress(plain) == BatchDone(
        batch_id=3, records=0, bytes=None, seconds=0.0, shards={}, bounds={}
    )
