"""One stream of the model: hash routing, resharding, retention, and reading a shard to its end.

It knows neither other streams nor wire formats nor clocks. Sources: the Kinesis API reference;
where that says nothing, the behaviour that the Java KCL relies on.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from kclrun.errors import Throttled
from kclrun.local.hash_ranges import Merge, Split, even_ranges, even_ranges_near, steps_to
from kclrun.local.limits import ShardLimits, ShardMeter, Storage
from kclrun.local.refusals import (
    invalid_argument,
    limit_exceeded,
    resource_in_use,
    resource_not_found,
    throughput_exceeded,
    validation,
)
from kclrun.local.sequence_numbers import COUNTER_END, Numbering, ParsedNumber
from kclrun.model.quotas import (
    GET_BYTES_MAX,
    HASH_KEY_DIGITS_MAX,
    PARTITION_KEY_CHARACTERS_MAX,
    RECORD_BYTES_DEFAULT,
    RETENTION_HOURS_MIN,
)
from kclrun.model.shard import HASH_KEY_MAX, ChildShard, HashRange, Shard, hash_key_of
from kclrun.model.time import WallTime

# A record to put, its bounds, and its result. A refusal names neither data nor partition key.


class PutEntry(msgspec.Struct, frozen=True, gc=False):
    """One record to be written. `hash_key` is the ExplicitHashKey."""

    data: bytes = msgspec.field(name="Data")
    partition_key: str | None = msgspec.field(name="PartitionKey", default=None)
    hash_key: str | None = msgspec.field(name="ExplicitHashKey", default=None)


class PutResult(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The result of one record of a PutRecords: its shard and sequence number, or an error."""

    sequence_number: str | None = msgspec.field(name="SequenceNumber", default=None)
    shard_id: str | None = msgspec.field(name="ShardId", default=None)
    error_code: str | None = msgspec.field(name="ErrorCode", default=None)
    error_message: str | None = msgspec.field(name="ErrorMessage", default=None)


