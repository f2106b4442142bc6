"""The messages of `kpl.proto`, built when this module is imported.

Not generated code: protobuf accepts that only from its own major version and, with a warning,
from the one before, so one generated file cannot serve `protobuf>=6.31` for long. A descriptor
is plain data and has no such bounds. A pool of our own, so that other copies of the schema in the
process (aws_kinesis_agg has one) do not clash. A test compiles `kpl.proto` and compares.

Rule: this module and `kpl.proto` say the same. Look next: `kpl.py`, `aggregator.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

__all__ = [
    "ABSENT",
    "MAGIC",
    "MD5_BYTES",
    "RECORD_BYTES_MAX",
    "USER_RECORDS_MAX",
    "DecodeError",
    "WireAggregate",
    "WireRecord",
    "aggregate_descriptor",
    "new_aggregate",
    "parse_aggregate",
]

# "Aggregated record" format of the KPL: four bytes before the message, its MD5 after it.
MAGIC: Final = b"\xf3\x89\x9a\xc2"
MD5_BYTES: Final = 16
# What an index that was not written reads as (see kpl.proto).
ABSENT: Final = 2**64 - 1

# The largest record a stream can be set to take, partition key included.
RECORD_BYTES_MAX: Final = 10 * 1024 * 1024
# A classic record of 1 MiB full of user records of 4 bytes: each adds 2 bytes of framing, 2 of
# index and 2 before its data, so 10 bytes in all and 104,857 of them.
USER_RECORDS_MAX: Final = 100_000

_FILE: Final = "kclrun/codec/kpl.proto"
_PACKAGE: Final = "kclrun.kpl"


class WireRecord(Protocol):
    """One user record as the message holds it."""

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


def aggregate_descriptor() -> FileDescriptorProto:
    """`kpl.proto` as protobuf's own description of it."""
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
        default_value=str(ABSENT),
    )
    record.field.add(
        name="explicit_hash_key_index",
        number=2,
        label=field.LABEL_OPTIONAL,
        type=field.TYPE_UINT64,
        default_value=str(ABSENT),
    )
    record.field.add(name="data", number=3, label=field.LABEL_REQUIRED, type=field.TYPE_BYTES)
    record.reserved_range.add(start=4, end=5)
    return file


def _message_class() -> Any:
    pool = DescriptorPool()
    pool.AddSerializedFile(aggregate_descriptor().SerializeToString())
    return GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.AggregatedRecord"))


_AGGREGATED_RECORD: Final = _message_class()


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
