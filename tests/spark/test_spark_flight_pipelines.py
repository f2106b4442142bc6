"""The pipelines over the flights on a real Spark: the answers are those of the file.

The records come from Parquet files, one a micro-batch, cut and ordered as a stream's shards are.
Every hour of the whole year is compared by `tests/packaging/test_spark_fresh_install.py`.
"""

import csv
import io
import os
import random
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kclrun.samples.flight_pipelines import hourly_delay
from kclrun.samples.flight_stream import HEARTBEAT_AT, scheduled_at, scheduled_flights
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from kclrun.samples import flight_pipelines, flights, late_chains
from kclrun.spark.executor.reading import ARROW_SCHEMA, SCHEMA

pytestmark = pytest.mark.slow

Pipeline = Callable[[DataFrame, Mapping[str, Any]], DataFrame]

HEARTBEAT = ("heartbeat", f"heartbeat,{HEARTBEAT_AT}".encode())


def with_heartbeat(record: tuple[str, bytes]) -> tuple[str, bytes]:
    """A flight, and in its next line a heartbeat: the last record of the demo."""
    return record[0], record[1].rstrip() + b"\n" + HEARTBEAT[1]


LINE = "2013,1,1,517,515,{delay},830,819,11,UA,1545,{tail},{origin},IAH,227,1400,5,{minute},{hour}"
ARRIVED_AT = datetime(2026, 1, 1, tzinfo=UTC)


def flight(
    hour: str = "2013-01-01T10:00:00Z",
    minute: int = 15,
    delay: str = "2",
    tail: str = "N14228",
    origin: str = "EWR",
) -> tuple[str, bytes]:
    line = LINE.format(hour=hour, minute=minute, delay=delay, tail=tail, origin=origin)
    return tail, line.encode()


