"""How many leases there are, how many there should be, and how many nobody has: for metrics.

Pure and read-only. Knows: the last scan and the last listing. Rule: compared with each other, the
counts tell of shards that nobody will ever read, and of nothing else: a shard that was read to its
end and whose row was cleaned up [P13] is no missing lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from kclrun.leases.lineage import parent_keys
from kclrun.leases.listing import Listing
from kclrun.leases.observation import is_nobody
from kclrun.leases.table_view import TableView
from kclrun.model.lease import LeaseKey

__all__ = ["TableTotals", "shards_behind", "sum_totals", "table_totals"]


class TableTotals(msgspec.Struct, frozen=True):
    """`leases` are the readable rows. `shards` are the listed shards that have a row or should
    have one; None before the first listing. `unclaimed` are leases that could be read now and that
    nobody owns, or whose owner has fallen silent."""

    leases: int
    shards: int | None
    unclaimed: int


def table_totals(
    view: TableView, listing: Listing | None, is_ours: Callable[[LeaseKey], bool]
) -> TableTotals:
    """Count what one scan and one listing show; `is_ours` are the leases in our hands."""
    return TableTotals(
        leases=len(view.rows),
        shards=_shards_to_lease(listing, view) if listing is not None else None,
        unclaimed=sum(
            (is_nobody(lease.owner) or lease.key in view.expired) and not is_ours(lease.key)
            for lease in view.work
        ),
    )


def sum_totals(each: Iterable[TableTotals]) -> TableTotals:
    """The totals of several streams as one; shards are known once those of every stream are."""
    totals = tuple(each)
    shards = [one.shards for one in totals if one.shards is not None]
    return TableTotals(
        leases=sum(one.leases for one in totals),
        shards=sum(shards) if len(shards) == len(totals) else None,
        unclaimed=sum(one.unclaimed for one in totals),
    )


def _shards_to_lease(listing: Listing, view: TableView) -> int:
    """Of the listed shards, those with a row, and those without one that should have it by now.

    A shard from which some lease descends was read to its end, or lies before the start position.
    One that descends from a lease that has not ended gets its row when that one ends [P12].
    """
    behind = shards_behind(listing, view)
    ahead = _ahead(listing, view)
    return sum(
        view.has_row(shard.shard_id) or not (shard.shard_id in behind or shard.shard_id in ahead)
        for shard in listing.shards
    )


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
