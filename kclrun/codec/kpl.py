"""KPL aggregates opened: one Kinesis record in, its user records out, in their order.

Rule: whole or raw (`open_aggregates`). Must not know: checkpoint state, shards beyond the given
hash range.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, Protocol, cast

import msgspec
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from kclrun.errors import LimitExceeded, MalformedAggregate, RecordError
from kclrun.model.quotas import HASH_KEY_DIGITS_MAX, RECORD_BYTES_DEFAULT, RECORD_BYTES_LARGEST
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, hash_key_of

# 2**128 - 1 has 39 digits. Checked first, so that `int` never gets a text of unbounded length.


def effective_hash_key(partition_key: str, explicit_hash_key: str | None) -> int:
    """The hash key that decides the shard of a record, 0 to 2**128 - 1.

    Rule: an explicit hash key wins; else the hash key is the MD5 of the partition key's UTF-8, read
    as an unsigned big-endian number (Kinesis API reference, PutRecord).

    Raises: LimitExceeded if the explicit hash key is not a number in that range, or the partition
    key cannot be written as UTF-8.
    """
    if explicit_hash_key is not None:
        return parse_hash_key(explicit_hash_key)
    return hash_key_of(partition_key)


def parse_hash_key(text: str) -> int:
    """A hash key from its decimal text. Raises: LimitExceeded for anything but 0 to 2**128 - 1."""
    if 0 < len(text) <= HASH_KEY_DIGITS_MAX and text.isascii() and text.isdigit():
        hash_key = int(text)
        if hash_key <= HASH_KEY_MAX:
            return hash_key
    raise LimitExceeded(f"a hash key is not a decimal number from 0 to {HASH_KEY_MAX}")


_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
# The tags of length-delimited fields with numbers below 16.
_SHORT_TAGS: Final = frozenset(range(_LENGTH_DELIMITED, 0x80, 8))
# 64 bits in groups of seven.
_VARINT_BYTES_MAX: Final = 10


def count_fields(message: bytes, most: int) -> int:
    """The number of top-level fields of a protobuf message, counted without parsing it.

    For large messages only: a hostile 10 MiB can hold five million empty sub-messages, which would
    cost a parser hundreds of megabytes before they can be counted. Here they cost a bounded walk.

    Raises: LimitExceeded as soon as there are more than `most`; MalformedAggregate if the bytes are
    not a sequence of fields, or use groups (which no schema since proto2 began should use).
    """
    position = count = 0
    end = len(message)
    while position < end:
        # The cheap case first: a tag and a length of one byte each, typical of small bombs.
        if message[position] in _SHORT_TAGS and position + 1 < end and message[position + 1] < 0x80:
            position += 2 + message[position + 1]
        else:
            tag, position = _varint(message, position)
            position = _skip(message, position, wire_type=tag & 7)
        count += 1
        if count > most:
            raise LimitExceeded(f"a message has more than {most} fields")
    if position > end:
        raise MalformedAggregate("a message ends within a field")
    return count


def _skip(message: bytes, position: int, *, wire_type: int) -> int:
    """The end of the value that starts at `position`; may lie past the end of the message."""
    if wire_type == _LENGTH_DELIMITED:
        length, position = _varint(message, position)
        return position + length
    if wire_type == _VARINT:
        return _varint(message, position)[1]
    if wire_type == _FIXED64:
        return position + 8
    if wire_type == _FIXED32:
        return position + 4
    raise MalformedAggregate(f"a message uses wire type {wire_type}")


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift, byte in enumerate(message[position : position + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position + shift + 1
    raise MalformedAggregate("a message has a varint without an end")


# The "Aggregated record" format of the KPL: four bytes before the message, its MD5 after it.
MAGIC: Final = b"\xf3\x89\x9a\xc2"
MD5_BYTES: Final = 16
# The value of an index that was not written (see kpl.proto): beyond every table.
ABSENT_KEY: Final = 2**64 - 1
ABSENT_HASH_KEY: Final = -1

# A classic record of 1 MiB full of user records of 4 bytes: each adds 2 bytes of framing, 2 of
# index and 2 before its data, so 10 bytes in all and 104,857 of them.
USER_RECORDS_MAX: Final = 100_000

_FILE: Final = "kclrun/codec/kpl.proto"
_PACKAGE: Final = "kclrun.kpl"


class WireRecord(Protocol):
    """One user record in the message."""

    partition_key_index: int
    explicit_hash_key_index: int
    data: bytes

    def HasField(self, name: str) -> bool: ...  # noqa: N802 - protobuf's name


class WireAggregate(Protocol):
    """The message between the magic and the MD5."""

    partition_key_table: Any
    explicit_hash_key_table: Any
    records: Any

    def SerializeToString(self) -> bytes: ...  # noqa: N802 - protobuf's name
    def IsInitialized(self) -> bool: ...  # noqa: N802 - protobuf's name


def aggregate_descriptor() -> FileDescriptorProto:
    """`kpl.proto` in protobuf's own description format, built when this module is imported.

    Not generated code: protobuf accepts that only from its own major version and, with a warning,
    from the one before, so one generated file cannot serve `protobuf>=6.31` for long. A descriptor
    is plain data and has no such bounds. The pool is our own, so that other copies of the schema in
    the process (aws_kinesis_agg has one) do not clash. Rule: this module and `kpl.proto` agree; a
    test compiles `kpl.proto` and compares.
    """
    field = FieldDescriptorProto
    file = FileDescriptorProto(name=_FILE, package=_PACKAGE)
    aggregate = file.message_type.add(name="AggregatedRecord")
    for number, name in enumerate(("partition_key_table", "explicit_hash_key_table"), start=1):
        aggregate.field.add(
            name=name, number=number, label=field.LABEL_REPEATED, type=field.TYPE_BYTES
        )
    aggregate.field.add(
        name="records",
        number=3,
        label=field.LABEL_REPEATED,
        type=field.TYPE_MESSAGE,
        type_name=f".{_PACKAGE}.Record",
    )
    record = file.message_type.add(name="Record")
    record.field.add(
        name="partition_key_index",
        number=1,
        label=field.LABEL_REQUIRED,
        type=field.TYPE_UINT64,
        default_value=str(ABSENT_KEY),
    )
    record.field.add(
        name="explicit_hash_key_index",
        number=2,
        label=field.LABEL_OPTIONAL,
        type=field.TYPE_INT64,
        default_value=str(ABSENT_HASH_KEY),
    )
    record.field.add(name="data", number=3, label=field.LABEL_REQUIRED, type=field.TYPE_BYTES)
    record.reserved_range.add(start=4, end=5)
    by_column = file.message_type.add(name="AggregatedColumns")
    by_column.field.add(
        name="columns",
        number=3,
        label=field.LABEL_OPTIONAL,
        type=field.TYPE_MESSAGE,
        type_name=f".{_PACKAGE}.Columns",
    )
    columns = file.message_type.add(name="Columns")
    for number, name, kind in (
        (1, "partition_key_index", field.TYPE_UINT64),
        (2, "explicit_hash_key_index", field.TYPE_INT64),
        (3, "data", field.TYPE_BYTES),
    ):
        columns.field.add(name=name, number=number, label=field.LABEL_REPEATED, type=kind)
    return file


def _message_classes(*names: str) -> list[Any]:
    pool = DescriptorPool()
    pool.AddSerializedFile(aggregate_descriptor().SerializeToString())
    return [GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in names]


_AGGREGATED_RECORD, _AGGREGATED_COLUMNS = _message_classes("AggregatedRecord", "AggregatedColumns")


def parse_aggregate(message: bytes) -> WireAggregate:
    """Parse a message. Required fields are not checked. Raises: protobuf's DecodeError."""
    return cast("WireAggregate", _AGGREGATED_RECORD.FromString(message))


