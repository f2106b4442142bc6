"""Outputs to a stream and to a queue, whole: nothing is lost while processes are killed."""

import json
import os
import random
import signal
import uuid

import pytest

from tests.processes.ledger_rig.aws import MOTO, Aws
from tests.seeds import seed_of
from tests.support.clients import ONCE, client_of

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

# moto's SQS looks at every message of a queue for each request.
RECORDS = 300
KEYS = 20


@pytest.fixture(scope="module")
def embedded_aws():
    """One with SQS."""
    aws = Aws(dynamodb=MOTO)
    yield aws
    aws.close()


def rows_of(aws, stream):
    rows = []
    for shard in aws.kinesis.list_shards(StreamName=stream)["Shards"]:
        named = {"StreamName": stream, "ShardId": shard["ShardId"]}
        found = aws.kinesis.get_shard_iterator(**named, ShardIteratorType="TRIM_HORIZON")
        iterator = found["ShardIterator"]
        while True:
            page = aws.kinesis.get_records(ShardIterator=iterator)
            rows += [json.loads(record["Data"]) for record in page["Records"]]
            iterator = page["NextShardIterator"]
            if page["MillisBehindLatest"] == 0:
                break
    return rows


class Queue:
    """A queue, and all rows that were ever in it."""

    def __init__(self, aws):
        url = aws.embedded.dynamodb_endpoint
        self._sqs = client_of("sqs", url, config=ONCE)
        self.name = f"rows-{uuid.uuid4().hex[:8]}"
        self._url = self._sqs.create_queue(QueueName=self.name)["QueueUrl"]
        self._rows = []

    def rows(self):
        while found := self._sqs.receive_message(QueueUrl=self._url, MaxNumberOfMessages=10).get(
            "Messages"
        ):
            for each in found:
                self._rows.append(json.loads(each["Body"]))
                self._sqs.delete_message(QueueUrl=self._url, ReceiptHandle=each["ReceiptHandle"])
        return self._rows


def first_seen(rows):
    """For each key its numbers in the order of their first appearance."""
    seen = {}
    for row in rows:
        seen.setdefault(row["key"], {})[row["n"]] = None
    return {key: list(numbers) for key, numbers in seen.items()}


def by_number(seen):
    return {key: sorted(numbers) for key, numbers in seen.items()}


@pytest.mark.slow
def test_every_row_arrives_in_the_order_of_its_key_while_processes_are_killed(
    embedded_aws, application, producer
):
    rng = random.Random(seed_of(106_100))
    stream, target, queue = embedded_aws.stream(2), embedded_aws.stream(2), Queue(embedded_aws)
    app = application(
        stream,
        options={"emits": True, "emits_to": ["late"]},
        output={"kinesis": target, "key": ["key"]},
        outputs={"late": {"sqs": queue.name}},
        aws={"endpoints": {"sqs": embedded_aws.embedded.dynamodb_endpoint}},
    )
    source = producer(stream, RECORDS, seed=6, rate=100, keys=KEYS)
    app.start()
    app.until(lambda: app.of("lease_claimed"))
    source.start()
    killed = []

    def is_read():
        seen = len(app.ledger.delivered)
        if len(killed) < 3 and seen > 60 * (len(killed) + 1) and app.lease_pids():
            killed.append(rng.choice(app.lease_pids()))
            os.kill(killed[-1], signal.SIGKILL)
        return source.is_done and seen == source.total_put

    app.until(is_read, 90)
    put = first_seen({"key": key, "n": n} for rows in source.put.values() for _, key, n in rows)
    app.until(lambda: first_seen(rows_of(embedded_aws, target)) == put)
    app.until(lambda: by_number(first_seen(queue.rows())) == put)
    assert app.stop() == 0
    assert len(killed) == 3
