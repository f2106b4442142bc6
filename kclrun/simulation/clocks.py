"""A host's clocks, and the alarm that tells a core its time has come."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from kclrun.model.time import Instant, WallTime
from kclrun.simulation.scheduler import Scheduler

__all__ = ["WORLD_BEGAN_AT", "Alarm", "HostClock"]

# 2026-01-01 00:00 UTC, by the service's clock. Any date would do.
WORLD_BEGAN_AT: Final = 1_767_225_600.0
# An alarm rings this much after the instant asked for: the way from a host's instant to world time
# and back rounds, and one that rings a hair too early would ring for ever.
_LATE_S: Final = 1e-6


class HostClock(msgspec.Struct, frozen=True):
    """`offset_s`: since its boot when the world began; `rate`: 1 is true; the wall clock is off by
    `wall_offset_s`."""

    offset_s: float = 0.0
    rate: float = 1.0
    wall_offset_s: float = 0.0

    def instant(self, time_s: float) -> Instant:
        """CLOCK_BOOTTIME at a world time."""
        return Instant(self.offset_s + time_s * self.rate)

    def time_of(self, instant: Instant) -> float:
        """The world time of an instant."""
        return (instant - self.offset_s) / self.rate

    def wall(self, time_s: float) -> WallTime:
        """The host's wall clock."""
        return WallTime(WORLD_BEGAN_AT + time_s + self.wall_offset_s)


class Alarm:
    """Rings once at the deadline that was asked for last; an earlier one replaces a later one.

    `after` schedules for the host, so an alarm of a dead host stays silent and one of a frozen
    host rings late. `deadline` is the core's; `ring` gives it its Ticked.
    """

    def __init__(
        self,
        clock: HostClock,
        scheduler: Scheduler,
        after: Callable[[float, Callable[[], None]], None],
        *,
        deadline: Callable[[Instant], Instant],
        ring: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._scheduler = scheduler
        self._after = after
        self._deadline = deadline
        self._ring = ring
        self._due = math.inf
        self._asked = Instant(math.inf)

    def set(self) -> None:
        """After every event: look at the core's deadline. A later one is noticed when the earlier
        rings."""
        now, clock = self._scheduler.now, self._clock
        asked = self._asked = self._deadline(clock.instant(now))
        due = max(now, clock.time_of(asked)) + _LATE_S
        if due < self._due:
            self._due = due
            self._after(due - now, partial(self._rings, due))

    def _rings(self, due: float) -> None:
        if due != self._due:
            return
        self._due = math.inf
        if self._asked <= self._clock.instant(self._scheduler.now):
            self._ring()
        else:
            self.set()
