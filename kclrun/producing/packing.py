"""One PutRecords of a producer, and its records: each as it is, or many in a KPL aggregate. Pure.

An aggregate is stored whole in one shard, that of its first record, and readers of the KCL drop a
user record whose hash key is outside of the shard's range. So an aggregate holds only records that
belong to one shard by the last listing. If the service has stored it elsewhere, because the shard
was split meanwhile, the records that do not belong there are sent again (`PendingRecords`), as the
KPL does.
"""

from __future__ import annotations

import itertools

import msgspec

from kclrun.codec.aggregator import packed
from kclrun.model.quotas import PUT_RECORDS_MAX
from kclrun.model.record import PutEntry
from kclrun.producing.aggregate_queues import AGGREGATE_BYTES_MAX
from kclrun.producing.flow_control import ProducerSettings
from kclrun.producing.shard_queues import OrderedQueue, ShardQueue, hash_key_of


class Part(msgspec.Struct, frozen=True):
    """One record of a request, as the service gets it: the first `held` records of a queue."""

    entry: PutEntry
    size_bytes: int
    queue: OrderedQueue
    held: int
    shard_queue: ShardQueue

    @property
    def is_aggregate(self) -> bool:
        """Whether it was made of several records here."""
        return self.held > 1

    @property
    def is_of_several_hash_keys(self) -> bool:
        """Whether some of its records may belong to another shard than others, after a split."""
        held = itertools.islice(self.queue.entries, self.held)
        return len({hash_key_of(record.entry) for record in held}) > 1


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
        self._makes_aggregates = settings.aggregates
        self._size_max = min(AGGREGATE_BYTES_MAX, settings.record_bytes_max)

    def next_record(self, shard_queue: ShardQueue) -> Part:
        """The record that begins with the oldest entry of the first queue."""
        queue = shard_queue.ready[0]
        if self._makes_aggregates and len(queue.entries) > 1:
            held, made = packed((record.entry for record in queue.entries), self._size_max)
            if held > 1:
                entry = PutEntry(made.data, made.partition_key, made.explicit_hash_key, held)
                return Part(entry, entry.size_bytes, queue, held, shard_queue)
        alone = queue.entries[0]
        return Part(alone.entry, alone.size_bytes, queue, 1, shard_queue)
