"""Decides which shards a batch may hold: parents before children, all keys covered [A7]. Pure.

The `ShardGraph` may be stale: listings are taken page by page, so a shard may be missing that other
shards name. A function never guesses: its result then means "list again" or "not yet".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard, ShardGraph
from kclrun.spark.positions import SHARD_END, Position

KEY_SPACE: Final = HashRange(0, HASH_KEY_MAX)


def holes(covers: Iterable[HashRange], whole: HashRange = KEY_SPACE) -> tuple[HashRange, ...]:
    """The parts of `whole` that none of the ranges covers, in order."""
    found = []
    reached = whole.start
    for cover in sorted(covers):
        if cover.start > reached:
            found.append(HashRange(reached, min(cover.start - 1, whole.end)))
        reached = max(reached, cover.end + 1)
        if reached > whole.end:
            return tuple(found)
    return (*found, HashRange(reached, whole.end))


def key_space(graph: ShardGraph) -> HashRange:
    """All keys of the streams of these shards; the keys of several streams follow each other
    (`stream_set.py`). Each stream has a shard in every listing."""
    ranges = [shard.hash_range for shard in graph.unordered()]
    first = min((hash_range.start for hash_range in ranges), default=0)
    last = max((hash_range.end for hash_range in ranges), default=0)
    return HashRange(first & ~HASH_KEY_MAX, last | HASH_KEY_MAX)


def tiles(ranges: Collection[HashRange], whole: HashRange = KEY_SPACE) -> bool:
    """Whether every key lies in exactly one of the ranges."""
    return not holes(ranges, whole) and not _overlapping(ranges)


def ancestors_of(graph: ShardGraph, shard_id: str) -> frozenset[str]:
    """All parents, grandparents … that the listed shards name, whether listed themselves or not."""
    found: set[str] = set()
    ahead = [shard_id]
    while ahead:
        shard = graph.get(ahead.pop())
        for parent in shard.parents if shard is not None else ():
            if parent not in found:
                found.add(parent)
                ahead.append(parent)
    return frozenset(found)


def descendants_of(graph: ShardGraph, shard_ids: Iterable[str]) -> frozenset[str]:
    """All listed children, grandchildren … of the shards; the shards themselves only if related."""
    found: set[str] = set()
    ahead = list(shard_ids)
    while ahead:
        for child in graph.children_naming(ahead.pop()):
            if child not in found:
                found.add(child)
                ahead.append(child)
    return frozenset(found)


def relatives_of(graph: ShardGraph, shard_ids: Collection[str]) -> frozenset[str]:
    """The shards, their ancestors and their descendants: none of them needs another position."""
    above = (ancestors_of(graph, shard_id) for shard_id in shard_ids)
    return descendants_of(graph, shard_ids).union(shard_ids, *above)


def roots(graph: ShardGraph, among: Collection[str] | None = None) -> tuple[str, ...] | None:
    """The oldest shards: those without a listed parent. None: list again.

    Keys of shards that expired are covered by the descendants of their neighbours: a merge of an
    expired shard with a listed one waits for the listed one. `among` narrows the listing to some
    of its shards; their key space is then not checked.
    """
    inside = [shard for shard in graph if among is None or shard.shard_id in among]
    ids = {shard.shard_id for shard in inside}
    found = tuple(shard.shard_id for shard in inside if not ids.intersection(shard.parents))
    if _overlapping([graph[shard_id].hash_range for shard_id in found]):
        return None
    if among is not None:
        return found
    below = descendants_of(graph, found)
    covers = (graph[shard_id].hash_range for shard_id in (*found, *below))
    return None if holes(covers, key_space(graph)) else found


def leaves(graph: ShardGraph) -> tuple[str, ...] | None:
    """The newest shards: those without listed children, closed ones too. None: list again, because
    the children of one parent may appear one after the other."""
    found = tuple(shard.shard_id for shard in graph if not graph.children_of(shard.shard_id))
    covers = [graph[shard_id].hash_range for shard_id in found]
    return found if tiles(covers, key_space(graph)) else None


def children_ready(
    start: Mapping[str, Position], graph: ShardGraph, gone: Collection[str] = ()
) -> tuple[str, ...]:
    """Shards that may enter the batch after `start`, by id.

    Every parent that is listed or in `start` is at SHARD_END in `start`. No other shard in `start`
    shares keys with them, except their own ended ancestors. The exception does not hold where a
    parent is not listed: a generation between may still come. `gone` are shards of `start` that
    have left the listing for good; any other unlisted shard may have any keys.
    Looks at relatives only: all shards of a stream may split at once.
    """
    ended = [shard_id for shard_id, position in start.items() if position == SHARD_END]
    children = {child for ended_id in ended for child in graph.children_naming(ended_id)}
    waiting = [graph[shard_id] for shard_id in sorted(children.difference(start))]
    unknown = {shard_id for shard_id in start if shard_id not in graph}.difference(gone)
    ready = []
    for shard in waiting:
        parents = [parent for parent in shard.parents if parent in graph or parent in start]
        if all(start.get(parent) == SHARD_END for parent in parents):
            ready.append(shard)
    if not ready or any(start[shard_id] != SHARD_END for shard_id in unknown):
        return ()
    listed = [graph[shard_id] for shard_id in start.keys() - set(gone) if shard_id in graph]
    sharing = _sharing_keys(ready, listed)
    found = []
    for shard in ready:
        above = ancestors_of(graph, shard.shard_id)
        if unknown <= above and not _is_shadowed(
            shard, sharing[shard.shard_id], above, start, graph
        ):
            found.append(shard.shard_id)
    return tuple(found)


def superseded(
    end: Mapping[str, Position], graph: ShardGraph, gone: Collection[str] = ()
) -> frozenset[str]:
    """Ended shards that `end` does not need to name: their children in it have all their keys.

    A shard whose own parent stays is kept: without its entry the shard would look as if it had not
    been read yet. An ended shard that left the listing for good goes when the other shards cover
    the key space without it.
    """
    left = set(end)
    dropped: set[str] = set()
    ended = [shard_id for shard_id, position in end.items() if position == SHARD_END]
    is_covered_without = _Covering(end, graph, gone) if gone else None
    for shard_id in _parents_first(ended, graph):
        shard = graph.get(shard_id)
        if shard is not None and not left.isdisjoint(shard.parents):
            continue
        children = (
            graph[child].hash_range for child in graph.children_naming(shard_id) if child in left
        )
        is_followed = shard is not None and not holes(children, shard.hash_range)
        if not is_followed and shard_id in gone and is_covered_without is not None:
            is_followed = is_covered_without(shard_id, left)
        if is_followed:
            left.discard(shard_id)
            dropped.add(shard_id)
    return frozenset(dropped)


def unfollowed(
    ended: Iterable[str], graph: ShardGraph, gone: Collection[str] = ()
) -> frozenset[str]:
    """Ended shards with keys that no listed child has yet: list again, soon."""
    found = set()
    for shard_id in ended:
        shard = graph.get(shard_id)
        if shard is None:
            found.update({shard_id}.difference(gone))
            continue
        children = (graph[child].hash_range for child in graph.children_of(shard_id))
        if holes(children, shard.hash_range):
            found.add(shard_id)
    return frozenset(found)


def uncovered(start: Mapping[str, Position], graph: ShardGraph) -> tuple[HashRange, ...]:
    """Keys that neither `start` nor a listed descendant of it has. If fresh listings repeat this
    again and again, every generation over these keys has expired."""
    present = [shard_id for shard_id in start if shard_id in graph]
    below = descendants_of(graph, start)
    return holes((graph[shard_id].hash_range for shard_id in {*present, *below}), key_space(graph))


def oldest_over(lost: Sequence[HashRange], listed: ShardGraph) -> tuple[str, ...]:
    """The listed shards that hold the remaining part of those keys, oldest generation only."""
    over = {
        shard.shard_id: shard
        for shard in listed
        if any(shard.hash_range.overlaps(hash_range) for hash_range in lost)
    }
    return tuple(
        shard_id for shard_id in sorted(over) if not over.keys() & ancestors_of(listed, shard_id)
    )


def _is_shadowed(
    shard: Shard,
    sharing: Iterable[Shard],
    above: Collection[str],
    start: Mapping[str, Position],
    graph: ShardGraph,
) -> bool:
    """Whether another shard with keys of `shard` is not done with them; `above`: its ancestors."""
    parents = [graph[parent].hash_range for parent in shard.parents if parent in graph]
    unlisted = holes(parents, shard.hash_range)
    for other in sharing:
        if start[other.shard_id] != SHARD_END or other.shard_id not in above:
            return True
        is_parent = other.shard_id in shard.parents
        if not is_parent and any(other.hash_range.overlaps(hash_range) for hash_range in unlisted):
            return True
    return False


def _sharing_keys(
    shards: Iterable[Shard], others: Iterable[Shard]
) -> Mapping[str, Sequence[Shard]]:
    """For each shard, the others whose hash ranges overlap its own: one ordered pass over both."""
    by_start = sorted(others, key=lambda other: other.hash_range.start)
    starts = [other.hash_range.start for other in by_start]
    begun: list[Shard] = []
    passed = 0
    found: dict[str, Sequence[Shard]] = {}
    for shard in sorted(shards, key=lambda one: one.hash_range.start):
        keys = shard.hash_range
        until = bisect_right(starts, keys.start)
        begun = [
            other
            for other in (*begun, *by_start[passed:until])
            if other.hash_range.end >= keys.start
        ]
        passed = until
        found[shard.shard_id] = [*begun, *by_start[until : bisect_right(starts, keys.end)]]
    return found


def _parents_first(shard_ids: Collection[str], graph: ShardGraph) -> Sequence[str]:
    """The shards, each after its ancestors in the list."""
    among, ordered, seen = set(shard_ids), list[str](), set[str]()
    ahead = sorted(among, reverse=True)
    while ahead:
        shard = graph.get(ahead[-1])
        above = among.intersection(shard.parents) - seen if shard is not None else set[str]()
        if above:
            ahead += sorted(above)
            continue
        shard_id = ahead.pop()
        if shard_id not in seen:
            seen.add(shard_id)
            ordered.append(shard_id)
    return ordered


class _Covering:
    """Whether the shards of an offset cover all keys without one of them."""

    def __init__(
        self, end: Mapping[str, Position], graph: ShardGraph, gone: Collection[str]
    ) -> None:
        listed = [graph[shard_id] for shard_id in end if shard_id in graph]
        # A dropped shard does not change this: other shards have all its keys.
        self._covers_all = not holes((other.hash_range for other in listed), key_space(graph))
        self._graph = graph
        asked = (
            [graph[shard_id] for shard_id in gone if shard_id in graph] if self._covers_all else []
        )
        self._sharing = _sharing_keys(asked, listed)

    def __call__(self, shard_id: str, left: Collection[str]) -> bool:
        if not self._covers_all or shard_id not in self._graph:
            return self._covers_all
        others = (
            other.hash_range
            for other in self._sharing[shard_id]
            if other.shard_id != shard_id and other.shard_id in left
        )
        return not holes(others, self._graph[shard_id].hash_range)


def _overlapping(ranges: Iterable[HashRange]) -> bool:
    ordered = sorted(ranges)
    return any(one.overlaps(other) for one, other in pairwise(ordered))
