"""One PutRecords as it is put together: the bounds of a record and of a request, and aggregates.

Only records of one key and one explicit hash key share an aggregate: an aggregate goes whole to
the shard of its first record, and a split not known here would put others where consumers do not
look for them. Pure. Look next: `pending_records.py`, which chooses what goes in.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kclrun.codec.aggregator import Aggregator
from kclrun.codec.hash_keys import parse_hash_key
from kclrun.errors import LimitExceeded
from kclrun.model.outgoing import PutEntry
from kclrun.sinks.flow_control import BATCH_RECORDS_MAX
from kclrun.sinks.lanes import Chain, Lane
from kclrun.sinks.producing import ProducerSettings

__all__ = ["AGGREGATE_BYTES_MAX", "Packer", "Part", "Request", "checked_size_bytes"]

# The KPL's default. One request at a time holds it, and 50 kB each 40 ms are a shard's 1 MiB/s.
AGGREGATE_BYTES_MAX: Final = 51_200
# PutRecords documents 1 to 256 characters.
_KEY_CHARS_MAX: Final = 256


class Part(NamedTuple):
    """One record of a request, its size, and what it came from: so many entries of a chain."""

    entry: PutEntry
    size_bytes: int
    chain: Chain
    held: int
    lane: Lane


class Request:
    """One PutRecords to be made: `entries`, in order. Hand it back with what became of it."""

    def __init__(self, sent_at: float, bytes_max: int) -> None:
        self.sent_at = sent_at
        self.parts: list[Part] = []
        self.lanes: dict[Lane, int] = {}
        self.is_full_speed = True
        self._bytes_left = bytes_max

    @property
    def entries(self) -> tuple[PutEntry, ...]:
        return tuple(part.entry for part in self.parts)

    def has_room(self, size_bytes: int) -> bool:
        """Whether it takes such a record. The first always fits: above the bytes it goes alone."""
        if not self.parts:
            return True
        return len(self.parts) < BATCH_RECORDS_MAX and size_bytes <= self._bytes_left

    def take(self, part: Part) -> None:
        self.parts.append(part)
        self._bytes_left -= part.size_bytes

    def __repr__(self) -> str:
        return f"Request({len(self.parts)} records)"


class Packer:
    """Makes the next record of a chain: its oldest entry, or an aggregate that begins with it."""

    def __init__(self, settings: ProducerSettings) -> None:
        size_max = min(AGGREGATE_BYTES_MAX, settings.record_bytes_max)
        self._aggregator = Aggregator(size_max) if settings.aggregates else None

    def next_record(self, chain: Chain) -> tuple[PutEntry, int, int]:
        """The record, its size, and how many of the chain's entries it holds."""
        oldest, size_bytes = chain.entries[0]
        if self._aggregator is None or len(chain.entries) == 1:
            return oldest, size_bytes, 1
        held = 0
        for entry, _ in chain.entries:
            # A record that is an aggregate already would not be opened a second time.
            is_alike = entry.explicit_hash_key == oldest.explicit_hash_key
            if not is_alike or entry.user_records > 1:
                break
            if not self._aggregator.add(entry.partition_key, entry.data, entry.explicit_hash_key):
                break
            held += 1
        if held == 0:
            return oldest, size_bytes, 1
        made = self._aggregator.finish()
        if held == 1:
            return oldest, size_bytes, 1
        aggregate = PutEntry(made.data, made.partition_key, made.explicit_hash_key, held)
        return aggregate, aggregate.size_bytes, held


def checked_size_bytes(entry: PutEntry, bytes_max: int) -> int:
    """The size of a record as the service counts it.

    Raises: LimitExceeded for a record it never takes; names neither data nor key.
    """
    characters = len(entry.partition_key)
    if not 0 < characters <= _KEY_CHARS_MAX:
        raise LimitExceeded(
            f"a partition key has {characters} characters; the service takes 1 to {_KEY_CHARS_MAX}"
        )
    if entry.explicit_hash_key is not None:
        parse_hash_key(entry.explicit_hash_key)
    try:
        size_bytes = entry.size_bytes
    except UnicodeEncodeError:
        # Not chained: the original names the key.
        raise LimitExceeded("a partition key holds a lone surrogate and has no UTF-8") from None
    if size_bytes > bytes_max:
        raise LimitExceeded(
            f"a record has {size_bytes} bytes, its key included; at most {bytes_max} are taken"
        )
    return size_bytes
