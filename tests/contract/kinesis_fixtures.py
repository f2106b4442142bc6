"""The same stream operations over three services: the pure model, its HTTP face, an independent
emulator (kinesis-local). The methods follow `kclrun.ports`; refusals are ServiceErrors with codes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from kclrun.errors import ServiceError
from kclrun.local.iterators import ShardQuery
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.stream import PutEntry
from kclrun.model.reading import FetchedPage
from kclrun.model.record import Record, StartPoint
from kclrun.model.shard import ChildShard, HashRange, Shard
from kclrun.model.time import WallTime
from kclrun.ports import ShardFilter, StreamSummary
from kclrun.spark.subscribed import SubscribedReader
from tests.acceptance.account import Account
from tests.patience import HUNG_S
from tests.support.clients import ONCE, client_of
from tests.support.stream_ports import ModelStream, ModelSubscriber

# Without it, the emulator listens on every address of the machine.
LOOPBACK = Path(__file__).with_name("loopback.cjs")
EMULATOR = "kinesis-local@0.6.2"
SETTLE_MAX_S = HUNG_S


class ModelSubject:
    """The model, driven directly, in a time of its own."""

    def __init__(self, name: str) -> None:
        self._kinesis = Kinesis(KinesisSettings(), b"contract suite".ljust(32))
        self._now = 1_700_000_000.0
        self._port = ModelStream(self._kinesis, name, self._tick)
        self.name = name

    @property
    def _stream(self):
        return self._kinesis.stream(self.name, None, self._tick())

    def _tick(self) -> WallTime:
        self._now += 0.001
        return WallTime(self._now)

    def now(self) -> float:
        return self._now

    def pause(self, pause_s: float = 0.1) -> None:
        self._now += pause_s

    def create(self, shards: int) -> None:
        self._kinesis.create_stream(self.name, shards, self._tick())

    def delete(self) -> None:
        self._kinesis.delete_stream(self._stream, self._tick())

    def put(self, key: str, data: bytes = b"", hash_key: int | None = None) -> tuple[str, str]:
        entry = PutEntry(data, key, None if hash_key is None else str(hash_key))
        result = self._kinesis.put(self._stream, entry, self._tick())
        return result.shard_id, result.sequence_number

    def put_many(self, records: list[tuple[str, bytes]]) -> list[tuple[str, str]]:
        entries = [PutEntry(data, key) for key, data in records]
        results = self._kinesis.put_many(self._stream, entries, self._tick())
        return [(result.shard_id, result.sequence_number) for result in results]

    def iterator(self, shard_id, kind, sequence_number=None, timestamp=None) -> str:
        return self._port.iterator(shard_id, StartPoint(kind, sequence_number, timestamp))

    def fetch(self, iterator: str, limit: int = 10_000) -> FetchedPage:
        return self._port.fetch(iterator, limit)

    def list_shards(self, kind=None, timestamp=None, shard_id=None, page_size=1000):
        if shard_id is None and page_size == 1000:
            return self._port.list_shards(kind and ShardFilter(kind, timestamp))
        query = ShardQuery() if kind is None else ShardQuery(kind, timestamp, shard_id)
        page = self._kinesis.list_shards(self._stream, query, page_size, self._tick())
        shards = list(page.shards)
        while page.next_token is not None:
            page = self._kinesis.list_more_shards(page.next_token, page_size, self._tick())
            shards += page.shards
        return tuple(shard.describe() for shard in shards)

    def split(self, shard_id: str, at: int) -> None:
        self._kinesis.split_shard(self._stream, shard_id, at, self._tick())

    def merge(self, shard_id: str, adjacent_id: str) -> None:
        self._stream.merge(shard_id, adjacent_id, self._tick())

    def scale(self, count: int) -> None:
        self._kinesis.update_shard_count(self._stream, count, self._tick())

    def summary(self) -> StreamSummary:
        return self._port.summary()

    def by_arn(self) -> ModelSubject:
        return self


class SubscribedSubject(ModelSubject):
    """The model, read by polling and, from the tip of a shard on, by subscriptions."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._subscribed: SubscribedReader | None = None

    def create(self, shards: int) -> None:
        super().create(shards)
        if self._subscribed is None:
            self._subscribed = SubscribedReader(
                self._port,
                ModelSubscriber(self._kinesis, self.name, self._tick),
                now=self.now,
                service_time=self._tick,
                has_threads=False,
            )

    def iterator(self, shard_id, kind, sequence_number=None, timestamp=None) -> str:
        assert self._subscribed is not None
        return self._subscribed.iterator(shard_id, StartPoint(kind, sequence_number, timestamp))

    def fetch(self, iterator: str, limit: int = 10_000) -> FetchedPage:
        """Subscriptions begin, and bring events, before each read."""
        assert self._subscribed is not None
        for _ in range(2):
            self._subscribed.step()
        return self._subscribed.fetch(iterator, limit)

    @property
    def subscribed(self) -> int:
        assert self._subscribed is not None
        return int(self._subscribed.report()["shardsSubscribed"])


