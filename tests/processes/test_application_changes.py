"""The stream of a DynamoDB table under a real fleet: its shards roll every few seconds, processes
are killed, leases move, a machine drains. Each change comes in order, and the rows make the table.
"""

import contextlib
import json
import os
import random
import signal
import threading
import uuid
from collections import Counter, defaultdict
from functools import partial
from unittest import mock

import pytest

from kclrun.local import server
from kclrun.local.changes.model import ChangeSettings
from tests.processes.ledger_rig.application import Application
from tests.processes.ledger_rig.aws import MOTO, Aws
from tests.support.clients import ONCE, client_of

pytestmark = pytest.mark.slow

# Shards roll as often as they can beside all else on two cores: in the service every four hours.
SETTINGS = ChangeSettings(lives_s=6.0, partitions=2, partitions_max=3, listed_after_s=0.5)
FAILOVER = "3s"


def version_of(event):
    """An item and its version `n`, as `changes_processor` has it."""
    change = event["dynamodb"]
    image = change.get("NewImage")
    n = int(image["n"]["N"]) if image else int(change["OldImage"]["n"]["N"]) + 1
    return change["Keys"]["id"]["S"], n


class ChangesAws(Aws):
    """The embedded AWS with moto's tables, whose streams roll."""

    def __init__(self):
        started = server.start_embedded
        with mock.patch.object(server, "start_embedded", partial(started, changes=SETTINGS)):
            super().__init__(dynamodb=MOTO)
        self.streams = client_of("dynamodbstreams", self.embedded.dynamodb_endpoint, config=ONCE)

    def close(self):
        self.streams.close()
        super().close()


