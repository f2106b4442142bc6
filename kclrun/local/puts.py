"""What is put: one record, its bounds, and what became of it.

Holds the checks that need no shard. May not know: streams. Source: PutRecord and PutRecords in the
Kinesis API reference. Rule: neither data nor partition key is named in a refusal.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kclrun.local.refusals import invalid_argument
from kclrun.model.shard import HASH_KEY_MAX

__all__ = ["PutEntry", "PutResult", "check_entry"]

_KEY_CHARACTERS_MAX: Final = 256
# 2**128 - 1 has 39 digits.
_HASH_KEY_DIGITS_MAX: Final = 39


class PutEntry(msgspec.Struct, frozen=True, gc=False):
    """One record to be written. `hash_key` is the ExplicitHashKey."""

    data: bytes = msgspec.field(name="Data")
    partition_key: str | None = msgspec.field(name="PartitionKey", default=None)
    hash_key: str | None = msgspec.field(name="ExplicitHashKey", default=None)


class PutResult(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What became of one record of a PutRecords: a place, or an error."""

    sequence_number: str | None = msgspec.field(name="SequenceNumber", default=None)
    shard_id: str | None = msgspec.field(name="ShardId", default=None)
    error_code: str | None = msgspec.field(name="ErrorCode", default=None)
    error_message: str | None = msgspec.field(name="ErrorMessage", default=None)


def check_entry(entry: PutEntry, bytes_max: int, where: str) -> int | None:
    """The explicit hash key as a number, if there is one. `where` names the record in a refusal.

    Raises: InvalidRequest for a key, an explicit hash key or a size out of bounds.
    """
    key = entry.partition_key
    if not key or len(key) > _KEY_CHARACTERS_MAX:
        raise invalid_argument(
            f"PartitionKey of {where} must have 1 to {_KEY_CHARACTERS_MAX} characters."
        )
    size_bytes = len(entry.data) + len(key.encode())
    if size_bytes > bytes_max:
        raise invalid_argument(
            f"{where} is of {size_bytes} bytes (data and partition key), more than the stream's"
            f" maximum of {bytes_max} bytes."
        )
    text = entry.hash_key
    if text is None:
        return None
    is_number = text.isascii() and text.isdigit() and len(text) <= _HASH_KEY_DIGITS_MAX
    if not is_number or int(text) > HASH_KEY_MAX:
        raise invalid_argument(
            f"ExplicitHashKey of {where} is not a number between 0 and {HASH_KEY_MAX}."
        )
    return int(text)