class BotoSubject:
    """Any endpoint that speaks Kinesis, through stock boto3."""

    def __init__(self, name: str, endpoint: str) -> None:
        client = client_of("kinesis", endpoint, config=ONCE)
        self._use(name, client)

    def _use(self, name: str, client: Any) -> None:
        self.name = name
        self._where: dict[str, Any] = {"StreamName": name}
        self._client = client

    def close(self) -> None:
        self._client.close()

    def _ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        try:
            return getattr(self._client, operation)(**arguments)
        except ClientError as error:
            reported = error.response["Error"]
            raise ServiceError(reported.get("Message", ""), code=reported["Code"]) from None

    def now(self) -> float:
        return time.time()

    def pause(self, pause_s: float = 0.1) -> None:
        passed_at = time.time() + pause_s
        while time.time() < passed_at:
            time.sleep(0.02)

    def _settled(self) -> None:
        deadline = time.monotonic() + SETTLE_MAX_S
        while self.summary().status != "ACTIVE":
            assert time.monotonic() < deadline, "the stream never became ACTIVE"
            time.sleep(0.02)

    def create(self, shards: int) -> None:
        self._ask("create_stream", StreamName=self.name, ShardCount=shards)
        self._settled()

    def delete(self) -> None:
        self._ask("delete_stream", **self._where)

    def put(self, key: str, data: bytes = b"", hash_key: int | None = None) -> tuple[str, str]:
        extra = {} if hash_key is None else {"ExplicitHashKey": str(hash_key)}
        answer = self._ask("put_record", Data=data, PartitionKey=key, **extra, **self._where)
        return answer["ShardId"], answer["SequenceNumber"]

    def put_many(self, records: list[tuple[str, bytes]]) -> list[tuple[str, str]]:
        entries = [{"Data": data, "PartitionKey": key} for key, data in records]
        answer = self._ask("put_records", Records=entries, **self._where)
        return [(each["ShardId"], each["SequenceNumber"]) for each in answer["Records"]]

    def iterator(self, shard_id, kind, sequence_number=None, timestamp=None) -> str:
        extra: dict[str, Any] = {}
        if sequence_number is not None:
            extra["StartingSequenceNumber"] = sequence_number
        if timestamp is not None:
            extra["Timestamp"] = timestamp
        answer = self._ask(
            "get_shard_iterator",
            ShardId=shard_id,
            ShardIteratorType=kind.value,
            **extra,
            **self._where,
        )
        return answer["ShardIterator"]

    def fetch(self, iterator: str, limit: int = 10_000) -> FetchedPage:
        answer = self._ask("get_records", ShardIterator=iterator, Limit=limit)
        records = [
            Record(
                each["Data"],
                each["PartitionKey"],
                each["SequenceNumber"],
                each["ApproximateArrivalTimestamp"].timestamp(),
            )
            for each in answer["Records"]
        ]
        children = tuple(
            ChildShard(each["ShardId"], tuple(each["ParentShards"]), _hash_range(each))
            for each in answer.get("ChildShards", [])
        )
        following = answer.get("NextShardIterator")
        return FetchedPage(records, following, answer["MillisBehindLatest"], children)

    def list_shards(self, kind=None, timestamp=None, shard_id=None, page_size=1000):
        given = {"Type": kind, "Timestamp": timestamp, "ShardId": shard_id}
        named = {key: value for key, value in given.items() if value is not None}
        extra = {"ShardFilter": named} if named else {}
        answer = self._ask("list_shards", MaxResults=page_size, **extra, **self._where)
        shards = list(answer["Shards"])
        while "NextToken" in answer:
            token = answer["NextToken"]
            answer = self._ask("list_shards", NextToken=token, MaxResults=page_size)
            shards += answer["Shards"]
        return tuple(_shard(each) for each in shards)

    def split(self, shard_id: str, at: int) -> None:
        self._ask("split_shard", ShardToSplit=shard_id, NewStartingHashKey=str(at), **self._where)
        self._settled()

    def merge(self, shard_id: str, adjacent_id: str) -> None:
        self._ask(
            "merge_shards",
            ShardToMerge=shard_id,
            AdjacentShardToMerge=adjacent_id,
            **self._where,
        )
        self._settled()

    def scale(self, count: int) -> None:
        self._ask(
            "update_shard_count",
            TargetShardCount=count,
            ScalingType="UNIFORM_SCALING",
            **self._where,
        )
        self._settled()

    def summary(self) -> StreamSummary:
        reported = self._ask("describe_stream_summary", **self._where)["StreamDescriptionSummary"]
        return StreamSummary(
            name=reported["StreamName"],
            arn=reported["StreamARN"],
            status=reported["StreamStatus"],
            retention_hours=reported["RetentionPeriodHours"],
            open_shards=reported["OpenShardCount"],
            created_at=WallTime(reported["StreamCreationTimestamp"].timestamp()),
        )

    def by_arn(self) -> BotoSubject:
        """From here on the stream is named by its ARN in every call."""
        self._where = {"StreamARN": self.summary().arn}
        return self


