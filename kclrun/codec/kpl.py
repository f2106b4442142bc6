"""KPL aggregates opened: one Kinesis record in, its user records out, in their order.

Rule: whole or raw. An aggregate that is wrong in any way comes back as the one record it was,
flagged `malformed`; never a part of it, never nothing. (The Java KCL's `AggregatorUtil` delivers
what came before the first wrong index and drops the rest; it also drops a whole aggregate when
one user record lies outside the shard, where `kpl_range: drop` here drops that record alone.)
May not know: checkpoint state, shards beyond the hash range it is given.
Look next: `kpl.proto`, `kpl_messages.py`; the other direction is `aggregator.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec

from kclrun.codec.aggregator import AggregatedData, Aggregator, build_aggregate
from kclrun.codec.hash_keys import effective_hash_key
from kclrun.codec.kpl_messages import (
    ABSENT,
    MAGIC,
    MD5_BYTES,
    RECORD_BYTES_MAX,
    USER_RECORDS_MAX,
    DecodeError,
    WireAggregate,
    WireRecord,
    parse_aggregate,
)
from kclrun.codec.protowire import count_fields
from kclrun.errors import LimitExceeded, MalformedAggregate, RecordError
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import HashRange

__all__ = [
    "AggregatedData",
    "Aggregator",
    "KplRange",
    "build_aggregate",
    "drop_until",
    "effective_hash_key",
    "open_aggregate",
    "open_aggregates",
]

KplRange = Literal["keep", "drop"]

# The classic size of a record. A message up to it holds at most half a million empty user
# records, some 30 MB parsed; a larger one is counted before it is parsed.
_COUNTED_ABOVE_BYTES: Final = 1024 * 1024
# A user record brings at most a partition key and an explicit hash key of its own.
_FIELDS_MAX: Final = 3 * USER_RECORDS_MAX


def open_aggregates(
    records: Sequence[Record],
    *,
    kpl_range: KplRange = "keep",
    hash_range: HashRange | None = None,
) -> list[Record]:
    """The user records of a page: aggregates opened, everything else as it was, order kept.

    User records carry their aggregate's sequence number, arrival time and encryption type,
    `sub_sequence_number` from 0 in the aggregate's order, `aggregated=True`. What starts like an
    aggregate and is none (too short, wrong MD5, not the message, an index out of range, keys that
    are not UTF-8, above a limit) is delivered raw with `malformed=True`. Records that are
    aggregated or malformed already are left alone. Never raises for any bytes.

    With `kpl_range="drop"` and a `hash_range`, user records that belong to another shard (their
    effective hash key lies outside) are left out, the others keep their sub-sequence numbers. One
    whose explicit hash key is no hash key is kept: nothing is dropped that is not provably
    another shard's. Without a `hash_range` nothing is dropped, as in the Java KCL.

    An aggregate may yield no record (it was empty, or all were dropped). The caller has `records`
    and goes on from the last of them, or a shard of such aggregates would never be checkpointed.

    Costs about 200 bytes of memory a user record beside their data; hand over slices of a page
    to bound it. Returns `records` itself if it is a list without aggregates.
    """
    # Compared first, since most payloads sort below the magic and a comparison is a quarter of
    # the price of a slice or a call: 27 ns a record that is no aggregate.
    alike = [record for record in records if record.data >= MAGIC and record.data[:4] == MAGIC]
    if not alike:
        return _as_list(records)
    opened: list[Record] = []
    for record in records:
        if _starts_like_an_aggregate(record):
            opened += _opened_or_raw(record)
        else:
            opened.append(record)
    if kpl_range == "drop" and hash_range is not None:
        return _drop_outside(opened, hash_range)
    return opened


def open_aggregate(record: Record) -> list[Record]:
    """The user records of one aggregate, or why it has none; for tools that show the reason.

    Raises: MalformedAggregate if its data is no sound aggregate; LimitExceeded if it is above
    `RECORD_BYTES_MAX` or holds more than `USER_RECORDS_MAX` user records.
    """
    message = _verified(record.data)
    if len(message) > _COUNTED_ABOVE_BYTES:
        count_fields(message, _FIELDS_MAX)
    try:
        aggregate = parse_aggregate(message)
    except DecodeError:
        raise MalformedAggregate("its message does not parse") from None
    if len(aggregate.records) > USER_RECORDS_MAX:
        raise LimitExceeded(f"it holds more than {USER_RECORDS_MAX} user records")
    return _user_records(record, aggregate)


def drop_until(records: Sequence[Record], checkpoint: ExtendedSequenceNumber) -> list[Record]:
    """The records above a checkpoint, in their order.

    For the first pages after a start: an iterator AT_SEQUENCE_NUMBER of a checkpoint inside an
    aggregate brings the whole aggregate again. `records` ascend, as pages do: where the first is
    above, all are, and `records` itself is returned if it is a list. A sentinel below all numbers
    drops nothing; SHARD_END is above them all.
    """
    last = checkpoint.sort_key
    rank = 0  # That of numbers, see `ExtendedSequenceNumber.sort_key`.

    def is_above(record: Record) -> bool:
        number = record.sequence_number
        return (rank, len(number), number, record.sub_sequence_number) > last

    if not records or is_above(records[0]):
        return _as_list(records)
    return [record for record in records if is_above(record)]


def _as_list(records: Sequence[Record]) -> list[Record]:
    return records if isinstance(records, list) else list(records)


def _starts_like_an_aggregate(record: Record) -> bool:
    return record.data.startswith(MAGIC) and not record.aggregated and not record.malformed


def _opened_or_raw(record: Record) -> list[Record]:
    try:
        return open_aggregate(record)
    except RecordError:
        return [msgspec.structs.replace(record, malformed=True)]


def _verified(data: bytes) -> bytes:
    """The message between magic and MD5. The Java KCL wants more than an MD5 after the magic."""
    if not data.startswith(MAGIC) or len(data) <= len(MAGIC) + MD5_BYTES:
        raise MalformedAggregate("it is too short, or lacks the magic bytes")
    if len(data) > RECORD_BYTES_MAX:
        raise LimitExceeded(f"it has {len(data)} bytes; the limit is {RECORD_BYTES_MAX}")
    message = data[len(MAGIC) : -MD5_BYTES]
    if hashlib.md5(message, usedforsecurity=False).digest() != data[-MD5_BYTES:]:
        raise MalformedAggregate("its MD5 does not match its message")
    return message


def _user_records(record: Record, aggregate: WireAggregate) -> list[Record]:
    try:
        keys = [key.decode() for key in aggregate.partition_key_table]
        # By index, so that an absent index is one more entry and a wrong one a missing one.
        hash_keys: dict[int, str | None] = {ABSENT: None}
        for index, hash_key in enumerate(aggregate.explicit_hash_key_table):
            hash_keys[index] = hash_key.decode()
        number, arrival = record.sequence_number, record.approximate_arrival_timestamp
        encryption = record.encryption_type
        return [
            Record(
                # Positional: keywords would cost a tenth of the whole.
                user.data or _present_and_empty(user),
                keys[user.partition_key_index],
                number,
                arrival,
                encryption,
                sub_sequence_number,
                hash_keys[user.explicit_hash_key_index],
                True,  # noqa: FBT003 - `aggregated`
            )
            for sub_sequence_number, user in enumerate(aggregate.records)
        ]
    except LookupError:
        raise MalformedAggregate("a user record's key index is absent or out of range") from None
    except UnicodeDecodeError:
        # Never chained: the exception carries the key's bytes.
        raise MalformedAggregate("a key is not UTF-8") from None


def _present_and_empty(user: WireRecord) -> bytes:
    """Tell empty data from none: the field is required, and only an empty one need be asked."""
    if not user.HasField("data"):
        raise MalformedAggregate("a user record lacks its data")
    return b""


def _drop_outside(records: list[Record], hash_range: HashRange) -> list[Record]:
    is_ours = _range_test(hash_range)
    return [record for record in records if not record.aggregated or is_ours(record)]


def _range_test(hash_range: HashRange) -> Callable[[Record], bool]:
    """Whether a user record belongs to the range; each key is hashed once."""
    known: dict[tuple[str, str | None], bool] = {}

    def is_ours(record: Record) -> bool:
        keys = (record.partition_key, record.explicit_hash_key)
        ours = known.get(keys)
        if ours is None:
            try:
                ours = effective_hash_key(*keys) in hash_range
            except LimitExceeded:
                ours = True
            known[keys] = ours
        return ours

    return is_ours
