"""Batches into the embedded Kinesis from a real Spark: all rows arrive, or it says why not."""

import random

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.functions import col, length

from kclrun.spark.sink.writing import write
from tests.spark.sink_rig import Kinesis, numbered, numbers_by_key, records, rows_of


@pytest.fixture
def kinesis(embedded):
    return Kinesis(embedded.kinesis_endpoint)


def refused(rows: DataFrame, options: dict[str, str], mode: str = "append") -> str:
    """What Spark says instead of writing."""
    with pytest.raises(PySparkException) as raised:
        rows.write.format("kclrun").options(**options).mode(mode).save()
    return str(raised.value)


class TestABatch:
    def test_every_row_arrives_once(self, spark, kinesis):
        stream = kinesis.stream(4)
        rows = numbered(5_000, keys=100)

        rows_of(spark, rows).select("data", "partitionKey").write.format("kclrun").options(
            **kinesis.options(streamName=stream)
        ).mode("append").save()

        stored = kinesis.stored(stream)
        assert sorted(records(stored)) == sorted((key, data) for key, data, _ in rows)
        assert all(stored.values())

    @pytest.mark.long
    def test_write_puts_any_columns_in_the_order_asked_for(self, spark, kinesis):
        rows = numbered(3_000, keys=20)
        random.Random(20261).shuffle(rows)
        stream = kinesis.stream(2)
        flights = rows_of(spark, rows).repartition(3).withColumnRenamed("partitionKey", "tail")

        written = write(
            flights,
            stream,
            key="tail",
            data=col("number").cast("string"),
            order_by=[length("data"), "number"],
            options=kinesis.options(),
        )

        assert written is None
        by_key = numbers_by_key(kinesis.stored(stream))
        assert by_key == {f"key-{k}": list(range(k, 3_000, 20)) for k in range(20)}

    def test_explicit_hash_keys_decide_the_shard(self, spark, kinesis):
        stream = kinesis.stream(2)
        rows = [("same", b"%d" % number, str(number % 2 * (2**128 - 1))) for number in range(10)]
        ddl = "partitionKey string, data binary, explicitHashKey string"

        spark.createDataFrame(rows, ddl).write.format("kclrun").options(
            **kinesis.options(streamName=stream)
        ).mode("append").save()

        first, second = kinesis.stored(stream).values()
        assert [int(data) % 2 for _, data in first] == [0] * 5
        assert [int(data) % 2 for _, data in second] == [1] * 5

    @pytest.mark.long
    def test_aggregates_hold_every_row_in_the_order_of_its_key(self, spark, kinesis):
        stream = kinesis.stream(2)
        rows = numbered(4_000, keys=10)

        write(
            rows_of(spark, rows),
            stream,
            key="partitionKey",
            data="data",
            order_by="number",
            options=kinesis.options(aggregate="true"),
        )

        stored = records(kinesis.stored(stream))
        assert len(stored) < len(rows) / 10, "many rows travel in one record"
        read = spark.read.format("kclrun").options(**kinesis.options(streamName=stream)).load()
        of_key: dict[str, list[int]] = {}
        for row in read.orderBy("shardId", "sequenceNumber", "subSequenceNumber").collect():
            of_key.setdefault(row.partitionKey, []).append(int(row.data))
        assert of_key == {f"key-{k}": list(range(k, 4_000, 10)) for k in range(10)}

    @pytest.mark.long
    def test_text_is_written_as_utf8(self, spark, kinesis):
        stream = kinesis.stream(1)

        spark.createDataFrame([("k", "Zoë")], "partitionKey string, data string").write.format(
            "kclrun"
        ).options(**kinesis.options(streamName=stream)).mode("append").save()

        assert records(kinesis.stored(stream)) == [("k", "Zoë".encode())]


class TestRefusals:
    def test_before_anything_is_written(self, spark, kinesis):
        stream = kinesis.stream(1)
        rows = rows_of(spark, numbered(3, keys=1))
        two = rows.drop("number")
        good = kinesis.options(streamName=stream)

        assert "did you mean ordering?" in refused(two, {**good, "ordring": "key"})
        assert "streamName: is needed" in refused(two, kinesis.options())
        assert "cannot be overwritten" in refused(two, good, mode="overwrite")
        assert "does not know the column 'number'" in refused(rows, good)
        assert "needs a column data" in refused(two.drop("data"), good)
        assert "credentials are not options" in refused(two, {**good, "awsSecretKey": "x"})
        assert records(kinesis.stored(stream)) == []

    def test_a_missing_stream_is_named(self, spark, kinesis):
        reported = refused(
            rows_of(spark, numbered(3, 1)).drop("number"), kinesis.options(streamName="nowhere")
        )

        assert "nowhere" in reported
        assert "NotFound" in reported
