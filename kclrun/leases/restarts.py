"""How soon a lease's process is started again, and when to stop trying.

Knows: how often it died, and whether the checkpoint moved in between. May not know: clocks.
Rule: at once the first time (most deaths are accidents), then slower and slower; five deaths
without progress are no accident, and a halted lease is better than a wandering one [L7].
"""

from __future__ import annotations

from typing import Final

import msgspec

from kclrun.model.time import Instant

__all__ = ["DEATHS_MAX", "Restarts"]

# L7 allows five restarts of a crash loop; the fifth death in a row is the last one that counts.
DEATHS_MAX: Final = 5
_PAUSE_FIRST_S: Final = 1.0
# Long enough that a host short of memory recovers, short enough that nobody is paged for it.
_PAUSE_MAX_S: Final = 30.0
# An idle shard has nothing to checkpoint: a life as long as this counts as progress too. It is
# four times the default `stall` (2 min), so a process that does nothing was noticed long before.
_LONG_LIFE_S: Final = 480.0


class Restarts(msgspec.Struct):
    """The record of one lease in our hands. `deaths` are crashes in a row, without progress."""

    deaths: int = 0
    _stops: int = 0
    _started_instant: Instant | None = None

    def started(self, now: Instant) -> None:
        self._started_instant = now

    def progressed(self) -> None:
        """The checkpoint moved, or an operator resumed the lease: all is forgiven."""
        self.deaths = 0
        self._stops = 0

    def crashed(self, now: Instant) -> None:
        """The process died without a word: counts towards the halt."""
        self.stopped(now)
        self.deaths += 1

    def stopped(self, now: Instant) -> None:
        """It could not start, did not claim, or lost the lease: slows the next one, no more."""
        if self._started_instant is not None and now - self._started_instant >= _LONG_LIFE_S:
            self.progressed()
        self._started_instant = None
        self._stops += 1

    @property
    def has_tripped(self) -> bool:
        return self.deaths >= DEATHS_MAX

    @property
    def pause_s(self) -> float:
        """The pause before the next start: 0, then 1, 2, 4 … up to 30 seconds."""
        if self._stops <= 1:
            return 0.0
        return min(_PAUSE_MAX_S, _PAUSE_FIRST_S * 2.0 ** min(self._stops - 2, 16))
