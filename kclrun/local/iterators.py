"""Shard iterators and ListShards pages of the model, and their opaque tokens. Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

import msgspec

from kclrun.local.refusals import (
    expired_iterator,
    expired_token,
    invalid_argument,
)
from kclrun.local.sequence_numbers import parse
from kclrun.local.shard_log import ShardLog
from kclrun.model.quotas import ITERATOR_LIVES_S
from kclrun.model.record import IteratorType
from kclrun.model.time import WallTime

# The start position of each of the five kinds of iterator.
#
# Source: GetShardIterator in the Kinesis API reference. As in the service, a position before the
# trim horizon means the trim horizon.
_ROUNDING_S: Final = 0.001


def position_of(
    shard: ShardLog,
    kind: IteratorType,
    now: WallTime,
    *,
    sequence_number: str | None,
    timestamp: WallTime | None,
) -> int:
    """The position of the first record to read. Raises: InvalidRequest."""
    match kind:
        case IteratorType.TRIM_HORIZON:
            return shard.start
        case IteratorType.LATEST:
            return shard.end
        case IteratorType.AT_TIMESTAMP:
            return _at_timestamp(shard, timestamp, now)
        case IteratorType.AT_SEQUENCE_NUMBER:
            return _at_number(shard, sequence_number, after=False)
        case IteratorType.AFTER_SEQUENCE_NUMBER:
            return _at_number(shard, sequence_number, after=True)


def _at_timestamp(shard: ShardLog, timestamp: WallTime | None, now: WallTime) -> int:
    if timestamp is None:
        raise invalid_argument("Must specify timestampInMillis parameter.")
    # Arrival times are rounded to the millisecond, so a record's time may be slightly after `now`.
    if timestamp > now + _ROUNDING_S:
        raise invalid_argument(
            "The timestampInMillis parameter cannot be greater than the currentTimestampInMillis."
            f" timestampInMillis: {timestamp * 1000:.0f},"
            f" currentTimestampInMillis: {now * 1000:.0f}"
        )
    return shard.position_at(timestamp)


def _at_number(shard: ShardLog, text: str | None, *, after: bool) -> int:
    if text is None:
        raise invalid_argument("Must specify startingSequenceNumber parameter.")
    number = parse(text)
    mine = (shard.number, shard.numbering.generation)
    if number is None or (number.shard, number.generation) != mine:
        raise invalid_argument(
            f"StartingSequenceNumber used in GetShardIterator on shard {shard.shard_id} is invalid"
            " because it did not come from this shard of this stream."
        )
    return shard.position_of(number, after=after)


# Opaque tokens: sealed with a secret, so that a client can neither make nor read one.
#
# A token is its payload under a keystream, with a keyed checksum that also covers its purpose. The
# same payload gives the same token, so a token may be used twice. A token never appears in an error
# message.
_CHECKSUM_BYTES: Final = 16
# The longest payload sealed here is a page token: a few hundred bytes.
_TOKEN_CHARACTERS_MAX: Final = 4096


def _checksum(secret: bytes, purpose: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(
        payload, digest_size=_CHECKSUM_BYTES, key=secret, person=purpose
    ).digest()


def _mask(secret: bytes, checksum: bytes, payload: bytes) -> bytes:
    """Payload under the keystream of secret and checksum; its own inverse."""
    stream = hashlib.shake_256(secret + checksum).digest(len(payload))
    return (int.from_bytes(payload, "big") ^ int.from_bytes(stream, "big")).to_bytes(
        len(payload), "big"
    )


def seal(secret: bytes, purpose: bytes, payload: bytes) -> str:
    """A token for `payload`. `secret` is at most 64 bytes, `purpose` at most 16."""
    checksum = _checksum(secret, purpose, payload)
    return base64.b64encode(checksum + _mask(secret, checksum, payload)).decode("ascii")


def unseal(secret: bytes, purpose: bytes, token: str) -> bytes | None:
    """The payload of a token sealed with this secret for this purpose; None for any other text."""
    if len(token) > _TOKEN_CHARACTERS_MAX:
        return None
    try:
        sealed = base64.b64decode(token, validate=True)
    except ValueError:
        return None
    checksum, masked = sealed[:_CHECKSUM_BYTES], sealed[_CHECKSUM_BYTES:]
    payload = _mask(secret, checksum, masked)
    if not hmac.compare_digest(checksum, _checksum(secret, purpose, payload)):
        return None
    return payload


# Shard iterators: the position of the next GetRecords.
#
# "A shard iterator expires 5 minutes after it is returned to the requester."
_PURPOSE: Final = b"iterator"
# Stream id, shard number, position, time of issue in microseconds.
_LAYOUT: Final = struct.Struct(">QIQQ")
_MICROSECONDS: Final = 1_000_000


class IteratorPosition(msgspec.Struct, frozen=True):
    """A position in a shard: the number of records of the shard that come before it."""

    stream_id: int
    shard: int
    position: int


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%a %b %d %H:%M:%S UTC %Y")


# The shards of a ListShards: the six filters, and pages.
#
# Source: ListShards and ShardFilter in the Kinesis API reference. A page token contains the stream,
# the filter and the last shard of the page. It expires after five minutes.
# "Tokens expire after 300 seconds."
_TOKEN_AGE_MAX_S: Final = 300.0
_LISTING_PURPOSE: Final = b"shards"


class ShardQuery(msgspec.Struct, frozen=True):
    """The query of a listing; `after` is the exclusive first shard id."""

    kind: str = "FROM_TRIM_HORIZON"
    timestamp: WallTime | None = None
    shard_id: str | None = None
    after: str | None = None

    def check(self) -> None:
        """Raises: InvalidRequest if the filter's fields contradict each other."""
        if ("TIMESTAMP" in self.kind) != (self.timestamp is not None):
            raise invalid_argument(
                f"ShardFilter type {self.kind}: Timestamp is required by AT_TIMESTAMP and"
                " FROM_TIMESTAMP and not allowed with the others."
            )
        if (self.kind == "AFTER_SHARD_ID") != (self.shard_id is not None):
            raise invalid_argument(
                f"ShardFilter type {self.kind}: ShardId is required by AFTER_SHARD_ID and not"
                " allowed with the others."
            )


