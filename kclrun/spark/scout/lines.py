"""The stream's shards as listings and last pages tell, and what is missing from them [A7]. Pure.

Rule: what a listing leaves out is believed only when several in a row leave it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kclrun.errors import DataLoss
from kclrun.model.shard import ChildShard, Shard, ShardGraph
from kclrun.spark.lineage import children_ready, oldest_over, uncovered, unfollowed
from kclrun.spark.positions import SHARD_END, Position

__all__ = ["LISTINGS_TO_BELIEVE", "Lines"]

# Pages of one listing are read at different instants; five listings a second apart are not.
LISTINGS_TO_BELIEVE: Final = 5
# How soon to list again while something is missing.
_MISSING_INTERVAL_S: Final = 1.0


class Lines:
    """All shards known, and when to list again."""

    def __init__(self, interval_s: float) -> None:
        self.graph = ShardGraph(())
        self._interval_s = interval_s
        self._known: dict[str, Shard] = {}
        self._latest = ShardGraph(())
        self._misses: dict[str, int] = {}
        self._listed_at: float | None = None
        self._is_wanted = True
        self._watched: Mapping[str, Position] = {}

    def next_listing_at(self) -> float:
        """When the next listing is due."""
        if self._listed_at is None:
            return 0.0
        interval_s = min(self._interval_s, _MISSING_INTERVAL_S if self._is_wanted else 1e9)
        return self._listed_at + interval_s

    def list_now(self) -> None:
        """The next listing is due at once."""
        self._listed_at = None

    def watch(self, start: Mapping[str, Position]) -> None:
        """The shards that the query reads now."""
        self._watched = start
        self._misses = {each: self._misses.get(each, 0) for each in start}
        self._want_again()

    def listed(self, shards: Iterable[Shard], sent_at: float) -> None:
        """Take in a complete listing."""
        self._latest = ShardGraph(shards)
        for shard in self._latest:
            # A closed shard stays closed, whatever an older page says.
            if not (shard.is_open and self.is_closed(shard.shard_id)):
                self._known[shard.shard_id] = shard
        self._listed_at = sent_at
        for shard_id in self._misses:
            is_missing = shard_id not in self._latest
            self._misses[shard_id] = self._misses[shard_id] + 1 if is_missing else 0
        self._rebuild()

    def not_listed(self, now: float) -> None:
        """A listing failed: the next is due after the usual pause for one that is missing."""
        self._listed_at, self._is_wanted = now, True

    def heard_of(self, children: Iterable[ChildShard]) -> None:
        """The last page of a shard named its children."""
        new = [child for child in children if child.shard_id not in self._known]
        for child in new:
            parents = (*child.parents, None, None)
            self._known[child.shard_id] = Shard(
                child.shard_id, child.hash_range, "0", None, parents[0], parents[1]
            )
        if new:
            self._rebuild()

    def lists(self, shard_id: str) -> bool:
        """Whether the latest listing has it."""
        return shard_id in self._latest

    def is_closed(self, shard_id: str) -> bool:
        """Whether a listing said that nothing is written to it any more."""
        shard = self.graph.get(shard_id)
        return shard is not None and not shard.is_open

    def listed_since(self, at: float) -> bool:
        """Whether there is a listing that was asked for after `at`."""
        return self._listed_at is not None and self._listed_at > at

    def gone(self) -> tuple[str, ...]:
        """Shards of the query that left the listing for good."""
        return tuple(each for each, n in self._misses.items() if n >= LISTINGS_TO_BELIEVE)

    def entering(self, *, fails_on_data_loss: bool) -> tuple[str, ...]:
        """Shards that the next batch takes in: children, or what is left where all of a line
        expired. Raises: DataLoss for such a line, unless that is allowed."""
        start, gone = self._watched, self.gone()
        ready = children_ready(start, self.graph, gone)
        if ready or not gone or any(start[each] != SHARD_END for each in gone):
            return ready
        lost = uncovered(start, self.graph)
        if not lost:
            return ready
        if not fails_on_data_loss:
            return oldest_over(lost, self._latest)
        raise DataLoss(
            f"all children of {', '.join(gone)} expired before they were read: hash keys"
            f" {lost[0].start} to {lost[0].end} are in no shard that this query has read to its"
            " end\nTo go on with what is left: failOnDataLoss=false, or a new checkpoint"
        )

    def waits_for_children(self) -> bool:
        """Whether children may enter now, or are not listed yet; not, whether one waits for its
        other parent."""
        return self._lacks_children() or bool(
            children_ready(self._watched, self.graph, self.gone())
        )

    def _lacks_children(self) -> bool:
        """Whether a shard has ended and not all its keys are in children that are known."""
        ended = [each for each, position in self._watched.items() if position == SHARD_END]
        return bool(unfollowed(ended, self.graph, self.gone()))

    def _rebuild(self) -> None:
        self.graph = ShardGraph(self._known.values())
        self._want_again()

    def _want_again(self) -> None:
        self._is_wanted = self._lacks_children() or any(
            each not in self.graph for each in self._watched
        )
