"""The arithmetic of hash ranges: even ranges, and the way from one set of them to another.

Every step is a split of one range or a merge of two neighbours, as the service does it
(UpdateShardCount: "performs splits or merges on individual shards. This can cause short-lived
shards to be created"). May not know: shards. Rule: steps keep the tiling of the hash space.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from kclrun.model.shard import HASH_KEY_MAX, HashRange

__all__ = ["Merge", "Split", "even_ranges", "steps_to"]


class Split(msgspec.Struct, frozen=True):
    """Cut a range in two; the second begins at `at`."""

    whole: HashRange
    at: int


class Merge(msgspec.Struct, frozen=True):
    """Join two neighbours."""

    low: HashRange
    high: HashRange


def even_ranges(count: int) -> list[HashRange]:
    """The hash space in `count` equal ranges; the last takes what the division leaves."""
    width = (HASH_KEY_MAX + 1) // count
    starts = [index * width for index in range(count)]
    ends = [start - 1 for start in starts[1:]] + [HASH_KEY_MAX]
    return [HashRange(start, end) for start, end in zip(starts, ends, strict=True)]


def steps_to(current: Sequence[HashRange], target: Sequence[HashRange]) -> Iterator[Split | Merge]:
    """Splits, then merges, that lead from one tiling (in order) to another.

    A range that is in both is left alone. Cuts and joins go by halves, so that a lineage of k
    steps is about log2(k) generations deep.
    """
    cuts = [wanted.start for wanted in target]
    pieces: list[HashRange] = []
    for whole in current:
        inside = [cut for cut in cuts if whole.start < cut <= whole.end]
        yield from _cut(whole, inside)
        edges = [whole.start, *inside, whole.end + 1]
        pieces += [HashRange(low, high - 1) for low, high in pairwise(edges)]
    for wanted in target:
        yield from _join([piece for piece in pieces if piece.overlaps(wanted)])


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
