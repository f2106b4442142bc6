"""The end of a batch as an offset, and the hints that travel with it [A2, A4]. Pure.

A hint saves calls and never changes a row: a replay reads the same records by sequence number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from kclrun.model.shard import ShardGraph
from kclrun.spark.lineage import superseded
from kclrun.spark.offsets import Hint, Offset
from kclrun.spark.planning import shard_cursor
from kclrun.spark.planning.batch_target import BATCH_INLINE_BYTES_MAX
from kclrun.spark.positions import SHARD_END

# Retention is at least a day: an idle stream's offset records once an hour that nothing was missed.
AS_OF_AGE_MAX_MS: Final = 3_600_000
# Shards are looked at one after the other; rounded to steps, thousands of them share one time.
_AS_OF_STEP_MS: Final = 10_000


def offer(
    start: Offset,
    cursors: Mapping[str, shard_cursor.ShardCursor],
    graph: ShardGraph,
    gone: Collection[str],
    *,
    aligned_ms: int,
    is_first: bool,
) -> Offset:
    """`start` itself if no shard has new records, else the end of a batch from there.

    `cursors` are those of the shards of `start` and of the children that enter; `is_first` means
    that the batch is the query's first, whose start is not stored.
    """
    shards = {**start.shards, **{shard_id: cursor.bound for shard_id, cursor in cursors.items()}}
    seen = _seen(start, cursors)
    if shards == dict(start.shards) and not _is_stale(start, seen):
        return start
    for shard_id in superseded(shards, graph, gone):
        del shards[shard_id]
    began = {
        shard_id: cursors[shard_id].began() if shard_id in cursors else start.shards[shard_id]
        for shard_id in shards
        if _needs_beginning(start, cursors.get(shard_id), shard_id, is_first=is_first)
    }
    return Offset(
        streams=start.streams,
        shards=shards,
        began=began,
        aligned_ms=max(start.aligned_ms, aligned_ms),
        as_of_ms={shard_id: at for shard_id, at in seen.items() if shard_id in shards},
    )


def joined(start: Offset, end: Offset, later: Offset, graph: ShardGraph) -> Offset:
    """Two batches that follow each other, (start, end] and (end, later], as one.

    A shard that was read to its end within it stays, and is named as the parent of the children
    that entered after it.
    """
    kept = {
        shard_id: bound
        for shard_id, bound in end.shards.items()
        if shard_id in later.shards or start.shards.get(shard_id) != SHARD_END
    }
    shards = {**kept, **later.shards}
    began = {shard_id: where for shard_id, where in end.began.items() if shard_id in shards}
    for shard_id, where in later.began.items():
        # Where the first batch read no record, the later one has the exact beginning of the rows.
        so_far = began.get(shard_id, start.shards.get(shard_id))
        if so_far is None or so_far == end.shards.get(shard_id):
            began[shard_id] = where
    read = {shard for shard in shards if start.shards.get(shard) != SHARD_END}
    entered = [
        shard_id for shard_id in later.shards if shard_id not in end.shards and shard_id in graph
    ]
    above = {
        shard_id: tuple(sorted(read.intersection(graph[shard_id].parents))) for shard_id in entered
    }
    parents = {**end.parents, **{shard_id: found for shard_id, found in above.items() if found}}
    return Offset(
        streams=later.streams,
        shards=shards,
        began=began,
        aligned_ms=later.aligned_ms,
        as_of_ms=later.as_of_ms,
        parents=parents,
    )


def _needs_beginning(
    start: Offset, cursor: shard_cursor.ShardCursor | None, shard_id: str, *, is_first: bool
) -> bool:
    """Whether the start does not name the beginning exactly, or may differ in a replay."""
    position = start.shards.get(shard_id)
    is_lost = cursor is not None and cursor.is_lost
    return is_first or is_lost or position is None or not position.is_exact


def _seen(start: Offset, cursors: Mapping[str, shard_cursor.ShardCursor]) -> dict[str, int]:
    """The time at which each shard was last seen to hold nothing after its bound.

    It is rewritten together with the bound. For unchanged bounds it is rewritten only once one of
    their times is an hour old, and then for all: so an idle stream makes one batch an hour of it.
    """
    is_refreshed = any(
        _is_old(start.as_of_ms[shard_id], cursor.tip_at_bound_ms)
        for shard_id, cursor in cursors.items()
        if shard_id in start.as_of_ms and cursor.bound == start.shards.get(shard_id)
    )
    seen = {}
    for shard_id, cursor in cursors.items():
        before_ms, now_ms = start.as_of_ms.get(shard_id), cursor.tip_at_bound_ms
        if cursor.bound == SHARD_END:
            continue
        stays = cursor.bound == start.shards.get(shard_id) and before_ms is not None
        if stays and before_ms is not None and not (is_refreshed and now_ms is not None):
            seen[shard_id] = before_ms
        elif now_ms is not None:
            seen[shard_id] = now_ms - now_ms % _AS_OF_STEP_MS
    return seen


def _is_old(before_ms: int, now_ms: int | None) -> bool:
    return now_ms is not None and now_ms - before_ms >= AS_OF_AGE_MAX_MS


def _is_stale(start: Offset, seen: Mapping[str, int]) -> bool:
    return any(
        _is_old(start.as_of_ms[shard_id], at)
        for shard_id, at in seen.items()
        if shard_id in start.as_of_ms
    )


def hints_for(
    cursors: Iterable[shard_cursor.ShardCursor],
    end: Offset,
    shard_bytes_max: int,
    now: float,
    wall_ahead_s: float,
) -> Mapping[str, Hint]:
    """Hints for the ranges that end at `end`; rows of as many shards as fit, smallest first.

    `shard_bytes_max` 0 gives no rows at all.
    """
    hints = {
        cursor.shard_id: cursor.hint(now, wall_ahead_s)
        for cursor in cursors
        if cursor.bound != cursor.position and end.shards.get(cursor.shard_id) == cursor.bound
    }
    left = BATCH_INLINE_BYTES_MAX
    for size, shard_id in sorted(
        (shard_cursor.size_of(hint.rows or ()), shard_id) for shard_id, hint in hints.items()
    ):
        if size > min(left, shard_bytes_max) or not shard_bytes_max:
            hints[shard_id] = msgspec.structs.replace(hints[shard_id], rows=None)
        else:
            left -= size
    return hints
