"""Progress as Spark 4.3 reports it, and what is made of it."""

from typing import Any

from kclrun.model.time import Instant
from kclrun.spark.offsets import Offset, StreamIs, encode_offset
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, Position, after
from kclrun.spark.running.progress import RunCounts, ShardBatch, read_lags, read_progress

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


def test_a_first_batch_begins_where_its_end_offset_says() -> None:
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


def test_a_shard_that_stood_still_is_no_part_of_the_batch() -> None:
    start, end = offset(a=after("5"), b=after("9")), offset(a=after("6"), b=after("9"))

    batch = read_progress(progress(1, start, end, {"records": 0, "bytes": None, "by_shard": []}))

    assert batch is not None
    assert batch.shards == {A: ShardBatch(begin=after("5"), end=after("6"), records=0)}
    assert (batch.records, batch.bytes) == (0, 0)


def test_where_rows_are_not_counted_by_shard_they_are_counted_in_all() -> None:
    batch = read_progress(progress(1, offset(a=after("5")), offset(a=after("6"))))

    assert batch is not None
    assert (batch.records, batch.bytes) == (7, None)
    assert batch.shards[A].records is None


def test_the_accounts_of_a_processors_tasks_are_added_up_by_shard() -> None:
    accounts = [
        {"item": A, "count": 2, "bytes": 20, "processingS": 0.5},
        {"item": A, "count": 1, "bytes": 10, "processingS": 0.25},
    ]
    observed = {"records": 3, "bytes": 30, "by_shard": accounts}

    batch = read_progress(progress(1, offset(a=after("5")), offset(a=after("6")), observed))

    assert batch is not None
    part = batch.shards[A]
    assert (part.records, part.bytes, part.processing_s) == (3, 30, 0.75)


def test_an_idle_trigger_is_no_batch_and_still_tells_the_lag() -> None:
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


def test_the_report_adds_batches_up_by_shard_and_in_all() -> None:
    report = run_of_three_batches().report(
        application="x", stream="s", owner="o", exit_reason="drained", seconds=3.0
    )

    assert (report.totals.records, report.totals.batches, report.totals.ended) == (10, 3, 1)
    assert report.totals.bytes == 30
    first, child = report.shards[A], report.shards[B]
    assert (first.records, first.batches, first.is_ended) == (5, 2, True)
    assert (first.first_position, first.checkpoint) == ("TRIM_HORIZON", "SHARD_END")
    assert (child.records, child.last_position, child.lag_ms) == (4, "7", 1_000)


def test_the_picture_shows_living_shards_and_keeps_the_records_of_ended_ones() -> None:
    sample = run_of_three_batches().sample(
        application="x", stream="s", owner="o", is_draining=False, now=Instant(104.0)
    )

    assert [view.shard for view in sample.leases] == [B, C]
    assert (sample.records_total, sample.ended_total, sample.lag_ms_max) == (10, 1, 1_000)
    assert sample.leases[0].records_per_s == 1.0  # four, in the four seconds of the run


def test_a_rate_falls_to_nothing_when_nothing_comes() -> None:
    sample = run_of_three_batches().sample(
        application="x", stream="s", owner="o", is_draining=False, now=Instant(120.0)
    )

    assert sample.records_per_s == 0.0


def test_before_the_first_batch_a_person_is_told_what_is_waited_for() -> None:
    place = {"application": "a", "stream": "s", "owner": "o", "is_draining": False}

    waiting = RunCounts(Instant(100.0)).sample(**place, now=Instant(101.0))
    running = run_of_three_batches().sample(**place, now=Instant(105.0))

    assert "Spark is starting" in waiting.doing
    assert (waiting.uptime_s, waiting.has_leases, waiting.is_draining) == (1.0, False, False)
    assert running.doing == ""
