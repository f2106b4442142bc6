"""What of the driver's own reading travels with a batch to the executors [A4]. Pure.

Rule: a hint saves calls and never changes a row: a replay reads the same by sequence number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from kclrun.model.record import Record
from kclrun.spark.offsets import Offset
from kclrun.spark.ranges import Hint
from kclrun.spark.scout.aiming import BATCH_INLINE_BYTES_MAX
from kclrun.spark.scout.stretch import RECORD_OVERHEAD_BYTES
from kclrun.spark.scout.track import Track

__all__ = ["hints_for"]


def hints_for(
    tracks: Iterable[Track], end: Offset, shard_bytes_max: int, now: float, wall_ahead_s: float
) -> Mapping[str, Hint]:
    """Hints for the ranges that end at `end`; rows of as many shards as fit, smallest first.

    `shard_bytes_max` 0 gives no rows at all.
    """
    hints = {
        track.shard_id: track.hint(now, wall_ahead_s)
        for track in tracks
        if track.bound != track.position and end.shards.get(track.shard_id) == track.bound
    }
    left = BATCH_INLINE_BYTES_MAX
    for size, shard_id in sorted((_size(hint.rows), each) for each, hint in hints.items()):
        if size > min(left, shard_bytes_max) or not shard_bytes_max:
            hints[shard_id] = msgspec.structs.replace(hints[shard_id], rows=None)
        else:
            left -= size
    return hints


def _size(rows: tuple[Record, ...] | None) -> int:
    return sum(len(row.data) + RECORD_OVERHEAD_BYTES for row in rows or ())
