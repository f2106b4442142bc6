"""One complete ListShards, with the edges that matter and a verdict on whether it hangs together.

Rule: what the service no longer lists (trimmed) may still be named as a parent by what it lists;
`children_named` follows those names, `graph` does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from kclrun.model.lease import Lease
from kclrun.model.shard import HashRange, Shard, ShardGraph
from kclrun.model.time import Instant, WallTime

__all__ = ["Listing"]


class Listing:
    """The shards of one complete listing, made at `listed_at` by the service's clock."""

    def __init__(self, shards: Iterable[Shard], listed_at: WallTime, seen_instant: Instant) -> None:
        self.shards = tuple(shards)
        self.graph = ShardGraph(self.shards)
        self.listed_at = listed_at
        self.seen_instant = seen_instant
        children: dict[str, list[str]] = {}
        for shard in self.shards:
            for parent in shard.parents:
                children.setdefault(parent, []).append(shard.shard_id)
        self._children = children

    def seen_again(self, listed_at: WallTime, seen_instant: Instant) -> Listing:
        """The same shards, listed once more: as nearly always."""
        again = Listing.__new__(Listing)
        again.__dict__ |= self.__dict__
        again.listed_at = listed_at
        again.seen_instant = seen_instant
        return again

    def __contains__(self, shard_id: str) -> bool:
        return shard_id in self.graph

    def range_of(self, shard_id: str) -> HashRange | None:
        shard = self.graph.get(shard_id)
        return None if shard is None else shard.hash_range

    def children_named(self, shard_id: str) -> tuple[str, ...]:
        """The listed shards that name this one as a parent, be it listed itself or not."""
        return tuple(self._children.get(shard_id, ()))

    @cached_property
    def inconsistency(self) -> str | None:
        """Why no lease may be created from this listing, or None.

        The Java KCL refuses a listing in which an open shard has children
        (`assertAllParentShardsAreClosed`): the service shows one while a reshard is under way.
        """
        for shard_id in self._children:
            parent = self.graph.get(shard_id)
            if parent is not None and parent.is_open:
                return f"shard {shard_id} is open and yet has children"
        return None

    def contradiction(self, rows: Iterable[Lease]) -> str | None:
        """Why this listing is older than the rows of a scan made before it, or None.

        A child has a row once its parent was read to its end, so the parent was closed by then;
        ListShards may still show it open for a while. By such a listing a shard that was read,
        ended and cleaned up would look like one without a lease, and be read again from its start.
        """
        for row in rows:
            for parent_id in row.parents:
                parent = self.graph.get(parent_id)
                if parent is not None and parent.is_open:
                    return f"shard {parent_id} is open there, and its child {row.key} has a lease"
        return None
