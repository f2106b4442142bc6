"""How fast one shard may be read by one task: a rate, and a small burst. Pure."""

from __future__ import annotations

from typing import Final

from kclrun.model.time import Instant

__all__ = ["ReadPace"]

# Most ranges are one page: a second call at once does not wait, and leaves three of the five
# calls that the service allows in a second to the others.
_BURST: Final = 2.0


class ReadPace:
    """At most `rate` calls a second in the long run; two may follow each other at once."""

    def __init__(self, rate: float, now: Instant) -> None:
        self._rate = rate
        self._tokens = _BURST
        self._at = now

    def delay_s(self, now: Instant) -> float:
        """Count one call; how long it must wait before it is made."""
        elapsed_s = max(0.0, now - self._at)
        self._tokens = min(_BURST, self._tokens + elapsed_s * self._rate) - 1
        self._at = max(self._at, now)
        return max(0.0, -self._tokens / self._rate)