def new_aggregate(
    partition_keys: Sequence[str], explicit_hash_keys: Sequence[str]
) -> WireAggregate:
    """A message with these key tables and no record yet. Raises: UnicodeEncodeError."""
    return cast(
        "WireAggregate",
        _AGGREGATED_RECORD(
            partition_key_table=[key.encode() for key in partition_keys],
            explicit_hash_key_table=[key.encode() for key in explicit_hash_keys],
        ),
    )


KplRange = Literal["keep", "drop"]

# A message up to it holds at most half a million empty user records, some 30 MB parsed; a larger
# one is counted before it is parsed.
_COUNTED_ABOVE_BYTES: Final = RECORD_BYTES_DEFAULT
# A user record brings at most a partition key and an explicit hash key of its own.
_FIELDS_MAX: Final = 3 * USER_RECORDS_MAX


def open_aggregates(
    records: Sequence[Record],
    *,
    kpl_range: KplRange = "keep",
    hash_range: HashRange | None = None,
) -> list[Record]:
    """The user records of a page: aggregates opened, other records as they were, order kept.

    User records carry their aggregate's sequence number, arrival time and encryption type,
    `sub_sequence_number` from 0 in the aggregate's order, `aggregated=True`. Records that are
    aggregated or malformed already are left alone. Never raises for any bytes.

    Rule: whole or raw. A record that starts like an aggregate and is not one (too short, wrong MD5,
    not the message, an index out of range, keys that are not UTF-8, above a limit) is delivered raw
    with `malformed=True`: never a part of it, never nothing. (The Java KCL's `AggregatorUtil`
    delivers the user records before the first wrong index and drops the rest. It also drops a whole
    aggregate when one user record lies outside the shard.)

    With `kpl_range="drop"` and a `hash_range`, user records that belong to another shard (their
    effective hash key lies outside) are left out; the others keep their sub-sequence numbers. A
    user record with an invalid explicit hash key is kept: only a record that is provably another
    shard's is dropped. Without a `hash_range` nothing is dropped, as in the Java KCL.

    An aggregate may yield no record (it was empty, or all were dropped). The caller has `records`
    and goes on from the last of them; otherwise a shard of such aggregates would never be
    checkpointed.

    Costs about 200 bytes of memory a user record beside their data; `open_in_parts` bounds it.
    Returns `records` itself if it is a list without aggregates.
    """
    if not records:
        return _as_list(records)
    no_part_is_full = USER_RECORDS_MAX * len(records)  # before the last record
    ((opened, _),) = open_in_parts(
        records, no_part_is_full, kpl_range=kpl_range, hash_range=hash_range
    )
    return opened


