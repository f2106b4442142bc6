"""Which rows are deleted: of shards that have ended, and of shards that were trimmed [P13].

Must not know: who deletes, and when. Rule: a row goes only when its children have rows that have
begun, or when its shard is provably gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kclrun.leases.shard_sync import Listing
from kclrun.leases.table_view import TableView
from kclrun.model.lease import (
    OWNER_PREFIX,
    Lease,
    LeaseKey,
)
from kclrun.model.sequence import AT_TIMESTAMP, TRIM_HORIZON
from kclrun.model.shard import (
    is_of_changes,
)
from kclrun.model.state import is_own_version
from kclrun.model.time import Instant
from kclrun.protocol import writes
from kclrun.protocol.trimming import LISTING_LAG_MAX_S, Absence, absence_of

# A child at one of these positions may still need the row of its parent. One at LATEST does not, as
# in the Java KCL: a child of an ended parent is created at TRIM_HORIZON, so one at LATEST never had
# a parent to wait for.
_AT_START = frozenset({TRIM_HORIZON.sequence_number, AT_TIMESTAMP.sequence_number})


def ended_rows(view: TableView, listing: Listing | None) -> tuple[writes.DeleteEnded, ...]:
    """The ended rows that may be deleted [P13, I11].

    Rule: an ended row goes once its children have begun and its own parents' rows are gone (so a
    family goes oldest first), and only after it was seen as ended for a while (`EndWatch`). Any
    other row goes only when its shard is provably trimmed (`TrimWatch`). The row names its
    children; else the last listing does. A row with keyed state stays until the state of each of
    its children is the child's own [K17]. A row of a DynamoDB stream stays while its shard is
    listed: the listing may show one child before the other.
    """
    return tuple(
        writes.DeleteEnded(row.key)
        for row in view.ended
        if not _may_have_more_children(row.key, listing)
        and not any(view.has_row(parent) for parent in row.parents)
        and _are_past_start(_children(row, listing), view)
        and _is_state_inherited(row, view, listing)
    )


def _may_have_more_children(key: LeaseKey, listing: Listing | None) -> bool:
    """Whether a child that is listed later would find no row of its parent, and so count as a shard
    without ancestors, which begins at the start position."""
    return is_of_changes(key) and (listing is None or key in listing)


class EndWatch:
    """Since when each ended row has been seen as ended. It stays for a while, for two reasons.

    1. A write may arrive long after its sender gave up on it. The creation of a row by a first sync
    has only the condition that there is not a row. Once the row is gone, a late creation would
    bring it back at its first position, and the shard would be read again beside its children.
    2. A Java worker may have stolen the lease from a kclrun process a moment before it read the
    shard to its end. For a failover that process may conclude that the vanished row was deleted by
    an operator, and write it again.
    """

    def __init__(self, stays_s: float) -> None:
        self._stays_s = stays_s
        self._since: dict[LeaseKey, Instant] = {}

    def deletable(self, view: TableView, listing: Listing | None) -> tuple[writes.DeleteEnded, ...]:
        """Take in a whole scan, and return the ended rows that may be deleted now."""
        before, now = self._since, view.seen_instant
        self._since = {row.key: before.get(row.key, now) for row in view.ended}
        ended = ended_rows(view, listing)
        return tuple(row for row in ended if now - self._since[row.key] >= self._stays_s)


class TrimWatch:
    """Shards with a row that complete listings no longer show, and since when. Also since when the
    counter of each of those rows has stood still."""

    def __init__(self, failover_s: float) -> None:
        self._failover_s = failover_s
        self._absent_since: dict[LeaseKey, Instant] = {}
        self._still_since: dict[LeaseKey, tuple[int, Instant]] = {}

    def update(self, view: TableView, listing: Listing) -> None:
        """Take in one complete listing, made after the scan. An empty listing is not evidence."""
        if not listing.shards:
            self._absent_since.clear()
            self._still_since.clear()
            return
        before = self._absent_since
        self._absent_since = {
            key: before.get(key, listing.seen_instant) for key in view.rows if key not in listing
        }
        still = self._still_since
        self._still_since = {}
        for key in self._absent_since:
            counter = view.rows[key].counter
            seen = still.get(key)
            is_same = seen is not None and seen[0] == counter
            self._still_since[key] = seen if seen and is_same else (counter, view.seen_instant)

    def trimmed_rows(
        self,
        view: TableView,
        listing: Listing,
        *,
        two_periods_s: float,
        held: Collection[LeaseKey],
    ) -> Iterable[writes.DeleteTrimmed]:
        """The rows of shards absent from two listings at least two sync periods apart.

        A row stays if it has not ended and a kclrun owner, this manager or another, renewed,
        released or offered it within a failover. The process of its owner learns that the shard is
        gone, reports it and ends the row [P13]. If the row were deleted under that owner, the owner
        would write it again. A row also stays if its listed children or heirs have no row: they are
        created first, at their beginning (`children_to_create`). With keyed state it stays until
        its lease process has ended it, and its children have what it names [K17].
        """
        for key, since in self._absent_since.items():
            row = view.rows.get(key)
            if row is None or key in held or self._is_alive(row, listing.seen_instant):
                continue
            absence = absence_of(listing.shards, key, row.hash_range, row.parents)
            is_new = absence is Absence.TOO_NEW
            lag_s = LISTING_LAG_MAX_S if is_new else 0.0
            if listing.seen_instant - since < max(two_periods_s, lag_s):
                continue
            heirs_exist = all(view.has_row(child) for child in listing.heirs_of(row))
            if heirs_exist and _is_state_inherited(row, view, listing):
                yield writes.DeleteTrimmed(key, row.owner, row.counter)

    def _is_alive(self, row: Lease, now: Instant) -> bool:
        """Whether it is unended and its silence so short that a kclrun owner may still write it."""
        is_of_java = row.owner is not None and not row.owner.startswith(OWNER_PREFIX)
        if row.is_ended or is_of_java:
            return False
        return now - self._still_since[row.key][1] < max(self._failover_s, row.failover_s or 0.0)


def _children(row: Lease, listing: Listing | None) -> Iterable[str]:
    if row.children or listing is None:
        return row.children
    return listing.children_named(row.key)


def _are_past_start(children: Iterable[str], view: TableView) -> bool:
    """Whether children exist and each has a row past its start."""
    rows = [view.rows.get(LeaseKey(child)) for child in children]
    return bool(rows) and all(
        row is not None and row.checkpoint.sequence_number not in _AT_START for row in rows
    )


def _is_state_inherited(row: Lease, view: TableView, listing: Listing | None) -> bool:
    """Whether no child needs the version of the state that the row names [K17]. A child begins with
    it, and its row names a version of its own from its first checkpoint on; or it was read
    without state. [V8]"""
    if row.state_version is None:
        return True
    children = [view.rows.get(LeaseKey(child)) for child in _children(row, listing)]
    return all(
        child is not None
        and (
            is_own_version(child.state_version) or (child.state_version is None and child.has_begun)
        )
        for child in children
    )
