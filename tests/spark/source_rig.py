"""What tests of the source drive: a stream, and queries over it that keep what they read."""

import time
import uuid

from aws_kinesis_agg.aggregator import RecordAggregator

from tests.patience import HUNG_S
from tests.support.clients import client_of

REGION = "us-east-1"
# They are searched for in plans and checkpoints. Loopback lets every key in.
ACCESS_KEY = "AKIAGLUETESTSEARCH"
SECRET_KEY = "glue-secret-that-must-not-be-seen"


def credentials_in(folder):
    """Variables for credentials in a file. With the keys in variables, Spark asks for the address
    of the machine's name, which a slim machine does not have."""
    file = folder / "credentials"
    file.write_text(
        f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    )
    file.chmod(0o600)
    return {"AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_EC2_METADATA_DISABLED": "true"}


class Stream:
    """One stream: what was put into it, in the order of each key; splits and merges."""

    def __init__(self, endpoint, shards):
        self.endpoint = endpoint
        self.name = f"spark-{uuid.uuid4().hex[:12]}"
        self.kinesis = client_of("kinesis", endpoint)
        self.put_records = []  # (key, data), user records, in the order of their puts
        self.create(shards)

    @property
    def options(self):
        return {"streamName": self.name, "endpointUrl": self.endpoint, "region": REGION}

    def create(self, shards):
        self.kinesis.create_stream(StreamName=self.name, ShardCount=shards)
        until(self._is_active, "the stream is active")

    def recreate(self, shards):
        self.kinesis.delete_stream(StreamName=self.name)
        until(lambda: self.name not in self._names(), "the stream is gone")
        self.create(shards)

    def put(self, count, keys=7, size=20):
        """Put records with numbered data over some keys."""
        first = len(self.put_records)
        new = [
            (f"key-{number % keys}", f"{number:08d}".encode().ljust(size, b"."))
            for number in range(first, first + count)
        ]
        for start in range(0, count, 500):
            said = self.kinesis.put_records(
                StreamName=self.name,
                Records=[
                    {"PartitionKey": key, "Data": data} for key, data in new[start : start + 500]
                ],
            )
            assert said["FailedRecordCount"] == 0
        self.put_records += new

    def put_aggregate(self, count):
        """Put one Kinesis record that holds several user records."""
        first = len(self.put_records)
        aggregator = RecordAggregator()
        for number in range(first, first + count):
            data = f"{number:08d}".encode()
            assert aggregator.add_user_record("key-a", data) is None
            self.put_records.append(("key-a", data))
        key, hash_key, data = aggregator.clear_and_get().get_contents()
        assert hash_key is None
        self.kinesis.put_record(StreamName=self.name, PartitionKey=key, Data=data)

    def shards(self):
        return self.kinesis.list_shards(StreamName=self.name)["Shards"]

    def open_shards(self):
        """In the order of their hash keys: neighbours are adjacent."""
        found = [
            (int(shard["HashKeyRange"]["StartingHashKey"]), shard["ShardId"])
            for shard in self.shards()
            if "EndingSequenceNumber" not in shard["SequenceNumberRange"]
        ]
        return [shard_id for _, shard_id in sorted(found)]

    def parents(self):
        """Each shard's parents."""
        return {
            shard["ShardId"]: [
                shard[name] for name in ("ParentShardId", "AdjacentParentShardId") if name in shard
            ]
            for shard in self.shards()
        }

    def split(self, shard_id):
        by_id = {shard["ShardId"]: shard["HashKeyRange"] for shard in self.shards()}
        low, high = (int(by_id[shard_id][end]) for end in ("StartingHashKey", "EndingHashKey"))
        self.kinesis.split_shard(
            StreamName=self.name,
            ShardToSplit=shard_id,
            NewStartingHashKey=str((low + high) // 2),
        )
        until(self._is_active, "the split is done")

    def merge(self, shard_id, adjacent):
        self.kinesis.merge_shards(
            StreamName=self.name, ShardToMerge=shard_id, AdjacentShardToMerge=adjacent
        )
        until(self._is_active, "the merge is done")

    def _is_active(self):
        said = self.kinesis.describe_stream_summary(StreamName=self.name)
        return said["StreamDescriptionSummary"]["StreamStatus"] == "ACTIVE"

    def _names(self):
        return self.kinesis.list_streams()["StreamNames"]


class Collected:
    """Runs queries over one checkpoint; every batch's rows by its number, as often as it ran."""

    def __init__(self, spark, stream, folder, **options):
        self.spark, self.stream = spark, stream
        self.options = {"startingOffsets": "earliest", "pollInterval": "200ms", **options}
        self.checkpoint = str(folder / "checkpoint")
        self.batches = []  # (number, [Row, …])
        self.before_commit = lambda number: None

    def frame(self):
        options = {**self.stream.options, **self.options}
        return self.spark.readStream.format("kclrun").options(**options).load()

    def start(self, **trigger):
        writer = self.frame().writeStream.option("checkpointLocation", self.checkpoint)
        if trigger:
            writer = writer.trigger(**trigger)
        return writer.foreachBatch(self._take).start()

    def run_until(self, count):
        """Run a query until so many rows were collected in all, then stop it."""
        query = self.start()
        try:
            until(lambda: len(self.rows) >= count, f"{count} rows", query)
            until(lambda: (query.lastProgress or {}).get("batchId") is not None, "progress", query)
        finally:
            query.stop()
        return query

    @property
    def rows(self):
        """The rows of all batches; of one that ran twice, the last time counts."""
        return [row for _, rows in sorted(dict(self.batches).items()) for row in rows]

    def _take(self, frame, number):
        self.batches.append((number, frame.collect()))
        self.before_commit(number)


def until(condition, what, query=None):
    """Wait for a condition, with a deadline; a query that failed meanwhile raises here."""
    deadline = time.monotonic() + HUNG_S
    while not condition():
        if query is not None and query.exception() is not None:
            raise query.exception()
        assert time.monotonic() < deadline, f"not within {HUNG_S:.0f} s: {what}"
        time.sleep(0.05)


def in_order_of_each_key(pairs):
    """Data by key, in order."""
    by_key = {}
    for key, data in pairs:
        by_key.setdefault(key, []).append(data)
    return by_key


def as_put(rows):
    """Rows as the producer has them, in the order of each key."""
    return in_order_of_each_key((row.partitionKey, bytes(row.data)) for row in rows)
