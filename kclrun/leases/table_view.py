"""What one scan shows, worked out once: the rows, the work, the owners, the holes.

Holds facts only; `assignment.py`, `cleanup.py` and `healing.py` draw the conclusions.
Rule: one pass over the rows and nothing quadratic; a table may have 10,000 of them.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from kclrun.leases.lineage import seem_over
from kclrun.leases.observation import Observation
from kclrun.model.lease import OFFERED, OWNER_PREFIX, Lease, LeaseKey, OwnerId
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.time import Instant

__all__ = ["TableView", "covers_all_hash_keys"]


class TableView:
    """The table as one scan showed it at `seen_instant`.

    `rows` are the readable leases by key; `broken` the keys of the others. `work` are the leases
    not ended whose parents are ended or absent. `owners` own at least one unexpired, unended
    lease, and `me` is always among them; former owners proven gone never are. `kclrun_owners` are
    those that are no Java workers; `silent` are those of whom only expired leases are left.
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
        self.unended = tuple(lease for lease in leases if not lease.is_ended)
        self.work = tuple(
            lease
            for lease in self.unended
            if not lease.parents or seem_over(lease, self.rows, self.broken)
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
