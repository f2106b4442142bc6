"""Which rows to create, and which shards still lack one, from listings and the rows of the table
[P10, P12]. `cleanup.py` says which rows go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from typing import Final

import msgspec

from kclrun.leases.table_view import TableView, covers_all_hash_keys, is_unowned, parent_keys
from kclrun.model.lease import (
    Lease,
    LeaseKey,
    Pause,
    highest_generation,
    inherited_pause,
    pause_of_stream,
)
from kclrun.model.output import StoredCursors
from kclrun.model.sequence import LATEST, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import (
    HashRange,
    Shard,
    ShardGraph,
    is_older,
    made_at,
)
from kclrun.model.state import OF_PARENTS
from kclrun.model.time import Instant, WallTime
from kclrun.protocol import writes


class SyncPlan(msgspec.Struct, frozen=True):
    """Leases to create; or none, and the `problem` that prevents any creation."""

    leases: tuple[Lease, ...] = ()
    problem: str | None = None


def child_lease(
    key: str,
    parents: Iterable[str],
    hash_range: HashRange,
    generation: int = 0,
    *,
    pause: Pause | None = None,
    has_state: bool = False,
) -> Lease:
    """The row of a child whose parents were read to their ends: from its first record on [P12].
    `generation`: the highest of its parents' [K4]. `pause`: that of its parents. `has_state`: the
    row notes that the child begins with the keyed state of its parents [K16]."""
    return Lease(
        key=LeaseKey(key),
        checkpoint=TRIM_HORIZON,
        parents=frozenset(parents),
        hash_range=hash_range,
        generation=generation,
        outputs=StoredCursors(TRIM_HORIZON, ()) if has_state else None,
        state_version=OF_PARENTS if has_state else None,
        pause=pause,
    )


def sync_empty_table(
    at_start: Collection[Shard], start: ExtendedSequenceNumber, listed_at: WallTime
) -> SyncPlan:
    """A lease for every shard that was there at the start position (`EmptyLeaseTableSynchronizer`).

    `at_start` is the listing filtered by the start. It must cover all hash keys, otherwise a lease
    would be missing for ever: then nothing is created and the caller lists again.
    """
    if not covers_all_hash_keys([shard.hash_range for shard in at_start]):
        return SyncPlan(problem="the shards at the start position do not cover all hash keys")
    leases = (_lease_at(shard, start, listed_at) for shard in _in_order(at_start))
    return SyncPlan(tuple(leases))


def sync_table(
    listing: Listing,
    has_row: Callable[[str], bool],
    start: ExtendedSequenceNumber,
    generation: int = 0,
    pause: Pause | None = None,
) -> SyncPlan:
    """The leases that a table with rows lacks, as the Java KCL decides it.

    (`HierarchicalShardSyncer`, `NonEmptyLeaseTableSynchronizer`, 2.x and 3.x.) Rule: for a shard
    with an ancestor in the table only the missing ancestors one level above are created. The
    shard's own lease is created when its parents end [P12]. `children_to_create` adds repairs that
    the Java KCL does not make.

    Each open shard without a row is traced to its ancestors. If none of them has a row, its topmost
    ancestors get a lease at the start position; if the start is LATEST, the shard itself gets it.
    If one of them has a row, only the parents without an ancestor in the table get a lease.

    One difference: a parent that has a row counts even if the service does not list it any more.
    The Java KCL would create the child at the start position, and with LATEST lose its records.

    `generation`: the highest of the table's rows. Destinations may have rows of a shard whose row
    was deleted since [K4]. `pause`: that of the whole stream, if it is paused.
    """
    if listing.inconsistency is not None:
        return SyncPlan(problem=listing.inconsistency)
    trace = _Trace(listing, has_row, start)
    for shard in listing.graph.open_shards():
        if not has_row(shard.shard_id):
            trace.visit(shard)
    leases = (
        _lease_at(shard, trace.created[shard.shard_id], listing.listed_at, generation, pause)
        for shard in _in_order(listing.graph[shard_id] for shard_id in trace.created)
    )
    return SyncPlan(tuple(leases))


class _Trace:
    """The ancestors judged so far. `created`: the shards to lease and their checkpoints."""

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

        A loop instead of recursion: a year of retention can hold more generations than Python
        allows calls.
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
        """Whether it is in the table, below a shard in the table, or about to be created."""
        return (
            self._has_row(parent)
            or self._is_descendant.get(parent, False)
            or parent in self._starts_here
        )


def _lease_at(
    shard: Shard,
    start: ExtendedSequenceNumber,
    listed_at: WallTime,
    generation: int = 0,
    pause: Pause | None = None,
) -> Lease:
    """A row at the start sentinel, sub-sequence 0 as the Java KCL; LATEST is pinned [P14]."""
    lease = child_lease(shard.shard_id, shard.parents, shard.hash_range, generation, pause=pause)
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


# DescribeStream shows new shards within seconds. A parent that is missing for so long was trimmed
# before its time: nothing waits for it.
_PARENT_LATE_MAX_S: Final = 600.0


class Listing:
    """The shards of one complete listing, made at `listed_at` by the service's clock.

    It knows the parents and children of the shards, and whether the listing is consistent in
    itself. Rule: a trimmed shard is not listed any more, but listed shards may still name it as
    their parent. `children_named` follows those names, `graph` does not. Where the children were
    trimmed, too, `heirs_of` goes by hash keys.
    """

    def __init__(self, shards: Iterable[Shard], listed_at: WallTime, seen_instant: Instant) -> None:
        self.shards = tuple(shards)
        self.graph = ShardGraph(self.shards)
        self.listed_at = listed_at
        self.seen_instant = seen_instant

    def seen_again(self, listed_at: WallTime, seen_instant: Instant) -> Listing:
        """The same shards, listed once more: the usual case."""
        again = Listing.__new__(Listing)
        again.__dict__ |= self.__dict__
        if self.missing_parent is not None:
            for name in ("missing_parent", "inconsistency"):
                again.__dict__.pop(name, None)
        again.listed_at = listed_at
        again.seen_instant = seen_instant
        return again

    def __contains__(self, shard_id: str) -> bool:
        return shard_id in self.graph

    def range_of(self, shard_id: str) -> HashRange | None:
        shard = self.graph.get(shard_id)
        return None if shard is None else shard.hash_range

    def children_named(self, shard_id: str) -> tuple[str, ...]:
        """The listed shards that name this one as a parent, whether it is listed itself or not."""
        return self.graph.children_naming(shard_id)

    def heirs_of(self, row: Lease) -> tuple[str, ...]:
        """The oldest listed shards that descend from this row's shard: those that name it as a
        parent. Where it and its children are not listed any more, the eldest shards of its hash
        keys."""
        named = self.children_named(row.key)
        mine = row.hash_range
        if named or mine is None or row.key in self:
            return named
        return tuple(
            shard.shard_id
            for shard in self._eldest
            if shard.hash_range.overlaps(mine) and is_older(row.key, shard.shard_id)
        )

    @cached_property
    def _eldest(self) -> tuple[Shard, ...]:
        """The shards whose parents were all trimmed; without the first shards of the stream."""
        return tuple(
            shard
            for shard in self.shards
            if shard.parents and not any(parent in self for parent in shard.parents)
        )

    @cached_property
    def inconsistency(self) -> str | None:
        """Why no lease may be created from this listing, or None.

        The Java KCL refuses a listing in which an open shard has children
        (`assertAllParentShardsAreClosed`): the service shows one while a reshard is under way.
        """
        for shard in self.shards:
            if shard.is_open and self.children_named(shard.shard_id):
                return f"shard {shard.shard_id} is open and yet has children"
        return self.missing_parent

    @cached_property
    def missing_parent(self) -> str | None:
        """Of a DynamoDB stream: why a parent that is not listed is not trimmed, or None.

        A parent closed when its child was made, and stays for a day. So the listing lags: without
        the parent the child looks like the first of its lineage, and would be read before it.
        """
        for shard in self.shards:
            child, made = shard.shard_id, made_at(shard.shard_id)
            if made is None or self.listed_at - made >= _PARENT_LATE_MAX_S:
                continue
            for parent in shard.parents:
                if parent not in self:
                    return f"shard {child} is new, and its parent {parent} is not listed yet"
        return None

    def contradiction(self, rows: Iterable[Lease]) -> str | None:
        """Why this listing is older than the rows of a scan made before it, or None.

        A child has a row only after its parent was read to its end, so the parent was closed by
        then. ListShards may still show it open for a while. In such a listing a shard that was
        read, ended and cleaned up looks like one without a lease, and would be read again from its
        start.
        """
        for row in rows:
            for parent_id in row.parents:
                parent = self.graph.get(parent_id)
                if parent is not None and parent.is_open:
                    return f"shard {parent_id} is open there, and its child {row.key} has a lease"
        return None


class RecentRows:
    """The rows of the last scans: a row that vanished may come back within a failover.

    If an operator deletes the row of a live owner, its next renewal finds no row. The owner writes
    the row again from its last confirmed checkpoint while its fence stands [P2]. If another manager
    creates the row before that, the shard begins anew, or the records between are skipped.

    Bounded by the scans of one failover: two or three, and a few more after hasty ones.
    """

    def __init__(self, failover_s: float) -> None:
        self._failover_s = failover_s
        self._seen: deque[tuple[Instant, Collection[str]]] = deque()

    def update(self, view: TableView) -> None:
        """Take in a whole scan."""
        self._seen.append((view.seen_instant, view.rows.keys()))
        while view.seen_instant - self._seen[0][0] >= self._failover_s:
            self._seen.popleft()

    def had(self, key: str) -> bool:
        """Whether a scan of the last failover showed this row."""
        return any(key in keys for _, keys in self._seen)


# A transaction of DynamoDB has at most 100 parts, and each condition is one. A split or a merge
# needs three. But while a fleet is stopped for longer than the retention, one trimmed row may get
# hundreds of heirs, or one heir hundreds of trimmed ancestors. Then the heirs are created in parts,
# and the first ancestors alone are checked: a creation that arrives late must fail, and the rows of
# all ancestors are deleted in the same pass, once the heirs have rows.
_CHILDREN_AT_ONCE_MAX: Final = 50
_PARENTS_CHECKED_MAX: Final = 50


def children_to_create(view: TableView, listing: Listing) -> tuple[writes.CreateChildren, ...]:
    """Repair missing children: one change for each set of parents, with all their children that
    have no row [P12].

    A shard's own lease process creates the children's rows before it ends the lease. If a row says
    SHARD_END (or its shard is trimmed) and a listed child has no row, a process stopped half way,
    or the client never creates children. The Java KCL would leave the child unread for ever. Where
    the children of a trimmed shard were trimmed, too, its heirs are the eldest listed shards of its
    hash keys. The rule of the first sync would create them at the start position, and with LATEST
    lose their records.

    Rules: each creation has a condition on every parent's row that is there, because our rows are
    from a scan. A shard whose own children have begun is never created: it was read, and its row
    was deleted. Nothing is created while the listing is inconsistent. A child whose other parent is
    still listed and has no row waits: that parent's row comes first, from `sync_table` or its own
    repair.
    """
    if listing.inconsistency is not None:
        return ()
    groups: dict[tuple[writes.ParentCondition, ...], list[Lease]] = {}
    ancestors = _trimmed_ancestors(view, listing)
    of_stream = pause_of_stream(view.rows.values())  # ended rows are not paused
    for shard in listing.graph:
        if view.has_row(shard.shard_id) or _was_read(shard, view, listing):
            continue
        conditions = _conditions(shard, view, listing)
        if shard.shard_id in ancestors and not any(map(view.has_row, shard.parents)):
            conditions = _inherited(shard, ancestors[shard.shard_id], view, listing)
        if conditions:
            parents = [view.rows[condition.key] for condition in conditions]
            child = child_lease(
                shard.shard_id,
                shard.parents,
                shard.hash_range,
                highest_generation(parents),
                pause=inherited_pause(parents) or of_stream,
                has_state=any(parent.state_version for parent in parents),
            )
            groups.setdefault(conditions[:_PARENTS_CHECKED_MAX], []).append(child)
    return tuple(
        writes.CreateChildren(tuple(group[at : at + _CHILDREN_AT_ONCE_MAX]), checked)
        for checked, group in groups.items()
        for at in range(0, len(group), _CHILDREN_AT_ONCE_MAX)
    )


def _trimmed_ancestors(view: TableView, listing: Listing) -> dict[str, list[Lease]]:
    """The rows of trimmed shards by their heirs, where none of their children is listed."""
    ancestors: dict[str, list[Lease]] = {}
    for key, row in view.rows.items():
        if key not in listing and not listing.children_named(key):
            for heir in listing.heirs_of(row):
                ancestors.setdefault(heir, []).append(row)
    return ancestors


def _inherited(
    shard: Shard, ancestors: Iterable[Lease], view: TableView, listing: Listing
) -> tuple[writes.ParentCondition, ...]:
    """Conditions on the rows of trimmed ancestors. None where a descendant of the shard has begun:
    then the shard was read, and its row was cleaned up after its parents' rows [P13]."""
    waiting, seen = [shard.shard_id], {shard.shard_id}
    while waiting:
        following = set(listing.children_named(waiting.pop())) - seen
        if view.has_begun(following):
            return ()
        seen |= following
        waiting += following
    return tuple(map(_as_seen, ancestors))