def open_in_parts(
    records: Sequence[Record],
    records_max: int,
    *,
    kpl_range: KplRange = "keep",
    hash_range: HashRange | None = None,
) -> Iterator[tuple[list[Record], Record]]:
    """`open_aggregates` of a page that is not empty, part by part, each with its last raw record.

    A part ends with the record that fills it, so it holds less than `records_max` user records plus
    those of one aggregate (`USER_RECORDS_MAX`). A page with fewer, or without aggregates, is one
    part. The next part is made on request: 10 MiB of aggregates of empty records are 1.7 million,
    264 MB [I12].
    """
    # Compared first: most payloads sort below the magic, and a comparison is a quarter of the price
    # of a slice or a call: 27 ns for a record that is not an aggregate.
    alike = [record for record in records if record.data >= MAGIC and record.data[:4] == MAGIC]
    if not alike:
        yield _as_list(records), records[-1]
        return
    drops = hash_range if kpl_range == "drop" else None
    opened: list[Record] = []
    for record in records:
        if _starts_like_an_aggregate(record):
            opened += _opened_or_raw(record)
        else:
            opened.append(record)
        if len(opened) >= records_max and record is not records[-1]:
            yield opened if drops is None else _drop_outside(opened, drops), record
            opened = []
    yield opened if drops is None else _drop_outside(opened, drops), records[-1]


