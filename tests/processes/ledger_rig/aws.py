"""The embedded AWS as these tests see it: resharded by boto3, made to stand still by SIGSTOP."""

import contextlib
import os
import signal
import uuid
from unittest import mock

from kclrun.local import server
from tests.support.clients import ONCE, client_of

QUICK = "tests.processes.ledger_rig.quick_dynamodb"
MOTO = server.MOTO
REGION = "us-east-1"
# Loopback lets every key in. No retries: a put that is sent twice would make the producer lie.


class Aws:
    """One embedded AWS, with new names for each test."""

    def __init__(self, *, dynamodb=QUICK):
        """`dynamodb` is the module of its second process: `QUICK`, or `MOTO` with all services."""
        with mock.patch.object(server, "MOTO", dynamodb):
            self.embedded = server.start_embedded()
        self.kinesis = client_of("kinesis", self.embedded.kinesis_endpoint, config=ONCE)
        self.dynamodb = client_of("dynamodb", self.embedded.dynamodb_endpoint, config=ONCE)

    def stream(self, shards):
        name = f"ledger-{uuid.uuid4().hex[:12]}"
        self.kinesis.create_stream(StreamName=name, ShardCount=shards)
        self.kinesis.get_waiter("stream_exists").wait(
            StreamName=name, WaiterConfig={"Delay": 1, "MaxAttempts": 20}
        )
        return name

    def rows(self, table):
        """The lease table as plain values, by lease key."""
        pages = self.dynamodb.get_paginator("scan").paginate(TableName=table, ConsistentRead=True)
        items = [item for page in pages for item in page["Items"]]
        return {
            item["leaseKey"]["S"]: {
                name: next(iter(value.values())) for name, value in item.items()
            }
            for item in items
        }

    @contextlib.contextmanager
    def outage(self, service):
        """The process of `kinesis` or `dynamodb` stands still: sockets accept, nobody answers."""
        pid = self.embedded.pids[("kinesis", "dynamodb").index(service)]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def close(self):
        self.kinesis.close()
        self.dynamodb.close()
        self.embedded.close()
