"""How often the source may ask: per shard, and in all [A5]. Pure.

Kinesis allows five GetRecords and 2 MB a second and shard, shared by everybody who reads it.
"""

from __future__ import annotations

from typing import Final

__all__ = ["CALLS_PER_SECOND_MAX", "ReadBudget", "Tick"]

# What one Python process signs and decodes on half a core: 0.45 core at 1,000 calls a second.
CALLS_PER_SECOND_MAX: Final = 500.0
# Five calls may be made at once by Kinesis' own rule; what is left over in quiet ticks is kept.
_BURST: Final = 5.0
# Adding up fractions of a call must not make a caller wait for less than a clock can tell.
_ROUNDING: Final = 1e-6
# A tenth of the shard's 2 MB/s may be spent on bytes that executors read again.
_WASTED_BYTES_PER_SECOND: Final = 200_000.0
# Kinesis itself makes readers wait for as long after an answer of 10 MB.
_REST_MAX_S: Final = 5.0
# Additive decrease, multiplicative increase of the pause between two ticks.
_LONGER: Final = 1.5
_SHORTER_S: Final = 0.1
# Longer ticks help nobody: other applications get four fifths of the calls by then.
_TICK_MAX_S: Final = 5.0


class ReadBudget:
    """One shard's GetRecords: `rate` a second on average, by driver and executors together."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._tokens = _BURST
        self._at = now
        self._rests_until = now

    def ready_at(self, now: float) -> float:
        """When the next call may be made."""
        self._refill(now)
        missing = 1.0 - self._tokens
        return max(self._rests_until, now + (missing / self._rate if missing > _ROUNDING else 0.0))

    def spend(self, now: float, calls: float = 1.0) -> None:
        """Count calls; what executors will make may leave a debt, of at most one burst."""
        self._refill(now)
        self._tokens = max(-_BURST, self._tokens - calls)

    def waste(self, size_bytes: int, now: float) -> None:
        """Count bytes that will be read a second time."""
        rests_until = max(self._rests_until, now) + size_bytes / _WASTED_BYTES_PER_SECOND
        self._rests_until = min(rests_until, now + _REST_MAX_S)

    def rest(self, until: float) -> None:
        """Ask nothing before that: the shard said it was too much, or did not answer."""
        self._rests_until = max(self._rests_until, until)

    def _refill(self, now: float) -> None:
        self._tokens = min(_BURST, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = max(self._at, now)


class Tick:
    """The pause between two looks at all shards: longer after throttles, back in small steps."""

    def __init__(self, poll_interval_s: float) -> None:
        self._poll_interval_s = poll_interval_s
        self._added_s = 0.0
        self._throttles = 0

    def throttled(self) -> None:
        """A call of this tick was throttled."""
        self._throttles += 1

    def next_s(self, shards: int) -> float:
        """End a tick over so many shards: how long until the next one begins."""
        base = max(self._poll_interval_s, shards / CALLS_PER_SECOND_MAX)
        if self._throttles:
            longer = (base + self._added_s) * _LONGER
            self._added_s = max(0.0, min(_TICK_MAX_S, longer) - base)
        else:
            self._added_s = max(0.0, self._added_s - _SHORTER_S)
        self._throttles = 0
        return base + self._added_s