def open_aggregate(record: Record) -> list[Record]:
    """The user records of one aggregate, or the reason why it has none; for tools that show it.

    Raises: MalformedAggregate if its data is not a sound aggregate; LimitExceeded if it is above
    `RECORD_BYTES_LARGEST` or holds more than `USER_RECORDS_MAX` user records.
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
    return _user_records(record, aggregate, message)


def is_sound(data: bytes) -> bool:
    """Whether a record with this data is an aggregate that is opened where it is read."""
    if not data.startswith(MAGIC):
        return False
    try:
        open_aggregate(Record(data, "", "0"))
    except RecordError:
        return False
    return True


def drop_until(records: Sequence[Record], checkpoint: ExtendedSequenceNumber) -> list[Record]:
    """The records above a checkpoint, in their order.

    For the first pages after a start: an iterator AT_SEQUENCE_NUMBER of a checkpoint inside an
    aggregate brings the whole aggregate again. `records` ascend, as pages do: if the first is
    above, all are, and `records` itself is returned if it is a list. A sentinel below all numbers
    drops nothing; SHARD_END is above them all.
    """
    last = checkpoint.sort_key
    rank = 0  # The rank of numbers, see `ExtendedSequenceNumber.sort_key`.

    def is_above(record: Record) -> bool:
        number = record.sequence_number
        return (rank, len(number), number, record.sub_sequence_number) > last

    if not records or is_above(records[0]):
        return _as_list(records)
    return [record for record in records if is_above(record)]


def _as_list(records: Sequence[Record]) -> list[Record]:
    return records if isinstance(records, list) else list(records)


def _starts_like_an_aggregate(record: Record) -> bool:
    return record.data.startswith(MAGIC) and not record.aggregated


def _opened_or_raw(record: Record) -> list[Record]:
    try:
        return open_aggregate(record)
    except RecordError:
        return [msgspec.structs.replace(record, malformed=True)]


def _verified(data: bytes) -> bytes:
    """The message between magic and MD5. The Java KCL needs more than an MD5 after the magic."""
    if not data.startswith(MAGIC) or len(data) <= len(MAGIC) + MD5_BYTES:
        raise MalformedAggregate("it is too short, or lacks the magic bytes")
    if len(data) > RECORD_BYTES_LARGEST:
        raise LimitExceeded(f"it has {len(data)} bytes; the limit is {RECORD_BYTES_LARGEST}")
    message = data[len(MAGIC) : -MD5_BYTES]
    if hashlib.md5(message, usedforsecurity=False).digest() != data[-MD5_BYTES:]:
        raise MalformedAggregate("its MD5 does not match its message")
    return message


def _user_records(record: Record, aggregate: WireAggregate, message: bytes) -> list[Record]:
    try:
        keys = [key.decode() for key in aggregate.partition_key_table]
        # By index: an absent index is one more entry, and a wrong index is a missing entry.
        hash_keys: dict[int, str | None] = {ABSENT_HASH_KEY: None}
        for index, hash_key in enumerate(aggregate.explicit_hash_key_table):
            hash_keys[index] = hash_key.decode()
        columns = _columns_of(aggregate, message)
        if columns is not None:
            return _of_columns(record, keys, columns)
        return _of_rows(record, keys, hash_keys, aggregate)
    except LookupError:
        raise MalformedAggregate("a user record's key index is absent or out of range") from None
    except UnicodeDecodeError:
        # Never chained: the exception carries the key's bytes.
        raise MalformedAggregate("a key is not UTF-8") from None


def _columns_of(aggregate: WireAggregate, message: bytes) -> Any:
    """The same user records as columns, if row `i` of each is user record `i`; else None.

    Parsing them once more and proving that costs 130 ns a user record. Making a Python object for
    each and reading its fields one by one costs 300 ns more than reading whole columns.

    The proof: every user record has a key index and data, for both are required. There are as many
    of each as user records, so each has them once. None has an index of a hash key.
    """
    # A user record may hold its fields many times; each costs 16 bytes of memory here.
    if len(message) > _COUNTED_ABOVE_BYTES or not aggregate.IsInitialized():
        return None
    try:
        columns = _AGGREGATED_COLUMNS.FromString(message).columns
    except DecodeError:
        # A packed list of indexes that is cut: an unknown field of a user record, but not here.
        return None
    count = len(aggregate.records)
    if len(columns.data) != count or len(columns.partition_key_index) != count:
        return None
    return None if columns.explicit_hash_key_index else columns


def _of_columns(record: Record, keys: list[str], columns: Any) -> list[Record]:
    return list(
        map(
            Record,
            columns.data[:],
            map(keys.__getitem__, columns.partition_key_index[:]),
            itertools.repeat(record.sequence_number),
            itertools.repeat(record.approximate_arrival_timestamp),
            itertools.repeat(record.encryption_type),
            itertools.count(),
            itertools.repeat(None),  # `explicit_hash_key`
            itertools.repeat(True),
        )
    )


def _of_rows(
    record: Record,
    keys: list[str],
    hash_keys: dict[int, str | None],
    aggregate: WireAggregate,
) -> list[Record]:
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


def _present_and_empty(user: WireRecord) -> bytes:
    """Empty data, if the field is there. Called only for empty data: the field is required, and
    absent data reads as empty.
    """
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
