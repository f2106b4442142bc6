"""Streams that exist as a formula: every record has its place, its number and its instant.

A stream's name says all (`small-32`: shape and number of shards). Record i of a shard arrived
i / rate seconds after the stream's beginning, hours before the server's start or at it, so that
all of the service's iterator types, its `Limit` and its lag mean what they should; only the
payload repeats from page to page. All records of a shape have one length: a page is a block of
bytes into which numbers and instants are stored by columns, a third of a millisecond for 10,000
records, so the server costs little beside a client. Pure: time is an argument.
"""

from __future__ import annotations

import base64
import json
import random
from functools import cache
from typing import Any, Final

import msgspec
import numpy as np

from kclrun.codec.aggregator import build_aggregate

_REGION: Final = "us-east-1"
# Real numbers have 56 digits and begin with 49.
_INDEX_DIGITS: Final = 16
_SEQUENCE_HEAD: Final = "49" + "0" * (54 - _INDEX_DIGITS)
_ITERATOR_CHARACTERS: Final = 224
_HASH_KEYS: Final = 2**128
_RETENTION_HOURS: Final = 24
# Four digits are stored at a time.
_QUADS: Final = np.frombuffer("".join(f"{n:04d}" for n in range(10_000)).encode(), np.uint8)
_QUAD_TABLE: Final = _QUADS.reshape(-1, 4)


class Kind(msgspec.Struct, frozen=True):
    """What a stream holds. `per_second`: Kinesis records a second and shard; `page_records`: the
    most that one answer holds; `backlog_s`: how long it had been written when the server began."""

    name: str
    payload_bytes: int
    per_second: int
    page_records: int
    backlog_s: int
    user_records: int = 1


# A shard takes 1,000 records or 1 MB a second. A page is what `bench fetch` calls one, 2 MB of
# data, or the service's limit of 10,000 records.
KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("small", 200, per_second=1_000, page_records=10_000, backlog_s=12 * 3600),
        Kind("large", 1_000, per_second=1_000, page_records=2_000, backlog_s=12 * 3600),
        Kind("aggregated", 200, 20, page_records=40, backlog_s=12 * 3600, user_records=240),
        Kind("quiet", 200, per_second=20, page_records=10_000, backlog_s=0),
        Kind("busy", 1_000, per_second=500, page_records=2_000, backlog_s=0),
    )
}


