"""Which shards a batch may hold: parents before children, the key space always covered [A7].

Pure, over a `ShardGraph` that may be stale: listings are taken page by page, so a shard may be
missing that others name. Rule: what is not known is waited for, never guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard, ShardGraph
from kclrun.spark.positions import SHARD_END, Position

__all__ = [
    "KEY_SPACE",
    "ancestors_of",
    "children_ready",
    "descendants_of",
    "holes",
    "leaves",
    "oldest_over",
    "relatives_of",
    "roots",
    "superseded",
    "tiles",
    "uncovered",
    "unfollowed",
]

KEY_SPACE: Final = HashRange(0, HASH_KEY_MAX)


def holes(covers: Iterable[HashRange], whole: HashRange = KEY_SPACE) -> tuple[HashRange, ...]:
    """The parts of `whole` that none of the ranges covers, in order."""
    found = []
    reached = whole.start
    for each in sorted(covers):
        if each.start > reached:
            found.append(HashRange(reached, min(each.start - 1, whole.end)))
        reached = max(reached, each.end + 1)
        if reached > whole.end:
            return tuple(found)
    return (*found, HashRange(reached, whole.end))


def tiles(ranges: Collection[HashRange]) -> bool:
    """Whether every key lies in exactly one of the ranges."""
    return not holes(ranges) and not _overlapping(ranges)


def ancestors_of(graph: ShardGraph, shard_id: str) -> frozenset[str]:
    """All that the listed shards name as parents, grandparents …, listed themselves or not."""
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
    """All listed children, grandchildren … of the shards, without themselves unless related."""
    found: set[str] = set()
    ahead = list(shard_ids)
    named = _children_by_name(graph)
    while ahead:
        for child in named.get(ahead.pop(), ()):
            if child not in found:
                found.add(child)
                ahead.append(child)
    return frozenset(found)


def relatives_of(graph: ShardGraph, shard_ids: Collection[str]) -> frozenset[str]:
    """The shards, their ancestors and their descendants: what positions of them speak for."""
    above = (ancestors_of(graph, shard_id) for shard_id in shard_ids)
    return descendants_of(graph, shard_ids).union(shard_ids, *above)


def roots(graph: ShardGraph, among: Collection[str] | None = None) -> tuple[str, ...] | None:
    """Where everything begins: shards of which no parent is listed; None: list again.

    Keys of shards that expired are covered by the descendants of their neighbours: a merge of an
    expired shard with one that is listed waits for that one. `among` narrows the listing to some
    of its shards, whose key space is then not checked.
    """
    inside = [shard for shard in graph if among is None or shard.shard_id in among]
    ids = {shard.shard_id for shard in inside}
    found = tuple(shard.shard_id for shard in inside if not ids.intersection(shard.parents))
    if _overlapping([graph[shard_id].hash_range for shard_id in found]):
        return None
    if among is not None:
        return found
    below = descendants_of(graph, found)
    return None if holes(graph[each].hash_range for each in (*found, *below)) else found


def leaves(graph: ShardGraph) -> tuple[str, ...] | None:
    """Where everything ends now: shards, closed ones too, without listed children; None: list
    again, for children of one parent may appear one after the other."""
    found = tuple(shard.shard_id for shard in graph if not graph.children_of(shard.shard_id))
    return found if tiles([graph[shard_id].hash_range for shard_id in found]) else None


def children_ready(
    start: Mapping[str, Position], graph: ShardGraph, gone: Collection[str] = ()
) -> tuple[str, ...]:
    """Shards that may enter the batch after `start`, by id.

    Every parent that is listed or in `start` is at SHARD_END in `start`, and nothing else in
    `start` has keys of theirs except their own ended ancestors, and those not where a parent is
    not listed: a generation between may still be to come. `gone` are shards of `start` known to
    have left the listing for good; any other one that is not listed may have any keys.
    """
    unknown = [each for each in start if each not in graph and each not in gone]
    ready = []
    for shard in graph:
        if shard.shard_id in start or not any(each in start for each in shard.parents):
            continue
        parents = [each for each in shard.parents if each in graph or each in start]
        if any(start.get(each) != SHARD_END for each in parents):
            continue
        above = ancestors_of(graph, shard.shard_id)
        if any(each not in above or start[each] != SHARD_END for each in unknown):
            continue
        if not _is_shadowed(
            shard, {each: start[each] for each in start if each not in gone}, graph
        ):
            ready.append(shard.shard_id)
    return tuple(ready)


def superseded(
    end: Mapping[str, Position], graph: ShardGraph, gone: Collection[str] = ()
) -> frozenset[str]:
    """Ended shards that `end` need not name: their children in it have all their keys.

    Never one whose own parent stays: it would look as if it had not been read yet. An ended shard
    that left the listing for good goes when the others cover the key space without it.
    """
    left = dict(end)
    dropped: set[str] = set()
    for shard_id in sorted(end, key=lambda each: (len(ancestors_of(graph, each)), each)):
        if end[shard_id] != SHARD_END:
            continue
        shard = graph.get(shard_id)
        if shard is not None and any(parent in left for parent in shard.parents):
            continue
        others = {each: left[each] for each in left if each != shard_id}
        if _is_covered(shard_id, shard, others, graph, gone):
            del left[shard_id]
            dropped.add(shard_id)
    return frozenset(dropped)


def unfollowed(
    ended: Iterable[str], graph: ShardGraph, gone: Collection[str] = ()
) -> frozenset[str]:
    """Ended shards some of whose keys are in no child that is listed yet: list again, soon."""
    found = set()
    for shard_id in ended:
        shard = graph.get(shard_id)
        if shard is None:
            found.update({shard_id}.difference(gone))
            continue
        children = (graph[each].hash_range for each in graph.children_of(shard_id))
        if holes(children, shard.hash_range):
            found.add(shard_id)
    return frozenset(found)


def uncovered(start: Mapping[str, Position], graph: ShardGraph) -> tuple[HashRange, ...]:
    """Keys that neither `start` nor a listed descendant of it has: if a fresh listing says so
    again and again, every generation over them has expired."""
    present = [each for each in start if each in graph]
    below = descendants_of(graph, start)
    return holes(graph[each].hash_range for each in {*present, *below})


def oldest_over(lost: Sequence[HashRange], listed: ShardGraph) -> tuple[str, ...]:
    """The listed shards that hold what is left of those keys, oldest generation only."""
    over = {
        shard.shard_id: shard
        for shard in listed
        if any(shard.hash_range.overlaps(each) for each in lost)
    }
    return tuple(each for each in sorted(over) if not over.keys() & ancestors_of(listed, each))


def _is_shadowed(shard: Shard, start: Mapping[str, Position], graph: ShardGraph) -> bool:
    above = ancestors_of(graph, shard.shard_id)
    parents = [graph[each].hash_range for each in shard.parents if each in graph]
    unlisted = holes(parents, shard.hash_range)
    for other_id, position in start.items():
        other = graph.get(other_id)
        if other is None or not other.hash_range.overlaps(shard.hash_range):
            continue
        if position != SHARD_END or other_id not in above:
            return True
        is_parent = other_id in shard.parents
        if not is_parent and any(other.hash_range.overlaps(each) for each in unlisted):
            return True
    return False


def _is_covered(
    shard_id: str,
    shard: Shard | None,
    others: Mapping[str, Position],
    graph: ShardGraph,
    gone: Collection[str],
) -> bool:
    known = [graph[each] for each in others if each in graph]
    if shard is not None:
        children = [each.hash_range for each in known if shard_id in each.parents]
        if not holes(children, shard.hash_range):
            return True
    return shard_id in gone and not holes(each.hash_range for each in known)


def _overlapping(ranges: Iterable[HashRange]) -> bool:
    ordered = sorted(ranges)
    return any(one.overlaps(other) for one, other in pairwise(ordered))


def _children_by_name(graph: ShardGraph) -> Mapping[str, Sequence[str]]:
    """Children by the parents they name, which need not be listed any more."""
    named: dict[str, list[str]] = {}
    for shard in graph:
        for parent in shard.parents:
            named.setdefault(parent, []).append(shard.shard_id)
    return named
