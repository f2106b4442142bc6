"""Which rows a Java worker creates beside those of a shard's end: `HierarchicalShardSyncer`.

For an application that starts at TRIM_HORIZON. An empty table gets a row for every shard that was
open at the horizon. Else each open shard without a row asks its ancestors: below a row nothing is
created, for that row's own end will do it; else the topmost ancestors without a row get theirs.
May not know: when it is done (`syncing.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final

from kclrun.model.lease import Lease
from kclrun.model.shard import HASH_KEY_MAX, Shard
from kclrun.simulation.java import rows
from kclrun.simulation.java.items import PutNewItem

__all__ = ["first_hole", "rows_of_a_sync"]

_UNCOVERED: Final = -1


def rows_of_a_sync(shards: Sequence[Shard], leased: Set[str]) -> list[PutNewItem]:
    """Oldest first."""
    listed = {shard.shard_id: shard for shard in shards}
    wanted: set[str] = set()
    for shard in shards:
        if shard.is_open and shard.shard_id not in leased:
            wanted |= _topmost_unleased(shard, listed, leased)
    created = sorted(wanted, key=lambda shard_id: int(listed[shard_id].starting_sequence_number))
    return [rows.create(each, listed[each].parents, listed[each].hash_range) for each in created]


def _topmost_unleased(shard: Shard, listed: Mapping[str, Shard], leased: Set[str]) -> set[str]:
    """Itself where no ancestor is listed; nothing where it descends from a row."""
    parents = [listed[parent] for parent in shard.parents if parent in listed]
    if not parents:
        return {shard.shard_id}
    above: set[str] = set()
    for parent in parents:
        if parent.shard_id not in leased:
            above |= _topmost_unleased(parent, listed, leased)
    return above


def first_hole(leases: Iterable[Lease]) -> int | None:
    """The first hash key that no unended row covers, as the periodic sync looks at it."""
    covered = _UNCOVERED
    ranges = [lease.hash_range for lease in leases if not lease.is_ended and lease.hash_range]
    for hash_range in sorted(ranges):
        if hash_range.start > covered + 1:
            break
        covered = max(covered, hash_range.end)
    return None if covered >= HASH_KEY_MAX else covered + 1