class Table:
    """A table that a thread writes: puts, updates and removals of forty items. `put` is what its
    stream has, shard by shard, as the ledger's judge takes it."""

    def __init__(self, aws, seed):
        self.name = f"orders-{uuid.uuid4().hex[:8]}"
        self._aws = aws
        made = aws.dynamodb.create_table(
            TableName=self.name,
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
            StreamSpecification={"StreamEnabled": True, "StreamViewType": "NEW_AND_OLD_IMAGES"},
        )
        self.arn = made["TableDescription"]["LatestStreamArn"]
        self.written = 0
        self.put = defaultdict(list)
        self._random = random.Random(seed)
        self._versions = Counter()
        self._there = set()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def start(self):
        self._thread.start()

    def stop(self):
        self._is_stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _write(self):
        while not self._is_stopping.wait(0.02):
            key = f"key-{self._random.randrange(40)}"
            where = {"TableName": self.name, "Key": {"id": {"S": key}}}
            n = {"N": str(self._versions[key])}
            if key not in self._there:
                item = {"id": {"S": key}, "n": n}
                self._aws.dynamodb.put_item(TableName=self.name, Item=item)
                self._there.add(key)
            elif self._random.random() < 0.1:
                self._aws.dynamodb.delete_item(**where)
                self._there.discard(key)
            else:
                self._aws.dynamodb.update_item(
                    **where,
                    UpdateExpression="SET n = :n",
                    ExpressionAttributeValues={":n": n},
                )
            self._versions[key] += 1
            self.written += 1

    def shards(self):
        shards, page = [], {}
        while True:
            page = self._aws.streams.describe_stream(StreamArn=self.arn, **page)
            page = page["StreamDescription"]
            shards += page["Shards"]
            if "LastEvaluatedShardId" not in page:
                return shards
            page = {"ExclusiveStartShardId": page["LastEvaluatedShardId"]}

    def read(self):
        """Take in all that the stream has, by boto3. Returns itself."""
        self.put.clear()
        for shard in self.shards():
            self._read_shard(shard["ShardId"])
        return self

    def _read_shard(self, shard_id):
        token = self._aws.streams.get_shard_iterator(
            StreamArn=self.arn, ShardId=shard_id, ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        while token is not None:
            page = self._aws.streams.get_records(ShardIterator=token)
            for event in page["Records"]:
                key, n = version_of(event)
                self.put[shard_id].append((event["dynamodb"]["SequenceNumber"], key, n))
            token = page.get("NextShardIterator") if page["Records"] else None

    def items(self):
        pages = self._aws.dynamodb.get_paginator("scan").paginate(TableName=self.name)
        return {item["id"]["S"]: item for page in pages for item in page["Items"]}


@pytest.fixture(scope="module")
def aws():
    aws = ChangesAws()
    yield aws
    aws.close()


@pytest.fixture
def table(aws):
    table = Table(aws, seed=16)
    yield table
    table.stop()


@pytest.fixture
def application(tmp_path, aws, table):
    """Makes an application on a machine; all emit into one folder."""
    made = []

    def make(machine, **settings):
        settings = {
            "application": f"app-{table.name}",
            "processor": "changes_processor:Changes",
            "decode": "json",
            "output": {"path": str(tmp_path / "out" / machine)},
            "leases": {"failover": FAILOVER},
        } | settings
        app = Application(tmp_path, aws, table.name, machine=machine, stream=table.arn, **settings)
        made.append(app)
        return app

    yield make
    for one in made:
        one.close()


def folded(folder):
    """The table as the emitted rows make it: of each key the newest version."""
    newest = {}
    for path in folder.rglob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["n"] >= newest.get(row["key"], {"n": -1})["n"]:
                newest[row["key"]] = row
    return {key: row["image"] for key, row in newest.items() if row["image"] is not None}


def owners(aws, table):
    rows = aws.rows(f"app-{table.name}").values()
    return {row.get("leaseOwner") for row in rows if row["checkpoint"] != "SHARD_END"}


def test_rolling_shards_a_kill_a_move_and_a_drain_lose_nothing_and_keep_the_order(
    aws, table, application, tmp_path
):
    table.start()
    first = application("a").start()
    first.until_delivered(50)
    second = application("b").start()
    first.until(lambda: len(owners(aws, table)) == 2)  # a planned move

    victims = []
    first.until(lambda: victims or kill_one(first.lease_pids(), victims))
    rolled = len(table.shards())
    first.until(lambda: len(table.shards()) >= rolled + 6)
    assert second.stop() == 0
    at_drain = table.written
    first.until(lambda: table.written > at_drain + 100)
    table.stop()

    first.until(lambda: len(first.ledger.delivered) >= table.written)
    assert first.stop() == 0
    verdict = first.judged(table.read(), killed=set(victims), cap=200)
    assert verdict.records == table.written
    assert len(table.put) >= 8
    print(f"{len(table.shards())} shards, {table.written} changes; {verdict}")
    assert folded(tmp_path / "out") == table.items()
    begun = {mark["shard"] for mark in first.ledger.marks if mark["what"] == "began"}
    assert begun >= table.put.keys()


def test_a_machine_that_is_lost_while_its_shards_roll_loses_nothing_and_keeps_the_order(
    aws, table, application, tmp_path
):
    table.start()
    first = application("a").start()
    first.until_delivered(50)
    lost = application("b").start()
    dead = set()

    def is_read_by_both():
        dead.update(lost.lease_pids())
        return sum(batch.pid in dead for batch in first.ledger.batches) > 5

    first.until(is_read_by_both)

    # Before the failover is over, shards of the lost machine close, and have children.
    rolled = len(table.shards())
    dead.update(lost.lease_pids())
    lost.lose_power()
    first.until(lambda: len(table.shards()) >= rolled + 4)
    table.stop()

    first.until(lambda: len(first.ledger.delivered) >= table.written)
    assert first.stop() == 0
    verdict = first.judged(table.read(), killed=dead, cap=200)
    assert verdict.records == table.written
    assert folded(tmp_path / "out") == table.items()


def kill_one(pids, victims):
    """Kill one of these lease processes, unless its shard has just ended and it with it."""
    for pid in pids[:1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            victims.append(pid)
    return victims


def test_the_verbs_look_at_a_fleet_that_reads_the_changes_of_a_table(table, application):
    app = application("a")
    table.start()
    app.start()
    app.until(lambda: app.ledger.delivered and len(table.shards()) > 4)
    shard = app.ledger.marks[0]["shard"]
    config = ("--config", str(app.config))

    def ask(*arguments, code=0):
        done = app.cli(*arguments, *config)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    assert "DynamoDB Streams at http" in ask("check")
    behind = json.loads(ask("lag", "--json"))
    assert behind["unknown"] == 0
    assert behind["behind_s_max"] < 60
    lines = ask("tail", "--from", "TRIM_HORIZON", "--json", "--max", "5").splitlines()
    events = [json.loads(json.loads(line)["data"]) for line in lines]
    assert {event["eventSource"] for event in events} == {"aws:dynamodb"}
    assert shard in ask("leases")
    assert shard in ask("why", shard)
    assert "hash" not in app.cli("doctor", *config).stdout
    table.stop()
    app.until(lambda: len(app.ledger.delivered) >= table.written)
    assert app.stop() == 0

    plan = ask("reset", "--to", "TRIM_HORIZON", "--yes")
    assert table.name in plan
    before = len(app.ledger.batches)
    app.start()
    again = set()

    def is_read_again():
        for batch in app.ledger.batches[before:]:
            again.update(number for number, _, _ in batch.records)
        return len(again) >= table.written

    app.until(is_read_again)
    assert app.stop() == 0
