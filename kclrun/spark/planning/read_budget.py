"""How often the source may read: per shard, and in total [A5]. Pure."""

from __future__ import annotations

from typing import Final

from kclrun.model.quotas import SHARD_READ_CALLS_MAX

# Kinesis allows five GetRecords and 2 MB a second and shard, shared by all its readers.
# One Python process signs and decodes so many calls on half a core: 0.45 core at 1,000 a second.
CALLS_PER_SECOND_MAX: Final = 500.0
# Kinesis' own rule allows a second's calls at once; unused calls of quiet ticks are kept.
_BURST: Final = float(SHARD_READ_CALLS_MAX)
# Sums of fractions of a call must not cause waits that are shorter than a clock's resolution.
_ROUNDING: Final = 1e-6
# A tenth of the shard's 2 MB/s may be spent on bytes that executors read again.
_WASTED_BYTES_PER_SECOND: Final = 200_000.0
# Kinesis itself makes readers wait as long after an answer of 10 MB.
_REST_MAX_S: Final = 5.0
# Additive decrease, multiplicative increase of the pause between two ticks.
_LONGER: Final = 1.5
_SHORTER_S: Final = 0.1
# Longer ticks do not help: other applications get four fifths of the calls by then.
_TICK_MAX_S: Final = 5.0


class ReadBudget:
    """One shard's GetRecords: `rate` a second on average, by driver and executors together."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._tokens = _BURST
        self._at = now
        self._rests_until = now

    def ready_at(self, now: float) -> float:
        """The time of the next allowed call."""
        self._refill(now)
        missing = 1.0 - self._tokens
        return max(self._rests_until, now + (missing / self._rate if missing > _ROUNDING else 0.0))

    def spend(self, now: float, calls: float = 1.0) -> None:
        """Count calls; calls that executors will make may leave a debt, of at most one burst."""
        self._refill(now)
        self._tokens = max(-_BURST, self._tokens - calls)

    def refund(self) -> None:
        """A call that was counted was not made: the page came from a subscription."""
        self._tokens = min(_BURST, self._tokens + 1.0)

    def waste(self, size_bytes: int, now: float) -> None:
        """Count bytes that will be read a second time."""
        rests_until = max(self._rests_until, now) + size_bytes / _WASTED_BYTES_PER_SECOND
        self._rests_until = min(rests_until, now + _REST_MAX_S)

    def rest(self, until: float) -> None:
        """Send no request before that: the shard was throttled, or did not answer."""
        self._rests_until = max(self._rests_until, until)

    def _refill(self, now: float) -> None:
        self._tokens = min(_BURST, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = max(self._at, now)


class Tick:
    """The pause between two looks at all shards: longer after throttles, shorter in small steps."""

    def __init__(self, poll_interval_s: float) -> None:
        self._poll_interval_s = poll_interval_s
        self._added_s = 0.0
        self._throttles = 0

    def throttled(self) -> None:
        """A call of this tick was throttled."""
        self._throttles += 1

    def next_s(self, shards: int) -> float:
        """End a tick over `shards` shards. Returns: the seconds until the next one begins."""
        base = max(self._poll_interval_s, shards / CALLS_PER_SECOND_MAX)
        if self._throttles:
            longer = (base + self._added_s) * _LONGER
            self._added_s = max(0.0, min(_TICK_MAX_S, longer) - base)
        else:
            self._added_s = max(0.0, self._added_s - _SHORTER_S)
        self._throttles = 0
        return base + self._added_s
