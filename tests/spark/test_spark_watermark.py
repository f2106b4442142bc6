"""A8: catching up on a dense and a sparse shard: no row comes behind the watermark.

The backlog is written straight into the model of Kinesis with arrival times of the last quarter
of an hour, and served over HTTP as the embedded service serves it.
"""

import contextlib
import socket
import threading
import time

import pytest
import uvicorn
from pyspark.sql import functions

from kclrun.local.http_server import HttpServer
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.stream import PutEntry
from kclrun.model.time import WallTime
from tests.patience import HUNG_S
from tests.spark.source_rig import REGION

pytestmark = pytest.mark.slow

SECRET = b"watermark".ljust(32)
BACKLOG_S = 900
DENSE, SPARSE = 0, 1
# Ten minutes apart: a batch that ended after one of them would be far ahead of the other shard.
SPARSE_AT_S = (100, 700)
ROWS = BACKLOG_S + len(SPARSE_AT_S)


def backlog():
    """A record a second in one shard, one in ten minutes in the other, up to this moment."""
    began = time.time() - BACKLOG_S
    kinesis = Kinesis(KinesisSettings(), SECRET)
    stream = kinesis.create_stream("late", 2, WallTime(began))
    hash_keys = [str(shard.hash_range.start) for shard in stream.open_shards()]
    for second in range(BACKLOG_S):
        at = WallTime(began + second)
        kinesis.put(stream, PutEntry(b"dense", "d", hash_keys[DENSE]), at)
        if second in SPARSE_AT_S:
            kinesis.put(stream, PutEntry(b"sparse", "s", hash_keys[SPARSE]), at)
    return kinesis


@contextlib.contextmanager
def served(kinesis):
    """The endpoint's URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            HttpServer(kinesis, None),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            date_header=False,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(HUNG_S)


@pytest.fixture
def few_partitions(spark):
    """Two hundred state stores would be opened in every batch."""
    name = "spark.sql.shuffle.partitions"
    spark.conf.set(name, "2")
    yield
    spark.conf.unset(name)


class Counted:
    """What a query with a watermark of five seconds made of the backlog."""

    def __init__(self, query, counts):
        self.batches = [each for each in query.recentProgress if each.numInputRows]
        self.read = sum(each.numInputRows for each in self.batches)
        self.dropped = sum(
            operator.numRowsDroppedByWatermark
            for progress in query.recentProgress
            for operator in progress.stateOperators
        )
        self.counted = sum(counts.values())
        print("rows of the batches:", [each.numInputRows for each in self.batches])


def counted(spark, folder, url, **options):
    """Counts by second, which leave no slack to the watermark; until all was read."""
    counts = {}
    options = {"pollInterval": "200ms", "startingOffsets": "earliest"} | options
    windows = (
        spark.readStream.format("kclrun")
        .options(streamName="late", endpointUrl=url, region=REGION, **options)
        .load()
        .withWatermark("approximateArrivalTimestamp", "5 seconds")
        .groupBy(functions.window("approximateArrivalTimestamp", "1 second").alias("w"))
        .count()
    )

    def take(frame, number):
        counts.update((row.w.start, row["count"]) for row in frame.collect())

    query = (
        windows.writeStream.outputMode("update")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .foreachBatch(take)
        .start()
    )
    try:
        assert query.awaitTermination(HUNG_S), query.lastProgress
        return Counted(query, counts)
    finally:
        query.stop()


def test_a_dense_and_a_sparse_shard_in_catch_up_lose_nothing_to_the_watermark(
    spark, few_partitions, tmp_path
):
    with served(backlog()) as url:
        found = counted(spark, tmp_path, url, maxRecordsPerTrigger="300")

    assert len(found.batches) >= 3
    assert found.dropped == 0
    assert (found.read, found.counted) == (ROWS, ROWS)
