"""Streaming queries into the embedded Kinesis: every batch, in order, throttled or not."""

import json
import random
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.functions import col

from kclrun.errors import NotFound, SettingsError
from kclrun.local.server import start_embedded
from kclrun.spark.sink.writing import write
from tests.processes.bad_input_rig.denying import DenyingEndpoint
from tests.spark.sink_rig import Feed, Kinesis, numbered, numbers_by_key, records

pytestmark = pytest.mark.slow


@pytest.fixture
def kinesis(embedded):
    return Kinesis(embedded.kinesis_endpoint)


@pytest.fixture
def counting(embedded):
    endpoint = DenyingEndpoint(embedded.kinesis_endpoint)
    yield endpoint
    endpoint.close()


@pytest.fixture(scope="module")
def throttling():
    with start_embedded(limits=True) as embedded:
        yield Kinesis(embedded.kinesis_endpoint)


@pytest.fixture
def feed(spark, tmp_path):
    return Feed(spark, tmp_path)


def telling_source(reported: Path) -> type:
    """The format, under another name, whose commits also write down what they were told."""

    def make() -> type:
        # In here, so that it travels by value: workers do not know this module.
        from kclrun.spark.sink.writers import TaskDone
        from kclrun.spark.source import KclrunDataSource

        def told_writer(writer):
            class TellingWriter(type(writer)):
                def commit(self, messages, batchId):  # noqa: N803 - Spark's name
                    super().commit(messages, batchId)
                    assert all(isinstance(each, TaskDone) for each in messages)
                    reports = [[each.report.rows, each.report.refused_records] for each in messages]
                    with reported.open("a") as lines:
                        lines.write(json.dumps([batchId, reports]) + "\n")

            writer.__class__ = TellingWriter
            return writer

        def stream_writer(self, schema, overwrite):
            return told_writer(KclrunDataSource.streamWriter(self, schema, overwrite))

        body = {"name": classmethod(lambda _: "telling"), "streamWriter": stream_writer}
        return type("TellingSource", (KclrunDataSource,), body)

    return make()


class TestAStream:
    def test_every_batch_arrives_and_straight_from_the_files_in_their_order(self, kinesis, feed):
        stream = kinesis.stream(2)
        rows = numbered(2_000, keys=10)
        for first in range(0, len(rows), 500):
            feed.add(rows[first : first + 500])

        progress = feed.run(
            write(
                feed.rows(),
                stream,
                key="partitionKey",
                data="data",
                keys_are_together=True,
                options=kinesis.options(),
            )
        )

        assert [each.numInputRows for each in progress] == [500] * 4
        by_key = numbers_by_key(kinesis.stored(stream))
        assert by_key == {f"key-{k}": list(range(k, 2_000, 10)) for k in range(10)}

    def test_each_batch_is_sorted_where_an_order_is_named(self, kinesis, feed):
        stream = kinesis.stream(2)
        rows = numbered(600, keys=7)
        for first in range(0, len(rows), 300):
            shuffled = rows[first : first + 300]
            random.Random(20261).shuffle(shuffled)
            feed.add(shuffled)

        feed.run(
            write(
                feed.rows(),
                stream,
                key="partitionKey",
                data="data",
                order_by=["number"],
                options=kinesis.options(),
            )
        )

        by_key = numbers_by_key(kinesis.stored(stream))
        assert by_key == {f"key-{k}": list(range(k, 600, 7)) for k in range(7)}

    def test_output_mode_complete_is_refused(self, kinesis, feed):
        stream = kinesis.stream(1)
        feed.add(numbered(3, keys=1))
        counts = feed.rows().groupBy("partitionKey").count()
        rows = counts.select("partitionKey", col("count").cast("string").alias("data"))

        with pytest.raises(StreamingQueryException) as raised:
            feed.run(
                rows.writeStream.format("kclrun")
                .outputMode("complete")
                .options(**kinesis.options(streamName=stream))
            )

        assert "use append, or foreachBatch" in str(raised.value)

    def test_a_row_that_cannot_be_a_record_ends_the_query_and_says_which(self, kinesis, feed):
        stream = kinesis.stream(1)
        feed.add([*numbered(5, keys=1), ("", b"x", 5)])
        rows = feed.rows().drop("number")

        with pytest.raises(StreamingQueryException) as raised:
            feed.run(
                rows.writeStream.format("kclrun").options(**kinesis.options(streamName=stream))
            )

        assert "partitionKey is empty in 1 of 6 rows: the first is row 6" in str(raised.value)

    def test_a_missing_stream_is_an_error_before_the_query_starts(self, kinesis, feed):
        with pytest.raises(NotFound, match="nowhere"):
            write(
                feed.rows(),
                "nowhere",
                key="partitionKey",
                data="data",
                options=kinesis.options(),
            )

    def test_so_is_an_option_or_a_column_that_does_not_fit(self, kinesis, feed):
        stream = kinesis.stream(1)

        with pytest.raises(SettingsError, match="aggregat"):
            write(feed.rows(), stream, key="number", data="data", options={"agregate": "true"})
        with pytest.raises(SettingsError, match="the column data is bigint"):
            write(feed.rows(), stream, key="number", data="number", options=kinesis.options())

    def test_the_shards_are_listed_once_and_not_for_every_batch(self, kinesis, counting, feed):
        stream = kinesis.stream(1)
        for number in range(6):
            feed.add([("k", b"x", number)])

        progress = feed.run(
            feed.rows()
            .drop("number")
            .writeStream.format("kclrun")
            .options(**kinesis.options(streamName=stream, endpointUrl=counting.url))
        )

        assert len(progress) == 6
        assert len(records(kinesis.stored(stream))) == 6
        # Once a process that plans, and Spark may have started a second.
        assert counting.calls.count("ListShards") <= 2

    def test_a_permission_that_is_missing_ends_the_query_and_is_named(
        self, kinesis, counting, feed
    ):
        stream = kinesis.stream(1)
        feed.add(numbered(3, keys=1))
        counting.deny("PutRecords")

        with pytest.raises(StreamingQueryException) as raised:
            feed.run(
                feed.rows()
                .drop("number")
                .writeStream.format("kclrun")
                .options(**kinesis.options(streamName=stream, endpointUrl=counting.url))
            )

        assert "AccessDenied: PutRecords" in str(raised.value)
        # Spark tries the task four times.
        assert counting.calls.count("PutRecords") == 4


class TestThrottling:
    def test_it_costs_no_record_and_no_order_and_the_commit_is_reported(
        self, spark, throttling, feed, tmp_path
    ):
        # One shard takes 1,000 records a second.
        stream = throttling.stream(1)
        rows = numbered(6_000, keys=600)
        feed.add(rows)
        reported = tmp_path / "told"
        spark.dataSource.register(telling_source(reported))

        feed.run(
            feed.rows()
            .drop("number")
            .writeStream.format("telling")
            .options(**throttling.options(streamName=stream))
        )

        by_key = numbers_by_key(throttling.stored(stream))
        assert by_key == {f"key-{k}": list(range(k, 6_000, 600)) for k in range(600)}
        ((batch_id, reports),) = [json.loads(line) for line in reported.read_text().splitlines()]
        assert batch_id == 0
        assert sum(rows for rows, _ in reports) == 6_000
        assert sum(refused for _, refused in reports) > 0
