"""Filters of a batch read spare reading, and never a row that Spark would have kept."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from kclrun.model.record import Record
from kclrun.spark.options import SourceSettings, Start, StartKind, StreamAddress
from kclrun.spark.source import Narrowing, narrowing_of
from tests.support.tables import over_rows

datasource = pytest.importorskip("pyspark.sql.datasource")
NOW_MS = 1_700_000_000_000
MINUTE_MS, HOUR_MS = 60_000, 3_600_000
BATCH = SourceSettings(address=StreamAddress(stream="s"), start=Start(StartKind.EARLIEST))
ARRIVAL, SHARD, KEY = ("approximateArrivalTimestamp",), ("shardId",), ("partitionKey",)


def at(ms):
    return datetime.fromtimestamp(ms / 1000, UTC)


def narrowed(narrowing, settings=BATCH, created_ms=0, retention_hours=24):
    return narrowing.narrowed(settings, NOW_MS, created_ms, retention_hours)


def test_filters_are_read_together():
    found = narrowing_of(
        [
            datasource.GreaterThanOrEqual(ARRIVAL, at(5_000)),
            datasource.GreaterThan(ARRIVAL, at(6_000)),
            datasource.LessThan(ARRIVAL, at(9_000)),
            datasource.In(SHARD, ("a", "b")),
            datasource.EqualTo(SHARD, "b"),
            datasource.EqualTo(KEY, "k"),
        ]
    )

    assert found == Narrowing(6_000, 9_000, frozenset({"b"}), frozenset({"k"}))


@over_rows(
    "unknown",
    [
        datasource.Not(datasource.EqualTo(SHARD, "a")),
        datasource.GreaterThan(SHARD, "a"),
        datasource.EqualTo(("data",), "a"),
        datasource.EqualTo(SHARD, None),
        datasource.IsNotNull(SHARD),
        datasource.GreaterThan(ARRIVAL, datetime(2026, 1, 1)),
    ],
)
def test_what_is_not_known_to_leave_rows_out_spares_nothing(unknown):
    assert narrowing_of([unknown]) == Narrowing()


@pytest.mark.parametrize(
    ("narrowing", "created_ms"),
    [
        (Narrowing(NOW_MS - 30 * HOUR_MS), 0),  # before the oldest record
        (Narrowing(NOW_MS - 3 * HOUR_MS), NOW_MS - HOUR_MS),  # before the stream was made
        (Narrowing(to_ms=NOW_MS), 0),  # records with that stamp may still come
        (Narrowing(to_ms=NOW_MS - 30 * HOUR_MS), 0),
    ],
)
def test_times_that_the_stream_may_not_hold_are_left_to_spark(narrowing, created_ms):
    assert narrowed(narrowing, created_ms=created_ms) == BATCH


def test_a_time_to_come_is_not_waited_for():
    assert narrowed(Narrowing(NOW_MS + HOUR_MS)).start.timestamp_ms == NOW_MS - MINUTE_MS


def test_keys_spare_rows_and_shards_spare_reading():
    narrowing = Narrowing(shard_ids=frozenset({"a"}), partition_keys=frozenset({"k"}))
    records = [Record(b"1", "k", "1"), Record(b"2", "other", "2")]

    assert (narrowing.reads("s", "a"), narrowing.reads("s", "b")) == (True, False)
    assert narrowing.left(records) == records[:1]
    assert Narrowing().left(records) is records


TIMESTAMP, LATEST, EARLIEST = StartKind.TIMESTAMP, StartKind.LATEST, StartKind.EARLIEST
OLDEST_MS = NOW_MS - 24 * HOUR_MS  # what the retention leaves; plus the margin of a minute


@over_rows(
    ("from_ms", "start", "narrowed_to"),
    [
        (NOW_MS - 3 * HOUR_MS, Start(EARLIEST), NOW_MS - 3 * HOUR_MS - MINUTE_MS),
        (OLDEST_MS + 2 * MINUTE_MS, Start(EARLIEST), None),
        (OLDEST_MS + 2 * MINUTE_MS + 1, Start(EARLIEST), OLDEST_MS + MINUTE_MS + 1),
        (NOW_MS - HOUR_MS, Start(TIMESTAMP, NOW_MS - 2 * HOUR_MS), NOW_MS - HOUR_MS - MINUTE_MS),
        (NOW_MS - 3 * HOUR_MS, Start(TIMESTAMP, NOW_MS - 2 * HOUR_MS), None),
        (NOW_MS - HOUR_MS, Start(LATEST), None),
        (None, Start(EARLIEST), None),
    ],
)
def test_a_start_is_narrowed_to_a_later_time_that_the_stream_holds(from_ms, start, narrowed_to):
    settings = replace(BATCH, start=start)
    expected = start if narrowed_to is None else Start(TIMESTAMP, narrowed_to)

    assert narrowed(Narrowing(from_ms), settings) == replace(settings, start=expected)


@over_rows(
    ("to_ms", "end", "narrowed_to"),
    [
        (NOW_MS - HOUR_MS, Start(LATEST), NOW_MS - HOUR_MS + MINUTE_MS),
        (NOW_MS - 2 * MINUTE_MS, Start(LATEST), None),
        (NOW_MS - 2 * MINUTE_MS - 1, Start(LATEST), NOW_MS - MINUTE_MS - 1),
        (OLDEST_MS, Start(LATEST), None),
        (OLDEST_MS + 1, Start(LATEST), OLDEST_MS + MINUTE_MS + 1),
        (NOW_MS - HOUR_MS, Start(TIMESTAMP, NOW_MS), NOW_MS - HOUR_MS + MINUTE_MS),
        (NOW_MS - HOUR_MS, Start(TIMESTAMP, NOW_MS - 2 * HOUR_MS), None),
        (NOW_MS - HOUR_MS, Start(EARLIEST), None),
    ],
)
def test_an_end_is_narrowed_to_an_earlier_time_that_is_past_and_held(to_ms, end, narrowed_to):
    settings = replace(BATCH, end=end)
    expected = end if narrowed_to is None else Start(TIMESTAMP, narrowed_to)

    assert narrowed(Narrowing(to_ms=to_ms), settings) == replace(settings, end=expected)


@over_rows(
    ("filters", "bounds"),
    [
        (["GreaterThan 5", "GreaterThan 4"], (5, None)),
        (["GreaterThanOrEqual 4", "GreaterThan 5"], (5, None)),
        (["LessThan 5", "LessThanOrEqual 4"], (None, 4)),
        (["LessThan 4", "LessThan 5"], (None, 4)),
        (["EqualTo 5"], (5, 5)),
        (["EqualTo 5", "LessThan 9", "GreaterThan 1"], (5, 5)),
    ],
)
def test_the_narrowest_of_several_times_counts(filters, bounds):
    made = [
        getattr(datasource, kind)(ARRIVAL, at(int(seconds) * 1000))
        for kind, seconds in (each.split() for each in filters)
    ]

    found = narrowing_of(made)

    assert (found.from_ms, found.to_ms) == tuple(each and each * 1000 for each in bounds)
    assert narrowing_of([datasource.In(SHARD, ("a", 1))]) == Narrowing()
    assert narrowing_of([datasource.EqualTo((*SHARD, "x"), "a")]) == Narrowing()
    assert narrowing_of([datasource.EqualTo(("stream",), "s")]) == Narrowing(streams=frozenset("s"))
