"""Shard iterators: where the next GetRecords reads, good for five minutes.

Holds the token and its expiry. May not know: streams or shards beyond their numbers.
Source: GetShardIterator and GetRecords in the Kinesis API reference.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from typing import Final

import msgspec

from kclrun.local.refusals import expired_iterator, invalid_argument
from kclrun.local.tokens import seal, unseal
from kclrun.model.time import WallTime

__all__ = ["ITERATOR_AGE_MAX_S", "Place", "open_iterator", "seal_iterator"]

# "A shard iterator expires 5 minutes after it is returned to the requester."
ITERATOR_AGE_MAX_S: Final = 300.0
_PURPOSE: Final = b"iterator"
# Stream id, shard number, position, time of issue in microseconds.
_LAYOUT: Final = struct.Struct(">QIQQ")
_MICROSECONDS: Final = 1_000_000


class Place(msgspec.Struct, frozen=True):
    """A position in a shard: the number of records of the shard that come before it."""

    stream_id: int
    shard: int
    position: int


def seal_iterator(secret: bytes, place: Place, now: WallTime) -> str:
    issued = round(now * _MICROSECONDS)
    payload = _LAYOUT.pack(place.stream_id, place.shard, place.position, issued)
    return seal(secret, _PURPOSE, payload)


def open_iterator(secret: bytes, token: str, now: WallTime) -> Place:
    """Where a token reads on. Raises: InvalidRequest (not ours), ExpiredIterator (too old)."""
    payload = unseal(secret, _PURPOSE, token)
    if payload is None or len(payload) != _LAYOUT.size:
        raise invalid_argument("Invalid ShardIterator.")
    stream_id, shard, position, issued = _LAYOUT.unpack(payload)
    issued_at = issued / _MICROSECONDS
    if now - issued_at > ITERATOR_AGE_MAX_S:
        raise expired_iterator(
            f"Iterator expired. The iterator was created at time {_stamp(issued_at)} while right"
            f" now it is {_stamp(now)} which is further in the future than the tolerated delay of"
            f" {ITERATOR_AGE_MAX_S * 1000:.0f} milliseconds."
        )
    return Place(stream_id, shard, position)


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%a %b %d %H:%M:%S UTC %Y")