class AccountSubject(BotoSubject):
    """A stream of the account of `bin/aws-acceptance`, tagged as all that it makes."""

    def __init__(self, name: str, account: Account) -> None:
        self._account = account
        self._use(f"{account.stream}-{name}", account.client("kinesis"))

    def create(self, shards: int) -> None:
        self._ask("create_stream", StreamName=self.name, ShardCount=shards, Tags=self._account.tags)
        self._settled()

    def close(self) -> None:
        """Each stream costs a shard's hour: it goes with its test."""
        with contextlib.suppress(ServiceError):
            self._ask("delete_stream", StreamName=self.name)
        super().close()


def _hash_range(reported: dict[str, Any]) -> HashRange:
    bounds = reported["HashKeyRange"]
    return HashRange(int(bounds["StartingHashKey"]), int(bounds["EndingHashKey"]))


def _shard(reported: dict[str, Any]) -> Shard:
    return Shard(
        shard_id=reported["ShardId"],
        hash_range=_hash_range(reported),
        starting_sequence_number=reported["SequenceNumberRange"]["StartingSequenceNumber"],
        ending_sequence_number=reported["SequenceNumberRange"].get("EndingSequenceNumber"),
        parent_shard_id=reported.get("ParentShardId"),
        adjacent_parent_shard_id=reported.get("AdjacentParentShardId"),
    )


def emulator_endpoint() -> Iterator[str]:
    """kinesis-local in a process of its own; skipped without Node, unless this is CI."""
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("Node.js is missing, and CI must run the independent emulator")
        pytest.skip("the independent emulator kinesis-local needs Node.js, which is not here")
    script = _installed() / "node_modules" / "kinesis-local" / "main.js"
    plain, tls = _free_port(), _free_port()
    moments = {
        f"{change}_DURATION": "1ms"
        for change in ("CREATE_STREAM", "DELETE_STREAM", "MERGE_SHARDS", "SPLIT_SHARD")
    }
    environment = {
        "PATH": os.environ["PATH"],
        "KINESIS_MOCK_PLAIN_PORT": str(plain),
        "KINESIS_MOCK_TLS_PORT": str(tls),
        "LOG_LEVEL": "ERROR",
        "SHARD_LIMIT": "1000",
        "UPDATE_SHARD_COUNT_DURATION": "1ms",
        **moments,
    }
    # It reads its certificate from the current folder.
    process = subprocess.Popen(
        [node, "-r", str(LOOPBACK), script.name],
        cwd=script.parent,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    try:
        _until_healthy(plain, process)
        yield f"http://127.0.0.1:{plain}"
    finally:
        # It does not end on SIGTERM while a connection is open.
        process.send_signal(signal.SIGKILL)
        process.wait()


def _installed() -> Path:
    """The folder kinesis-local is installed in; installed once, whoever comes first."""
    cache = Path(os.environ.get("KCLRUN_TEST_CACHE") or Path.home() / ".cache" / "kclrun-tests")
    target = cache / EMULATOR.replace("@", "-")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / "installed.json").exists():
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            subprocess.run(
                ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", EMULATOR],
                cwd=target,
                check=True,
                capture_output=True,
                timeout=HUNG_S,
            )
            (target / "installed.json").write_text(json.dumps({"package": EMULATOR}))
    return target


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _until_healthy(port: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + HUNG_S
    while True:
        assert process.poll() is None, f"the emulator ended with {process.returncode}"
        assert time.monotonic() < deadline, "the emulator never answered"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthcheck", timeout=1):
                return
        except OSError:
            time.sleep(0.05)
