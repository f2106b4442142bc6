"""Which time all shards look for next: the tip, or where the window in catch-up ends [A3, A8, A9].

Rules: the time never falls; it stands still, behind the tip, while an ended parent's children are
not in the offset. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from kclrun.spark.scout.service_time import ServiceTime
from kclrun.spark.scout.track import Track
from kclrun.spark.scout.walk import Aim
from kclrun.spark.scout.window import Admission, Window
from kclrun.spark.settings import SourceSettings

__all__ = ["BATCH_INLINE_BYTES_MAX", "Aiming"]

# Measured: a trigger takes as long with 2 MB of inlined rows as without, 1.4 times with 8 MB.
BATCH_INLINE_BYTES_MAX: Final = 4 * 1024 * 1024
# AT_TIMESTAMP refuses the future; what arrived in the last moment is found by the next tick.
TIP_MARGIN_MS: Final = 200
_PAGE_BYTES_MIN: Final = 64 * 1024
# What a task reads of one shard in half a minute at Kinesis' 2 MB/s.
_TRIGGER_BYTES_PER_SHARD: Final = 64 * 1024 * 1024


class Aiming:
    """The time up to which all shards were read together, and how far it goes next."""

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
        """What may be read of each shard that executors need not read again."""
        share = BATCH_INLINE_BYTES_MAX // max(1, shards)
        return max(_PAGE_BYTES_MIN, min(self._settings.inline_bytes_max, share))

    def heads(self, tracks: Collection[Track], service: ServiceTime) -> Aim | None:
        """An aim for the first record after every position, where nothing else is known yet, not
        even the service's time."""
        if self._has_heads or (self.aligned_ms and service.is_known):
            return None
        self._has_heads = True
        return Aim(0, self.page_bytes(len(tracks)), only_heads=True)

    def tip(
        self,
        tracks: Collection[Track],
        service: ServiceTime,
        now: float,
        *,
        takes_all: bool = False,
    ) -> Aim:
        """An aim for all there is. `takes_all`: in this very batch."""
        tip_ms = service.surely_past_ms(now) - TIP_MARGIN_MS
        return Aim(tip_ms, self.page_bytes(len(tracks)), is_tip=True, takes_all=takes_all)

    def next(
        self, tracks: Collection[Track], service: ServiceTime, now: float, *, waits: bool
    ) -> Aim:
        """The next aim. `waits`: children of an ended shard are not in the offset yet."""
        tip = self.tip(tracks, service, now)
        base_ms = self._base_ms(tracks, tip.until_ms)
        until_ms = self.window.until_ms(base_ms, self._admitted_s(tracks))
        if until_ms >= tip.until_ms:
            self._held_since = None
            return tip
        if self._is_held(now, waits=waits and self._settings.aligns_shards):
            until_ms = max(1, self.aligned_ms)
        return Aim(until_ms, tip.page_bytes)

    def _base_ms(self, tracks: Collection[Track], tip_ms: int) -> int:
        """Where the window begins: where all were read to, or later if nothing lies before."""
        found = [each.head_ms for each in tracks if each.head_ms is not None]
        is_certain = all(each.head_ms is not None or each.kept.at_tip for each in tracks)
        if is_certain or not self.aligned_ms:
            return max(self.aligned_ms, min(tip_ms, *found) if found else tip_ms)
        return self.aligned_ms

    def _admitted_s(self, tracks: Collection[Track]) -> float:
        bytes_max = self._settings.bytes_per_trigger_max
        admission = Admission(
            self._settings.records_per_trigger_max,
            bytes_max or _TRIGGER_BYTES_PER_SHARD * max(1, len(tracks)),
        )
        return admission.span_s(each.density for each in tracks if each.density is not None)

    def _is_held(self, now: float, *, waits: bool) -> bool:
        """Held back for children, but not for longer than a batch should take."""
        if not waits:
            self._held_since = None
            return False
        self._held_since = now if self._held_since is None else self._held_since
        return now - self._held_since < self._settings.target_batch_s
