"""The searches of all shards that take part in a batch, and the shards that take part. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from kclrun.model.shard import ShardGraph
from kclrun.spark.offsets import Offset
from kclrun.spark.options import SourceSettings
from kclrun.spark.planning import shard_cursor
from kclrun.spark.planning.read_budget import ReadBudget
from kclrun.spark.planning.shard_listing import ShardListing
from kclrun.spark.planning.shard_search import ShardSearch
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, Position, PositionKind

# Before a bound is known, rows of at least this many bytes are kept, so that a later target inside
# them is found without a call.
_ROWS_BYTES_MIN: Final = 256 * 1024
# All shards together, each with the rows after its position and the rows read further on: some
# 250 MB of a Python process. A thousand shards then keep one sample (64 KiB) in each; rows that are
# not kept are read again.
ROWS_BYTES_TOTAL: Final = 128 * 2**20


class ShardSearches(dict[str, ShardSearch]):
    """By shard id. Each shard keeps its budget of calls while it takes part, and all of them share
    one budget of rows."""

    def __init__(self, settings: SourceSettings) -> None:
        super().__init__()
        self._settings = settings
        self._budgets: dict[str, ReadBudget] = {}
        self._rows_bytes_max = _ROWS_BYTES_MIN

    def under_way(self) -> list[ShardSearch]:
        """Those that go on."""
        return [search for search in self.values() if search.is_searching]

    def follow(self, start: Offset, listing: ShardListing, now: float) -> None:
        """Have a search for exactly the shards of `start` and those that enter."""
        wanted = {shard_id: where for shard_id, where in start.shards.items() if where != SHARD_END}
        fails = self._settings.fails_on_data_loss
        for shard_id in listing.entering(fails_on_data_loss=fails):
            wanted[shard_id] = _entrance(start, listing.graph, shard_id)
        for shard_id in [shard_id for shard_id in self if shard_id not in wanted]:
            self.pop(shard_id).stop()
            self._budgets.pop(shard_id, None)
        self._share_rows(len(wanted))
        for shard_id, position in wanted.items():
            search = self.get(shard_id)
            if search is None:
                self.add(shard_id, position, now)
            elif search.cursor.position != position:
                search.stop()
                search.cursor.move(position)

    def add(self, shard_id: str, position: Position, now: float) -> ShardSearch:
        """The search of a shard that takes part from now on."""
        rate = self._settings.reads_per_second_max
        budget = self._budgets.setdefault(shard_id, ReadBudget(rate, now))
        is_counted = self._settings.records_per_trigger_max is not None
        cursor = shard_cursor.ShardCursor(
            shard_id, position, self._rows_bytes_max, is_counted=is_counted
        )
        search = ShardSearch(cursor, budget)
        self[shard_id] = search
        return search

    def _share_rows(self, shards: int) -> None:
        """Limit the rows kept of each shard, so that all of them stay within their budget."""
        self._rows_bytes_max = min(
            max(_ROWS_BYTES_MIN, self._settings.inline_bytes_max),
            ROWS_BYTES_TOTAL // (2 * max(1, shards)),
        )
        for search in self.values():
            search.cursor.rows_bytes_max = self._rows_bytes_max


def _entrance(start: Offset, graph: ShardGraph, shard_id: str) -> Position:
    """The beginning of a child: its first record. If the query began at a time and the parents
    had no records after it, the child begins at the same time."""
    shard = graph[shard_id]
    began = [start.began.get(parent) for parent in shard.parents if parent in start.shards]
    times = [
        position
        for position in began
        if position is not None and position.kind is PositionKind.TIMESTAMP
    ]
    return max(times) if times and len(times) == len(began) else TRIM_HORIZON


class AvailableNow(msgspec.Struct, frozen=True):
    """The records that existed at an instant, and no more [A9]. The service's clock had passed
    `past_ms` by then, and had not reached `ahead_ms`."""

    ahead_ms: int
    past_ms: int
    asked_at: float

    def is_done(self, cursor: shard_cursor.ShardCursor, listing: ShardListing) -> bool:
        """Whether the shard has ended, begins later, or its tip was seen."""
        tip_ms, finding = cursor.tip_at_bound_ms, cursor.finding
        arrived_ms = cursor.head_ms if finding is None else finding.arrived_ms
        is_later = arrived_ms is not None and arrived_ms >= self.ahead_ms
        if cursor.bound == SHARD_END or is_later:
            return True
        # The tip of a closed shard is not its end: its children may hold further records.
        is_at_tip = tip_ms is not None and tip_ms >= self.past_ms
        return is_at_tip and not listing.is_closed(cursor.shard_id)


class PushedNews:
    """The shards whose records were pushed, until they are looked at. The first look at a shard is
    that of a tick."""

    def __init__(self) -> None:
        self._shard_ids: set[str] = set()
        self._has_ticked = False

    def ticked(self) -> None:
        self._has_ticked = True

    def add(self, shard_ids: Collection[str]) -> None:
        self._shard_ids.update(shard_ids)

    def remove(self, shard_ids: Collection[str]) -> None:
        self._shard_ids.difference_update(shard_ids)

    def of(self, searches: Mapping[str, ShardSearch]) -> list[str]:
        """Those of the searches, without those that are searched now: the records of these stay
        news, because a search under way may have missed the last of them."""
        if not self._has_ticked or not self._shard_ids:
            return []
        self._shard_ids.intersection_update(searches)
        return sorted(new for new in self._shard_ids if not searches[new].is_searching)
