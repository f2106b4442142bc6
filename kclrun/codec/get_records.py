"""GetRecords bodies and SubscribeToShard events (JSON 1.1), decoded straight into records.

The decoder and its limits. Must not know: HTTP, ports, the meaning of iterators. Rule: one pass in
C makes the records (base64 included); Python only looks at a page's edges. `aws/` turns the result
into a `FetchedPage`.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec

from kclrun.codec.kpl import parse_hash_key
from kclrun.errors import LimitExceeded, MalformedBody
from kclrun.model.quotas import (
    GET_BYTES_MAX,
    GET_RECORDS_MAX,
    ITERATOR_CHARACTERS_MAX,
    PARTITION_KEY_CHARACTERS_MAX,
    SHARD_ID_CHARACTERS_MAX,
)
from kclrun.model.record import Record
from kclrun.model.sequence import SEQUENCE_DIGITS_MAX, ExtendedSequenceNumber
from kclrun.model.shard import ChildShard, HashRange

# Base64 writes 4 characters for each begun 3 bytes, so at most 2 bytes of data more a record.
_BASE64_BYTES_MAX: Final = (GET_BYTES_MAX + 2 * GET_RECORDS_MAX) * 4 // 3
# A character beyond the BMP is two \uXXXX escapes.
_KEY_BYTES_MAX: Final = PARTITION_KEY_CHARACTERS_MAX * 12
# Field names and punctuation (~130), a sequence number (<= 129), a timestamp (~20), KMS (3): < 512.
_ENVELOPE_BYTES_MAX: Final = 512
# 47.5 MiB. No body of the service is larger.
BODY_BYTES_MAX: Final = _BASE64_BYTES_MAX + GET_RECORDS_MAX * (_KEY_BYTES_MAX + _ENVELOPE_BYTES_MAX)

# A split names two children, a merge one; the rest is room for future forms of the service.
CHILDREN_MAX: Final = 8
# Eight times the service's, for emulators that encode more.
_ITERATOR_CHARS_MAX: Final = 8 * ITERATOR_CHARACTERS_MAX
# 2**63 - 1, a Java long: the service's own type.
_MILLIS_MAX: Final = 2**63 - 1

_ShardId = Annotated[str, msgspec.Meta(min_length=1, max_length=SHARD_ID_CHARACTERS_MAX)]


class GetRecordsBody(msgspec.Struct, frozen=True):
    """The content of one GetRecords answer, aggregates not yet opened.

    `records` are in ascending order of their sequence numbers. `next_iterator` is None at the end
    of a closed shard; `children` are then the shard's children, where the service names them.
    `millis_behind_latest` is None where the service left it out. An event of a subscription has
    `continuation` instead of an iterator.
    """

    records: list[Record]
    next_iterator: str | None
    millis_behind_latest: int | None
    children: tuple[ChildShard, ...]
    continuation: str | None = None

    def __repr__(self) -> str:
        """Without the iterator: representations end up in logs."""
        return f"GetRecordsBody({len(self.records)} records, {len(self.children)} children)"


class _WireHashRange(msgspec.Struct, rename="pascal"):
    starting_hash_key: str
    ending_hash_key: str


class _WireChild(msgspec.Struct, rename="pascal"):
    shard_id: _ShardId
    parent_shards: Annotated[list[_ShardId], msgspec.Meta(max_length=CHILDREN_MAX)]
    hash_key_range: _WireHashRange


class _WireBody(msgspec.Struct, rename="pascal"):
    records: list[Record]
    next_shard_iterator: (
        Annotated[str, msgspec.Meta(min_length=1, max_length=_ITERATOR_CHARS_MAX)] | None
    ) = None
    millis_behind_latest: Annotated[int, msgspec.Meta(ge=0, le=_MILLIS_MAX)] | None = None
    child_shards: list[_WireChild] | None = None


class _WireEvent(_WireBody, rename="pascal"):
    continuation_sequence_number: (
        Annotated[str, msgspec.Meta(min_length=1, max_length=SEQUENCE_DIGITS_MAX)] | None
    ) = None


_DECODER: Final = msgspec.json.Decoder(_WireBody)
_EVENT_DECODER: Final = msgspec.json.Decoder(_WireEvent)


def decode_get_records(body: bytes | bytearray) -> GetRecordsBody:
    """Decode the body of a GetRecords answer with status 200.

    Guaranteed: at most `GET_RECORDS_MAX` records, ascending; sequence numbers at the edges are
    numbers; fields that belong to us (`aggregated`, …) have their defaults.
    Memory: the data, and about twice the body at the worst, for a body of nothing but records.
    Raises: MalformedBody if the bytes are not such a body; LimitExceeded if they are above
    `BODY_BYTES_MAX` or hold more records or children than the service ever sends.
    """
    if len(body) > BODY_BYTES_MAX:
        raise LimitExceeded(
            f"a GetRecords body of {len(body)} bytes is above the limit of {BODY_BYTES_MAX}"
        )
    wire = _parse(_DECODER, body)
    return _checked(wire, next_iterator=wire.next_shard_iterator, continuation=None)


def decode_subscription_event(payload: bytes) -> GetRecordsBody:
    """Decode the payload of a SubscribeToShardEvent; `codec/event_stream.py` bounds its size.

    Guaranteed, and raises: as `decode_get_records`.
    """
    wire = _parse(_EVENT_DECODER, payload)
    return _checked(wire, next_iterator=None, continuation=wire.continuation_sequence_number)


def _checked(
    wire: _WireBody, *, next_iterator: str | None, continuation: str | None
) -> GetRecordsBody:
    check_records(wire.records, GET_RECORDS_MAX)
    return GetRecordsBody(
        records=wire.records,
        next_iterator=next_iterator,
        millis_behind_latest=wire.millis_behind_latest,
        children=_children(wire.child_shards or []),
        continuation=continuation,
    )


def check_records(records: list[Record], most: int) -> None:
    """Raises: LimitExceeded for more records; MalformedBody if they do not ascend."""
    _check_count("records", len(records), most)
    _check_sequence(records)


_BodyT = TypeVar("_BodyT", bound=_WireBody)


def _parse(decoder: msgspec.json.Decoder[_BodyT], body: bytes | bytearray) -> _BodyT:
    try:
        return decoder.decode(body)
    except UnicodeDecodeError:
        # Never chained: the exception carries the bytes, and with them payloads.
        raise MalformedBody("a GetRecords body holds text that is not UTF-8") from None
    except RecursionError:
        raise MalformedBody("a GetRecords body is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError) as error:
        # msgspec's own are ValueErrors only in later versions. They name a path and a type, never
        # a value.
        raise MalformedBody(f"a GetRecords body does not parse: {error}") from None


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise LimitExceeded(f"a GetRecords body holds {count} {what}; the limit is {most}")


def _check_sequence(records: list[Record]) -> None:
    """Check that the edges are numbers and that the page ascends: 30 ns a record, while parsing
    takes 420.

    That is enough. The runtime goes on from a page's first and last positions, and dropping records
    up to a checkpoint relies on the order. A number between the edges becomes a position only as an
    `ExtendedSequenceNumber`, which checks it. A sentinel's name cannot be between two numbers,
    because letters sort above digits.
    """
    if not records:
        return
    first, last = records[0].sequence_number, records[-1].sequence_number
    _check_number(first)
    _check_number(last)
    numbers = [record.sequence_number for record in records]
    # Sorting a sorted list takes one comparison for each record. Numbers of one length sort as
    # their texts do; the service's all have 56 digits, some emulators count 1, 2, … 10.
    key = None if len(first) == len(last) else _by_value
    if sorted(numbers, key=key) != numbers:
        raise MalformedBody("the records of a GetRecords body are not in ascending order")


def _by_value(number: str) -> tuple[int, str]:
    return len(number), number


def _check_number(text: str) -> None:
    if len(text) <= SEQUENCE_DIGITS_MAX:
        try:
            if not ExtendedSequenceNumber(text).is_sentinel:
                return
        except LimitExceeded:
            pass  # its message shows the text, and a peer may have sent any text
    raise MalformedBody(
        "a record of a GetRecords body has a sequence number that is not a decimal of at most"
        f" {SEQUENCE_DIGITS_MAX} digits"
    )


def _children(wire: list[_WireChild]) -> tuple[ChildShard, ...]:
    _check_count("children", len(wire), CHILDREN_MAX)
    return tuple(
        ChildShard(
            shard_id=child.shard_id,
            parents=tuple(child.parent_shards),
            hash_range=_hash_range(child.hash_key_range),
        )
        for child in wire
    )


def _hash_range(wire: _WireHashRange) -> HashRange:
    try:
        start, end = parse_hash_key(wire.starting_hash_key), parse_hash_key(wire.ending_hash_key)
    except LimitExceeded as error:
        raise MalformedBody(f"the hash range of a child shard: {error}") from None
    if start > end:
        raise MalformedBody("the hash range of a child shard ends before it starts")
    return HashRange(start, end)
