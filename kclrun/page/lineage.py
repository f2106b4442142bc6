"""The shards' ancestry through splits and merges, in the order of a tree. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from kclrun.model.lease import Lease
from kclrun.model.shard import Shard


class Descent(msgspec.Struct, frozen=True):
    """One shard of the tree: `depth` below its oldest known ancestor."""

    key: str
    depth: int
    parents: tuple[str, ...]
    children: tuple[str, ...]


class Lineage(msgspec.Struct, frozen=True):
    """`descents`: each shard below a parent. A merge is below the one that comes first, and names
    both. `alone` counts the shards without known parents and children, `left_out` those beyond the
    limit, or in a circle."""

    descents: tuple[Descent, ...]
    alone: int
    left_out: int


def lineage_of(leases: Mapping[str, Lease], shards: Mapping[str, Shard], most: int) -> Lineage:
    """The tree of all rows and listed shards, at most so many. Rows may name shards that neither
    the table nor the listing has: those are left out."""
    keys: set[str] = {*leases, *shards}
    parents: dict[str, set[str]] = {key: set() for key in keys}
    children: dict[str, set[str]] = {key: set() for key in keys}
    for parent, child in _edges(leases, shards):
        if parent in keys and child in keys and parent != child:
            parents[child].add(parent)
            children[parent].add(child)
    alone = sum(not parents[key] and not children[key] for key in keys)
    roots = sorted((key for key in keys if not parents[key] and children[key]), reverse=True)
    waiting = [(root, 0) for root in roots]
    seen: set[str] = set()
    descents: list[Descent] = []
    while waiting and len(descents) < most:
        key, depth = waiting.pop()
        if key in seen:
            continue
        seen.add(key)
        descents.append(Descent(key, depth, _sorted(parents[key]), _sorted(children[key])))
        waiting += [(child, depth + 1) for child in sorted(children[key], reverse=True)]
    return Lineage(tuple(descents), alone, len(keys) - alone - len(descents))


def _edges(leases: Mapping[str, Lease], shards: Mapping[str, Shard]) -> list[tuple[str, str]]:
    of_rows = [(parent, key) for key, lease in leases.items() for parent in lease.parents]
    of_rows += [(key, child) for key, lease in leases.items() for child in lease.children]
    return of_rows + [(parent, key) for key, shard in shards.items() for parent in shard.parents]


def _sorted(keys: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(keys))
