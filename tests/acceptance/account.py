"""The account that the checklist runs in: what it makes has its tag, and only that is removed.

`given()` is the same account inside pytest, for the contract suites.
"""

import json
import os
import time
from dataclasses import asdict, dataclass

import boto3
from botocore.config import Config

from tests.patience import HUNG_S

TAG = "kclrun-acceptance"
VARIABLE = "KCLRUN_ACCEPTANCE"
_POLL_S = 0.2


@dataclass(frozen=True)
class Account:
    """`stream` and `table` are the beginnings of all names; `run` is the value of the tag."""

    region: str
    endpoint: str | None
    stream: str
    table: str
    run: str

    @property
    def tags(self):
        return {TAG: self.run}

    def client(self, service):
        keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x"} if self.endpoint else {}
        return boto3.client(
            service,
            region_name=self.region,
            endpoint_url=self.endpoint,
            config=Config(retries={"mode": "standard", "total_max_attempts": 6}),
            **keys,
        )

    def environment(self):
        """For the contract suites, in a process of their own."""
        return os.environ | {VARIABLE: json.dumps(asdict(self))}

    def taken_names(self):
        """What is there under our names already, whoever made it."""
        return [f"stream {name}" for name in self._streams()] + [
            f"table {name}" for name in self._tables()
        ]

    def owned(self):
        """What the run of this tag has made and is still there: (kind, name)."""
        kinesis, dynamodb = self.client("kinesis"), self.client("dynamodb")
        for name in self._streams():
            if _is_there(lambda name=name: self._has_tag_of_stream(kinesis, name)):
                yield "stream", name
        for name in self._tables():
            if _is_there(lambda name=name: self._has_tag_of_table(dynamodb, name)):
                yield "table", name

    def remove(self):
        """Delete all of it and wait until it is gone. Returns: what was deleted."""
        kinesis, dynamodb = self.client("kinesis"), self.client("dynamodb")
        found = list(self.owned())
        for kind, name in found:
            if kind == "stream":
                kinesis.delete_stream(StreamName=name, EnforceConsumerDeletion=True)
            else:
                dynamodb.delete_table(TableName=name)
        deadline = time.monotonic() + HUNG_S
        while left := list(self.owned()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"still there: {left}; run it again with --remove {self.run}")
            time.sleep(_POLL_S)
        return found

    def create_stream(self, name, shards):
        kinesis = self.client("kinesis")
        kinesis.create_stream(StreamName=name, ShardCount=shards, Tags=self.tags)
        self.until_active(kinesis, name)

    def until_active(self, kinesis, name):
        deadline = time.monotonic() + HUNG_S
        while self.summary(kinesis, name)["StreamStatus"] != "ACTIVE":
            assert time.monotonic() < deadline, f"stream {name} never became ACTIVE"
            time.sleep(_POLL_S)

    @staticmethod
    def summary(kinesis, name):
        reported = kinesis.describe_stream_summary(StreamName=name)
        return reported["StreamDescriptionSummary"]

    def _streams(self):
        pages = self.client("kinesis").get_paginator("list_streams").paginate()
        return [n for page in pages for n in page["StreamNames"] if _is_of(n, self.stream)]

    def _tables(self):
        pages = self.client("dynamodb").get_paginator("list_tables").paginate()
        return [n for page in pages for n in page["TableNames"] if _is_of(n, self.table)]

    def _has_tag_of_stream(self, kinesis, name):
        tags = kinesis.list_tags_for_stream(StreamName=name)["Tags"]
        return {"Key": TAG, "Value": self.run} in tags

    def _has_tag_of_table(self, dynamodb, name):
        arn = dynamodb.describe_table(TableName=name)["Table"]["TableArn"]
        tags = dynamodb.list_tags_of_resource(ResourceArn=arn)["Tags"]
        return {"Key": TAG, "Value": self.run} in tags


def _is_of(name, prefix):
    """The name itself, or it with a suffix of ours."""
    return name == prefix or name.startswith(f"{prefix}-")


def _is_there(ask):
    """What `ask` says; no, if it has gone meanwhile."""
    try:
        return ask()
    except Exception as error:  # a client's exceptions are made at run time
        if type(error).__name__ == "ResourceNotFoundException":
            return False
        raise


def given():
    """The account of the run that this process belongs to; None in an ordinary run of the tests."""
    text = os.environ.get(VARIABLE)
    return None if text is None else Account(**json.loads(text))
