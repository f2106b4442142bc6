"""GetRecords bodies as the service writes them, made once and numbered anew for each page.

All records of a shape have one length, so the page number inside their sequence numbers sits in a
fixed column and is written with a few strided stores (20 µs for 10,000 records): the server that
sends the pages costs next to nothing beside a client that decodes them.
"""

import base64
import random
from typing import Final

import msgspec

from kclrun.codec.aggregator import build_aggregate

_ARRIVED_AT: Final = 1_772_366_400.25
# The service's iterators have more than 200 characters, and a client carries them back and forth.
_ITERATOR_CHARACTERS: Final = 224
_PAGE_DIGITS: Final = 8
_INDEX_DIGITS: Final = 8
# Real numbers have 56 digits and begin with 49.
_SEQUENCE_HEAD: Final = "49" + "0" * (54 - _PAGE_DIGITS - _INDEX_DIGITS)


class Shape(msgspec.Struct, frozen=True):
    """What a page of a shape holds: `user_records` above 1 makes each record an aggregate."""

    name: str
    records: int
    payload_bytes: int
    user_records: int = 1

    @property
    def records_a_page(self) -> int:
        """User records, which is what a processor counts."""
        return self.records * self.user_records


SHAPES: Final = {
    shape.name: shape
    for shape in (
        Shape("small", records=10_000, payload_bytes=200),
        Shape("large", records=1_000, payload_bytes=1_000),
        # 240 user records of 200 bytes are 50 kB an aggregate.
        Shape("aggregated", records=40, payload_bytes=200, user_records=240),
        # A shard at its limit of 1,000 records and 1 MB a second, read five times a second.
        Shape("full", records=200, payload_bytes=1_000),
        Shape("empty", records=0, payload_bytes=0),
    )
}


def iterator_of(shard_id: str, page: int) -> str:
    """An iterator says all: the shard, whose name begins with the shape's, and the page."""
    return f"{shard_id}|{page:0{_PAGE_DIGITS}d}".ljust(_ITERATOR_CHARACTERS, ".")


def shape_of_shard(shard_id: str) -> Shape:
    return SHAPES[shard_id.partition("-")[0]]


class Page:
    """One shape's body, rewritten in place for each page of a shard."""

    def __init__(self, shape: Shape) -> None:
        chance = random.Random(shape.name)
        records = [_record(shape, index, chance) for index in range(shape.records)]
        self._count = shape.records
        self._stride = len(records[0]) + 1 if records else 0
        self._number_at = records[0].index(b"P" * _PAGE_DIGITS) if records else 0
        behind_ms = 0 if shape.records == 0 else 60_000
        head = f'{{"MillisBehindLatest":{behind_ms},"NextShardIterator":"'.encode()
        self._iterator_at = len(head)
        iterator = b"." * _ITERATOR_CHARACTERS
        self._records_at = len(head) + len(iterator) + len(b'","Records":[')
        self._body = bytearray(head + iterator + b'","Records":[' + b",".join(records) + b"]}")

    def numbered(self, shard_id: str, page: int) -> bytearray:
        """The body of page `page`, whose iterator leads to the next one. Valid until the next."""
        following = iterator_of(shard_id, page + 1).encode()
        self._body[self._iterator_at : self._iterator_at + len(following)] = following
        if self._count:
            first = self._records_at + self._number_at
            end = first + self._stride * (self._count - 1) + _PAGE_DIGITS
            for column, digit in enumerate(f"{page:0{_PAGE_DIGITS}d}".encode()):
                self._body[first + column : end : self._stride] = bytes([digit]) * self._count
        return self._body


def _record(shape: Shape, index: int, chance: random.Random) -> bytes:
    key = f"key-{index:08d}"
    data = _aggregate(shape, chance) if shape.user_records > 1 else _payload(shape, chance)
    number = f"{_SEQUENCE_HEAD}{'P' * _PAGE_DIGITS}{index:0{_INDEX_DIGITS}d}"
    text = (
        f'{{"ApproximateArrivalTimestamp":{_ARRIVED_AT},"Data":"{base64.b64encode(data).decode()}"'
        f',"PartitionKey":"{key}","SequenceNumber":"{number}"}}'
    )
    return text.encode()


def _payload(shape: Shape, chance: random.Random) -> bytes:
    # Letters only: no payload begins with the mark of an aggregate by chance.
    return bytes(chance.choices(b"abcdefghijklmnopqrstuvwxyz", k=shape.payload_bytes))


def _aggregate(shape: Shape, chance: random.Random) -> bytes:
    users = [(f"user-{n:04d}", _payload(shape, chance), None) for n in range(shape.user_records)]
    return build_aggregate(users)
