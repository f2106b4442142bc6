"""The services: the embedded AWS, and DynamoDB Local for the lease table; a stream and its rows."""

import json
import os
import socket
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass

import pytest

from kclrun.codec.aggregator import Aggregator
from kclrun.local.server import start_embedded
from tests.interop.rig.artefacts import NotToBeHad, dynamodb_local
from tests.patience import HUNG_S
from tests.support.clients import ONCE, client_of

_USER_RECORDS_AN_AGGREGATE = 50


def until(condition, what, within_s=HUNG_S):
    """Poll until it holds; what it then was, and after how many seconds."""
    began = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() < began + within_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.1)
    return found, time.monotonic() - began


@dataclass
class _Endpoints:
    kinesis_endpoint: str
    dynamodb_endpoint: str


class World:
    """`kclrun local`, and DynamoDB Local in front of its DynamoDB where it can be had."""

    def __init__(self, folder):
        self._subscribed = folder / "subscribed"
        self._subscribed.touch()
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("KCLRUN_LOCAL_SUBSCRIBED", str(self._subscribed))
            self._local = start_embedded()
        self._dynamodb_local = None
        self.dynamodb_is = "moto"
        # As `ledger_rig.application` asks for it.
        self.embedded = _Endpoints(self._local.endpoint, self._local.dynamodb_endpoint)
        try:
            self._start_dynamodb_local(folder)
        except NotToBeHad as reason:
            print(f"the lease table is in moto: {reason}")
        except BaseException:
            self._end_services()
            raise
        self.kinesis = client_of("kinesis", self.embedded.kinesis_endpoint, config=ONCE)
        self.dynamodb = client_of("dynamodb", self.embedded.dynamodb_endpoint, config=ONCE)

    def subscriptions(self):
        """The shards, as the ledger has those of several streams, to which `kclrun` and `java` have
        subscribed, by the record of Kinesis."""
        by_side = {"kclrun": set(), "java": set()}
        for line in self._subscribed.read_text().splitlines():
            taken = json.loads(line)
            side = "kclrun" if taken["caller"] == "kclrun" else "java"
            by_side[side].add(f"{taken['stream']}:{taken['shard']}")
        return by_side

    def _start_dynamodb_local(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with (folder / "dynamodb.log").open("ab") as log:
            self._dynamodb_local = subprocess.Popen(
                dynamodb_local(port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=os.environ | {"AWS_REGION": "us-east-1"},
            )

        def listens():
            assert self._dynamodb_local.poll() is None, (folder / "dynamodb.log").read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        until(listens, "DynamoDB Local listens")
        self.dynamodb_is = "DynamoDB Local"
        self.embedded.dynamodb_endpoint = f"http://127.0.0.1:{port}"

    def close(self):
        self.kinesis.close()
        self.dynamodb.close()
        self._end_services()

    def _end_services(self):
        if self._dynamodb_local is not None:
            self._dynamodb_local.terminate()
            try:
                self._dynamodb_local.wait(20)
            except subprocess.TimeoutExpired:
                self._dynamodb_local.kill()
                self._dynamodb_local.wait()
        self._local.close()


class Stream:
    """One stream of the world, its lease table, and every record that was put. As one of several it
    gets the `table` that they share; Java calls it by `creation`, if it is not the true one."""

    def __init__(self, world, shards, table=None, creation=None):
        self.world = world
        self.name = f"interop-{uuid.uuid4().hex[:10]}"
        self.table = table or f"app-{self.name}"
        # Record to (shard, (sequence, sub)); the shard as the ledger has it.
        self.put = {}
        self._counts = 0
        world.kinesis.create_stream(StreamName=self.name, ShardCount=shards)
        world.kinesis.get_waiter("stream_exists").wait(
            StreamName=self.name, WaiterConfig={"Delay": 1, "MaxAttempts": 20}
        )
        # What stands before a shard in its lease key; as the KCL names it: account:stream:creation.
        self.identifier = self._identifier(creation) if table else ""

    def _identifier(self, creation):
        summary = self._summary()
        account = summary["StreamARN"].split(":")[4]
        creation = creation or int(summary["StreamCreationTimestamp"].timestamp())
        return f"{account}:{self.name}:{creation}"

    def _summary(self):
        answer = self.world.kinesis.describe_stream_summary(StreamName=self.name)
        return answer["StreamDescriptionSummary"]

    def in_ledger(self, shard_id):
        """A shard as the ledger has it: with the stream's name, if there are several."""
        return f"{self.name}:{shard_id}" if self.identifier else shard_id

    def shards(self):
        """All of them as ListShards has them."""
        pages = self.world.kinesis.get_paginator("list_shards").paginate(StreamName=self.name)
        return [shard for page in pages for shard in page["Shards"]]

    def open_shards(self):
        """In the order of their hash ranges."""
        shards = [
            s for s in self.shards() if "EndingSequenceNumber" not in s["SequenceNumberRange"]
        ]
        return sorted(shards, key=lambda s: int(s["HashKeyRange"]["StartingHashKey"]))

    def parents(self):
        names = ("ParentShardId", "AdjacentParentShardId")
        return {
            self.in_ledger(shard["ShardId"]): [
                self.in_ledger(shard[name]) for name in names if name in shard
            ]
            for shard in self.shards()
        }

    # Putting.

    def put_aggregates(self, a_shard):
        """So many KPL aggregates to each open shard."""
        for shard in self.open_shards():
            for _ in range(a_shard):
                self.put_aggregate(shard["HashKeyRange"]["StartingHashKey"])

    def put_aggregate(self, hash_key):
        aggregator = Aggregator()
        records = [self._next() for _ in range(_USER_RECORDS_AN_AGGREGATE)]
        for record in records:
            assert aggregator.add("key", record.encode(), hash_key)
        made = aggregator.finish()
        answer = self.world.kinesis.put_record(
            StreamName=self.name,
            Data=made.data,
            PartitionKey=made.partition_key,
            ExplicitHashKey=made.explicit_hash_key,
        )
        for sub, record in enumerate(records):
            place = (int(answer["SequenceNumber"]), sub)
            self.put[record] = (self.in_ledger(answer["ShardId"]), place)

    def put_singles(self, count):
        """Spread evenly over the hash keys, wherever the shards' bounds are."""
        records = [self._next() for _ in range(count)]
        answer = self.world.kinesis.put_records(
            StreamName=self.name,
            Records=[
                {
                    "Data": record,
                    "PartitionKey": "key",
                    "ExplicitHashKey": str(place * 2**128 // count),
                }
                for place, record in enumerate(records)
            ],
        )
        assert answer["FailedRecordCount"] == 0, "the rig's puts are never refused"
        for record, result in zip(records, answer["Records"], strict=True):
            place = (int(result["SequenceNumber"]), 0)
            self.put[record] = (self.in_ledger(result["ShardId"]), place)

    def _next(self):
        self._counts += 1
        return f"{self.name}:{self._counts}"

    # Resharding.

    def _is_active(self):
        summary = self.world.kinesis.describe_stream_summary(StreamName=self.name)
        return summary["StreamDescriptionSummary"]["StreamStatus"] == "ACTIVE"

    def split(self, index):
        until(self._is_active, "the reshard before it is done")
        shard = self.open_shards()[index]
        first, last = (
            int(shard["HashKeyRange"][f"{end}HashKey"]) for end in ("Starting", "Ending")
        )
        self.world.kinesis.split_shard(
            StreamName=self.name,
            ShardToSplit=shard["ShardId"],
            NewStartingHashKey=str((first + last) // 2 + 1),
        )

    def merge(self, index):
        until(self._is_active, "the reshard before it is done")
        shards = self.open_shards()
        self.world.kinesis.merge_shards(
            StreamName=self.name,
            ShardToMerge=shards[index]["ShardId"],
            AdjacentShardToMerge=shards[index + 1]["ShardId"],
        )

    def double(self):
        """Each open shard in two."""
        for shard in self.open_shards():
            self.split([s["ShardId"] for s in self.open_shards()].index(shard["ShardId"]))

    # The lease table.

    def consumer_count(self):
        """The consumers that are registered for enhanced fan-out."""
        return self._summary()["ConsumerCount"]

    def client_version(self):
        """The mode of KCL 3: 3.5 keeps it in the lease table, earlier ones beside it. Or ''."""
        for table in (self.table, f"{self.table}-CoordinatorState"):
            if row := self.items(table, key="key").get("Migration3.0"):
                return row.get("cv", "")
        return ""

    def items(self, table=None, key="leaseKey"):
        """Each item by its key, as plain values; none before the table is there."""
        pages = self.world.dynamodb.get_paginator("scan").paginate(
            TableName=table or self.table, ConsistentRead=True
        )
        try:
            found = [item for page in pages for item in page["Items"]]
        except self.world.dynamodb.exceptions.ResourceNotFoundException:
            return {}
        return {
            (item.get(key) or item["leaseKey"])["S"]: {
                name: next(iter(value.values())) for name, value in item.items()
            }
            for item in found
        }

    def leases_of_no(self, streams):
        """The lease keys of the table that none of these streams has."""
        own = tuple(f"{stream.identifier}:" for stream in streams)
        return [key for key in self.items() if "shardId-" in key and not key.startswith(own)]

    def rows(self):
        """The stream's leases among them, by shard."""
        before = f"{self.identifier}:" if self.identifier else ""
        return {
            key.removeprefix(before): row
            for key, row in self.items().items()
            if key.startswith(f"{before}shardId-")
        }

    def owners(self):
        """The owner (`kclrun` for all of one machine's, else the worker's name) of each open
        shard's lease; None where it has none."""
        rows = self.rows()
        found = {shard["ShardId"]: None for shard in self.open_shards()}
        for shard in found:
            found[shard] = rows.get(shard, {}).get("leaseOwner")
        return found


class Producer:
    """Puts a little of everything into each stream, again and again, until it is stopped.
    `paused()` around a reshard, so that no put falls between a listing and its use."""

    def __init__(self, streams, every_s=0.5):
        self._streams = streams
        self._every_s = every_s
        self._is_stopping = threading.Event()
        self._between = threading.Lock()
        self._error = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            rounds = 0
            # A pace, not a wait for anything.
            while not self._is_stopping.wait(self._every_s):
                with self._between:
                    rounds += 1
                    for stream in self._streams:
                        stream.put_singles(40)
                        if rounds % 5 == 0:
                            stream.put_aggregates(1)
        except Exception as error:
            self._error = error

    def paused(self):
        return self._between

    def stop(self):
        self._is_stopping.set()
        self._thread.join(HUNG_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
