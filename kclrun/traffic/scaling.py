"""How many workers the application needs, by CPU, by the slope of its lag, and by its leases. Pure.

One process reads one shard, in order. Further workers bring CPU and places for leases, and nothing
else: a shard whose process waits for something, or fills one core, is read no faster by them. So
CPU decides, and the lag only shows how much more a fleet that is short of CPU needs.

Every manager computes the number from its own machine and from the lease table. The mean over all
managers is that of the fleet: `workers * CPU share`, summed over the machines, by
their number.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from typing import Final

import msgspec

from kclrun.model.time import Instant

# Of three zones one may be lost: the others then have one and a half times the work, 90 % of their
# CPU. Workers are added up to this share of CPU.
TARGET_SHARE: Final = 0.6
# Workers are added above the one share and removed down to the other. Both are so far from the
# target that no change causes the opposite change before the load has changed by a sixth:
# adding one of n leaves more than 0.6 (n - 1)/n, and removing begins below 0.5 (n - 1)/n.
ADD_ABOVE: Final = 0.75
REMOVE_TO: Final = 0.5
# At this share of CPU, processes wait for each other: the lag then shows what CPU is missing.
SHORT_OF_CPU: Final = 0.85
# A new machine is ready, has its share of the leases and warm caches within two minutes, so no
# figure older than that is about the present number of workers.
WINDOW_S: Final = 120.0
# A lag of polling and batching is seconds; a shard a minute behind has fallen behind.
BEHIND_MS: Final = 60_000
# A fleet that has fallen behind should be at the tip again within a quarter of an hour.
CATCH_UP_S: Final = 900.0
# One step at most doubles the fleet, as a slope of two minutes is a rough figure.
STEP_MAX: Final = 2.0


class MachineLook(msgspec.Struct, frozen=True, kw_only=True):
    """One machine at one moment, and the fleet as the lease table shows it.

    `cpu_share` is the machine's used CPU since the former look, from 0 to 1; None if unknown.
    `lags_ms` has the lag of each lease that a process reads here. `workers` counts the owners of
    leases, `leases` the unended ones of the fleet, `leases_max` is `leases.max`.
    """

    now: Instant
    cpu_share: float | None
    lags_ms: Mapping[str, int]
    workers: int
    leases: int
    leases_max: int


class WorkersNeeded:
    """Takes a look about every 20 s; `count` is the number of workers needed, None while unknown.

    Rule: the number is never above that of the leases, for each worker beyond would have none, and
    never so low that `leases.max` leaves leases unread. While a lease is behind, no worker is
    removed.
    """

    def __init__(self) -> None:
        self._looks: collections.deque[MachineLook] = collections.deque()
        self.count: int | None = None

    def take(self, look: MachineLook) -> None:
        """A look; `count` then is the number by this one and those of the last two minutes."""
        self._looks.append(look)
        while self._looks[0].now < look.now - WINDOW_S:
            self._looks.popleft()
        self.count = self._needed(look)

    def _needed(self, look: MachineLook) -> int | None:
        # By the workers of its time: a worker that came since then has taken over some of the work.
        each_busy = [
            former.workers * former.cpu_share
            for former in self._looks
            if former.cpu_share is not None
        ]
        if not each_busy or not look.leases:
            return None
        busy = sum(each_busy) / len(each_busy)
        share = busy / look.workers
        needed = look.workers
        if share > ADD_ABOVE:
            needed = _whole(busy / TARGET_SHARE)
        elif not any(lag_ms >= BEHIND_MS for lag_ms in look.lags_ms.values()):
            needed = min(needed, _whole(busy / REMOVE_TO))
        if share >= SHORT_OF_CPU:
            needed = max(needed, _whole(look.workers * self._missing(look)))
        places = _whole(look.leases / look.leases_max)
        return min(look.leases, max(1, places, needed))

    def _missing(self, look: MachineLook) -> float:
        """By how much the CPU for our leases has to grow: the mean over them, from 1 to 2."""
        first = self._looks[0]
        past_s = look.now - first.now
        if past_s <= 0 or not look.lags_ms:
            return 1.0
        factors = [
            _factor(lag_ms / 1000, (lag_ms - first.lags_ms[key]) / 1000 / past_s)
            for key, lag_ms in look.lags_ms.items()
            if lag_ms >= BEHIND_MS and key in first.lags_ms
        ]
        others = len(look.lags_ms) - len(factors)
        return min(STEP_MAX, (sum(factors) + others) / len(look.lags_ms))


def _whole(workers: float) -> int:
    """Rounded up, but not for the last digit of a floating-point number."""
    return math.ceil(workers - 1e-9)


def _factor(lag_s: float, growth: float) -> float:
    """How much faster a lease has to be. Its lag grows by `growth` seconds each second.

    It gets through `1 - growth` seconds of the stream in a second. To be at the tip in time, these
    have to be one second and its part of the lag.
    """
    speed = max(1.0 - growth, 1.0 / STEP_MAX)
    return max(1.0, (1.0 + lag_s / CATCH_UP_S) / speed)
