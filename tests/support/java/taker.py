"""`DynamoDBLeaseTaker`: which leases a Java worker takes, and when it calls one expired.

Every 2 x (failover + epsilon) after the last run: a scan, a choice, the takes. Errors of the KCL
are repeated here; see `Taker`.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.time import Instant
from kclrun.simulation.machine import OsProcess
from tests.support.java import rows
from tests.support.java.renewer import Renewer
from tests.support.java.threads import (
    DependencyFailed,
    JavaClient,
    Steps,
    ThroughputExceeded,
    sleep,
)

_EPSILON_S: Final = 0.025
# `TAKE_RETRIES`, for throttles alone.
_TRIES_MAX: Final = 3
# `veryOldLeaseDurationNanosMultiplier`.
_VERY_OLD_FAILOVERS: Final = 3
# `maxLeasesToStealAtOneTime`.
_STEALS_MAX: Final = 1
# `RENEWAL_SLACK_PERCENTAGE` of a renewal interval: leases to steal are read again after a scan that
# took longer.
_SCAN_SLACK: Final = 0.5
_NEVER: Final = Instant(-math.inf)


class Taker:
    """Calls `taken` for each lease that was taken, with its new counter.

    It has two errors of the KCL. A take whose reply is lost is repeated by the SDK, fails its
    condition, and counts as not taken: the row names us, and no worker renews it. A take that fails
    in any other way ends the run, and the takes that succeeded before it in that run are not
    renewed either.
    """

    def __init__(
        self,
        jvm: OsProcess,
        client: JavaClient,
        renewer: Renewer,
        me: OwnerId,
        *,
        failover_s: float,
        chance: random.Random,
    ) -> None:
        self._jvm = jvm
        self._client = client
        self._renewer = renewer
        self._me = me
        self._failover_s = failover_s
        self._chance = chance
        self._seen: dict[LeaseKey, tuple[int, Instant]] = {}

    def run(self, is_running: Callable[[], bool]) -> Steps[None]:
        """Runs with a fixed delay, the first time at once."""
        while is_running():
            try:
                taken = yield from self._take()
            except (ThroughputExceeded, DependencyFailed):
                taken = []
            if is_running():
                for row, counter in taken:
                    self._renewer.add(row, counter)
            yield from sleep(self._jvm, 2 * (self._failover_s + _EPSILON_S))

    def _take(self) -> Steps[list[tuple[Lease, int]]]:
        began = self._jvm.machine.instant()
        scanned = yield from self._client.rows()
        now = self._jvm.machine.instant()
        self._observe(scanned, now)
        chosen, is_steal = leases_to_take(
            scanned,
            {row.key: now - self._seen[row.key][1] for row in scanned},
            self._me,
            failover_s=self._failover_s,
            chance=self._chance,
        )
        if is_steal and now - began > self._failover_s / 3 * _SCAN_SLACK:
            chosen = yield from self._read_again(chosen)
        taken: list[tuple[Lease, int]] = []
        for row in chosen:
            is_taken = yield from self._take_one(row)
            if is_taken:
                taken.append((row, row.counter + 1))
        return taken

    def _observe(self, scanned: Sequence[Lease], now: Instant) -> None:
        """Note when each counter last moved. New and unowned: never; new and owned: now."""
        seen: dict[LeaseKey, tuple[int, Instant]] = {}
        for row in scanned:
            before = self._seen.get(row.key)
            if before is None:
                moved = now if row.owner is not None else _NEVER
            else:
                moved = before[1] if before[0] == row.counter else now
            seen[row.key] = (row.counter, moved)
        self._seen = seen

    def _read_again(self, chosen: Sequence[Lease]) -> Steps[list[Lease]]:
        fresh: list[Lease] = []
        for row in chosen:
            try:
                now = yield from self._client.row(row.key)
            except DependencyFailed:
                now = row
            if now is not None:
                fresh.append(now)
        return fresh

    def _take_one(self, row: Lease) -> Steps[bool]:
        for _ in range(_TRIES_MAX):
            try:
                is_taken: bool = yield from self._client.write(rows.take(row, self._me))
            except ThroughputExceeded:
                continue
            return is_taken
        return False


def leases_to_take(
    scanned: Sequence[Lease],
    unchanged_s: dict[LeaseKey, float],
    me: OwnerId,
    *,
    failover_s: float,
    chance: random.Random,
) -> tuple[list[Lease], bool]:
    """`computeLeasesToTake`, with priority for very old leases; and whether it is a steal.

    `maxLeasesForWorker` is unbounded, its default. Ended leases are treated like all others: they
    count as load, and are taken.
    """
    if not scanned:
        return [], False
    available = [row for row in scanned if row.owner is None or unchanged_s[row.key] > failover_s]
    free = {row.key for row in available}
    counts = Counter({me: 0})
    counts.update(row.owner for row in scanned if row.owner is not None and row.key not in free)
    target = math.ceil(len(scanned) / len(counts))
    very_old = [row for row in scanned if unchanged_s[row.key] > _VERY_OLD_FAILOVERS * failover_s]
    if very_old:
        return _some(very_old, len(very_old), chance), False
    needed = target - counts[me]
    if available or needed <= 0:
        return _some(available, needed, chance), False
    return _stolen(scanned, counts, target, needed, chance), True


def _stolen(
    scanned: Sequence[Lease],
    counts: Counter[OwnerId],
    target: int,
    needed: int,
    chance: random.Random,
) -> list[Lease]:
    """From the most loaded, if it is above the target, or at it and two or more are missing."""
    owner, most = max(counts.items(), key=lambda owned: owned[1])
    if most < target:
        return []
    wanted = min(needed, most - target)
    if wanted == 0 and needed > 1:
        wanted = 1
    of_owner = [row for row in scanned if row.owner == owner]
    return _some(of_owner, min(wanted, _STEALS_MAX), chance)


def _some(found: Sequence[Lease], most: int, chance: random.Random) -> list[Lease]:
    """At most `most` leases, in random order."""
    return chance.sample(found, max(0, min(most, len(found))))
