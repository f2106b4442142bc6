"""Two kinds of time that must not be mixed, and so have two types."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Literal, NewType

# Seconds on CLOCK_BOOTTIME of this host: counts through suspend, so a fence holds after a resume.
Instant = NewType("Instant", float)
# Seconds since the epoch, by the service's clock if it gave one, else by the host's.
WallTime = NewType("WallTime", float)
# The year 5138. A greater number, as a person or user code may write it, is not a time.
WALL_TIME_MAX: Final = WallTime(1e11)


# 2**16 is beyond every bound in use; it only keeps the power finite.
DOUBLINGS_MAX: Final = 16


def backoff_s(attempt: int, chance: float, *, base_s: float = 0.05, max_s: float = 3.0) -> float:
    """How long to wait before attempt number `attempt` (from 1): jitter over a doubling bound.

    `chance` is in [0, 1). The bound doubles from `base_s` and stops at `max_s` (3 s: a lost
    service is noticed again within a failover of 10 s, with three tries at the least). Half
    of the bound is always waited, so that a crowd neither spins nor moves in step.
    """
    bound = min(max_s, base_s * 2.0 ** min(attempt, DOUBLINGS_MAX))
    return bound * (0.5 + chance / 2)


def utc_text(at: float, timespec: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """Seconds since the epoch for people: `2026-03-01T06:00:00Z`. Never raises: the times of a row
    are any numbers, and datetime knows only those up to the year 9999."""
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec=timespec)[:-6] + "Z"
    except (ValueError, OverflowError, OSError):
        return "an unknown time"
