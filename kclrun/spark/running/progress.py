"""What one committed micro-batch did, read from the progress that Spark reports of it.

Positions are those of the source's own offsets; rows by shard come from the metric that
`building.py` lets Spark observe; lag from what the source reports beside its offsets.
Pure. Rule: what is not there is None, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from kclrun.errors import OffsetRefused
from kclrun.spark.offsets import Offset, decode_offset
from kclrun.spark.positions import Position

__all__ = ["OBSERVED", "BatchDone", "ShardBatch", "read_lags", "read_progress"]

# The name of the observed metric. A pipeline may observe under names of its own.
OBSERVED: Final = "kclrun"


class ShardBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One shard's part; `records` None where this Spark cannot count by shard.

    A processor's tasks say more: `bytes`, and `processing_s` spent in user code.
    """

    begin: Position
    end: Position
    records: int | None = None
    bytes: int | None = None
    processing_s: float = 0.0


class BatchDone(msgspec.Struct, frozen=True, kw_only=True):
    """One batch that is committed. `shards` are those it read something of, or brought to an end.

    `bytes` None where they were not counted; `seconds` is the time of the whole trigger;
    `bounds` are all positions after it.
    """

    batch_id: int
    records: int
    bytes: int | None
    seconds: float
    shards: Mapping[str, ShardBatch]
    bounds: Mapping[str, Position]


def read_progress(progress: Mapping[str, Any]) -> BatchDone | None:
    """The batch that a progress (Spark's JSON, decoded) tells of; None for an idle trigger."""
    durations = progress.get("durationMs", {})
    if "addBatch" not in durations:
        return None
    observed = progress.get("observedMetrics", {}).get(OBSERVED, {})
    by_shard = _by_shard(observed)
    shards: dict[str, ShardBatch] = {}
    bounds: dict[str, Position] = {}
    for source in progress.get("sources", ()):
        end = _offset(source.get("endOffset"))
        if end is None:
            continue
        bounds |= end.shards
        shards |= _shards(_offset(source.get("startOffset")), end, by_shard)
    return BatchDone(
        batch_id=progress["batchId"],
        # A sum over nothing is none.
        records=(observed.get("records") or 0) if observed else progress.get("numInputRows", 0),
        bytes=(observed.get("bytes") or 0) if observed else None,
        seconds=durations.get("triggerExecution", 0) / 1000,
        shards=shards,
        bounds=bounds,
    )


def read_lags(progress: Mapping[str, Any]) -> Mapping[str, int]:
    """Milliseconds behind the tip by shard, as the source last reported them."""
    lags: dict[str, int] = {}
    for source in progress.get("sources", ()):
        reported = source.get("latestOffset")
        shards = reported.get("shards") if isinstance(reported, dict) else None
        if not isinstance(shards, dict):
            continue
        for shard_id, told in shards.items():
            lag_ms = told.get("lagMs") if isinstance(told, dict) else None
            if isinstance(lag_ms, int | float):
                lags[shard_id] = round(lag_ms)
    return lags


def _offset(value: object) -> Offset | None:
    """Our offset; None for that of another source, or for none."""
    try:
        return decode_offset(value)
    except OffsetRefused:
        return None


class ShardCount(NamedTuple):
    """What was counted of one shard in one batch."""

    records: int | None = None
    bytes: int | None = None
    processing_s: float = 0.0

    def plus(self, other: ShardCount) -> ShardCount:
        return ShardCount(
            (self.records or 0) + (other.records or 0),
            other.bytes if self.bytes is None else self.bytes + (other.bytes or 0),
            self.processing_s + other.processing_s,
        )


def _shards(
    start: Offset | None, end: Offset, by_shard: Mapping[str, ShardCount] | None
) -> dict[str, ShardBatch]:
    former = start.shards if start is not None else {}
    moved = {}
    for shard_id, bound in end.shards.items():
        begin = end.began.get(shard_id, former.get(shard_id))
        if begin is None or begin == bound:
            continue
        counted = by_shard.get(shard_id, ShardCount(0)) if by_shard is not None else ShardCount()
        moved[shard_id] = ShardBatch(
            begin=begin,
            end=bound,
            records=counted.records,
            bytes=counted.bytes,
            processing_s=counted.processing_s,
        )
    return moved


def _by_shard(observed: Mapping[str, Any]) -> Mapping[str, ShardCount] | None:
    """A processor's tasks may say several things of one shard: it can be released within."""
    counted = observed.get("by_shard")
    if not isinstance(counted, list):
        return None
    told: dict[str, ShardCount] = {}
    for each in counted:
        told[each["item"]] = told.get(each["item"], ShardCount(0)).plus(
            ShardCount(each["count"], each.get("bytes"), each.get("processingS") or 0.0)
        )
    return told