def check_entry(entry: PutEntry, bytes_max: int, where: str) -> int | None:
    """The explicit hash key as a number, if there is one. `where` names the record in a refusal.

    Raises: InvalidRequest for a key, an explicit hash key or a size out of bounds.
    """
    key = entry.partition_key
    if not key or len(key) > PARTITION_KEY_CHARACTERS_MAX:
        raise invalid_argument(
            f"PartitionKey of {where} must have 1 to {PARTITION_KEY_CHARACTERS_MAX} characters."
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
    is_number = text.isascii() and text.isdigit() and len(text) <= HASH_KEY_DIGITS_MAX
    if not is_number or int(text) > HASH_KEY_MAX:
        raise invalid_argument(
            f"ExplicitHashKey of {where} is not a number between 0 and {HASH_KEY_MAX}."
        )
    return int(text)


# The modes of a stream. The model does not scale by itself.
PROVISIONED: Final = "PROVISIONED"
ON_DEMAND: Final = "ON_DEMAND"
# "You can assign up to 50 tags to a data stream." Their keys may not begin as AWS's own do.
_TAGS_MAX: Final = 50
_OF_AWS: Final = "aws:"


def add_tags(tags: dict[str, str], more: Mapping[str, str]) -> None:
    """Add or replace tags. Raises: InvalidRequest, before anything is changed."""
    if any(key.lower().startswith(_OF_AWS) for key in more):
        raise invalid_argument(f"The key of a tag must not begin with {_OF_AWS}")
    if len(tags.keys() | more.keys()) > _TAGS_MAX:
        raise invalid_argument(f"There would be more than {_TAGS_MAX} tags.")
    tags.update(more)


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


_DAY_S: Final = 24 * 3600.0
RETENTION_DEFAULT_S: Final = RETENTION_HOURS_MIN * 3600.0
# UpdateShardCount: "Scale more than ten times per rolling 24-hour period per stream", "Scale up to
# more than 10000 shards in a stream".
_SCALINGS_MAX: Final = 10
SCALED_SHARDS_MAX: Final = 10_000


class Page(msgspec.Struct, frozen=True):
    """The result of one read of a shard. `next_position` None is the end of a closed shard."""

    records: list[StoredRecord]
    next_position: int | None
    millis_behind_latest: int
    children: tuple[ChildShard, ...] = ()


class Stream:
    """One stream and all its shards that are not removed yet.

    The open shards tile the hash space at every moment. A closed shard keeps its records until the
    retention trims them, and is listed until its end is older than the retention.
    """

    def __init__(
        self,
        *,
        name: str,
        arn: str,
        stream_id: int,
        account_id: str,
        shard_count: int,
        now: WallTime,
        storage: Storage,
        limits: ShardLimits | None = None,
        settle_s: float = 0.0,
        update_s: float = 0.0,
        record_bytes_max: int = RECORD_BYTES_DEFAULT,
        mode: str = PROVISIONED,
    ) -> None:
        self.name = name
        self.arn = arn
        self.stream_id = stream_id
        self.created_at = now
        self.retention_s = RETENTION_DEFAULT_S
        self.record_bytes_max = record_bytes_max
        self.tags: dict[str, str] = {}
        self.mode = mode
        # Remembered for the descriptions; nothing here depends on them.
        self.encryption_key: str | None = None
        self.shard_metrics: frozenset[str] = frozenset()
        self._account_id = account_id
        self._storage = storage
        self._limits = limits
        self._settle_s = settle_s
        self._update_s = max(settle_s, update_s)
        # When UpdateShardCount was called, in the last day.
        self._scaled_at: deque[WallTime] = deque()
        self._phase = "CREATING"
        self._settled_at = WallTime(now + settle_s)
        self._shards: dict[str, ShardLog] = {}
        self._next_number = 0
        # The routing table: the open shards by the start of their hash range.
        self._open_shards = [
            self._open(even_range, (), now) for even_range in even_ranges(shard_count)
        ]
        self._open_starts = [shard.hash_range.start for shard in self._open_shards]

    def status(self, now: WallTime) -> str:
        """CREATING or UPDATING until the change has settled, DELETING until it is removed."""
        return "ACTIVE" if now >= self._settled_at and self._phase != "DELETING" else self._phase

    def is_gone(self, now: WallTime) -> bool:
        return self._phase == "DELETING" and now >= self._settled_at

    def delete(self, now: WallTime) -> None:
        """Remove the records at once. The stream itself is removed after `settle_s`."""
        self._enter("DELETING", now)
        for shard in self._shards.values():
            shard.free(self._storage)
        for kept in (self._shards, self._open_shards, self._open_starts):
            kept.clear()

    def horizon(self, now: WallTime) -> WallTime:
        """The arrival time before which records are trimmed."""
        return WallTime(max(now - self.retention_s, self.created_at))

    def shards(self, now: WallTime) -> list[ShardLog]:
        """All shards that can still hold records, oldest first."""
        self.trim(now)
        return list(self._shards.values())

    def open_shards(self) -> list[ShardLog]:
        """In the order of their hash ranges; a later split or merge does not change the list."""
        return self._open_shards.copy()

    def shard(self, shard_id: str, now: WallTime) -> ShardLog:
        """Raises: NotFound, also for a closed shard whose records have all expired."""
        shard = self._shards.get(shard_id)
        if shard is None or self._is_forgotten(shard, now):
            raise resource_not_found(
                f"Could not find shard {shard_id} in stream {self.name} under account"
                f" {self._account_id}."
            )
        return shard

    def trim(self, now: WallTime) -> None:
        """Remove records older than the retention, and shards that were closed before that."""
        horizon = self.horizon(now)
        for shard in list(self._shards.values()):
            shard.trim(horizon, self._storage)
            if self._is_forgotten(shard, now):
                # If a clock was set back, records may have arrived "after" the shard was closed.
                shard.free(self._storage)
                del self._shards[shard.shard_id]

    def put(
        self, data: bytes, partition_key: str, hash_key: int | None, now: WallTime
    ) -> tuple[str, StoredRecord]:
        """Write one record. Also returns its shard's id. `hash_key` overrides the key's MD5.

        The caller must check the bounds of a record. Raises: Throttled (a shard's rate, or the
        whole model's bytes).
        """
        size_bytes = len(data) + len(partition_key.encode())
        key = hash_key_of(partition_key) if hash_key is None else hash_key
        shard = self._open_at(key)
        self._reserve(size_bytes)
        if shard.meter is not None and not shard.meter.admit_write(size_bytes, now):
            raise self._rate_exceeded(shard)
        return shard.shard_id, shard.append(data, partition_key, size_bytes, now, self._storage)

    def read(self, shard_number: int, position: int, limit: int, now: WallTime) -> Page:
        """Up to `limit` records from a position on. Raises: NotFound, Throttled.

        The page that reaches the end of a closed shard ends it, with or without records. A page
        that is filled to a bound never ends the shard, because it does not look further.
        """
        shard = self.shard(shard_id_of(shard_number), now)
        shard.trim(self.horizon(now), self._storage)
        meter = shard.meter
        if meter is not None and not meter.admit_read(now):
            raise self._rate_exceeded(shard)
        first = max(position, shard.start)
        records = shard.page(first, limit, GET_BYTES_MAX)
        following = first + len(records)
        if meter is not None:
            meter.count_read(shard.size_between(first, following), now)
        if following < shard.end:
            behind_s = now - shard.arrival_of(following)
            return Page(records, following, max(1, int(behind_s * 1000)))
        if shard.closed_at is None or len(records) == limit:
            return Page(records, following, 0)
        return Page(records, None, 0, self.children_of(shard))

    def children_of(self, shard: ShardLog) -> tuple[ChildShard, ...]:
        return tuple(
            ChildShard(child.shard_id, child.parents, child.hash_range)
            for child in shard.children
            if child.shard_id in self._shards
        )

    def split(self, shard_id: str, at: int, now: WallTime) -> None:
        """Close a shard and open two. Raises: NotFound, InvalidRequest, Unavailable (in use)."""
        self._require_scalable("SplitShard", now)
        shard = self._open_shard(shard_id, now)
        if not shard.hash_range.start + 1 < at < shard.hash_range.end:
            raise invalid_argument(
                f"NewStartingHashKey {at} used in SplitShard() on shard {shard_id} in stream"
                f" {self.name} under account {self._account_id} is not both greater than one plus"
                f" the shard's StartingHashKey {shard.hash_range.start} and less than the shard's"
                f" EndingHashKey {shard.hash_range.end}."
            )
        self._apply(Split(shard.hash_range, at), now)
        self._enter("UPDATING", now)

    def merge(self, shard_id: str, adjacent_id: str, now: WallTime) -> None:
        """Close two neighbours and open one. Raises: NotFound, InvalidRequest, Unavailable."""
        self._require_scalable("MergeShards", now)
        one, other = self._open_shard(shard_id, now), self._open_shard(adjacent_id, now)
        low, high = sorted((one, other), key=lambda shard: shard.hash_range.start)
        if low.hash_range.end + 1 != high.hash_range.start:
            raise invalid_argument(
                f"Shards {shard_id} and {adjacent_id} in stream {self.name} under account"
                f" {self._account_id} are not an adjacent pair of shards eligible for merging"
            )
        self._apply(Merge(one.hash_range, other.hash_range), now)
        self._enter("UPDATING", now)

    def update_shard_count(self, count: int, now: WallTime) -> None:
        """Uniform scaling. Raises: InvalidRequest (beyond double or half; its mode), Throttled
        (too often, with limits), Unavailable."""
        self._require_scalable("UpdateShardCount", now)
        current = len(self._open_shards)
        if count > 2 * current or 2 * count < current or count > SCALED_SHARDS_MAX:
            raise invalid_argument(
                f"UpdateShardCount cannot go from {current} open shards to {count}: at most double"
                f" and at least half of the current count is possible in one call, and at most"
                f" {SCALED_SHARDS_MAX} shards."
            )
        if self._limits is not None:
            self._count_scaling(now)
        ranges = [shard.hash_range for shard in self._open_shards]
        for step in steps_to(ranges, even_ranges_near(ranges, count)):
            self._apply(step, now)
        self._enter("UPDATING", now)

    def _count_scaling(self, now: WallTime) -> None:
        while self._scaled_at and self._scaled_at[0] <= now - _DAY_S:
            self._scaled_at.popleft()
        if len(self._scaled_at) >= _SCALINGS_MAX:
            raise limit_exceeded(
                f"Stream {self.name} under account {self._account_id} was scaled {_SCALINGS_MAX}"
                " times within 24 hours, the most that is possible."
            )
        self._scaled_at.append(now)

    def change(self, now: WallTime) -> None:
        """One of its settings changes: it is UPDATING. Raises: Unavailable (in use)."""
        self._require_active(now)
        self._enter("UPDATING", now)

    def change_mode(self, mode: str, now: WallTime) -> None:
        """Raises: Unavailable (in use)."""
        self.change(now)
        self.mode = mode

    def encrypt(self, key: str | None, now: WallTime) -> None:
        """Remember the key of encryption at rest, None for none. Raises: Unavailable (in use)."""
        self.change(now)
        self.encryption_key = key

    def _apply(self, step: Split | Merge, now: WallTime) -> None:
        parents: tuple[ShardLog, ...]
        ranges: tuple[HashRange, ...]
        match step:
            case Split(whole, at):
                parents = (self._open_at(whole.start),)
                ranges = (HashRange(whole.start, at - 1), HashRange(at, whole.end))
            case Merge(one, other):
                parents = (self._open_at(one.start), self._open_at(other.start))
                ranges = (HashRange(min(one.start, other.start), max(one.end, other.end)),)
        first = bisect_left(self._open_starts, ranges[0].start)
        for parent in parents:
            parent.close(now)
        children = [self._open(hash_range, parents, now) for hash_range in ranges]
        # In place: UpdateShardCount takes a step for each of thousands of shards.
        self._open_shards[first : first + len(parents)] = children
        self._open_starts[first : first + len(parents)] = [
            hash_range.start for hash_range in ranges
        ]

    def _open_at(self, hash_key: int) -> ShardLog:
        return self._open_shards[bisect_right(self._open_starts, hash_key) - 1]

    def _open(
        self, hash_range: HashRange, parents: tuple[ShardLog, ...], now: WallTime
    ) -> ShardLog:
        shard = ShardLog(self._next_number, hash_range, parents, now, self._limits)
        self._next_number += 1
        self._shards[shard.shard_id] = shard
        for parent in parents:
            parent.children.append(shard)
        return shard

    def _open_shard(self, shard_id: str, now: WallTime) -> ShardLog:
        shard = self.shard(shard_id, now)
        if shard.closed_at is not None:
            raise invalid_argument(
                f"Shard {shard_id} in stream {self.name} under account {self._account_id} is"
                " closed: only open shards can be split or merged."
            )
        return shard

    def _reserve(self, size_bytes: int) -> None:
        if not self._storage.has_room(size_bytes + RECORD_OVERHEAD_BYTES):
            raise throughput_exceeded(
                f"The embedded Kinesis is full: {self._storage.used_bytes} of at most"
                f" {self._storage.bytes_max} bytes are held and none is older than its stream's"
                " retention. Delete a stream, or start it with a larger stored_bytes_max."
            )

    def _require_active(self, now: WallTime) -> None:
        if self.status(now) != "ACTIVE":
            raise resource_in_use(
                f"Stream {self.name} under account {self._account_id} not ACTIVE, instead in"
                f" state {self.status(now)}"
            )

    def _require_scalable(self, operation: str, now: WallTime) -> None:
        self._require_active(now)
        if self.mode == ON_DEMAND:
            raise validation(
                f"{operation} is not possible for stream {self.name} under account"
                f" {self._account_id}: its mode is {ON_DEMAND}."
            )

    def _enter(self, phase: str, now: WallTime) -> None:
        self._phase = phase
        self._settled_at = WallTime(
            now + (self._update_s if phase == "UPDATING" else self._settle_s)
        )

    def _is_forgotten(self, shard: ShardLog, now: WallTime) -> bool:
        return shard.closed_at is not None and shard.closed_at < now - self.retention_s

    def _rate_exceeded(self, shard: ShardLog) -> Throttled:
        return throughput_exceeded(
            f"Rate exceeded for shard {shard.shard_id} in stream {self.name} under account"
            f" {self._account_id}."
        )
