"""Shards, their hash ranges, and the graph of their splits and merges."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from kclrun.errors import LimitExceeded

# Partition keys are hashed with MD5: 128 bits.
HASH_KEY_MAX: Final = 2**128 - 1
# Every shard id of the service begins with this; its number follows.
_NUMBERED: Final = "shardId-"


def hash_key_of(partition_key: str) -> int:
    """The hash key of a record without an explicit one: the MD5 of its partition key. Raises:
    LimitExceeded if the key cannot be written as UTF-8."""
    try:
        encoded = partition_key.encode()
    except UnicodeEncodeError:
        # Not chained: the original names the key.
        raise LimitExceeded("a partition key holds a lone surrogate and has no UTF-8") from None
    return int.from_bytes(hashlib.md5(encoded, usedforsecurity=False).digest(), "big")


class HashRange(msgspec.Struct, frozen=True, order=True, gc=False):
    """A range of hash keys, inclusive at both ends, as in ListShards."""

    start: int
    end: int

    def __contains__(self, hash_key: int) -> bool:
        return self.start <= hash_key <= self.end

    def overlaps(self, other: HashRange) -> bool:
        return self.start <= other.end and other.start <= self.end


# The shards of a DynamoDB stream have no hash keys. Each counts as one of all hash keys, so that a
# listing of any of them leaves none out.
ALL_HASH_KEYS: Final = HashRange(0, HASH_KEY_MAX)


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
        children: dict[str, list[str]] = {}
        for shard in self._shards.values():
            for parent in shard.parents:
                children.setdefault(parent, []).append(shard.shard_id)
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

    def unordered(self) -> Iterable[Shard]:
        """All shards, in any order."""
        return self._shards.values()

    def get(self, shard_id: str) -> Shard | None:
        return self._shards.get(shard_id)

    def parents_of(self, shard_id: str) -> tuple[str, ...]:
        """The listed parents of a shard."""
        return tuple(parent for parent in self._shards[shard_id].parents if parent in self._shards)

    def children_of(self, shard_id: str) -> tuple[str, ...]:
        """The listed children of a listed shard."""
        return self._children.get(shard_id, ()) if shard_id in self._shards else ()

    def children_naming(self, shard_id: str) -> tuple[str, ...]:
        """The listed shards that name it as a parent, whether or not it is listed itself."""
        return self._children.get(shard_id, ())

    def open_shards(self) -> tuple[Shard, ...]:
        return tuple(shard for shard in self if shard.is_open)


def is_older(one: str, other: str) -> bool:
    """Whether shard `one` was made before `other`: their numbers grow (`AFTER_SHARD_ID` of
    ListShards relies on it). Shard ids or lease keys; False where one of them has no number."""
    first, second = one.rpartition(":")[2], other.rpartition(":")[2]
    are_numbered = first.startswith(_NUMBERED) and second.startswith(_NUMBERED)
    return are_numbered and first < second


def is_of_changes(shard: str) -> bool:
    """Whether a shard, or the shard of a lease key, is one of a DynamoDB stream: its id has a third
    part, `shardId-<time>-<random>`. Such shards have no hash keys, their children may be listed one
    after the other, and they are not trimmed in the order of their ids."""
    return shard.rpartition(":")[2].removeprefix(_NUMBERED).count("-") > 0


def made_at(shard: str) -> float | None:
    """When a shard of a DynamoDB stream was made, by its id; None for another one."""
    time_ms = shard.rpartition(":")[2].removeprefix(_NUMBERED).partition("-")[0]
    return int(time_ms) / 1000 if is_of_changes(shard) and time_ms.isdecimal() else None


def is_too_new_for(
    shards: Iterable[Shard], shard_id: str, hash_range: HashRange | None, parents: Collection[str]
) -> bool:
    """Whether a shard that a listing lacks is too new for it, and not trimmed.

    Shards are trimmed oldest first. So if a parent, or an older shard of the same hash keys, is
    still listed, the shard is newer than the listing, which lags. For a shard of a DynamoDB stream
    only parents count.
    """
    has_order = hash_range is not None and not is_of_changes(shard_id)
    return any(
        shard.shard_id in parents
        or (
            has_order
            and hash_range is not None
            and shard.hash_range.overlaps(hash_range)
            and is_older(shard.shard_id, shard_id)
        )
        for shard in shards
    )