def rows_of(records: Iterable[tuple[str, bytes]]) -> list[dict[str, Any]]:
    """As the source gives them: four shards, and four records to an aggregate.

    The first sequence numbers are a digit shorter, so that only length and text order them.
    """
    first = 10**17 - 500
    return [
        {
            "data": data,
            "partitionKey": key,
            "explicitHashKey": None,
            "stream": "flights",
            "shardId": f"shardId-{zlib.crc32(key.encode()) % 4:012}",
            "sequenceNumber": str(first + number // 4),
            "subSequenceNumber": number % 4,
            "approximateArrivalTimestamp": ARRIVED_AT + timedelta(milliseconds=number),
        }
        for number, (key, data) in enumerate(records)
    ]


def cut(rows: list[dict[str, Any]], count: int, behind: int = 1) -> list[list[dict[str, Any]]]:
    """Equal batches, each shard by shard; from the middle on one shard is some batches behind.

    So are the children of a shard that was split: they begin when their parent's end is
    committed, a batch later; and their own children two.
    """
    size = -(-len(rows) // count)
    batches: list[list[dict[str, Any]]] = [[] for _ in range(count + behind)]
    for number, row in enumerate(rows):
        batch = number // size
        is_child = row["shardId"] == "shardId-000000000002" and batch >= count // 2
        batches[batch + behind * is_child].append(row)
    return [sorted(batch, key=lambda row: row["shardId"]) for batch in batches if batch]


class Feed:
    """A folder of micro-batches, and what a pipeline makes of them."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder
        self._files = 0
        self.output = folder / "out"
        (folder / "in").mkdir()

    def add(self, batches: Iterable[list[dict[str, Any]]]) -> None:
        for batch in batches:
            path = self._folder / "in" / f"{self._files:03}.parquet"
            pq.write_table(pa.Table.from_pylist(batch, schema=ARROW_SCHEMA), path)
            # Spark takes files by their age, which it knows to the millisecond.
            os.utime(path, (1_000_000_000 + self._files, 1_000_000_000 + self._files))
            self._files += 1

    def run(self, pipeline: Pipeline, options: Mapping[str, Any] | None = None) -> list[Any]:
        """Everything that is there, one file a batch; the progress of each batch."""
        records = (
            self._spark.readStream.schema(SCHEMA)
            .option("maxFilesPerTrigger", 1)
            .parquet(str(self._folder / "in"))
        )
        query = (
            pipeline(records, options or {})
            .writeStream.format("parquet")
            .option("checkpointLocation", str(self._folder / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(self.output))
        )
        try:
            query.awaitTermination()
        finally:
            query.stop()
        return list(query.recentProgress)


@pytest.fixture
def feed(spark, tmp_path):
    return Feed(spark, tmp_path)


@pytest.fixture(scope="module")
def some_flights():
    """The first half of a year, of about one aircraft in thirty."""
    return [
        pair
        for pair in scheduled_flights()
        if zlib.crc32(pair[0].encode()) % 30 == 0 and pair[1][-21:] < b",2013-07"
    ]


def dropped(progress: Iterable[Any]) -> int:
    return sum(
        operator.numRowsDroppedByWatermark
        for batch in progress
        for operator in batch.stateOperators
    )


def observed(progress: Iterable[Any]) -> dict[str, int]:
    """The records seen by all batches with data."""
    totals: dict[str, int] = {}
    for batch in progress:
        if batch.numInputRows:
            for name, count in batch.observedMetrics["records"].asDict().items():
                totals[name] = totals.get(name, 0) + count
    return totals


def test_without_a_heartbeat_the_last_hours_stay_open(feed):
    feed.add([rows_of([flight()])])
    feed.run(hourly_delay)
    assert flight_pipelines.hours(feed.output) == {}

    feed.add([rows_of([flight("2013-04-01T10:00:00Z")])])
    feed.run(hourly_delay)

    assert set(flight_pipelines.hours(feed.output)) == {("2013-01-01T10:00:00Z", "EWR")}


# Four batches of 46 days, and a shard two of them behind. The second is Spark's to cover: it
# takes rows as late by the watermark of the batch before.
def test_each_hour_comes_out_once_and_complete_although_a_shard_lags(feed, some_flights):
    feed.add(cut(rows_of(some_flights[:-1]), 4, behind=2))
    feed.add([rows_of([with_heartbeat(some_flights[-1])])])

    progress = feed.run(hourly_delay)

    assert flight_pipelines.hours(feed.output) == flight_pipelines.expected_hourly(some_flights)
    assert dropped(progress) == 0
    seen = observed(progress)
    assert (seen["flights"], seen["heartbeats"], seen["malformed"]) == (len(some_flights), 1, 0)
    assert sum(batch.numInputRows for batch in progress) == len(some_flights)
    # The hours after the last watermark of the data came out of a batch without records.
    assert progress[-1].numInputRows == 0
    assert progress[-1].stateOperators[0].numRowsRemoved > 0
    assert_the_summary_tells(flight_pipelines.expected_hourly(some_flights), feed.output)


def assert_the_summary_tells(expected: Mapping[Any, flight_pipelines.HourlyDelay], folder: Path):
    shown = flight_pipelines.summary(folder).splitlines()
    flights_in_all = sum(hour.flights for hour in expected.values())
    assert f"{flights_in_all:,} flights, {len(expected):,} rows" in shown[0]
    (hour, origin), _ = min(expected.items(), key=lambda item: (-item[1].delay_sum, item[0]))
    assert shown[5].startswith(f"{origin}      {hour[:13].replace('T', ' ')}:00")
    assert [line[:3] for line in shown[-3:]] == ["EWR", "JFK", "LGA"]


def test_a_delay_shorter_than_the_lag_of_a_shard_drops_flights_and_spark_says_so(
    feed, some_flights
):
    feed.add(cut(rows_of(some_flights[:2000]), 3, behind=2))

    progress = feed.run(hourly_delay, {"delay": "1 hour"})

    assert dropped(progress) > 0


def test_a_record_that_is_no_flight_fails_the_query_by_its_position_and_is_not_shown(feed):
    feed.add([rows_of([flight(), ("canary", b"canary,1")])])

    with pytest.raises(
        StreamingQueryException, match=r"record shardId-0{11}\d/9{14}500/1 is neither"
    ) as e:
        feed.run(hourly_delay)
    assert "canary" not in str(e.value)


MALFORMED = {
    "too few fields": b"2013,1,1",
    "too many fields": flight()[1] + b",more",
    "no number": flight(delay="two")[1],
    "no time": flight(hour="yesterday")[1],
    "no airport": flight(origin="NA")[1],
    "two lines": flight()[1] + b"\n" + flight()[1],
    "empty": b"",
    "no text": bytes(range(128, 256)),
    "a heartbeat of no time": b"heartbeat,soon",
    "a heartbeat before its flight": HEARTBEAT[1] + b"\n" + flight()[1],
}


def test_malformed_records_are_counted_where_the_query_is_to_go_on(feed):
    good = flight(delay="7", tail="NA")
    lines = [("k", data) for data in MALFORMED.values()]
    feed.add([rows_of(lines), rows_of([good, *lines, (good[0], good[1] + b"\r\n"), HEARTBEAT])])

    progress = feed.run(hourly_delay, {"malformed": "count"})

    assert flight_pipelines.hours(feed.output) == {
        ("2013-01-01T10:00:00Z", "EWR"): flight_pipelines.HourlyDelay(2, 2, 0, 14)
    }
    expected = {"flights": 2, "no_tailnum": 2, "heartbeats": 1, "malformed": 2 * len(MALFORMED)}
    assert observed(progress) == expected


# One batch in random order, read in Arrow batches of seven rows: a call gets several frames.
def test_a_chain_follows_the_stream_over_shuffled_rows_batches_and_a_restart(
    spark, feed, some_flights
):
    chance = random.Random(20261)
    batches = cut(rows_of(some_flights), 3)
    for batch in batches:
        chance.shuffle(batch)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 7)
    try:
        feed.add(batches[:2])
        feed.run(late_chains.late_chains)
        feed.add(batches[2:])
        feed.run(late_chains.late_chains)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")

    found = late_chains.longest_chains(feed.output)
    assert found == late_chains.expected_chains(some_flights)
    assert max(chain.late_flights for chain in found.values()) > 5


def test_every_chain_of_a_month_is_what_the_file_says(feed):
    records = [each for each in scheduled_flights() if scheduled_at(each[1].decode()) < FEBRUARY]
    feed.add(cut(rows_of(records), 3))

    progress = feed.run(late_chains.late_chains)

    found = late_chains.longest_chains(feed.output)
    assert found == late_chains.expected_chains(records)
    rows = list(csv_rows())
    assert observed(progress)["no_tailnum"] == sum(row["tailnum"] == "NA" for row in rows) > 0
    marks: dict[str, str] = {}
    for row in sorted(rows, key=lambda row: (row["time_hour"], int(row["minute"]))):
        if row["dep_delay"] != "NA":
            mark = "L" if int(row["dep_delay"]) > 15 else " "
            marks[row["tailnum"]] = marks.get(row["tailnum"], "") + mark
    another_way = {tail: max(map(len, text.split(" "))) for tail, text in marks.items()}
    assert {tail: chain.late_flights for tail, chain in found.items()} == {
        tail: length for tail, length in another_way.items() if length
    }
    shown = late_chains.summary(feed.output).splitlines()
    first = min(found, key=lambda tail: (-found[tail].late_flights, tail))
    assert shown[4].split()[:2] == [first, str(found[first].late_flights)]


FEBRUARY = datetime(2013, 2, 1, tzinfo=UTC)


def csv_rows() -> Iterator[dict[str, str]]:
    """January by the names of columns, sharing nothing with the pipelines."""
    with zipfile.ZipFile(flights._data_folder() / "flights.csv.zip") as packed:
        for row in csv.DictReader(io.StringIO(packed.read("flights.csv").decode())):
            if row["time_hour"] < "2013-02-01":
                yield row
