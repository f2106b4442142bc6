"""What one scan shows, worked out once: the rows, the work, the owners, the holes.

Holds facts only; `assignment.py`, `cleanup.py` and `healing.py` draw the conclusions.
Rule: one pass over the rows and nothing quadratic; a table may have 10,000 of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Set
from functools import cached_property

from kclrun.leases.lineage import seem_over
from kclrun.leases.observation import Observation
from kclrun.model.lease import OFFERED, OWNER_PREFIX, Lease, LeaseKey, OwnerId
from kclrun.model.sequence import SHARD_END
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.stream_key import StreamKey, stream_of
from kclrun.model.time import Instant

__all__ = ["TableView", "covers_all_hash_keys"]


class TableView:
    """The table as one scan showed it at `seen_instant`.

    `rows` are the readable leases by key, `unended` and `ended` the two parts of them; `broken` the
    keys of the others. `work` are the leases not ended whose parents are ended or absent. `owners`
    own at least one unexpired, unended lease, and `me` is always among them; former owners proven
    gone never are. `kclrun_owners` are those that are no Java workers; `silent` are those of whom
    only expired leases are left.
    """

    def __init__(
        self,
        leases: tuple[Lease, ...],
        broken: tuple[str, ...],
        observation: Observation,
        *,
        me: OwnerId,
        gone: Set[OwnerId],
        now: Instant,
    ) -> None:
        self.seen_instant = now
        self.rows: dict[LeaseKey, Lease] = {lease.key: lease for lease in leases}
        self.broken = frozenset(broken)
        self._part(leases)
        rows, unreadable = self.rows, self.broken
        self.work = tuple(
            [
                lease
                for lease in self.unended
                if not lease.parents or seem_over(lease, rows, unreadable)
            ]
        )
        lapsed = observation.expired(self.unended, now)
        owners = {me}
        expired = set()
        for lease in self.unended:
            owner, key = lease.owner, lease.key
            if owner is None or owner in (me, OFFERED):
                continue
            if key in lapsed or owner in gone:
                expired.add(key)
            else:
                owners.add(owner)
        self.owners = frozenset(owners)
        self.kclrun_owners = frozenset(o for o in owners if o.startswith(OWNER_PREFIX))
        self.expired = frozenset(expired)
        unheard = (self.rows[key].owner for key in expired)
        self.silent = frozenset(owner for owner in unheard if owner is not None) - self.owners

    def _part(self, leases: Iterable[Lease]) -> None:
        """Those that ended from those that did not."""
        end = SHARD_END.sequence_number
        unended: list[Lease] = []
        ended: list[Lease] = []
        for lease in leases:
            which = ended if lease.checkpoint.sequence_number == end else unended
            which.append(lease)
        self.unended, self.ended = tuple(unended), tuple(ended)

    def by_stream(self, streams: Collection[StreamKey]) -> dict[StreamKey, TableView]:
        """The same for each stream: its rows, work and expired leases; the owners are everybody's.

        `streams` are all that the rows are of.
        """
        if len(streams) == 1:
            return dict.fromkeys(streams, self)
        keys: dict[StreamKey, list[str]] = {stream: [] for stream in streams}
        for key in (*self.rows, *self.broken):
            keys[stream_of(key)].append(key)
        return {stream: self._of_keys(own) for stream, own in keys.items()}

    def _of_keys(self, keys: Iterable[str]) -> TableView:
        view = copy.copy(self)
        view.rows = {LeaseKey(key): self.rows[LeaseKey(key)] for key in keys if key in self.rows}
        view.broken = self.broken.intersection(keys)
        view.expired = self.expired.intersection(view.rows)
        view._part(view.rows.values())  # noqa: SLF001 - a copy of ourselves
        at_work = self._work_keys.intersection(view.rows)
        view.work = tuple(lease for lease in view.unended if lease.key in at_work)
        return view

    @cached_property
    def _work_keys(self) -> frozenset[LeaseKey]:
        return frozenset(lease.key for lease in self.work)

    @property
    def is_empty(self) -> bool:
        """No row at all, readable or not: nobody has synced this table yet."""
        return not self.rows and not self.broken

    def has_row(self, shard_id: str) -> bool:
        """Whether a row with this key stands there, be it readable or not."""
        return shard_id in self.rows or shard_id in self.broken

    def lacks_children(self) -> bool:
        """A row names a child that has no row: a merge that waits, or an end cut short."""
        return any(
            not self.has_row(child) for lease in self.rows.values() for child in lease.children
        )

    def has_hole(self, range_of: Callable[[str], HashRange | None]) -> bool:
        """Some hash key belongs to no unended lease. `range_of` helps where a row lacks its own.

        A lease without any known range (rows of other KCLs may lack it) leaves a hole, so that
        the shards are listed and its range becomes known.
        """
        ranges = (lease.hash_range or range_of(lease.key) for lease in self.unended)
        return not covers_all_hash_keys([known for known in ranges if known is not None])


def covers_all_hash_keys(ranges: list[HashRange]) -> bool:
    """Whether the ranges, which may overlap, leave no hash key out."""
    covered_to = -1
    for hash_range in sorted(ranges):
        if hash_range.start > covered_to + 1:
            return False
        covered_to = max(covered_to, hash_range.end)
    return covered_to >= HASH_KEY_MAX
