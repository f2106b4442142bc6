"""Which leases to create, as the Java KCL decides it (`HierarchicalShardSyncer`, 2.x and 3.x).

Pure functions from a listing and the keys of the table to new rows; `healing.py` adds what the
Java KCL never repairs. Rule: for a shard with an ancestor in the table nothing is created but the
missing ancestors one level above: its own lease comes with its parents' end [P12].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import msgspec

from kclrun.leases.listing import Listing
from kclrun.leases.table_view import covers_all_hash_keys
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import LATEST, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HashRange, Shard
from kclrun.model.time import WallTime

__all__ = ["SyncPlan", "child_lease", "sync_empty_table", "sync_table"]


class SyncPlan(msgspec.Struct, frozen=True):
    """Leases to create; or none, and the `problem` that stands against creating any."""

    leases: tuple[Lease, ...] = ()
    problem: str | None = None


def child_lease(key: str, parents: Iterable[str], hash_range: HashRange) -> Lease:
    """The row of a child whose parents are read to their end: from its first record on [P12]."""
    return Lease(
        key=LeaseKey(key),
        checkpoint=TRIM_HORIZON,
        parents=frozenset(parents),
        hash_range=hash_range,
    )


def sync_empty_table(
    at_start: Collection[Shard], start: ExtendedSequenceNumber, listed_at: WallTime
) -> SyncPlan:
    """A lease for every shard that was there at the start position (`EmptyLeaseTableSynchronizer`).

    `at_start` is the listing filtered by the start; it must cover all hash keys, else a lease
    would be missing for ever: then nothing is created and the caller lists again.
    """
    if not covers_all_hash_keys([shard.hash_range for shard in at_start]):
        return SyncPlan(problem="the shards at the start position do not cover all hash keys")
    leases = (_lease_at(shard, start, listed_at) for shard in _in_order(at_start))
    return SyncPlan(tuple(leases))


def sync_table(
    listing: Listing, has_row: Callable[[str], bool], start: ExtendedSequenceNumber
) -> SyncPlan:
    """The leases that a table with rows lacks (`NonEmptyLeaseTableSynchronizer`).

    Each open shard without a row is traced to its ancestors. If none of them has a row, it gets a
    lease at the start position: its topmost ancestors do instead, unless the start is LATEST. If
    one has, only the parents that have no ancestor in the table get one.

    One difference: a parent that has a row counts although the service lists it no more. The Java
    KCL would create the child at the start position, and with LATEST lose what it holds.
    """
    if listing.inconsistency is not None:
        return SyncPlan(problem=listing.inconsistency)
    trace = _Trace(listing, has_row, start)
    for shard in listing.graph.open_shards():
        if not has_row(shard.shard_id):
            trace.visit(shard)
    leases = (
        _lease_at(shard, trace.created[shard.shard_id], listing.listed_at)
        for shard in _in_order(listing.graph[shard_id] for shard_id in trace.created)
    )
    return SyncPlan(tuple(leases))


class _Trace:
    """Ancestors judged so far. `created`: the shards to lease and their checkpoints."""

    def __init__(
        self, listing: Listing, has_row: Callable[[str], bool], start: ExtendedSequenceNumber
    ) -> None:
        self._graph = listing.graph
        self._has_row = has_row
        self._start = start
        self._is_descendant: dict[str, bool] = {}
        self._starts_here: set[str] = set()
        self.created: dict[str, ExtendedSequenceNumber] = {}

    def visit(self, shard: Shard) -> None:
        """Judge an open shard without a row, after all its ancestors."""
        for ancestor in self._ancestors_first(shard):
            self._judge(ancestor)
        if not self._is_descendant[shard.shard_id]:
            self.created[shard.shard_id] = self._start

    def _ancestors_first(self, shard: Shard) -> list[Shard]:
        """The shard and its unleased ancestors not judged yet, parents before children.

        A loop, for a year of retention can hold more generations than Python allows calls.
        """
        order: list[Shard] = []
        entered: set[str] = set()
        stack = [(shard, False)]
        while stack:
            current, are_parents_done = stack.pop()
            if are_parents_done:
                order.append(current)
                continue
            if current.shard_id in entered:
                continue
            entered.add(current.shard_id)
            stack.append((current, True))
            stack += [
                (self._graph[parent], False)
                for parent in self._graph.parents_of(current.shard_id)
                if not self._has_row(parent) and parent not in self._is_descendant
            ]
        return order

    def _judge(self, shard: Shard) -> None:
        rooted = {parent for parent in shard.parents if self._is_rooted(parent)}
        self._is_descendant[shard.shard_id] = bool(rooted)
        if not rooted:
            if self._start.sequence_number != LATEST.sequence_number:
                self._starts_here.add(shard.shard_id)
            return
        for parent in self._graph.parents_of(shard.shard_id):
            if not self._has_row(parent) and (parent in self._starts_here or parent not in rooted):
                self.created[parent] = self._start

    def _is_rooted(self, parent: str) -> bool:
        """In the table, below something in the table, or about to be created itself."""
        return (
            self._has_row(parent)
            or self._is_descendant.get(parent, False)
            or parent in self._starts_here
        )


def _lease_at(shard: Shard, start: ExtendedSequenceNumber, listed_at: WallTime) -> Lease:
    """A row at the start sentinel, sub-sequence 0 as the Java KCL; LATEST is pinned [P14]."""
    lease = child_lease(shard.shard_id, shard.parents, shard.hash_range)
    sentinel = ExtendedSequenceNumber(start.sequence_number)
    pinned_at = listed_at if sentinel == LATEST else None
    return msgspec.structs.replace(lease, checkpoint=sentinel, latest_pinned_at=pinned_at)


def _in_order(shards: Iterable[Shard]) -> list[Shard]:
    """By starting sequence number, as the Java KCL creates them."""
    return sorted(
        shards,
        key=lambda shard: (
            ExtendedSequenceNumber(shard.starting_sequence_number).sort_key,
            shard.shard_id,
        ),
    )
