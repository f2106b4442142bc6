"""One PutRecords of a producer, and its records: each as it is, or many in a KPL aggregate. Pure.

An aggregate is stored whole in one shard, that of its first record, and readers of the KCL drop a
user record whose hash key is outside of the shard's range. So an aggregate holds only records that
belong to one shard by the last listing. If the service has stored it elsewhere, because the shard
was split meanwhile, the records that do not belong there are sent again (`PendingRecords`), as the
KPL does.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from kclrun.codec.aggregator import Aggregator
from kclrun.model.quotas import PUT_RECORDS_MAX
from kclrun.model.record import PutEntry
from kclrun.producing.flow_control import ProducerSettings
from kclrun.producing.shard_queues import KeyQueue, ShardQueue, hash_key_of

# The KPL's default. One request at a time has an aggregate of a key: 50 kB each 40 ms are 1 MiB/s.
AGGREGATE_BYTES_MAX: Final = 51_200


class Origin(NamedTuple):
    """The first `held` records of a key queue."""

    key_queue: KeyQueue
    held: int


class Part(msgspec.Struct, frozen=True):
    """One record of a request, as the service gets it, and where its records come from."""

    entry: PutEntry
    size_bytes: int
    origins: tuple[Origin, ...]
    shard_queue: ShardQueue

    @property
    def is_aggregate(self) -> bool:
        """Whether it was made of several records here."""
        return len(self.origins) > 1 or self.origins[0].held > 1

    @property
    def is_of_several_hash_keys(self) -> bool:
        """Whether some of its records may belong to another shard than others, after a split."""
        first = {hash_key_of(key_queue.entries[0].entry) for key_queue, _ in self.origins}
        return len(first) > 1


class Request:
    """One PutRecords to be made: `entries`, in order. Return it with its outcome."""

    def __init__(self, sent_at: float, bytes_max: int) -> None:
        self.sent_at = sent_at
        self.parts: list[Part] = []
        self.shard_queues: dict[ShardQueue, int] = {}
        self.is_full_speed = True
        self._bytes_left = bytes_max

    @property
    def entries(self) -> tuple[PutEntry, ...]:
        return tuple([part.entry for part in self.parts])

    def has_room(self, size_bytes: int) -> bool:
        """Whether such a record fits. The first always fits: above the byte limit it is alone."""
        if not self.parts:
            return True
        return len(self.parts) < PUT_RECORDS_MAX and size_bytes <= self._bytes_left

    def take(self, part: Part) -> None:
        self.parts.append(part)
        self._bytes_left -= part.size_bytes

    def __repr__(self) -> str:
        return f"Request({len(self.parts)} records)"


class Packer:
    """Makes the next record of a shard: its oldest entry, or an aggregate that begins with it."""

    def __init__(self, settings: ProducerSettings) -> None:
        size_max = min(AGGREGATE_BYTES_MAX, settings.record_bytes_max)
        self._aggregator = Aggregator(size_max) if settings.aggregates else None

    def next_record(self, shard_queue: ShardQueue) -> Part:
        """The record that begins with the oldest entry of the first key queue."""
        first = shard_queue.ready[0]
        alone = first.entries[0]
        if self._aggregator is None:
            return Part(alone.entry, alone.size_bytes, (Origin(first, 1),), shard_queue)
        key_queues = iter(shard_queue.ready)
        next(key_queues)
        origins: list[Origin] = []
        key_queue: KeyQueue | None = first
        while key_queue is not None:
            held = self._add_all(self._aggregator, key_queue)
            if held:
                origins.append(Origin(key_queue, held))
            if held < len(key_queue.entries):
                break
            key_queue = next(key_queues, None)
        if not origins:
            return Part(alone.entry, alone.size_bytes, (Origin(first, 1),), shard_queue)
        made = self._aggregator.finish()
        if len(origins) == 1 and origins[0].held == 1:
            return Part(alone.entry, alone.size_bytes, tuple(origins), shard_queue)
        count = sum([origin.held for origin in origins])
        aggregate = PutEntry(made.data, made.partition_key, made.explicit_hash_key, count)
        return Part(aggregate, aggregate.size_bytes, tuple(origins), shard_queue)

    def _add_all(self, aggregator: Aggregator, key_queue: KeyQueue) -> int:
        """How many of the queue's first records were added."""
        routed_by = key_queue.entries[0].entry.explicit_hash_key
        held = 0
        for record in key_queue.entries:
            entry = record.entry
            # An aggregate inside an aggregate would not be opened by readers. With one hash key a
            # key's records are all in the shard where they belong, or are all sent again.
            if entry.user_records > 1 or entry.explicit_hash_key != routed_by:
                break
            if not aggregator.add(entry.partition_key, entry.data, entry.explicit_hash_key):
                break
            held += 1
        return held
