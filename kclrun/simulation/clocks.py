"""Virtual time, a host's clocks, and the alarm that wakes a core at its deadline."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from kclrun.model.time import Instant, WallTime

# Virtual time: one heap of future actions, and chance that comes from one seed.
#
# Actions at the same instant run in an order drawn from the seed. So other seeds explore other
# orders, and the same seed gives the same order.
Action = Callable[[], object]


class Scheduler:
    """Runs actions in the order of their time. `now` is in seconds since the world began."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        # `now` as a call; C code, because every event reads it several times.
        self.clock: Callable[[], float] = partial(getattr, self, "now")
        self.events_total = 0
        self._seed = seed
        self._ties = self.chance("ties").random
        self._order = itertools.count()
        self._heap: list[tuple[float, float, int, Action]] = []

    def chance(self, name: str) -> random.Random:
        """An independent source of chance, so that a new draw in one place changes no other."""
        return random.Random(f"{self._seed}:{name}")

    def after(self, delay_s: float, action: Action) -> None:
        """Run the action that much later; never before now."""
        due = self.now + delay_s if delay_s > 0.0 else self.now
        heapq.heappush(self._heap, (due, self._ties(), next(self._order), action))

    def run_until(self, end: float) -> None:
        """Run all actions that are due up to `end`, which is then now."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= end:
            self.now, _, _, action = pop(heap)
            self.events_total += 1
            action()
        self.now = end


# 2026-01-01 00:00 UTC, by the service's clock. Any date would do.
WORLD_BEGAN_AT: Final = 1_767_225_600.0
# An alarm rings this much after its instant: the conversion from a host's instant to world time and
# back rounds, and an alarm that rings slightly too early would ring for ever.
_LATE_S: Final = 1e-6


class HostClock(msgspec.Struct, frozen=True):
    """`offset_s`: seconds since boot when the world began; `rate`: 1 is exact; the wall clock is
    off by `wall_offset_s`."""

    offset_s: float
    rate: float
    wall_offset_s: float

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
    """Rings once at the latest requested deadline; an earlier one replaces a later one.

    `after` schedules for the host, so the alarm of a lost host stays silent and that of a frozen
    host rings late. `deadline` is the core's; `ring` gives the core its Ticked event.
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
        """Read the core's deadline; call it after every event. A later deadline is noticed when the
        earlier alarm rings."""
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
