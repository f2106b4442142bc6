"""The stream's shards, as listings and last pages show them, and the missing ones [A7]. Pure.

A shard counts as missing only when several listings in a row leave it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kclrun.errors import DataLoss
from kclrun.model.shard import ChildShard, Shard, ShardGraph
from kclrun.protocol.trimming import Absence, absence_of
from kclrun.spark.lineage import children_ready, descendants_of, oldest_over, uncovered, unfollowed
from kclrun.spark.positions import SHARD_END, Position

# Pages of one listing are read at different instants; five listings, a second apart, are enough.
LISTINGS_TO_BELIEVE: Final = 5
# The interval of listings while a shard is missing.
_MISSING_INTERVAL_S: Final = 1.0


class ShardListing:
    """All known shards, and the time of the next listing.

    Each answer is computed once for a start and a listing, because a look at thousands of shards
    needs it several times.
    """

    def __init__(self, interval_s: float) -> None:
        self._graph: ShardGraph | None = None
        self._interval_s = interval_s
        self._known: dict[str, Shard] = {}
        self._latest = ShardGraph(())
        self._misses: dict[str, int] = {}
        self._unlisted: dict[str, int] = {}
        self._ready: tuple[str, ...] | None = None
        self._lacks: bool | None = None
        self._listed_at: float | None = None
        self._is_wanted: bool | None = True
        self._watched: Mapping[str, Position] = {}

    @property
    def graph(self) -> ShardGraph:
        """All known shards and their relations, made on first use after a change."""
        if self._graph is None:
            self._graph = ShardGraph(self._known.values())
        return self._graph

    def next_listing_at(self) -> float:
        """When the next listing is due."""
        if self._listed_at is None:
            return 0.0
        interval_s = min(self._interval_s, _MISSING_INTERVAL_S if self._misses_some() else 1e9)
        return self._listed_at + interval_s

    def list_now(self) -> None:
        """The next listing is due at once."""
        self._listed_at = None

    def list_soon(self) -> None:
        """A shard is not found: the next listing is due after the pause for a missing shard."""
        self._is_wanted = True

    def watch(self, start: Mapping[str, Position]) -> None:
        """The shards that the query reads now."""
        if start == self._watched:
            return
        self._watched = start
        self._misses = {shard_id: self._misses.get(shard_id, 0) for shard_id in start}
        self._judge_again()

    def listed(self, shards: Iterable[Shard], sent_at: float) -> None:
        """Take in a complete listing."""
        self._latest = ShardGraph(shards)
        for shard in self._latest:
            # A closed shard stays closed, also if an older page shows it open.
            if not (shard.is_open and self.is_closed(shard.shard_id)):
                self._known[shard.shard_id] = shard
        self._listed_at = sent_at
        for shard_id in self._misses:
            self._misses[shard_id] = self._misses[shard_id] + 1 if self._misses_it(shard_id) else 0
        self._change()
        self._forget()

    def _misses_it(self, shard_id: str) -> bool:
        """Whether the latest listing leaves a shard out, and is not only older than the shard."""
        if shard_id in self._latest:
            return False
        known = self._known.get(shard_id)
        keys, parents = (known.hash_range, known.parents) if known is not None else (None, ())
        absence = absence_of(tuple(self._latest.unordered()), shard_id, keys, parents)
        return absence is not Absence.TOO_NEW

    def not_listed(self, now: float) -> None:
        """A listing failed: the next is due after the usual pause for a missing shard."""
        self._listed_at, self._is_wanted = now, True

    def add_children(self, children: Iterable[ChildShard]) -> None:
        """The last page of a shard named its children."""
        new = [child for child in children if child.shard_id not in self._known]
        for child in new:
            parents = (*child.parents, None, None)
            self._known[child.shard_id] = Shard(
                child.shard_id, child.hash_range, "0", None, parents[0], parents[1]
            )
        # A thousand shards that end at once each name their children: make the graph only once.
        if new:
            self._change()

    def lists(self, shard_id: str) -> bool:
        """Whether the latest listing has it."""
        return shard_id in self._latest

    def is_closed(self, shard_id: str) -> bool:
        """Whether a listing showed the shard as closed."""
        shard = self._known.get(shard_id)
        return shard is not None and not shard.is_open

    def listed_since(self, at: float) -> bool:
        """Whether a listing exists that was requested after `at`."""
        return self._listed_at is not None and self._listed_at > at

    def gone(self) -> tuple[str, ...]:
        """Shards of the query that left the listing for good."""
        return tuple(shard_id for shard_id, n in self._misses.items() if n >= LISTINGS_TO_BELIEVE)

    def entering(self, *, fails_on_data_loss: bool) -> tuple[str, ...]:
        """Shards that the next batch takes in: children, or, where all generations over some keys
        have expired, the oldest listed shards. Raises: DataLoss for such keys, unless that is
        allowed."""
        start, gone = self._watched, self.gone()
        ready = self._children_ready()
        if ready or not gone or any(start[shard_id] != SHARD_END for shard_id in gone):
            return ready
        lost = uncovered(start, self.graph)
        if not lost:
            return ready
        if not fails_on_data_loss:
            return oldest_over(lost, self._latest)
        raise DataLoss(
            f"all children of {', '.join(gone)} expired before they were read: hash keys"
            f" {lost[0].start} to {lost[0].end} are in no shard that this query has read to its"
            " end, and what the children held, if anything, is lost\nTo go on with what is left:"
            " failOnDataLoss=false, or a new checkpoint"
        )

    def waits_for_children(self) -> bool:
        """Whether children may enter now, or are not listed yet; a child that waits for its other
        parent does not count."""
        return self._lacks_children() or bool(self._children_ready())

    def _children_ready(self) -> tuple[str, ...]:
        if self._ready is None:
            self._ready = children_ready(self._watched, self.graph, self.gone())
        return self._ready

    def _lacks_children(self) -> bool:
        """Whether a shard has ended and no known child has some of its keys."""
        if self._lacks is None:
            ended = [
                shard_id for shard_id, position in self._watched.items() if position == SHARD_END
            ]
            self._lacks = bool(unfollowed(ended, self.graph, self.gone()))
        return self._lacks

    def _forget(self) -> None:
        """Drop shards that several listings in a row left out, unless the query has not passed them
        yet: a stream that is resharded every day lists thousands of shards within a month."""
        self._unlisted = {
            shard_id: self._unlisted.get(shard_id, 0) + 1
            for shard_id in self._known
            if shard_id not in self._latest
        }
        expired = {shard_id for shard_id, n in self._unlisted.items() if n >= LISTINGS_TO_BELIEVE}
        if not expired.difference(self._watched):
            return
        needed = descendants_of(self.graph, self._watched).union(self._watched)
        for shard_id in expired - needed:
            del self._known[shard_id]
        if expired - needed:
            self._change()

    def _change(self) -> None:
        self._graph = None
        self._judge_again()

    def _judge_again(self) -> None:
        self._ready = self._lacks = self._is_wanted = None

    def _misses_some(self) -> bool:
        """Whether a listing is due soon: shards of the query, or children, are not known."""
        if self._is_wanted is None:
            self._is_wanted = self._lacks_children() or any(
                shard_id not in self._known for shard_id in self._watched
            )
        return self._is_wanted
