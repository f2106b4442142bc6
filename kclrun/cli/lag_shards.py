"""Which shards an application has still to read, whether they have a lease or not. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from kclrun.config.start_position import StartPosition
from kclrun.model.lease import Lease
from kclrun.model.reading import IteratorType, StartPoint
from kclrun.model.sequence import LATEST, TRIM_HORIZON
from kclrun.model.shard import Shard, ShardGraph
from kclrun.model.stream_key import called

__all__ = ["Unleased", "unleased", "waiting_for"]


class Unleased(msgspec.Struct, frozen=True):
    """A shard without a lease that is to be read: where from (None: from its tip), and why."""

    shard_id: str
    start: StartPoint | None
    note: str


def unleased(
    shards: Iterable[Shard], leases: Mapping[str, Lease], first: StartPosition
) -> tuple[Unleased, ...]:
    """The listed shards without a lease that were not read.

    One whose descendant has a lease was: its own row was cleaned up [P13]. In a table with rows, a
    new lease begins at its shard's beginning; in an empty one where `start:` (`first`) says.
    """
    graph = ShardGraph(shards)
    has_begun = bool(leases)
    is_read: dict[str, bool] = {}

    def was_read(shard_id: str) -> bool:
        # Shard ids grow from parents to children, so a chain is as deep as a shard's reshards.
        if shard_id not in is_read:
            is_read[shard_id] = any(
                child in leases or was_read(child) for child in graph.children_of(shard_id)
            )
        return is_read[shard_id]

    return tuple(
        Unleased(
            shard.shard_id,
            StartPoint(IteratorType.TRIM_HORIZON) if has_begun else _first_start(first),
            _why(graph, shard.shard_id, leases) if has_begun else "not begun: there is no lease",
        )
        for shard in graph
        if shard.shard_id not in leases and not was_read(shard.shard_id)
    )


def waiting_for(lease: Lease, leases: Mapping[str, Lease]) -> tuple[str, ...]:
    """The parents that must end before this lease may be read."""
    return tuple(
        parent
        for parent in sorted(lease.parents)
        if parent in leases and not leases[parent].is_ended
    )


def _why(graph: ShardGraph, shard_id: str, leases: Mapping[str, Lease]) -> str:
    parents = [parent for parent in graph.parents_of(shard_id) if parent in leases]
    if any(not leases[parent].is_ended for parent in parents):
        return f"no lease yet: it is made when {' and '.join(map(called, parents))} ended"
    return "no lease: a running manager makes one within a few cycles"


def _first_start(first: StartPosition) -> StartPoint | None:
    if first.sentinel == LATEST:
        return None
    if first.sentinel == TRIM_HORIZON:
        return StartPoint(IteratorType.TRIM_HORIZON)
    return StartPoint(IteratorType.AT_TIMESTAMP, timestamp=first.at)
