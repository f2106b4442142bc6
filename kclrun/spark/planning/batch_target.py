"""Decides the next time that all shards look for: the tip, or the end of the window in catch-up
[A3, A8, A9]. Pure.

The time never falls. It stops behind the tip while the children of an ended parent are not in the
offset.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from kclrun.spark.options import SourceSettings
from kclrun.spark.planning.bound_search import BatchTarget
from kclrun.spark.planning.service_time import ServiceTime
from kclrun.spark.planning.shard_cursor import Density, ShardCursor

# While reading is behind, the time advances by a window. The window is doubled while batches take
# less than half of the target duration, and halved where they take more. It is shorter where the
# density of the records would exceed a limit of the trigger. The time never falls.
# The first window: it is read before the oldest records of a stream have expired.
_FIRST_S: Final = 60.0
_SHORTEST_S: Final = 0.001
# The longest retention is a year.
_LONGEST_S: Final = 365 * 86_400.0


def admitted_s(
    records_max: int | None, bytes_max: float | None, densities: Collection[Density]
) -> float:
    """The time span of those densities that is within a trigger's limits, in Kinesis records and
    bytes; None means unlimited."""
    by_records = _quotient(records_max, sum(density.records_per_second for density in densities))
    by_bytes = _quotient(bytes_max, sum(density.bytes_per_second for density in densities))
    return max(_SHORTEST_S, min(by_records, by_bytes))


class Window:
    """The window's width, adapted to the duration of batches."""

    def __init__(self, target_batch_s: float) -> None:
        self._target_s = target_batch_s
        self.width_s = _FIRST_S

    def took(self, batch_s: float) -> None:
        """Note the time from a batch that the window ended to the request of the next batch."""
        if batch_s < self._target_s / 2:
            self.width_s = min(_LONGEST_S, self.width_s * 2)
        elif batch_s > self._target_s:
            self.width_s = max(_SHORTEST_S, self.width_s / 2)

    def until_ms(self, from_ms: int, admitted_s: float) -> int:
        """The end of a batch from `from_ms` on."""
        return from_ms + max(1, int(min(self.width_s, admitted_s) * 1000))


def _quotient(limit: float | None, rate: float) -> float:
    return _LONGEST_S if limit is None or rate <= 0 else limit / rate


# Measured: a trigger takes as long with 2 MB of inlined rows as without, 1.4 times with 8 MB.
BATCH_INLINE_BYTES_MAX: Final = 4 * 1024 * 1024
# AT_TIMESTAMP refuses the future; the next tick finds the records of the last moment.
TIP_MARGIN_MS: Final = 200
_PAGE_BYTES_MIN: Final = 64 * 1024
# The bytes that a task reads of one shard in half a minute at Kinesis' 2 MB/s.
_TRIGGER_BYTES_PER_SHARD: Final = 64 * 1024 * 1024


class TargetSearch:
    """Holds the time up to which all shards were read together, and decides the next target."""

    def __init__(self, settings: SourceSettings) -> None:
        self.aligned_ms = 0
        self.window = Window(settings.target_batch_s)
        self._settings = settings
        self._has_heads = False
        self._held_since: float | None = None

    def reach(self, aligned_ms: int) -> None:
        """All shards were read to that time."""
        self.aligned_ms = max(self.aligned_ms, aligned_ms)

    def page_bytes(self, shards: int) -> int:
        """The bytes that may be read of each shard without a second read by the executors."""
        share = BATCH_INLINE_BYTES_MAX // max(1, shards)
        return max(_PAGE_BYTES_MIN, min(self._settings.inline_bytes_max, share))

    def heads(self, cursors: Collection[ShardCursor], service: ServiceTime) -> BatchTarget | None:
        """A target for the first record after every position: once, while the time that all were
        read to, or the service's time, is unknown. Else None."""
        if self._has_heads or (self.aligned_ms and service.is_known):
            return None
        self._has_heads = True
        return BatchTarget(0, self.page_bytes(len(cursors)), only_heads=True)

    def tip(
        self,
        cursors: Collection[ShardCursor],
        service: ServiceTime,
        now: float,
        *,
        takes_all: bool = False,
    ) -> BatchTarget:
        """A target for all records up to the tip. `takes_all`: in this very batch."""
        tip_ms = service.surely_past_ms(now) - TIP_MARGIN_MS
        return BatchTarget(tip_ms, self.page_bytes(len(cursors)), is_tip=True, takes_all=takes_all)

    def next(
        self, cursors: Collection[ShardCursor], service: ServiceTime, now: float, *, waits: bool
    ) -> BatchTarget:
        """The next target. `waits`: children of an ended shard are not in the offset yet."""
        tip = self.tip(cursors, service, now)
        base_ms = self._base_ms(cursors, tip.until_ms)
        bytes_max = self._settings.bytes_per_trigger_max
        span_s = admitted_s(
            self._settings.records_per_trigger_max,
            bytes_max or _TRIGGER_BYTES_PER_SHARD * max(1, len(cursors)),
            [cursor.density for cursor in cursors if cursor.density is not None],
        )
        until_ms = self.window.until_ms(base_ms, span_s)
        if until_ms >= tip.until_ms:
            self._held_since = None
            return tip
        if self._is_held(now, waits=waits and self._settings.aligns_shards):
            until_ms = max(1, self.aligned_ms)
        return BatchTarget(until_ms, tip.page_bytes)

    def _base_ms(self, cursors: Collection[ShardCursor], tip_ms: int) -> int:
        """The start of the window: the time that all were read to, or later if no records lie
        between."""
        found = [cursor.head_ms for cursor in cursors if cursor.head_ms is not None]
        is_certain = all(cursor.head_ms is not None or cursor.kept.at_tip for cursor in cursors)
        if is_certain or not self.aligned_ms:
            return max(self.aligned_ms, min(tip_ms, *found) if found else tip_ms)
        return self.aligned_ms

    def _is_held(self, now: float, *, waits: bool) -> bool:
        """Whether the time waits for children; not for longer than a batch should take."""
        if not waits:
            self._held_since = None
            return False
        self._held_since = now if self._held_since is None else self._held_since
        return now - self._held_since < self._settings.target_batch_s
