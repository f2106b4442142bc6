"""Children that should have a lease and have none: created here, under P12's conditions.

A shard's own lease process creates the children's rows before it ends the lease. Where a row says
SHARD_END (or its shard is trimmed) and a listed child has no row, somebody stopped half way, or
was a client that never creates them; the Java KCL would leave the shard unread for ever.
Rules: only with a condition on every parent's row that is there, for our rows are from a scan;
never a shard whose own children have begun: it was read, and its row deleted by somebody.
"""

from __future__ import annotations

from kclrun.leases.listing import Listing
from kclrun.leases.shard_sync import child_lease
from kclrun.leases.table_view import TableView
from kclrun.model.changes import CreateChildren, EndedParent, ExistingParent, ParentCondition
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.shard import Shard

__all__ = ["children_to_create"]


def children_to_create(view: TableView, listing: Listing) -> tuple[CreateChildren, ...]:
    """One change for each set of parents, with all their children that have no row.

    Nothing while the listing is inconsistent. A child whose other parent is still listed and has
    no row waits: that parent's row comes first, from `shard_sync.py` or its own healing.
    """
    if listing.inconsistency is not None:
        return ()
    groups: dict[tuple[ParentCondition, ...], list[Lease]] = {}
    for shard in listing.graph:
        if view.has_row(shard.shard_id) or _was_read(shard, view, listing):
            continue
        conditions = _conditions(shard, view, listing)
        if conditions:
            child = child_lease(shard.shard_id, shard.parents, shard.hash_range)
            groups.setdefault(conditions, []).append(child)
    return tuple(CreateChildren(tuple(group), parents) for parents, group in groups.items())


def _was_read(shard: Shard, view: TableView, listing: Listing) -> bool:
    """Whether a child has begun: it waited for this shard's end, or found it absent, which it shall
    stay [P11]. Read again now, its records would come after those of its children."""
    children = (view.rows.get(LeaseKey(each)) for each in listing.children_named(shard.shard_id))
    return any(
        row is not None and (row.is_ended or not row.checkpoint.is_sentinel) for row in children
    )


def _conditions(
    shard: Shard, view: TableView, listing: Listing
) -> tuple[ParentCondition, ...] | None:
    """What must hold to create this child; None or empty if it is not to be created."""
    conditions: list[ParentCondition] = []
    is_due = False
    for parent in shard.parents:
        row = view.rows.get(LeaseKey(parent))
        if row is None:
            if parent in view.broken or parent in listing:
                return None
            continue
        is_due = is_due or row.is_ended or parent not in listing
        condition = EndedParent(row.key) if row.is_ended else ExistingParent(row.key)
        conditions.append(condition)
    return tuple(conditions) if is_due else None
