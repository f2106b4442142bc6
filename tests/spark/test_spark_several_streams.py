"""Two streams in one source on Spark: every row once, with its stream, over a reshard."""

import json
import textwrap
import uuid

import pytest
from pyspark.errors import StreamingQueryException

import kclrun.spark
from tests.patience import HUNG_S
from tests.spark.source_rig import in_order_of_each_key

pytestmark = pytest.mark.slow

PROCESSOR = """
from kclrun import RecordProcessor


class Named(RecordProcessor):
    def initialize(self, context):
        self.context = context

    def process_records(self, batch, checkpointer):
        for record in batch:
            self.context.emit({"n": int(record.data), "of": self.context.stream})
"""


def rows_of(stream, rows):
    return [(row.partitionKey, bytes(row.data)) for row in rows if row.stream == stream.name]


def both(one, other):
    return f"{other.name},{one.name}"


def test_a_second_stream_joins_the_checkpoint_of_one_and_both_are_read_over_a_reshard(
    collected, stream_of
):
    one, other = stream_of(2), stream_of(1)
    run = collected(one, maxRecordsPerTrigger="200")
    one.put(50)
    alone = run.start(availableNow=True)
    assert alone.awaitTermination(HUNG_S)

    run.options["streamName"] = both(one, other)
    other.put(50)
    one.split(one.open_shards()[0])
    one.put(50)
    together = run.start(availableNow=True)
    assert together.awaitTermination(HUNG_S)
    assert together.exception() is None

    for stream in (one, other):
        assert in_order_of_each_key(rows_of(stream, run.rows)) == in_order_of_each_key(
            stream.put_records
        )
        assert len(rows_of(stream, run.rows)) == len(stream.put_records)
    # Both have a shard of this name: a row says whose it is.
    first = {row.stream for row in run.rows if row.shardId == "shardId-000000000000"}
    assert first == {one.name, other.name}
    reported = json.loads(together.lastProgress.json)["sources"][0]["latestOffset"]
    report = json.loads(reported) if isinstance(reported, str) else reported
    assert set(report["streams"]) == {one.name, other.name}

    run.options["streamName"] = one.name
    left_out = run.start(availableNow=True)
    with pytest.raises(StreamingQueryException, match="none left out"):
        left_out.awaitTermination(HUNG_S)


def test_a_batch_read_has_both_and_a_filter_of_streams_spares_one(spark, stream_of):
    one, other = stream_of(1), stream_of(1)
    one.put(20)
    other.put(10)
    options = one.options | {"streamName": both(one, other)}

    frame = spark.read.format("kclrun").options(**options).load()

    assert frame.count() == 30
    assert frame.where(frame.stream == other.name).count() == 10


def test_a_processor_has_an_instance_for_each_stream_and_its_rows_say_which(
    spark, stream_of, tmp_path
):
    one, other = stream_of(1), stream_of(1)
    one.put(20, size=8)
    other.put(10, size=8)
    module = f"named_{uuid.uuid4().hex[:8]}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(PROCESSOR))
    rows = kclrun.spark.process(
        spark,
        f"{module}:Named",
        one.options | {"streamName": both(one, other), "startingOffsets": "earliest"},
        paths=[tmp_path],
    )
    seen = []
    writer = rows.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = (
        writer.trigger(availableNow=True)
        .foreachBatch(lambda batch, _: seen.extend(batch.collect()))
        .start()
    )

    assert query.awaitTermination(HUNG_S)
    assert query.exception() is None
    assert {row.stream for row in seen} == {one.name, other.name}
    assert all(json.loads(row.row)["of"] == row.stream for row in seen)
    for stream, count in ((one, 20), (other, 10)):
        numbers = [json.loads(row.row)["n"] for row in seen if row.stream == stream.name]
        assert numbers == list(range(count))
