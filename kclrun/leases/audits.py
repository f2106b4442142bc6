"""An `Auditor` for each stream of the application, and what they all say together.

Each sees the rows of its own stream alone: an empty table, a hole, a merge that waits, trimmed
shards are a matter of one stream, and a stream that is added to a running application begins like
one with an empty table. May not know: who takes what; targets are over the work of all streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from kclrun.leases.auditing import Auditor
from kclrun.leases.commands import Command
from kclrun.leases.differences import Differences
from kclrun.leases.events import LeasesScanned, ShardsListed, WriteResolved
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.table_view import TableView
from kclrun.leases.totals import TableTotals, sum_totals, table_totals
from kclrun.model.changes import keys_of
from kclrun.model.lease import LeaseKey
from kclrun.model.stream_key import StreamKey, stream_of
from kclrun.model.time import Instant

__all__ = ["Audits"]


class Audits:
    """One instance a manager. `is_held` says whether a row is in our hands."""

    def __init__(
        self,
        policy: ManagerPolicy,
        out: list[Command],
        is_held: Callable[[LeaseKey], bool],
    ) -> None:
        self._auditors: Mapping[StreamKey, Auditor] = {
            stream: Auditor(policy.of_stream(stream), out, is_held, stream)
            for stream in policy.streams
        }
        self._is_held = is_held
        self._views: Mapping[StreamKey, TableView] = {}
        self._synced: set[StreamKey] = set()
        self._differences = Differences(policy, out)

    def of_ours(self, event: LeasesScanned) -> LeasesScanned:
        """The scan without the rows of streams that we do not read."""
        auditors = self._auditors
        leases = tuple([each for each in event.leases if stream_of(each.key) in auditors])
        broken = tuple(key for key in event.broken if self.is_ours(key))
        if len(leases) == len(event.leases) and len(broken) == len(event.broken):
            self._differences.strangers(())
            return event
        known = {lease.key for lease in leases} | set(broken)
        every = {lease.key for lease in event.leases} | set(event.broken)
        self._differences.strangers(every - known)
        return LeasesScanned(leases, broken, event.foreign)

    def is_ours(self, key: str) -> bool:
        """Whether this lease is of a stream that we read."""
        return stream_of(key) in self._auditors

    def after_scan(self, view: TableView) -> None:
        """Clean up, stream by stream; compare settings with rows. After `see`."""
        for stream, auditor in self._auditors.items():
            auditor.after_scan(self._views[stream])
        self._differences.after_scan(view)

    def see(self, view: TableView) -> None:
        """Keep the last view, for what follows it: clean-up, listings, counts."""
        self._views = view.by_stream(self._auditors.keys())

    def view_of(self, stream: StreamKey) -> TableView:
        """The rows of one stream at the last scan."""
        return self._views[stream]

    def needs_listing(self, stream: StreamKey) -> bool:
        """What the last scan shows calls for a listing of this stream now [P10]."""
        return self._auditors[stream].needs_listing(self._views[stream])

    def after_listing(self, event: ShardsListed, now: Instant) -> bool:
        """Create what is missing, delete what is trimmed; True to list again soon."""
        auditor = self._auditors[event.stream]
        auditor.after_listing(event, self._views[event.stream], now)
        self._synced.add(event.stream)
        return auditor.should_list_soon

    def resolved(self, event: WriteResolved) -> bool:
        """Take in an outcome; True once all that was being created is there to be taken."""
        stream = stream_of(keys_of(event.change)[0])
        return self._auditors[stream].resolved(event) and not self.is_creating

    def is_writing(self, key: LeaseKey) -> bool:
        """Whether a write of ours to this row is under way."""
        auditor = self._auditors.get(stream_of(key))
        return auditor is not None and key in auditor.under_way

    def keys_under_way(self) -> Iterator[LeaseKey]:
        """The rows that a write of ours is on its way to."""
        return chain.from_iterable(auditor.under_way for auditor in self._auditors.values())

    @property
    def has_writes_under_way(self) -> bool:
        return any(auditor.under_way for auditor in self._auditors.values())

    @property
    def is_creating(self) -> bool:
        return any(auditor.is_creating for auditor in self._auditors.values())

    @property
    def have_synced(self) -> bool:
        """Whether every stream was listed at least once."""
        return len(self._synced) == len(self._auditors)

    def totals(self) -> TableTotals:
        """What the last scan and the last listings counted, over all streams."""
        return sum_totals(
            table_totals(self._views[stream], auditor.listing, self._is_held)
            for stream, auditor in self._auditors.items()
        )
