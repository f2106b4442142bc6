"""Hash ranges: equal ones, and the steps from one set of ranges to another. Pure.

Every step is a split of one range or a merge of two neighbours, as the service does it
(UpdateShardCount: "performs splits or merges on individual shards. This can cause short-lived
shards to be created"). After every step the ranges still tile the hash space.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import msgspec

from kclrun.model.shard import HASH_KEY_MAX, HashRange

# An edge is in its place if it is off by less than this part of a range.
_SHARE: Final = 1_000_000


class Split(msgspec.Struct, frozen=True):
    """Cut a range in two; the second begins at `at`."""

    whole: HashRange
    at: int


class Merge(msgspec.Struct, frozen=True):
    """Join two neighbours."""

    low: HashRange
    high: HashRange


def even_ranges(count: int) -> list[HashRange]:
    """The hash space in `count` ranges whose sizes differ by one at most. Half as many ranges have
    their edges among these, so that a doubling is a split of each."""
    edges = [index * (HASH_KEY_MAX + 1) // count for index in range(count + 1)]
    return [HashRange(low, high - 1) for low, high in pairwise(edges)]


def even_ranges_near(current: Sequence[HashRange], count: int) -> list[HashRange]:
    """As `even_ranges`, but an edge of `current` that is nearly in its place is kept: otherwise a
    shard some hash keys wide would be cut off and joined again."""
    edges = [hash_range.start for hash_range in current]
    starts = []
    for wanted in even_ranges(count):
        at = bisect_left(edges, wanted.start)
        near = min(edges[max(0, at - 1) : at + 1], key=lambda edge: abs(edge - wanted.start))
        is_near = abs(near - wanted.start) * count * _SHARE <= HASH_KEY_MAX
        starts.append(near if is_near else wanted.start)
    return [HashRange(low, high - 1) for low, high in pairwise([*starts, HASH_KEY_MAX + 1])]


def steps_to(current: Sequence[HashRange], target: Sequence[HashRange]) -> Iterator[Split | Merge]:
    """Splits, then merges, that lead from one tiling (in order) to another.

    A range that is in both is not changed. Ranges are cut and joined by halves, so that a lineage
    of k steps is about log2(k) generations deep.
    """
    cuts = [wanted.start for wanted in target]
    pieces: list[HashRange] = []
    for whole in current:
        inside = cuts[bisect_right(cuts, whole.start) : bisect_right(cuts, whole.end)]
        yield from _cut(whole, inside)
        edges = [whole.start, *inside, whole.end + 1]
        pieces += [HashRange(low, high - 1) for low, high in pairwise(edges)]
    starts = [piece.start for piece in pieces]
    for wanted in target:
        yield from _join(
            pieces[bisect_left(starts, wanted.start) : bisect_right(starts, wanted.end)]
        )


def _cut(whole: HashRange, cuts: Sequence[int]) -> Iterator[Split]:
    if not cuts:
        return
    middle = len(cuts) // 2
    at = cuts[middle]
    yield Split(whole, at)
    yield from _cut(HashRange(whole.start, at - 1), cuts[:middle])
    yield from _cut(HashRange(at, whole.end), cuts[middle + 1 :])


def _join(pieces: Sequence[HashRange]) -> Iterator[Merge]:
    if len(pieces) < 2:
        return
    middle = len(pieces) // 2
    yield from _join(pieces[:middle])
    yield from _join(pieces[middle:])
    low = HashRange(pieces[0].start, pieces[middle - 1].end)
    yield Merge(low, HashRange(pieces[middle].start, pieces[-1].end))
