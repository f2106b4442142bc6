"""Which rows may be deleted: those that nobody can miss [P13, I11].

Rule: an ended row goes once its children have begun and its own parents' rows are gone (so a
family leaves oldest first), and not before it was seen as ended for a while; any other row only
when its shard is provably trimmed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kclrun.leases.listing import Listing
from kclrun.leases.table_view import TableView
from kclrun.model.changes import DeleteEnded, DeleteTrimmed
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import AT_TIMESTAMP, TRIM_HORIZON
from kclrun.model.stream_key import shard_id_of
from kclrun.model.time import Instant

__all__ = ["EndWatch", "TrimWatch", "ended_rows"]


# A child at one of these has not begun. LATEST counts as begun, as in the Java KCL: a child of an
# ended parent is created at TRIM_HORIZON, so one at LATEST never had a parent to wait for.
_NOT_BEGUN = frozenset({TRIM_HORIZON.sequence_number, AT_TIMESTAMP.sequence_number})
# What every shard id of the service begins with; its number follows.
_NUMBERED: Final = "shardId-"
# ListShards shows new shards within seconds. A shard that looks newer than so many listings is none
# of this stream's: it was deleted and made again under its name.
_LAG_MAX_S: Final = 300.0


def ended_rows(view: TableView, listing: Listing | None) -> tuple[DeleteEnded, ...]:
    """The ended rows that may go. Children by the row's own word, else by the last listing's."""
    return tuple(
        DeleteEnded(row.key)
        for row in view.ended
        if not any(view.has_row(parent) for parent in row.parents)
        and _have_begun(_children(row, listing), view)
    )


class EndWatch:
    """Since when each ended row has been seen as ended: it stays on for a while.

    A write may arrive long after its sender gave up on it. The creation of a row by a first sync
    has no other condition than that there is none: once the row is gone, a late one would bring it
    back at its first position, and the shard would be read again beside its children. And a Java
    worker may have stolen the lease from a kclrun process a moment before it read the shard to its
    end: for a failover that process may take a row that vanished for one that somebody deleted
    under it, and write it again.
    """

    def __init__(self, stays_s: float) -> None:
        self._stays_s = stays_s
        self._since: dict[LeaseKey, Instant] = {}

    def update(self, view: TableView) -> None:
        """Take in a whole scan."""
        before, now = self._since, view.seen_instant
        self._since = {row.key: before.get(row.key, now) for row in view.ended}

    def may_go(self, key: LeaseKey, now: Instant) -> bool:
        since = self._since.get(key)
        return since is not None and now - since >= self._stays_s


class TrimWatch:
    """Shards with a row that complete listings no longer show, and since when."""

    def __init__(self) -> None:
        self._absent_since: dict[LeaseKey, Instant] = {}

    def update(self, view: TableView, listing: Listing) -> None:
        """Take in one complete listing, made after the scan. An empty one is no evidence."""
        if not listing.shards:
            self._absent_since.clear()
            return
        before = self._absent_since
        self._absent_since = {
            key: before.get(key, listing.seen_instant) for key in view.rows if key not in listing
        }

    def trimmed_rows(
        self,
        view: TableView,
        listing: Listing,
        *,
        two_periods_s: float,
        is_ours: Callable[[LeaseKey], bool],
    ) -> Iterable[DeleteTrimmed]:
        """The rows of shards absent from two listings at least two sync periods apart.

        Not a row we hold: its own process learns that the shard is gone. Not one with listed
        children that have no row: they are created first, at their beginning (`healing.py`).
        """
        for key, since in self._absent_since.items():
            row = view.rows.get(key)
            if row is None or is_ours(key):
                continue
            lag_s = _LAG_MAX_S if _is_newer(row, listing) else 0.0
            if listing.seen_instant - since < max(two_periods_s, lag_s):
                continue
            if all(view.has_row(child) for child in listing.children_named(key)):
                yield DeleteTrimmed(key, row.owner, row.counter)


def _is_newer(row: Lease, listing: Listing) -> bool:
    """Whether this shard is not listed yet, and not: no more.

    Shards are trimmed oldest first. So where a parent, or an older shard of the same hash keys, is
    listed still, this one is newer than the listing, which may lag.
    """
    if any(parent in listing for parent in row.parents):
        return True
    mine = row.hash_range
    return mine is not None and any(
        shard.hash_range.overlaps(mine) and _is_older(shard.shard_id, row.key)
        for shard in listing.shards
    )


def _is_older(one: str, other: str) -> bool:
    """By their numbers, which grow (`AFTER_SHARD_ID` of ListShards relies on it)."""
    first, second = shard_id_of(one), shard_id_of(other)
    are_numbered = first.startswith(_NUMBERED) and second.startswith(_NUMBERED)
    return are_numbered and first < second


def _children(row: Lease, listing: Listing | None) -> Iterable[str]:
    if row.children or listing is None:
        return row.children
    return listing.children_named(row.key)


def _have_begun(children: Iterable[str], view: TableView) -> bool:
    """There are children, and each has a row past its start. Unknown children have not begun."""
    rows = [view.rows.get(LeaseKey(child)) for child in children]
    return bool(rows) and all(
        row is not None and row.checkpoint.sequence_number not in _NOT_BEGUN for row in rows
    )
