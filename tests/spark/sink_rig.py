"""What tests of the sink share: streams that can be read back, and micro-batches from files."""

import os
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from tests.spark.source_rig import REGION
from tests.support.clients import ONCE, client_of

DDL = "partitionKey string, data binary, number long"
Stored = dict[str, list[tuple[str, bytes]]]


class Kinesis:
    """An embedded Kinesis: streams in it, and what they hold."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.client = client_of("kinesis", endpoint, config=ONCE)

    def stream(self, shards: int) -> str:
        name = f"sink-{uuid.uuid4().hex[:12]}"
        self.client.create_stream(StreamName=name, ShardCount=shards)
        self.client.get_waiter("stream_exists").wait(
            StreamName=name, WaiterConfig={"Delay": 0.1, "MaxAttempts": 100}
        )
        return name

    def options(self, **more: str) -> dict[str, str]:
        return {"endpointUrl": self.endpoint, "region": REGION, **more}

    def stored(self, stream: str) -> Stored:
        """What each open shard holds, in its order."""
        listed = self.client.list_shards(StreamName=stream)["Shards"]
        return {each["ShardId"]: list(self._records(stream, each["ShardId"])) for each in listed}

    def _records(self, stream: str, shard_id: str) -> Iterator[tuple[str, bytes]]:
        iterator = self.client.get_shard_iterator(
            StreamName=stream, ShardId=shard_id, ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        while True:
            try:
                page = self.client.get_records(ShardIterator=iterator, Limit=10_000)
            except self.client.exceptions.ProvisionedThroughputExceededException:
                time.sleep(0.2)
                continue
            yield from ((each["PartitionKey"], each["Data"]) for each in page["Records"])
            iterator = page["NextShardIterator"]
            if not page["Records"] and page["MillisBehindLatest"] == 0:
                return


def rows_of(spark: SparkSession, rows: list[tuple[str | None, bytes | None, int]]) -> DataFrame:
    return spark.createDataFrame(rows, DDL)


def numbered(count: int, keys: int) -> list[tuple[str, bytes, int]]:
    return [(f"key-{number % keys}", b"%d" % number, number) for number in range(count)]


def records(stored: Stored) -> list[tuple[str, bytes]]:
    return [each for shard in stored.values() for each in shard]


def numbers_by_key(stored: Stored) -> dict[str, list[int]]:
    by_key: dict[str, list[int]] = defaultdict(list)
    for key, data in records(stored):
        by_key[key].append(int(data))
    return by_key


class Feed:
    """A folder of Parquet files, one a micro-batch."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder
        self._files = 0
        (folder / "in").mkdir()

    def add(self, rows: list[tuple[str, bytes, int]]) -> None:
        keys, data, numbers = zip(*rows, strict=True)
        table = pa.table(
            {
                "partitionKey": pa.array(keys, pa.string()),
                "data": pa.array(data, pa.binary()),
                "number": pa.array(numbers, pa.int64()),
            }
        )
        path = self._folder / "in" / f"{self._files:03}.parquet"
        pq.write_table(table, path)
        # Spark takes files by their age, which it knows to the millisecond.
        os.utime(path, (1_000_000_000 + self._files, 1_000_000_000 + self._files))
        self._files += 1

    def rows(self) -> DataFrame:
        return (
            self._spark.readStream.schema(DDL)
            .option("maxFilesPerTrigger", 1)
            .parquet(str(self._folder / "in"))
        )

    def run(self, writer: Any) -> list[Any]:
        """All that is there; the progress of each batch."""
        query = (
            writer.option("checkpointLocation", str(self._folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        finally:
            query.stop()
        return list(query.recentProgress)
