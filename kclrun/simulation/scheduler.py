"""Virtual time: one heap of what will happen, and chance that comes from one seed.

May not know: fleets. Rule: what happens at the same instant happens in an order drawn from the
seed, so that other seeds explore other orders, and the same seed the same one.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from functools import partial

__all__ = ["Scheduler"]

Action = Callable[[], object]


class Scheduler:
    """Runs actions in the order of their time. `now` is in seconds since the world began."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        # `now` as a call; C code, for it is asked several times an event.
        self.clock: Callable[[], float] = partial(getattr, self, "now")
        self.events_total = 0
        self._seed = seed
        self._ties = self.chance("ties").random
        self._order = itertools.count()
        self._heap: list[tuple[float, float, int, Action]] = []

    def chance(self, name: str) -> random.Random:
        """A source of chance of its own, so that a new draw in one place moves no other."""
        return random.Random(f"{self._seed}:{name}")

    def after(self, delay_s: float, action: Action) -> None:
        """Do it that much later; never before now."""
        due = self.now + delay_s if delay_s > 0.0 else self.now
        heapq.heappush(self._heap, (due, self._ties(), next(self._order), action))

    def run_until(self, end: float) -> None:
        """Everything that is due up to `end`, which is then now."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= end:
            self.now, _, _, action = pop(heap)
            self.events_total += 1
            action()
        self.now = end