def _as_seen(row: Lease) -> writes.ParentCondition:
    return writes.EndedParent(row.key) if row.is_ended else writes.ExistingParent(row.key)


def _was_read(shard: Shard, view: TableView, listing: Listing) -> bool:
    """Whether a child has begun. It waited for this shard's end, or found the shard absent, and the
    shard must stay absent [P11]. Read again now, its records would come after those of its
    children."""
    return view.has_begun(listing.children_named(shard.shard_id))


def _conditions(
    shard: Shard, view: TableView, listing: Listing
) -> tuple[writes.ParentCondition, ...] | None:
    """The conditions for the creation of this child; None or empty if it is not to be created."""
    conditions: list[writes.ParentCondition] = []
    is_due = False
    for parent in shard.parents:
        row = view.rows.get(LeaseKey(parent))
        if row is None:
            if parent in view.broken or parent in listing:
                return None
            continue
        is_due = is_due or row.is_ended or parent not in listing
        conditions.append(_as_seen(row))
    return tuple(conditions) if is_due else None


class TableTotals(msgspec.Struct, frozen=True):
    """How many leases there are, how many there should be, and how many are unowned: for metrics.

    `leases` are the readable rows. `shards` are the listed shards that have a row or should have
    one; None before the first listing. `unclaimed` are leases that could be read now and that have
    no owner, or whose owner has fallen silent.

    Rule: the difference of the counts shows shards that would never be read, and nothing else. A
    shard that was read to its end and whose row was cleaned up [P13] does not count as missing.
    """

    leases: int
    shards: int | None
    unclaimed: int


