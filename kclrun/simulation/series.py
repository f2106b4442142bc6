"""A simulated fleet over time, look after look: for pictures, and for programs that draw.

May not know: how it is drawn, what befalls the fleet. Rule: a value is kept at each look, an
owner's shards only where their number changed, so that a large fleet at rest stays small.
"""

from __future__ import annotations

import msgspec

from kclrun.model.lease import OwnerId
from kclrun.simulation.fleet import Fleet

__all__ = ["OwnerSeries", "Recorder", "Series"]


class OwnerSeries(msgspec.Struct):
    """One worker from its start on: `[seconds, shards]` wherever their number changed. `left_s` is
    when it was first seen to take part no more; None to the end."""

    group: str
    shards: list[tuple[float, int]]
    left_s: float | None = None


class Series(msgspec.Struct, kw_only=True):
    """Columns of equal length, a value a look; and each worker by its owner id.

    `at_s` counts from the start. `unread` are the shards that have something to read and nobody
    who reads them, `unread_longest_s` is for how long the longest of them has been so. `moves`
    and DynamoDB's `write_units` and `read_units` are totals up to then.
    """

    at_s: list[float] = []
    unread: list[int] = []
    unread_longest_s: list[float] = []
    shards_even: list[float] = []
    moves: list[int] = []
    write_units: list[float] = []
    read_units: list[float] = []
    owners: dict[OwnerId, OwnerSeries] = {}


class Recorder:
    """Looks at one fleet whenever it is told to."""

    def __init__(self, fleet: Fleet) -> None:
        self.series = Series()
        self._fleet = fleet

    def look(self) -> None:
        """Take down how it stands now."""
        fleet, series = self._fleet, self.series
        now = round(fleet.scheduler.now, 3)
        unread, costs = fleet.oracles.gaps.unread(), fleet.table.costs
        counts = fleet.shards_by_owner()
        series.at_s.append(now)
        series.unread.append(len(unread))
        series.unread_longest_s.append(round(now - min(unread.values(), default=now), 3))
        even = fleet.stream.open_count() / len(counts) if counts else 0.0
        series.shards_even.append(round(even, 3))
        series.moves.append(fleet.oracles.tally.moves)
        series.write_units.append(costs.write_units)
        series.read_units.append(round(costs.read_units, 1))
        self._note_owners(counts, now)

    def _note_owners(self, counts: dict[OwnerId, int], now: float) -> None:
        owners = self.series.owners
        groups = {host.owner: host.group for host in self._fleet.hosts if host.owner not in owners}
        for owner, count in counts.items():
            known = owners.get(owner)
            if known is None:
                owners[owner] = OwnerSeries(groups[owner], [(now, count)])
            elif known.shards[-1][1] != count:
                known.shards.append((now, count))
        for owner, known in owners.items():
            if owner not in counts and known.left_s is None:
                known.left_s = now
