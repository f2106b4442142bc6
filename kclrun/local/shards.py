"""One shard: its records in order, its trim horizon, its end.

A position counts the records ever written to the shard before it, so it stays true when records
are trimmed. May not know: streams, iterators, limits. Rule: positions never go back, and arrival
times in a shard never decrease (a host clock that is set back must not reorder AT_TIMESTAMP).
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from typing import Final

import msgspec

from kclrun.local.limits import Storage
from kclrun.local.sequence_numbers import COUNTER_END, Numbering, ParsedNumber
from kclrun.model.shard import HashRange, Shard
from kclrun.model.time import WallTime

__all__ = ["RECORD_OVERHEAD_BYTES", "ShardLog", "StoredRecord", "shard_id_of"]

# What a record costs beside data and key: the struct, the headers of three strings and bytes,
# 56 digits, two array slots. Measured with sys.getsizeof: about 300 bytes.
RECORD_OVERHEAD_BYTES: Final = 300
# Trimmed records leave the lists in lots, so that trimming costs amortised O(1) a record.
_TRIM_LOT: Final = 1024


class StoredRecord(msgspec.Struct, frozen=True, gc=False):
    """A record as GetRecords gives it: encoding it as JSON is the answer's own form."""

    sequence_number: str = msgspec.field(name="SequenceNumber")
    arrived_at: float = msgspec.field(name="ApproximateArrivalTimestamp")
    data: bytes = msgspec.field(name="Data")
    partition_key: str = msgspec.field(name="PartitionKey")


def shard_id_of(number: int) -> str:
    return f"shardId-{number:012d}"


class ShardLog:
    """One shard, open or closed."""

    def __init__(
        self,
        number: int,
        hash_range: HashRange,
        parents: tuple[ShardLog, ...],
        now: WallTime,
    ) -> None:
        after_parents = [parent.numbering.generation + 1 for parent in parents]
        generation = max([int(now), *after_parents])
        self.number = number
        self.shard_id = shard_id_of(number)
        self.hash_range = hash_range
        self.parents = tuple(parent.shard_id for parent in parents)
        self.numbering: Numbering = Numbering(generation, number)
        self.created_at = now
        self.closed_at: WallTime | None = None
        self.starting_number = str(self.numbering.number(0, generation))
        self.ending_number: str | None = None
        self._records: list[StoredRecord] = []
        self._arrivals = array("d")
        # Bytes of data and keys up to and including each record, since the shard was made.
        self._sizes = array("Q")
        self._dropped = 0
        self._trimmed = 0
        self._last_arrival = 0.0
        self._size_total = 0
        self._size_trimmed = 0
        self._size_dropped = 0

    @property
    def start(self) -> int:
        """The trim horizon: the position of the oldest record still there."""
        return self._trimmed

    @property
    def end(self) -> int:
        """The position behind the newest record."""
        return self._dropped + len(self._records)

    def append(
        self, data: bytes, partition_key: str, size_bytes: int, now: WallTime, storage: Storage
    ) -> StoredRecord:
        """Write one record. `size_bytes` is data and key, as the service counts them."""
        assert self.closed_at is None, self.shard_id
        # Up to the next millisecond: a record never seems to have arrived before a time that was
        # taken before it was put, such as its stream's creation or a pinned LATEST.
        arrived_at = max(self._last_arrival, math.ceil(now * 1000) / 1000)
        self._last_arrival = arrived_at
        number = self.numbering.number(self.end + 1, int(arrived_at))
        record = StoredRecord(str(number), arrived_at, data, partition_key)
        self._size_total += size_bytes
        self._records.append(record)
        self._arrivals.append(arrived_at)
        self._sizes.append(self._size_total)
        storage.used_bytes += size_bytes + RECORD_OVERHEAD_BYTES
        return record

    def close(self, now: WallTime) -> None:
        """Nothing is written any more; what is there stays readable until it is trimmed."""
        self.closed_at = now
        self.ending_number = str(self.numbering.number(COUNTER_END, int(now)))

    def trim(self, horizon: WallTime, storage: Storage) -> None:
        """Forget what arrived before `horizon`."""
        head = self._trimmed - self._dropped
        if head == len(self._records) or self._arrivals[head] >= horizon:
            return
        keep = bisect_left(self._arrivals, horizon, head)
        size_before = self._size_trimmed
        self._size_trimmed = self._sizes[keep - 1]
        storage.used_bytes -= (
            self._size_trimmed - size_before + (keep - head) * RECORD_OVERHEAD_BYTES
        )
        self._trimmed = self._dropped + keep
        if keep >= _TRIM_LOT or keep == len(self._records):
            del self._records[:keep], self._arrivals[:keep], self._sizes[:keep]
            self._dropped = self._trimmed
            self._size_dropped = self._size_trimmed

    def position_at(self, timestamp: WallTime) -> int:
        """The first record that arrived at or after the time; the tip if there is none yet."""
        return max(self.start, self._dropped + bisect_left(self._arrivals, timestamp))

    def position_of(self, number: ParsedNumber, *, after: bool) -> int:
        """The first record at (or after) a sequence number of this shard; never trimmed ones."""
        position = number.counter - 1
        if position < self.start:
            return self.start
        if position >= self.end:
            return self.end
        here = int(self._records[position - self._dropped].sequence_number)
        passed = here <= number.value if after else here < number.value
        return position + 1 if passed else position

    def page(self, position: int, count_max: int, bytes_max: int) -> list[StoredRecord]:
        """Records from a position on, bounded in number and in bytes of data and keys.

        A first record that is alone above `bytes_max` is given by itself, so reading goes on.
        """
        first = max(position, self.start) - self._dropped
        last = min(first + count_max, len(self._records))
        if first >= last:
            return []
        before = self._sizes[first - 1] if first else self._size_dropped
        by_size = bisect_right(self._sizes, before + bytes_max, first, last)
        return self._records[first : max(by_size, first + 1)]

    def size_between(self, first: int, last: int) -> int:
        """Bytes of data and keys of the records from one position up to another."""
        if last <= first:
            return 0
        low, high = first - self._dropped, last - self._dropped
        before = self._sizes[low - 1] if low else self._size_dropped
        return self._sizes[high - 1] - before

    def arrival_of(self, position: int) -> float:
        """When the record at a position that is still there arrived."""
        return self._arrivals[position - self._dropped]

    def describe(self) -> Shard:
        parents = (*self.parents, None, None)
        return Shard(
            shard_id=self.shard_id,
            hash_range=self.hash_range,
            starting_sequence_number=self.starting_number,
            ending_sequence_number=self.ending_number,
            parent_shard_id=parents[0],
            adjacent_parent_shard_id=parents[1],
        )

    def free(self, storage: Storage) -> None:
        """Give the storage of all records back: the stream is deleted."""
        count = self.end - self._trimmed
        storage.used_bytes -= self._size_total - self._size_trimmed + count * RECORD_OVERHEAD_BYTES
