"""The shards of one stream, and the routing of hash keys to the open ones.

It knows neither records nor names of streams nor clocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from kclrun.local.hash_ranges import Merge, Split, even_ranges
from kclrun.local.limits import ShardLimits
from kclrun.local.shard_log import ShardLog
from kclrun.model.shard import ChildShard, HashRange
from kclrun.model.time import WallTime


class ShardMap:
    """All shards that are not removed yet, oldest first. The open ones tile the hash space at every
    moment."""

    def __init__(self, shard_count: int, now: WallTime, limits: ShardLimits | None) -> None:
        self._limits = limits
        self._shards: dict[str, ShardLog] = {}
        self._next_number = 0
        # The routing table: the open shards by the start of their hash range.
        self._open_shards = [
            self._open(even_range, (), now) for even_range in even_ranges(shard_count)
        ]
        self._open_starts = [shard.hash_range.start for shard in self._open_shards]

    def all(self) -> list[ShardLog]:
        return list(self._shards.values())

    def open(self) -> list[ShardLog]:
        """In the order of their hash ranges; a later split or merge does not change the list."""
        return self._open_shards.copy()

    @property
    def open_count(self) -> int:
        return len(self._open_shards)

    def get(self, shard_id: str) -> ShardLog | None:
        return self._shards.get(shard_id)

    def open_at(self, hash_key: int) -> ShardLog:
        """The shard that gets the records of a hash key."""
        return self._open_shards[bisect_right(self._open_starts, hash_key) - 1]

    def children_of(self, shard: ShardLog) -> tuple[ChildShard, ...]:
        """Those that are not removed."""
        return tuple(
            ChildShard(child.shard_id, child.parents, child.hash_range)
            for child in shard.children
            if child.shard_id in self._shards
        )

    def remove(self, shard: ShardLog) -> None:
        """Forget a closed shard."""
        del self._shards[shard.shard_id]

    def clear(self) -> None:
        for shards in (self._shards, self._open_shards, self._open_starts):
            shards.clear()

    def reshard(self, step: Split | Merge, now: WallTime) -> None:
        """Close the shards of these hash ranges and open their children."""
        parents: tuple[ShardLog, ...]
        ranges: tuple[HashRange, ...]
        match step:
            case Split(whole, at):
                parents = (self.open_at(whole.start),)
                ranges = (HashRange(whole.start, at - 1), HashRange(at, whole.end))
            case Merge(one, other):
                parents = (self.open_at(one.start), self.open_at(other.start))
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

    def _open(
        self, hash_range: HashRange, parents: tuple[ShardLog, ...], now: WallTime
    ) -> ShardLog:
        shard = ShardLog(self._next_number, hash_range, parents, now, self._limits)
        self._next_number += 1
        self._shards[shard.shard_id] = shard
        for parent in parents:
            parent.children.append(shard)
        return shard
