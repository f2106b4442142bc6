"""One shard of the model: its records in order, its trim horizon, its end.

It knows neither its stream nor wire formats nor clocks.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Final

import msgspec

from kclrun.local.limits import ShardLimits, ShardMeter, Storage
from kclrun.local.sequence_numbers import COUNTER_END, Numbering, ParsedNumber
from kclrun.model.shard import HashRange, Shard
from kclrun.model.time import WallTime

# The memory of a record besides data and key: the struct, the headers of three strings and bytes,
# 56 digits, two array slots. Measured with sys.getsizeof: about 300 bytes.
RECORD_OVERHEAD_BYTES: Final = 300
# Trimmed records are removed from the lists in batches, so that trimming costs amortised O(1) a
# record.
_TRIM_BATCH: Final = 1024


class StoredRecord(msgspec.Struct, frozen=True, gc=False):
    """A record as GetRecords returns it. Encoded as JSON it is in the answer's format."""

    sequence_number: str = msgspec.field(name="SequenceNumber")
    arrived_at: float = msgspec.field(name="ApproximateArrivalTimestamp")
    data: bytes = msgspec.field(name="Data")
    partition_key: str = msgspec.field(name="PartitionKey")


def shard_id_of(number: int) -> str:
    return f"shardId-{number:012d}"


class ShardLog:
    """One shard, open or closed: its records in order, its trim horizon, its end.

    A position counts all records written to the shard before it, so it stays valid when records
    are trimmed. Positions never go back. Arrival times in a shard never decrease, because a host
    clock that is set back must not reorder AT_TIMESTAMP.
    """

    def __init__(
        self,
        number: int,
        hash_range: HashRange,
        parents: tuple[ShardLog, ...],
        now: WallTime,
        limits: ShardLimits | None = None,
    ) -> None:
        after_parents = [parent.numbering.generation + 1 for parent in parents]
        generation = max([int(now), *after_parents])
        self.number = number
        self.shard_id = shard_id_of(number)
        self.hash_range = hash_range
        self.parents = tuple(parent.shard_id for parent in parents)
        self.children: list[ShardLog] = []
        self.numbering: Numbering = Numbering(generation, number)
        self.created_at = now
        self.closed_at: WallTime | None = None
        self.starting_number = str(self.numbering.number(0, generation))
        self.ending_number: str | None = None
        self._records: list[StoredRecord] = []
        self._arrivals = array("d")
        # Bytes of data and keys up to and including each record, since the shard was created.
        self._sizes = array("Q")
        self._dropped = 0
        self._trimmed = 0
        self._last_arrival = 0.0
        self._size_total = 0
        self._size_trimmed = 0
        self._size_dropped = 0
        # Called after each record, and after the close.
        self.watchers: set[Callable[[], None]] = set()
        self.meter = None if limits is None else ShardMeter(limits, now)

    @property
    def start(self) -> int:
        """The trim horizon: the position of the oldest record that is not trimmed."""
        return self._trimmed

    @property
    def end(self) -> int:
        """The position after the newest record."""
        return self._dropped + len(self._records)

    def append(
        self, data: bytes, partition_key: str, size_bytes: int, now: WallTime, storage: Storage
    ) -> StoredRecord:
        """Write one record. `size_bytes` is data and key, as the service counts them."""
        assert self.closed_at is None, self.shard_id
        # Rounded up to the next millisecond. So a record's arrival is never before a time that was
        # read before the put, such as its stream's creation or a pinned LATEST.
        arrived_at = max(self._last_arrival, math.ceil(now * 1000) / 1000)
        self._last_arrival = arrived_at
        number = self.numbering.number(self.end + 1, int(arrived_at))
        record = StoredRecord(str(number), arrived_at, data, partition_key)
        self._size_total += size_bytes
        self._records.append(record)
        self._arrivals.append(arrived_at)
        self._sizes.append(self._size_total)
        storage.used_bytes += size_bytes + RECORD_OVERHEAD_BYTES
        self._notify()
        return record

    def close(self, now: WallTime) -> None:
        """Stop writes. The records stay readable until they are trimmed."""
        self.closed_at = now
        self.ending_number = str(self.numbering.number(COUNTER_END, int(now)))
        self._notify()

    def number_at(self, position: int, now: WallTime) -> str:
        """A number between the record before a position and the record at it: reading after it
        begins at the position."""
        second = int(max(now, self._last_arrival))
        return str(self.numbering.number(position, second))

    def trim(self, horizon: WallTime, storage: Storage) -> None:
        """Remove the records that arrived before `horizon`."""
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
        if keep >= _TRIM_BATCH or keep == len(self._records):
            del self._records[:keep], self._arrivals[:keep], self._sizes[:keep]
            self._dropped = self._trimmed
            self._size_dropped = self._size_trimmed

    def position_at(self, timestamp: WallTime) -> int:
        """The first record that arrived at or after the time; the tip if there is none yet."""
        return max(self.start, self._dropped + bisect_left(self._arrivals, timestamp))

    def position_of(self, number: ParsedNumber, *, after: bool) -> int:
        """The first untrimmed record at (or after) a sequence number of this shard."""
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

        A first record that exceeds `bytes_max` alone is returned by itself, so reading goes on.
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
        """The arrival time of the untrimmed record at a position."""
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

    def _notify(self) -> None:
        for watcher in self.watchers:
            watcher()

    def free(self, storage: Storage) -> None:
        """Release the storage of all records, because the stream is deleted."""
        count = self.end - self._trimmed
        storage.used_bytes -= self._size_total - self._size_trimmed + count * RECORD_OVERHEAD_BYTES
