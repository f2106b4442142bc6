"""Row `local`: is the embedded Kinesis fast enough that tests and demos measure themselves?"""

import base64
import random
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import urllib3

from bench.figures import Figure, Target, figure
from kclrun.local.server import start_embedded

_STREAM: Final = "bench"
_RECORD_BYTES: Final = 1_000
# PutRecords takes 500 records at most.
_BATCH: Final = 500
_BATCHES: Final = 60
_encode: Final = msgspec.json.Encoder().encode


class _Page(msgspec.Struct, rename="pascal"):
    """What reading on needs; the records are counted by a marker and not decoded."""

    next_shard_iterator: str
    millis_behind_latest: int


class _Put(msgspec.Struct, rename="pascal"):
    failed_record_count: int


def local(rounds: int) -> list[Figure]:
    """PutRecords and GetRecords of 1 kB records, one shard, one connection, no limits set.

    By the wall clock, since the server is what is measured: a raw urllib3 client sends bodies
    made beforehand, unsigned, one request at a time, and only looks for the next iterator in the
    answers. GetRecords counts payload bytes, a third less than what travels in base64. Each round
    has a fresh stream of 30,000 records in the same server: written, then read from its horizon.
    """
    put_rates: list[float] = []
    get_rates: list[float] = []
    with start_embedded() as embedded:
        client = _Client(embedded.kinesis_endpoint)
        for number in range(rounds):
            stream = f"{_STREAM}-{number}"
            client.call("CreateStream", {"StreamName": stream, "ShardCount": 1})
            put_rates.append(_put_rate(client, stream))
            get_rates.append(_get_rate(client, stream))
            client.call("DeleteStream", {"StreamName": stream})
        client.close()
    return [
        figure(
            *("local", "GetRecords, 1 kB records", "MB/s"),
            [rate * _RECORD_BYTES / 1e6 for rate in get_rates],
            target=Target(at_least=40.0),
        ),
        figure(
            *("local", "PutRecords, 500 x 1 kB", "k records/s"),
            [rate / 1000 for rate in put_rates],
            target=Target(at_least=20.0),
        ),
    ]


class _Client:
    """One kept connection."""

    def __init__(self, url: str) -> None:
        self._pool = urllib3.connection_from_url(url)

    def call(self, operation: str, request: dict[str, Any]) -> bytes:
        return self.send(operation, _encode(request))

    def send(self, operation: str, body: bytes) -> bytes:
        headers = {
            "Content-Type": "application/x-amz-json-1.1",
            "X-Amz-Target": f"Kinesis_20131202.{operation}",
        }
        answer = self._pool.urlopen("POST", "/", body, headers)
        assert answer.status == 200, f"{operation}: {answer.status} {answer.data[:200]!r}"
        return answer.data

    def close(self) -> None:
        self._pool.close()


def _put_rate(client: _Client, stream: str) -> float:
    """Records a second."""
    bodies = [*_put_bodies(stream)]
    began = time.perf_counter()
    for body in bodies:
        answer = client.send("PutRecords", body)
        assert msgspec.json.decode(answer, type=_Put).failed_record_count == 0
    return _BATCH * len(bodies) / (time.perf_counter() - began)


def _put_bodies(stream: str) -> Iterator[bytes]:
    chance = random.Random(1)
    data = base64.b64encode(chance.randbytes(_RECORD_BYTES)).decode()
    for batch in range(_BATCHES):
        records = [{"Data": data, "PartitionKey": f"{batch}-{n}"} for n in range(_BATCH)]
        yield _encode({"StreamName": stream, "Records": records})


def _get_rate(client: _Client, stream: str) -> float:
    """Records a second, from the horizon to the tip."""
    answer = client.call(
        "GetShardIterator",
        {
            "StreamName": stream,
            "ShardId": "shardId-000000000000",
            "ShardIteratorType": "TRIM_HORIZON",
        },
    )
    iterator: str = msgspec.json.decode(answer)["ShardIterator"]
    began = time.perf_counter()
    total = 0
    while total < _BATCH * _BATCHES:
        answer = client.call("GetRecords", {"ShardIterator": iterator, "Limit": 10_000})
        total += answer.count(b'"PartitionKey"')
        iterator = msgspec.json.decode(answer, type=_Page).next_shard_iterator
    return total / (time.perf_counter() - began)