class PageToken(msgspec.Struct, frozen=True):
    """The position at which a listing continues."""

    stream_id: int
    issued_at: WallTime
    query: ShardQuery


def select(shards: Iterable[ShardLog], query: ShardQuery, horizon: WallTime) -> list[ShardLog]:
    """The shards a query names, in the order of their ids; `horizon` is the stream's trim time."""
    return [
        shard
        for shard in shards
        if (query.after is None or shard.shard_id > query.after) and _matches(shard, query, horizon)
    ]


def _matches(shard: ShardLog, query: ShardQuery, horizon: WallTime) -> bool:
    match query.kind:
        case "AT_LATEST":
            return shard.closed_at is None
        case "AFTER_SHARD_ID":
            return shard.shard_id > (query.shard_id or "")
        case "AT_TRIM_HORIZON":
            # A shard that was closed exactly at the horizon is replaced by its children, so that
            # the answer's hash ranges tile the hash space.
            is_still_open = shard.closed_at is None or shard.closed_at > horizon
            return shard.created_at <= horizon and is_still_open
        case "AT_TIMESTAMP":
            at = _timestamp(query, horizon)
            return shard.created_at <= at and (shard.closed_at is None or shard.closed_at >= at)
        case "FROM_TIMESTAMP":
            at = _timestamp(query, horizon)
            return shard.closed_at is None or shard.closed_at >= at
        case _:
            return True


def _timestamp(query: ShardQuery, horizon: WallTime) -> WallTime:
    """The query's time, "corrected to TRIM_HORIZON" if it is older."""
    return max(query.timestamp or horizon, horizon)


class NamePage(msgspec.Struct, frozen=True):
    """The position at which a listing of names continues. `of`: whose names they are."""

    of: str
    after: str
    issued_at: WallTime


_NAMES_PURPOSE: Final = b"names"


class Tokens:
    """The tokens of one region, sealed with its secret: iterators, and the pages of listings."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def seal_iterator(self, at: IteratorPosition, now: WallTime) -> str:
        issued = round(now * _MICROSECONDS)
        payload = _LAYOUT.pack(at.stream_id, at.shard, at.position, issued)
        return seal(self._secret, _PURPOSE, payload)

    def open_iterator(self, token: str, now: WallTime) -> IteratorPosition:
        """The position in a token. Raises: InvalidRequest (not ours), ExpiredIterator (too old)."""
        payload = unseal(self._secret, _PURPOSE, token)
        if payload is None:
            raise invalid_argument("Invalid ShardIterator.")
        stream_id, shard, position, issued = _LAYOUT.unpack(payload)
        issued_at = issued / _MICROSECONDS
        if now - issued_at > ITERATOR_LIVES_S:
            raise expired_iterator(
                f"Iterator expired. The iterator was created at time {_stamp(issued_at)} while"
                f" right now it is {_stamp(now)} which is further in the future than the tolerated"
                f" delay of {ITERATOR_LIVES_S * 1000:.0f} milliseconds."
            )
        return IteratorPosition(stream_id, shard, position)

    def seal_page(self, token: PageToken) -> str:
        """The token of the next page of a ListShards."""
        return seal(self._secret, _LISTING_PURPOSE, msgspec.json.encode(token))

    def open_page(self, text: str, now: WallTime) -> PageToken:
        """Raises: InvalidRequest for a token that is not ours or is older than five minutes."""
        payload = unseal(self._secret, _LISTING_PURPOSE, text)
        if payload is None:
            raise invalid_argument("Invalid NextToken.")
        token = msgspec.json.decode(payload, type=PageToken)
        if now - token.issued_at > _TOKEN_AGE_MAX_S:
            raise expired_token(f"NextToken is older than {_TOKEN_AGE_MAX_S:.0f} seconds.")
        return token

    def seal_names(self, after: str, of: str, now: WallTime) -> str:
        """The token of the page of names after this one; `of` says whose names they are."""
        return seal(self._secret, _NAMES_PURPOSE, msgspec.json.encode(NamePage(of, after, now)))

    def open_names(self, text: str, of: str, now: WallTime) -> str:
        """The name after which the page of a token begins. Raises: as `open_page`, also for a token
        of another listing."""
        payload = unseal(self._secret, _NAMES_PURPOSE, text)
        page = None if payload is None else msgspec.json.decode(payload, type=NamePage)
        if page is None or page.of != of:
            raise invalid_argument("Invalid NextToken.")
        if now - page.issued_at > _TOKEN_AGE_MAX_S:
            raise expired_token(f"NextToken is older than {_TOKEN_AGE_MAX_S:.0f} seconds.")
        return page.after
