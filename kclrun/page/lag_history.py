"""The lag of each shard while the page runs, as levels: the values of the heat strips.

Pure. Bounded: so many samples of one byte for each shard of the latest sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# A measurement sends a shard one read, and five at most, of the five a second that its applications
# share: every third scan of the table, at the default of 10 s, they are 0.7 %, and 3.3 % at most.
_SCANS_A_MEASUREMENT: Final = 3
# The lag of a shard takes 0.33 ms of a core (`bin/bench page`), so that of many takes 0.22 %.
_S_A_SHARD: Final = 0.15

# At a sample in 30 s this is the last hour; 10,000 shards are 1.2 MB.
SAMPLES_MAX: Final = 120
# Seconds up to which a level reaches. Ten seconds is the default of `checkpoint.every`, so a lease
# that is up to date stays in the first level; the last one is beyond an hour of a day's retention.
_UP_TO_S: Final = (10.0, 60.0, 600.0, 3_600.0)
LEVELS: Final = ("not known", "up to 10 s", "up to 1 min", "up to 10 min", "up to 1 h", "over 1 h")
_UNKNOWN: Final = 0


def measured_every_s(scanned_every_s: float, shards: int) -> float:
    """How often the lag of so many shards is measured, where the table is scanned so often."""
    return max(_SCANS_A_MEASUREMENT * scanned_every_s, _S_A_SHARD * shards)


def lag_level(behind_s: float | None) -> int:
    """The index in `LEVELS` of a lag."""
    if behind_s is None:
        return _UNKNOWN
    return 1 + sum(behind_s > up_to_s for up_to_s in _UP_TO_S)


class LagHistory:
    """The levels of the last `SAMPLES_MAX` samples, the latest last. Used by one thread."""

    def __init__(self) -> None:
        self._count = 0
        self._levels: dict[str, bytes] = {}

    def add(self, lags: Mapping[str, float | None]) -> None:
        """Add one sample of all shards. Shards that are not in the sample are forgotten."""
        before = min(self._count, SAMPLES_MAX - 1)
        self._count += 1
        blank = bytes(before)
        self._levels = {
            key: self._levels.get(key, blank)[-before or SAMPLES_MAX :] + bytes([lag_level(lag)])
            for key, lag in lags.items()
        }

    def look(self) -> Mapping[str, bytes]:
        """The levels of each shard. `add` makes a new mapping and never changes this one."""
        return self._levels
