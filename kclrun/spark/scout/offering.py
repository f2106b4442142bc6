"""The end offset of a batch, from its start and what was found of every shard [A2, A7]. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from kclrun.model.shard import ShardGraph
from kclrun.spark.lineage import superseded
from kclrun.spark.offsets import Offset
from kclrun.spark.positions import SHARD_END
from kclrun.spark.scout.track import Track

__all__ = ["AS_OF_AGE_MAX_MS", "offer"]

# Retention is a day at least: an idle stream's offset says once an hour that nothing was missed.
AS_OF_AGE_MAX_MS: Final = 3_600_000


def offer(
    start: Offset,
    tracks: Mapping[str, Track],
    graph: ShardGraph,
    gone: Collection[str],
    *,
    aligned_ms: int,
    is_first: bool,
) -> Offset:
    """`start` itself where there is no news, else the end of a batch from there.

    `tracks` are the shards of `start` and the children that enter; `is_first` says that the batch
    is the query's first, whose start nobody stores.
    """
    shards = {**start.shards, **{shard_id: track.bound for shard_id, track in tracks.items()}}
    seen = _seen(start, tracks)
    if shards == dict(start.shards) and not _is_stale(start, seen):
        return start
    for shard_id in superseded(shards, graph, gone):
        del shards[shard_id]
    began = {
        shard_id: tracks[shard_id].began() if shard_id in tracks else start.shards[shard_id]
        for shard_id in shards
        if _needs_beginning(start, tracks.get(shard_id), shard_id, is_first=is_first)
    }
    return Offset(
        stream=start.stream,
        created_ms=start.created_ms,
        shards=shards,
        began=began,
        aligned_ms=max(start.aligned_ms, aligned_ms),
        as_of_ms={shard_id: at for shard_id, at in seen.items() if shard_id in shards},
    )


def _needs_beginning(start: Offset, track: Track | None, shard_id: str, *, is_first: bool) -> bool:
    """Where the start does not say exactly where to begin, or will not be the same again."""
    position = start.shards.get(shard_id)
    is_lost = track is not None and track.is_lost
    return is_first or is_lost or position is None or not position.is_exact


def _seen(start: Offset, tracks: Mapping[str, Track]) -> dict[str, int]:
    """When each shard was last seen to hold nothing after its bound.

    Rewritten with the bound; for a bound that stays, only once the time is an hour old, so that an
    idle stream makes no batches of it.
    """
    seen = {}
    for shard_id, track in tracks.items():
        before_ms, now_ms = start.as_of_ms.get(shard_id), track.tip_at_bound_ms
        if track.bound == SHARD_END:
            continue
        stays = track.bound == start.shards.get(shard_id) and before_ms is not None
        if stays and before_ms is not None and not _is_old(before_ms, now_ms):
            seen[shard_id] = before_ms
        elif now_ms is not None:
            seen[shard_id] = now_ms
    return seen


def _is_old(before_ms: int, now_ms: int | None) -> bool:
    return now_ms is not None and now_ms - before_ms >= AS_OF_AGE_MAX_MS


def _is_stale(start: Offset, seen: Mapping[str, int]) -> bool:
    return any(
        _is_old(start.as_of_ms[shard_id], at)
        for shard_id, at in seen.items()
        if shard_id in start.as_of_ms
    )
