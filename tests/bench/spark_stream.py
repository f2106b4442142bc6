"""Streams that exist as a formula: every record has its place, its number and its instant.

A stream's name says all (`small-32`: shape and number of shards). Record i of a shard arrived
i / rate seconds after the stream's beginning, hours before the server's start or at it, so that
all of the service's iterator types, its `Limit` and its lag mean what they should; only the
payload repeats from page to page. All records of a shape have one length: a page is a block of
bytes into which numbers and instants are stored by columns, a third of a millisecond for 10,000
records, so the server costs little beside a client. Pure: time is an argument.
"""

import base64
import random
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import msgspec
import numpy as np

from kclrun.codec.aggregator import build_aggregate
from kclrun.codec.cbor import encode_cbor

Rows = np.ndarray[Any, Any]

_REGION: Final = "us-east-1"
# Real numbers have 56 digits and begin with 49.
_INDEX_DIGITS: Final = 16
_SEQUENCE_HEAD: Final = "49" + "0" * (54 - _INDEX_DIGITS)
_ITERATOR_CHARACTERS: Final = 224
_HASH_KEYS: Final = 2**128
_RETENTION_HOURS: Final = 24
_ARRIVED: Final = "ApproximateArrivalTimestamp"
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

    def summary(self) -> dict[str, Any]:
        described = {
            "StreamName": self.name,
            "StreamARN": f"arn:aws:kinesis:{_REGION}:000000000000:stream/{self.name}",
            "StreamStatus": "ACTIVE",
            "RetentionPeriodHours": _RETENTION_HOURS,
            "OpenShardCount": len(self.shards),
            "StreamCreationTimestamp": self.first_ms / 1_000,
        }
        return {"StreamDescriptionSummary": described}

    def listing(self) -> dict[str, Any]:
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
        return {"Shards": listed}


class Block:
    """Bytes of one page of a kind, rewritten in place. One for each thread."""

    def __init__(self, kind: Kind) -> None:
        rows = self.template(kind)
        first = rows[0].tobytes()
        self._kind = kind
        self._rows = rows.copy()
        self._number_at = first.index(_SEQUENCE_HEAD.encode()) + len(_SEQUENCE_HEAD)
        # Two bytes stand between the name and the value in both forms.
        self._arrived_at = first.index(_ARRIVED.encode()) + len(_ARRIVED) + 2

    def page(self, stream: Stream, iterator: str, limit: int, now_ms: int) -> bytes:
        """The body that GetRecords answers."""
        _, shard_id, rest = iterator.split("|")
        begin = int(rest.rstrip("."))
        known = stream.first_at(now_ms + 1)
        end = max(begin, min(begin + min(limit, self._kind.page_records), known))
        behind_ms = max(0, now_ms - stream.arrived_ms(end)) if end < known else 0
        following = stream.iterator_at(shard_id, end)
        return self.body(behind_ms, following, self._numbered(stream, begin, end))

    @staticmethod
    def template(kind: Kind) -> Rows:
        """A record a row, without number and instant."""
        return _json_rows(kind)

    @staticmethod
    def body(behind_ms: int, following: str, rows: Rows) -> bytes:
        """An answer with these records."""
        head = f'{{"MillisBehindLatest":{behind_ms},"NextShardIterator":"{following}","Records":['
        # Without the comma after the last one.
        return b"".join([head.encode(), rows.reshape(-1)[:-1].data, b"]}"])

    @staticmethod
    def store_arrival(place: Rows, arrived_ms: Rows) -> None:
        """As 1772366400.250: ten digits of seconds, a dot, three of milliseconds."""
        seconds = arrived_ms // 1_000
        place[:, 0:2] = _QUAD_TABLE[seconds // 10**8 % 10_000][:, 2:]
        place[:, 2:6] = _QUAD_TABLE[seconds // 10**4 % 10_000]
        place[:, 6:10] = _QUAD_TABLE[seconds % 10_000]
        place[:, 11:14] = _QUAD_TABLE[arrived_ms % 1_000][:, 1:]

    def _numbered(self, stream: Stream, begin: int, end: int) -> Rows:
        rows = self._rows[: end - begin]
        if begin == end:
            return rows
        index = np.arange(begin, end)
        for quad in range(_INDEX_DIGITS // 4):
            at = self._number_at + _INDEX_DIGITS - 4 * (quad + 1)
            rows[:, at : at + 4] = _QUAD_TABLE[index // 10_000**quad % 10_000]
        arrived_ms = stream.first_ms + 1_000 * index // self._kind.per_second
        self.store_arrival(rows[:, self._arrived_at :], arrived_ms)
        return rows


class CborBlock(Block):
    """The same in AWS's CBOR, which the SDK of Java asks for."""

    @staticmethod
    def template(kind: Kind) -> Rows:
        return _cbor_rows(kind)

    @staticmethod
    def body(behind_ms: int, following: str, rows: Rows) -> bytes:
        fields = {"MillisBehindLatest": behind_ms, "NextShardIterator": following}
        # A map of three: the two above, and the records.
        head = b"\xa3" + encode_cbor(fields)[1:] + encode_cbor("Records")
        count = b"\x9a" + len(rows).to_bytes(4, "big")
        return b"".join([head, count, rows.reshape(-1).data])

    @staticmethod
    def store_arrival(place: Rows, arrived_ms: Rows) -> None:
        """Behind the tag of a time and the mark of a number of 64 bits."""
        place[:, 0:8] = arrived_ms.astype(">u8").view(np.uint8).reshape(-1, 8)


@cache
def _json_rows(kind: Kind) -> Rows:
    """Half a second of work."""
    records = [
        f'{{"{_ARRIVED}":0000000000.000,"Data":"{base64.b64encode(data).decode()}"'
        f',"PartitionKey":"{key}","SequenceNumber":"{sequence_number(0)}"}},'
        for key, data in _records(kind)
    ]
    return _as_rows([text.encode() for text in records])


@cache
def _cbor_rows(kind: Kind) -> Rows:
    # A time of 64 bits, since its mark must not depend on the value; it comes first.
    time = encode_cbor(_ARRIVED) + b"\xc1\x1b" + bytes(8)
    fields = [
        encode_cbor({"Data": data, "PartitionKey": key, "SequenceNumber": sequence_number(0)})[1:]
        for key, data in _records(kind)
    ]
    return _as_rows([b"\xa4" + time + each for each in fields])


def _as_rows(records: list[bytes]) -> Rows:
    return np.frombuffer(b"".join(records), np.uint8).reshape(len(records), -1)


def _records(kind: Kind) -> Iterator[tuple[str, bytes]]:
    """Key and data of the records of a page."""
    chance = random.Random(kind.name)
    for slot in range(kind.page_records):
        data = _aggregate(kind, chance) if kind.user_records > 1 else _payload(kind, chance)
        yield f"key-{slot:08d}", data


def sequence_number(index: int) -> str:
    return f"{_SEQUENCE_HEAD}{index:0{_INDEX_DIGITS}d}"


def _payload(kind: Kind, chance: random.Random) -> bytes:
    # Letters only: no payload begins with the mark of an aggregate by chance.
    return bytes(chance.choices(b"abcdefghijklmnopqrstuvwxyz", k=kind.payload_bytes))


def _aggregate(kind: Kind, chance: random.Random) -> bytes:
    users = [(f"user-{n:04d}", _payload(kind, chance), None) for n in range(kind.user_records)]
    return build_aggregate(users)
