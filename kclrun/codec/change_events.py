"""GetRecords bodies of DynamoDB Streams, decoded into records: each is one change of an item.

Must not know: HTTP, ports, the meaning of iterators. A record's `data` is the change as the service
wrote it, byte for byte, as a Lambda function gets it too. Its partition key is the item's key, so
that the changes of one item stay in order wherever partition keys decide.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kclrun.codec.get_records import GetRecordsBody, check_records
from kclrun.errors import LimitExceeded, MalformedBody
from kclrun.model.quotas import CHANGES_MAX
from kclrun.model.record import Record

# A record may have two images of 400 KB each, and at the worst each byte of the megabyte is written
# as an escape of six characters. No body of the service is larger.
BODY_BYTES_MAX: Final = 16 * 1024 * 1024


class _Change(msgspec.Struct, rename="pascal"):
    keys: dict[str, dict[str, Any]]
    sequence_number: str
    approximate_creation_date_time: float = 0.0


class _Event(msgspec.Struct):
    dynamodb: _Change


class _Body(msgspec.Struct, rename="pascal"):
    records: list[msgspec.Raw]
    next_shard_iterator: str | None = None


_BODY: Final = msgspec.json.Decoder(_Body)
_EVENT: Final = msgspec.json.Decoder(_Event)
# Sorted: the service may name the parts of a key in any order.
_KEY: Final = msgspec.json.Encoder(order="sorted")


def decode_changes(body: bytes | bytearray) -> GetRecordsBody:
    """Decode the body of a GetRecords answer of DynamoDB Streams with status 200.

    Guaranteed: at most `CHANGES_MAX` records, in ascending order of their numbers, which may differ
    in length. The service names neither a lag nor children.
    Raises: MalformedBody if the bytes are not such a body; LimitExceeded for a body or a number of
    records above the service's limits.
    """
    if len(body) > BODY_BYTES_MAX:
        raise LimitExceeded(
            f"a GetRecords body of {len(body)} bytes is above the limit of {BODY_BYTES_MAX}"
        )
    try:
        parsed = _BODY.decode(body)
        records = [_record(bytes(raw)) for raw in parsed.records]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # Not chained, and without the parser's words: they may quote a change.
        raise MalformedBody("a GetRecords body of DynamoDB Streams does not parse") from None
    check_records(records, CHANGES_MAX)
    return GetRecordsBody(records, parsed.next_shard_iterator, None, ())


def _record(event: bytes) -> Record:
    change = _EVENT.decode(event).dynamodb
    return Record(
        data=event,
        partition_key=_KEY.encode(change.keys).decode(),
        sequence_number=change.sequence_number,
        approximate_arrival_timestamp=change.approximate_creation_date_time,
    )
