"""Keeps the table complete and clean: leases for shards that lack one, no rows that nobody needs.

Every manager does this; no leader is needed, for every write here is conditional and harmless to
repeat. What does not apply now is simply decided again after the next scan or listing.

Java workers beside us elect the leader of their shard sync by a shuffle of *all* owners, ours
included; when it falls on one of ours, none of them syncs [R6]. So everything that a Java 2.x
leader does is done here, by whoever: the first sync of an empty table, and after every listing the
leases that a hole in the hash range calls for (there after three looks two minutes apart). One of
its duties is left out, for nobody misses it: it writes hash ranges onto rows that lack them, which
only its own look for holes reads; ours takes them from the listing. Cleanup is no leader's duty
there: each worker deletes the rows of shards that it ended; here all do, by `cleanup.py`.

Knows: the last view and the last listing of one stream. May not know: who processes what.
Look next: `shard_sync.py`, `healing.py`, `cleanup.py` (the pure functions that decide).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kclrun.errors import InvariantViolation
from kclrun.leases.cleanup import EndWatch, TrimWatch, ended_rows
from kclrun.leases.commands import Command, Note, WriteRow
from kclrun.leases.events import ShardsListed, WriteResolved
from kclrun.leases.healing import children_to_create
from kclrun.leases.listing import Listing
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.recent_rows import RecentRows
from kclrun.leases.shard_sync import SyncPlan, sync_empty_table, sync_table
from kclrun.leases.table_view import TableView
from kclrun.model.changes import (
    CreateChildren,
    CreateLease,
    DeleteTrimmed,
    LeaseChange,
    keys_of,
)
from kclrun.model.lease import LeaseKey
from kclrun.model.outcomes import Applied, Refused, Throttled, Unavailable
from kclrun.model.stream_key import ONLY_STREAM, StreamKey, stream_name_of
from kclrun.model.time import Instant

__all__ = ["Auditor"]


class Auditor:
    """One instance a stream, which knows this stream's rows alone; `audits.py` holds them.

    `is_held` says whether a row is in our hands: hands off then.
    """

    def __init__(
        self,
        policy: ManagerPolicy,
        out: list[Command],
        is_held: Callable[[LeaseKey], bool],
        stream: StreamKey = ONLY_STREAM,
    ) -> None:
        self.listing: Listing | None = None
        self.under_way: dict[LeaseKey, LeaseChange] = {}
        self.should_list_soon = False
        self._policy = policy
        self._out = out
        self._is_held = is_held
        self._stream = stream
        self._trims = TrimWatch()
        self._ends = EndWatch(max(policy.failover_s, policy.ended_rows_stay_s))
        self._recent = RecentRows(policy.failover_s)
        self._has_seen_rows = False
        self._noted: dict[str, object] = {}

    def needs_listing(self, view: TableView) -> bool:
        """What the scan shows calls for a listing now, whoever else may be listing [P10]."""
        return (
            view.is_empty
            or view.lacks_children()
            or view.has_hole(lambda key: self.listing.range_of(key) if self.listing else None)
        )

    def after_scan(self, view: TableView) -> None:
        """Note rows that are not ours to judge; delete ended rows that nobody needs [P8, P13]."""
        self._has_seen_rows = self._has_seen_rows or not view.is_empty
        self._recent.update(view)
        broken = ", ".join(sorted(view.broken)[:10])
        self._note_change("rows_broken", len(view.broken), level="error", keys=broken)
        if self._policy.cleanup:
            self._ends.update(view)
            ended = ended_rows(view, self.listing)
            self._write(row for row in ended if self._ends.may_go(row.key, view.seen_instant))

    def after_listing(self, event: ShardsListed, view: TableView, now: Instant) -> None:
        """Create what is missing; delete the rows of trimmed shards. `view` is the scan before."""
        before = self.listing
        if before is not None and before.shards == event.shards:
            listing = before.seen_again(event.listed_at, now)
        else:
            listing = Listing(event.shards, event.listed_at, now)
        self.listing = listing
        plan = self._plan(event, view, listing)
        is_first_sync = event.at_start is not None and not self._has_seen_rows
        self.should_list_soon = is_first_sync and not plan.leases
        self._note_change("shard_sync_refused", plan.problem or 0, level="warning")
        self._write(CreateLease(lease) for lease in plan.leases)
        self._write(children_to_create(view, listing))
        self._trims.update(view, listing)
        if self._policy.cleanup:
            # One sync period: the expected time between two listings of this manager [P10].
            period_s = self._policy.scan_every_s * max(1.0, len(view.kclrun_owners) / 2)
            self._write(
                self._trims.trimmed_rows(
                    view, listing, two_periods_s=2 * period_s, is_ours=self._is_held
                )
            )

    def resolved(self, event: WriteResolved) -> bool:
        """Take in an outcome; True once all that was being created is there to be taken.

        A creation that was refused or put off is decided again with the next scan, not with one
        of its own: a missing permission would have us scan four times a second.

        An unknown outcome needs no reading back: the next scan shows the row or not, and the
        condition of a late arrival still protects it.
        """
        for key in keys_of(event.change):
            if self.under_way.pop(key, None) != event.change:
                raise InvariantViolation(f"lease {key}: an outcome of no write under way")
        if isinstance(event.outcome, Applied):
            self._note_write(event.change)
        if isinstance(event.outcome, Refused):
            code, message = event.outcome.code, event.outcome.message
            self._note_change("audit_refused", code, level="error", message=message)
        if isinstance(event.outcome, Refused | Throttled | Unavailable):
            return False
        return isinstance(event.change, CreateLease | CreateChildren) and not self.is_creating

    @property
    def is_creating(self) -> bool:
        return any(isinstance(c, CreateLease | CreateChildren) for c in self.under_way.values())

    def _plan(self, event: ShardsListed, view: TableView, listing: Listing) -> SyncPlan:
        if not view.is_empty:
            older = listing.contradiction(view.rows.values())
            if older is not None:
                return SyncPlan(problem=f"the listing is older than the table: {older}")
            return sync_table(listing, lambda key: self._has_row(key, view), self._policy.start)
        if self._has_seen_rows:
            return SyncPlan(
                problem=f"the lease table lost all {self._its_rows} while we were running; no"
                " position is guessed: restore the table, or restart kclrun to begin at the start"
                " position"
            )
        if event.at_start is None:
            return SyncPlan()
        return sync_empty_table(event.at_start, self._policy.start, event.listed_at)

    def _has_row(self, key: str, view: TableView) -> bool:
        """Now, or within the last failover: its live owner may write it again."""
        return view.has_row(key) or self._recent.had(key)

    @property
    def _its_rows(self) -> str:
        name = stream_name_of(self._stream)
        return f"rows of stream {name}" if name else "its rows"

    def _write(self, changes: Iterable[LeaseChange]) -> None:
        """Send what touches no row in our hands and none with a write under way."""
        for change in changes:
            keys = keys_of(change)
            if any(key in self.under_way or self._is_held(key) for key in keys):
                continue
            self.under_way.update(dict.fromkeys(keys, change))
            self._out.append(WriteRow(change))

    def _note_write(self, change: LeaseChange) -> None:
        """Creations and trims are rare and worth a line each; ended rows go quietly."""
        keys = keys_of(change)
        if isinstance(change, CreateLease):
            position = str(change.lease.checkpoint)
            self._out.append(Note("lease_created", key=keys[0], fields={"position": position}))
        elif isinstance(change, CreateChildren):
            parent, children = change.parents[0].key, ", ".join(keys)
            self._out.append(Note("children_healed", "warning", parent, {"children": children}))
        elif isinstance(change, DeleteTrimmed):
            self._out.append(Note("trimmed_row_deleted", "warning", keys[0]))

    def _note_change(
        self, event: str, value: str | int, *, level: str, **fields: str | float
    ) -> None:
        """Once per change of `value`; 0 is the healthy state, which is silent."""
        if self._noted.get(event, 0) == value:
            return
        self._noted[event] = value
        if self._stream:
            fields["stream"] = stream_name_of(self._stream)
        if value:
            self._out.append(Note(event, level, fields={"what": value, **fields}))
