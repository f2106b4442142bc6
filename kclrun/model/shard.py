"""Shards, their hash ranges, and the graph that splits and merges make of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

__all__ = ["HASH_KEY_MAX", "ChildShard", "HashRange", "Shard", "ShardGraph"]

# Partition keys are hashed with MD5: 128 bits.
HASH_KEY_MAX: Final = 2**128 - 1


class HashRange(msgspec.Struct, frozen=True, order=True, gc=False):
    """A range of hash keys, inclusive at both ends, as in ListShards."""

    start: int
    end: int

    def __contains__(self, hash_key: int) -> bool:
        return self.start <= hash_key <= self.end

    def overlaps(self, other: HashRange) -> bool:
        return self.start <= other.end and other.start <= self.end


class Shard(msgspec.Struct, frozen=True, gc=False):
    """One shard as ListShards describes it. `ending_sequence_number` is set once it is closed."""

    shard_id: str
    hash_range: HashRange
    starting_sequence_number: str
    ending_sequence_number: str | None = None
    parent_shard_id: str | None = None
    adjacent_parent_shard_id: str | None = None

    @property
    def is_open(self) -> bool:
        return self.ending_sequence_number is None

    @property
    def parents(self) -> tuple[str, ...]:
        """None, one (a split, or an UpdateShardCount), or two (a merge) parent shard ids."""
        named = (self.parent_shard_id, self.adjacent_parent_shard_id)
        return tuple(shard_id for shard_id in named if shard_id is not None)


class ChildShard(msgspec.Struct, frozen=True, gc=False):
    """A child as the last GetRecords of a closed shard names it (`ChildShards`)."""

    shard_id: str
    parents: tuple[str, ...]
    hash_range: HashRange


class ShardGraph:
    """The shards of one complete listing, by id, with the edges in both directions.

    Parents that the service no longer lists (trimmed) are not part of the graph: `parents_of`
    leaves them out, `Shard.parents` still names them.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._shards: Mapping[str, Shard] = {shard.shard_id: shard for shard in shards}
        children: dict[str, list[str]] = {shard_id: [] for shard_id in self._shards}
        for shard in self._shards.values():
            for parent in shard.parents:
                if parent in children:
                    children[parent].append(shard.shard_id)
        self._children = {shard_id: tuple(sorted(ids)) for shard_id, ids in children.items()}

    def __contains__(self, shard_id: str) -> bool:
        return shard_id in self._shards

    def __getitem__(self, shard_id: str) -> Shard:
        return self._shards[shard_id]

    def __iter__(self) -> Iterator[Shard]:
        """All shards, in the order of their ids."""
        return (self._shards[shard_id] for shard_id in sorted(self._shards))

    def __len__(self) -> int:
        return len(self._shards)

    def get(self, shard_id: str) -> Shard | None:
        return self._shards.get(shard_id)

    def parents_of(self, shard_id: str) -> tuple[str, ...]:
        """The listed parents of a shard."""
        return tuple(parent for parent in self._shards[shard_id].parents if parent in self._shards)

    def children_of(self, shard_id: str) -> tuple[str, ...]:
        return self._children.get(shard_id, ())

    def open_shards(self) -> tuple[Shard, ...]:
        return tuple(shard for shard in self if shard.is_open)
