"""A task that Spark starts a second time, while the first still runs, gives the same rows."""

import pickle
import threading

import boto3
import pyarrow as pa
import pytest

from kclrun.local.server import start_embedded
from kclrun.spark.options import SourceSettings, Start, StartKind, StreamAddress
from kclrun.spark.source import StreamReader
from tests.patience import HUNG_S

SHARDS, RECORDS = 4, 2_000


@pytest.fixture
def reached(monkeypatch):
    """A stream with records in all of its shards."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with start_embedded() as embedded:
        reached = StreamAddress(stream="twice", region="us-east-1", endpoint_url=embedded.endpoint)
        client = boto3.client("kinesis", endpoint_url=embedded.endpoint, region_name="us-east-1")
        client.create_stream(StreamName="twice", ShardCount=SHARDS)
        for first in range(0, RECORDS, 500):
            put(client, range(first, first + 500))
        yield reached
        client.close()


def put(client, numbers):
    entries = [{"Data": b"%d" % number, "PartitionKey": f"key-{number}"} for number in numbers]
    assert client.put_records(StreamName="twice", Records=entries)["FailedRecordCount"] == 0


def rows_by_shard(batches):
    """A task's rows; shards come in any order, the rows of each in its own."""
    table = pa.Table.from_batches(batches)
    by_shard = {shard_id: [] for shard_id in table["shardId"].unique().to_pylist()}
    for row in table.to_pylist():
        by_shard[row["shardId"]].append(row)
    return by_shard


@pytest.mark.seconds
@pytest.mark.parametrize("inline_bytes_max", [0, 512 * 1024])
def test_two_attempts_at_the_same_time_give_the_same_rows(reached, inline_bytes_max):
    start_at = Start(StartKind.EARLIEST)
    settings = SourceSettings(
        address=reached, start=start_at, inline_bytes_max=inline_bytes_max, shards_per_task=2
    )
    driver = StreamReader(settings)
    start = driver.initialOffset()
    end = start
    while any(not position.isdigit() for position in end["shards"].values()):
        end = driver.latestOffset(end)
    tasks = [pickle.dumps((driver, task)) for task in driver.partitions(start, end)]
    driver.stop()
    together = threading.Barrier(2 * len(tasks))
    attempts = {}

    def attempt(number, copy):
        reader, partition = pickle.loads(tasks[number])
        together.wait(HUNG_S)
        attempts[number, copy] = rows_by_shard(list(reader.read(partition)))

    threads = [
        threading.Thread(target=attempt, args=(number, copy))
        for number in range(len(tasks))
        for copy in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HUNG_S)

    assert len(tasks) == SHARDS // 2
    for number in range(len(tasks)):
        assert attempts[number, 0] == attempts[number, 1]
    first = [row for (_, copy), found in attempts.items() if copy == 0 for row in found.items()]
    assert sum(len(rows) for _, rows in first) == RECORDS
    assert {row["data"] for _, rows in first for row in rows} == {
        b"%d" % number for number in range(RECORDS)
    }