def table_totals(
    view: TableView, listing: Listing | None, held: Collection[LeaseKey]
) -> TableTotals:
    """Count the leases of one scan and one listing. `held` are the leases that we hold."""
    return TableTotals(
        leases=len(view.rows),
        shards=_shards_to_lease(listing, view) if listing is not None else None,
        unclaimed=sum(
            (is_unowned(lease.owner) or lease.key in view.expired) and lease.key not in held
            for lease in view.work
        ),
    )


def sum_totals(of_streams: Iterable[TableTotals]) -> TableTotals:
    """The totals of several streams as one. Shards are known once those of every stream are."""
    totals = tuple(of_streams)
    shards = [one.shards for one in totals if one.shards is not None]
    return TableTotals(
        leases=sum(one.leases for one in totals),
        shards=sum(shards) if len(shards) == len(totals) else None,
        unclaimed=sum(one.unclaimed for one in totals),
    )


def _shards_to_lease(listing: Listing, view: TableView) -> int:
    """Of the listed shards, those with a row, and those without one that should have it by now.

    A shard that an existing lease descends from was read to its end, or lies before the start
    position. A shard that descends from an unended lease gets its row when that lease ends [P12].
    """
    behind = shards_behind(listing, view)
    ahead = _ahead(listing, view)
    return sum(
        view.has_row(shard.shard_id) or not (shard.shard_id in behind or shard.shard_id in ahead)
        for shard in listing.shards
    )


def shards_without_lease(listing: Listing, view: TableView) -> tuple[str, ...]:
    """The listed shards that should have a row by now, and have none."""
    missing = [shard.shard_id for shard in listing.shards if not view.has_row(shard.shard_id)]
    if not missing:
        return ()
    behind, ahead = shards_behind(listing, view), _ahead(listing, view)
    return tuple(shard for shard in missing if shard not in behind and shard not in ahead)


def shards_behind(listing: Listing, view: TableView) -> set[str]:
    """The ancestors of all leases. Rows name parents that an old listing does not connect yet."""
    found: set[str] = {key for lease in view.rows.values() for key in parent_keys(lease)}
    to_follow: list[str] = [*view.rows, *found]
    while to_follow:
        shard = listing.graph.get(to_follow.pop())
        for parent in shard.parents if shard is not None else ():
            if parent not in found:
                found.add(parent)
                to_follow.append(parent)
    return found


def _ahead(listing: Listing, view: TableView) -> set[str]:
    """The descendants of all leases that have not ended."""
    found: set[str] = set()
    to_follow: list[str] = [lease.key for lease in view.unended]
    while to_follow:
        for child in listing.children_named(to_follow.pop()):
            if child not in found:
                found.add(child)
                to_follow.append(child)
    return found
