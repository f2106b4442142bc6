"""KPL aggregates made: user records in, the data of one Kinesis record out.

Rule: sizes are exact to the byte before anything is serialized, so the service never refuses an
aggregate for its size. The caller ensures that the user records of one aggregate belong to one
shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final, NamedTuple

from kclrun.codec import kpl
from kclrun.errors import LimitExceeded, MalformedAggregate
from kclrun.model.quotas import (
    PARTITION_KEY_CHARACTERS_MAX,
    RECORD_BYTES_DEFAULT,
    RECORD_BYTES_LARGEST,
)
from kclrun.model.record import PutEntry

# For `packed`. A record: two tags and lengths of its own, with its index, below 2 MiB. A key and a
# hash key of the tables: tag and length; a hash key has up to 39 digits, and its index.
_RECORD_BYTES_MAX: Final = 16
_KEY_BYTES_MAX: Final = 4
_HASH_KEY_BYTES_MAX: Final = 2 + 39 + 4


class AggregatedData(NamedTuple):
    """One record to put: the aggregate, and the routing keys, those of its first user record."""

    partition_key: str
    explicit_hash_key: str | None
    data: bytes

    def __repr__(self) -> str:
        """Without payload and keys: representations end up in logs."""
        return f"AggregatedData({len(self.data)} bytes)"


class _Growth(NamedTuple):
    """The growth by a user record: its key indexes, and bytes of the message."""

    key_index: int
    hash_key_index: int | None
    message_bytes: int


class Aggregator:
    """Packs user records into one aggregate until it is full. Not thread-safe.

    `size_max` bounds the aggregate plus its partition key, as the service counts a record.
    Raises: LimitExceeded if `size_max` is not between 1 and `RECORD_BYTES_LARGEST`.
    """

    def __init__(self, size_max: int = RECORD_BYTES_DEFAULT) -> None:
        if not 0 < size_max <= RECORD_BYTES_LARGEST:
            raise LimitExceeded(
                f"size_max is {size_max}; expected 1 to {RECORD_BYTES_LARGEST} bytes"
            )
        self._size_max = size_max
        self._clear()

    def _clear(self) -> None:
        self._keys: dict[str, int] = {}
        self._hash_keys: dict[str, int] = {}
        self._records: list[tuple[int, int | None, bytes]] = []
        self._message_bytes = 0
        self._outer_key_bytes = 0

    def __len__(self) -> int:
        """The number of user records in it."""
        return len(self._records)

    @property
    def size_bytes(self) -> int:
        """Its current size as the service counts it: magic, message, MD5 and partition key."""
        return len(kpl.MAGIC) + self._message_bytes + kpl.MD5_BYTES + self._outer_key_bytes

    def add(self, partition_key: str, data: bytes, explicit_hash_key: str | None = None) -> bool:
        """Add a user record; False, and nothing changed, if it does not fit.

        False from an empty aggregator means that it will never fit: put that record as it is.
        Raises: LimitExceeded if the service does not take a key.
        """
        key_bytes = _checked_key_bytes(partition_key)
        if explicit_hash_key is not None:
            kpl.parse_hash_key(explicit_hash_key)
        outer_key_bytes = self._outer_key_bytes if self._records else key_bytes
        growth = self._growth(partition_key, key_bytes, explicit_hash_key, len(data))
        message_bytes = self._message_bytes + growth.message_bytes
        size = len(kpl.MAGIC) + message_bytes + kpl.MD5_BYTES + outer_key_bytes
        if size > self._size_max or len(self._records) == kpl.USER_RECORDS_MAX:
            return False
        self._keys.setdefault(partition_key, growth.key_index)
        if explicit_hash_key is not None and growth.hash_key_index is not None:
            self._hash_keys.setdefault(explicit_hash_key, growth.hash_key_index)
        self._records.append((growth.key_index, growth.hash_key_index, data))
        self._message_bytes, self._outer_key_bytes = message_bytes, outer_key_bytes
        return True

    def finish(self) -> AggregatedData:
        """The aggregate of the added records. The aggregator is then empty and can be used again.

        Raises: MalformedAggregate if no record was added.
        """
        if not self._records:
            raise MalformedAggregate("an aggregate needs at least one user record")
        partition_key = next(iter(self._keys))
        first_hash_key_index = self._records[0][1]
        explicit_hash_key = None if first_hash_key_index is None else next(iter(self._hash_keys))
        data = self._serialized()
        self._clear()
        return AggregatedData(partition_key, explicit_hash_key, data)

    def _serialized(self) -> bytes:
        aggregate = kpl.new_aggregate(list(self._keys), list(self._hash_keys))
        for key_index, hash_key_index, data in self._records:
            # protobuf takes None for a field left out.
            aggregate.records.add(
                partition_key_index=key_index, explicit_hash_key_index=hash_key_index, data=data
            )
        message = aggregate.SerializeToString()
        assert len(message) == self._message_bytes, "the size of an aggregate was miscounted"
        return _framed(message)

    def _growth(
        self, partition_key: str, key_bytes: int, explicit_hash_key: str | None, data_bytes: int
    ) -> _Growth:
        added = 0
        key_index = self._keys.get(partition_key)
        if key_index is None:
            key_index = len(self._keys)
            added += _field_bytes(key_bytes)
        record_bytes = 1 + _varint_bytes(key_index) + _field_bytes(data_bytes)
        hash_key_index = None
        if explicit_hash_key is not None:
            hash_key_index = self._hash_keys.get(explicit_hash_key)
            if hash_key_index is None:
                hash_key_index = len(self._hash_keys)
                added += _field_bytes(len(explicit_hash_key))
            record_bytes += 1 + _varint_bytes(hash_key_index)
        return _Growth(key_index, hash_key_index, added + _field_bytes(record_bytes))


def packed(entries: Iterable[PutEntry], size_max: int) -> tuple[int, AggregatedData]:
    """An aggregate of the first entries, as many as certainly fit `size_max`, and their number.

    For a producer: the keys were checked, and sizes are bounded instead of counted, which takes a
    third of the time of `Aggregator.add`. The bound is at most 20 bytes a record above the size. An
    entry that is an aggregate itself ends it: readers do not open one inside another.
    """
    aggregate = kpl.new_aggregate((), ())
    add = aggregate.records.add
    keys: dict[str, int] = {}
    hash_keys: dict[str, int] = {}
    left = size_max - len(kpl.MAGIC) - kpl.MD5_BYTES
    count = 0
    for entry in entries:
        key, hash_key, data = entry.partition_key, entry.explicit_hash_key, entry.data
        left -= len(data) + _RECORD_BYTES_MAX
        key_index = keys.get(key)
        if key_index is None:
            key_index = len(keys)
            key_bytes = len(key) if key.isascii() else len(key.encode())
            # The first is the key of the aggregate, too.
            left -= _KEY_BYTES_MAX + (key_bytes if keys else 2 * key_bytes)
        if hash_key is not None:
            left -= _HASH_KEY_BYTES_MAX
        if left < 0 or entry.user_records > 1 or count == kpl.USER_RECORDS_MAX:
            break
        keys[key] = key_index
        if hash_key is None:
            add(partition_key_index=key_index, data=data)
        else:
            number = hash_keys.setdefault(hash_key, len(hash_keys))
            add(partition_key_index=key_index, explicit_hash_key_index=number, data=data)
        count += 1
    aggregate.partition_key_table.extend([key.encode() for key in keys])
    aggregate.explicit_hash_key_table.extend([key.encode() for key in hash_keys])
    first_key = next(iter(keys), "")
    first_hash_key = next(iter(hash_keys), None)
    is_routed = count > 0 and aggregate.records[0].HasField("explicit_hash_key_index")
    return count, AggregatedData(
        first_key, first_hash_key if is_routed else None, _framed(aggregate.SerializeToString())
    )


def _framed(message: bytes) -> bytes:
    return kpl.MAGIC + message + hashlib.md5(message, usedforsecurity=False).digest()


def build_aggregate(user_records: Iterable[tuple[str, bytes, str | None]]) -> bytes:
    """The data of one aggregate of (partition key, data, explicit hash key or None).

    Raises: LimitExceeded if they do not fit `RECORD_BYTES_LARGEST`; MalformedAggregate if there are
    none.
    """
    aggregator = Aggregator(size_max=RECORD_BYTES_LARGEST)
    for partition_key, data, explicit_hash_key in user_records:
        if not aggregator.add(partition_key, data, explicit_hash_key):
            raise LimitExceeded(
                f"user record {len(aggregator)} does not fit: an aggregate takes at most"
                f" {RECORD_BYTES_LARGEST} bytes and {kpl.USER_RECORDS_MAX} user records"
            )
    return aggregator.finish().data


def _checked_key_bytes(partition_key: str) -> int:
    if not 0 < len(partition_key) <= PARTITION_KEY_CHARACTERS_MAX:
        raise LimitExceeded(
            f"a partition key has {len(partition_key)} characters; the service takes 1 to"
            f" {PARTITION_KEY_CHARACTERS_MAX}"
        )
    try:
        return len(partition_key.encode())
    except UnicodeEncodeError:
        # Not chained: the original names the key.
        raise LimitExceeded("a partition key holds a lone surrogate and has no UTF-8") from None


def _field_bytes(length: int) -> int:
    """A length-delimited field on the wire: one byte of tag (numbers below 16), length, value."""
    return 2 + length if length < 128 else 1 + _varint_bytes(length) + length


def _varint_bytes(value: int) -> int:
    """Seven bits a byte, and one byte for 0."""
    return 1 if value < 128 else (value.bit_length() + 6) // 7
