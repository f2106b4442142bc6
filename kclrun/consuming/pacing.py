"""When to ask for records again. Pure: what came back goes in, a pause comes out.

The service allows 5 GetRecords a second and shard over all applications; the Java KCL polls at a
fixed pause even when far behind (its issue 237) and sleeps after any failure.
"""

from __future__ import annotations

from typing import Final

from kclrun.model.backoff import backoff_s

__all__ = ["FLOOR_S", "Pacing"]

# 5 GetRecords a second and shard is the service's limit: 200 ms keeps one reader at it.
FLOOR_S: Final = 0.2
# The most a throttled reader waits: an answer of 10 MB blocks the shard for 5 s (2 MB/s).
THROTTLE_MAX_S: Final = 5.0
# Failures other than throttling are retried for ever at this pace at the slowest (DESIGN §5).
ERROR_MAX_S: Final = 3.0


class Pacing:
    """The pause before the next GetRecords, counted from the start of the last one."""

    def __init__(self, idle_s: float, floor_s: float = FLOOR_S) -> None:
        self._idle_s = max(idle_s, floor_s)
        self._floor_s = floor_s
        self._failures = 0

    def after_page(self, records: int, millis_behind_latest: int | None) -> float:
        """Behind the tip, or something came: at the floor; at the tip and nothing came: idle.

        An empty page while behind is normal (a gap in the shard) and no reason to idle.
        """
        self._failures = 0
        at_tip = records == 0 and not millis_behind_latest
        return self._idle_s if at_tip else self._floor_s

    def after_throttle(self, chance: float) -> float:
        """The iterator stays good for five minutes: wait, doubling, and ask again with it."""
        return self._grown(FLOOR_S, THROTTLE_MAX_S, chance)

    def after_error(self, chance: float) -> float:
        return self._grown(FLOOR_S, ERROR_MAX_S, chance)

    def _grown(self, base_s: float, max_s: float, chance: float) -> float:
        self._failures += 1
        return backoff_s(self._failures, chance, base_s=base_s, max_s=max_s)