class Stream:
    """One stream's shape in time, and every answer about it that is not a page."""

    def __init__(self, name: str, began_ms: int) -> None:
        self.name = name
        self.kind = KINDS[name.partition("-")[0]]
        self.first_ms = began_ms - 1_000 * self.kind.backlog_s
        self.shards = [f"shardId-{n:012d}" for n in range(int(name.partition("-")[2]))]

    def arrived_ms(self, index: int) -> int:
        return self.first_ms + 1_000 * index // self.kind.per_second

    def first_at(self, at_ms: int) -> int:
        """The first record that arrived at an instant or later."""
        return max(0, -(-(at_ms - self.first_ms) * self.kind.per_second // 1_000))

    def iterator(self, request: dict[str, Any], now_ms: int) -> str:
        """What GetShardIterator answers: an iterator says the next record."""
        match request["ShardIteratorType"]:
            case "TRIM_HORIZON":
                index = 0
            case "LATEST":
                index = self.first_at(now_ms + 1)
            case "AT_TIMESTAMP":
                index = self.first_at(round(1_000 * request["Timestamp"]))
            case kind:
                number = request["StartingSequenceNumber"]
                index = self.index_of(number) + (kind == "AFTER_SEQUENCE_NUMBER")
        return self.iterator_at(request["ShardId"], index)

    @staticmethod
    def index_of(sequence_number: str) -> int:
        return int(sequence_number[-_INDEX_DIGITS:])

    def iterator_at(self, shard_id: str, index: int) -> str:
        return f"{self.name}|{shard_id}|{index}".ljust(_ITERATOR_CHARACTERS, ".")

    def summary(self) -> bytes:
        described = {
            "StreamName": self.name,
            "StreamARN": f"arn:aws:kinesis:{_REGION}:000000000000:stream/{self.name}",
            "StreamStatus": "ACTIVE",
            "RetentionPeriodHours": _RETENTION_HOURS,
            "OpenShardCount": len(self.shards),
            "StreamCreationTimestamp": self.first_ms / 1_000,
        }
        return json.dumps({"StreamDescriptionSummary": described}).encode()

    def listing(self) -> bytes:
        """All shards: open, without parents, each with its share of the hash keys."""
        count = len(self.shards)
        edges = [_HASH_KEYS * n // count for n in range(count + 1)]
        listed = [
            {
                "ShardId": shard_id,
                "HashKeyRange": {
                    "StartingHashKey": str(edges[n]),
                    "EndingHashKey": str(edges[n + 1] - 1),
                },
                "SequenceNumberRange": {"StartingSequenceNumber": sequence_number(0)},
            }
            for n, shard_id in enumerate(self.shards)
        ]
        return json.dumps({"Shards": listed}).encode()


class Block:
    """Bytes of one page of a kind, rewritten in place. One for each thread."""

    def __init__(self, kind: Kind) -> None:
        rows = _rows(kind)
        first = rows[0].tobytes()
        self._kind = kind
        self._rows = rows.copy()
        self._number_at = first.index(_SEQUENCE_HEAD.encode()) + len(_SEQUENCE_HEAD)
        self._arrived_at = first.index(b":") + 1

    def page(self, stream: Stream, iterator: str, limit: int, now_ms: int) -> bytes:
        """The body that GetRecords answers."""
        _, shard_id, rest = iterator.split("|")
        begin = int(rest.rstrip("."))
        known = stream.first_at(now_ms + 1)
        end = max(begin, min(begin + min(limit, self._kind.page_records), known))
        behind_ms = max(0, now_ms - stream.arrived_ms(end)) if end < known else 0
        head = (
            f'{{"MillisBehindLatest":{behind_ms}'
            f',"NextShardIterator":"{stream.iterator_at(shard_id, end)}","Records":['
        )
        return b"".join([head.encode(), self._records(stream, begin, end), b"]}"])

    def _records(self, stream: Stream, begin: int, end: int) -> memoryview | bytes:
        if begin == end:
            return b""
        rows = self._rows[: end - begin]
        index = np.arange(begin, end)
        arrived_ms = stream.first_ms + 1_000 * index // self._kind.per_second
        for quad in range(_INDEX_DIGITS // 4):
            at = self._number_at + _INDEX_DIGITS - 4 * (quad + 1)
            rows[:, at : at + 4] = _QUAD_TABLE[index // 10_000**quad % 10_000]
        # As 1772366400.250: ten digits of seconds, a dot, three of milliseconds.
        at = self._arrived_at
        seconds = arrived_ms // 1_000
        rows[:, at : at + 2] = _QUAD_TABLE[seconds // 10**8 % 10_000][:, 2:]
        rows[:, at + 2 : at + 6] = _QUAD_TABLE[seconds // 10**4 % 10_000]
        rows[:, at + 6 : at + 10] = _QUAD_TABLE[seconds % 10_000]
        rows[:, at + 11 : at + 14] = _QUAD_TABLE[arrived_ms % 1_000][:, 1:]
        # Without the comma after the last one.
        return rows.reshape(-1)[:-1].data


@cache
def _rows(kind: Kind) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """A record a row, without number and instant. Half a second of work."""
    chance = random.Random(kind.name)
    rows = [_record(kind, slot, chance) for slot in range(kind.page_records)]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)


def _record(kind: Kind, slot: int, chance: random.Random) -> bytes:
    data = _aggregate(kind, chance) if kind.user_records > 1 else _payload(kind, chance)
    text = (
        '{"ApproximateArrivalTimestamp":0000000000.000'
        f',"Data":"{base64.b64encode(data).decode()}"'
        f',"PartitionKey":"key-{slot:08d}","SequenceNumber":"{sequence_number(0)}"}},'
    )
    return text.encode()


def sequence_number(index: int) -> str:
    return f"{_SEQUENCE_HEAD}{index:0{_INDEX_DIGITS}d}"


def _payload(kind: Kind, chance: random.Random) -> bytes:
    # Letters only: no payload begins with the mark of an aggregate by chance.
    return bytes(chance.choices(b"abcdefghijklmnopqrstuvwxyz", k=kind.payload_bytes))


def _aggregate(kind: Kind, chance: random.Random) -> bytes:
    users = [(f"user-{n:04d}", _payload(kind, chance), None) for n in range(kind.user_records)]
    return build_aggregate(users)
