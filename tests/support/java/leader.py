"""The leader of a Java fleet, and its shard syncs: `DeterministicShuffleShardSyncLeaderDecider`.

Every worker shuffles the sorted owners of all rows in the same way, with `java.util.Random` of a
fixed seed, and the first owner is the leader. An owner of another kind can also be drawn.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Final

from kclrun.model.lease import Lease, OwnerId
from kclrun.model.shard import HASH_KEY_MAX, Shard
from kclrun.simulation.machine import OsProcess
from tests.support.java import rows
from tests.support.java.rows import PutNewItem
from tests.support.java.threads import (
    DependencyFailed,
    JavaClient,
    Steps,
    ThroughputExceeded,
    sleep,
)

# The rows that a Java worker creates beside those of a shard's end: `HierarchicalShardSyncer`.
#
# For an application that starts at TRIM_HORIZON. An empty table gets a row for every shard that
# was open at the horizon. Otherwise each open shard without a row checks its ancestors. Below an
# ancestor with a row no row is created, because that row's own end will do it. Otherwise the
# topmost ancestors without a row get theirs.
_UNCOVERED: Final = -1


def rows_of_a_sync(shards: Sequence[Shard], leased: Set[str]) -> list[PutNewItem]:
    """The rows to create, oldest first."""
    listed = {shard.shard_id: shard for shard in shards}
    wanted: set[str] = set()
    for shard in shards:
        if shard.is_open and shard.shard_id not in leased:
            wanted |= _topmost_unleased(shard, listed, leased)
    created = sorted(wanted, key=lambda shard_id: int(listed[shard_id].starting_sequence_number))
    return [rows.create(each, listed[each].parents, listed[each].hash_range) for each in created]


def _topmost_unleased(shard: Shard, listed: Mapping[str, Shard], leased: Set[str]) -> set[str]:
    """The shard itself where no ancestor is listed; empty where it descends from a row."""
    parents = [listed[parent] for parent in shard.parents if parent in listed]
    if not parents:
        return {shard.shard_id}
    above: set[str] = set()
    for parent in parents:
        if parent.shard_id not in leased:
            above |= _topmost_unleased(parent, listed, leased)
    return above


def first_hole(leases: Iterable[Lease]) -> int | None:
    """The first hash key that no unended row covers, as the periodic sync sees it."""
    covered = _UNCOVERED
    ranges = [lease.hash_range for lease in leases if not lease.is_ended and lease.hash_range]
    for hash_range in sorted(ranges):
        if hash_range.start > covered + 1:
            break
        covered = max(covered, hash_range.end)
    return None if covered >= HASH_KEY_MAX else covered + 1


# While the table is empty: a wait of 1 to 30 s, looking every 3 s.
_EMPTY_WAIT_MIN_S: Final = 1.0
_EMPTY_WAIT_MAX_S: Final = 30.0
_EMPTY_LOOK_S: Final = 3.0
# `PeriodicShardSyncManager`: first after a minute, then every `leasesRecoveryAuditor...` 2 minutes.
_FIRST_AUDIT_S: Final = 60.0
_AUDIT_EVERY_S: Final = 120.0
# A hole counts once it was seen so many times in a row.
_CONFIDENCE: Final = 3
# The leader is looked up at the first question, a minute later, then every five minutes.
_LEADER_SECOND_S: Final = 60.0
_LEADER_EVERY_S: Final = 300.0


class ShardSyncs:
    """The shard syncs of one worker."""

    def __init__(
        self, jvm: OsProcess, client: JavaClient, me: OwnerId, chance: random.Random
    ) -> None:
        self._jvm = jvm
        self._client = client
        self._me = me
        self._chance = chance
        self._hole: int | None = None
        self._times_seen = 0
        self._is_leader = False
        self._look_up_instant = -math.inf

    def at_start(self) -> Steps[None]:
        """Wait for other workers that may be filling the table, then sync. Raises:
        DependencyFailed, ThroughputExceeded."""
        wait_s = self._chance.uniform(_EMPTY_WAIT_MIN_S, _EMPTY_WAIT_MAX_S)
        began = self._jvm.machine.instant()
        while not (yield from self._client.rows()):
            if self._jvm.machine.instant() - began >= wait_s:
                break
            yield from sleep(self._jvm, min(_EMPTY_LOOK_S, wait_s))
        yield from self._sync((yield from self._client.rows()))

    def run(self, is_running: Callable[[], bool]) -> Steps[None]:
        yield from sleep(self._jvm, _FIRST_AUDIT_S)
        while is_running():
            try:
                yield from self._audit()
            except (ThroughputExceeded, DependencyFailed):
                pass
            yield from sleep(self._jvm, _AUDIT_EVERY_S)

    def _audit(self) -> Steps[None]:
        leases = yield from self._client.rows()
        if not self._leads(leases):
            self._times_seen = 0
            return
        hole = first_hole(leases)
        is_same = self._times_seen > 0 and hole == self._hole
        self._hole = hole
        self._times_seen = 0 if hole is None else (self._times_seen if is_same else 0) + 1
        if not leases or self._times_seen >= _CONFIDENCE:
            self._times_seen = 0
            yield from self._sync(leases)

    def _leads(self, leases: tuple[Lease, ...]) -> bool:
        """As of the last time the leader was looked up, which is not each time."""
        now = self._jvm.machine.instant()
        if now >= self._look_up_instant:
            is_first = self._look_up_instant == -math.inf
            self._look_up_instant = now + (_LEADER_SECOND_S if is_first else _LEADER_EVERY_S)
            self._is_leader = leader_of(leases) in {None, self._me}
        return self._is_leader

    def _sync(self, leases: tuple[Lease, ...]) -> Steps[None]:
        shards = yield from self._client.shards()
        leased = {lease.key for lease in leases}
        if not leases:
            shards = tuple(shard for shard in shards if not shard.parents)
        for row in rows_of_a_sync(shards, leased):
            yield from self._client.write(row)


_SEED: Final = 1947
# The linear congruential generator of `java.util.Random`, as its documentation states it.
_MULTIPLIER: Final = 0x5DEECE66D
_ADDEND: Final = 0xB
_MASK: Final = (1 << 48) - 1


def leader_of(leases: Iterable[Lease]) -> OwnerId | None:
    """The leader; None if no row has an owner: then every worker leads."""
    owners = sorted({lease.owner for lease in leases if lease.owner is not None})
    if not owners:
        return None
    _shuffle(owners)
    return owners[0]


def _shuffle(owners: list[OwnerId]) -> None:
    """`Collections.shuffle`: from the last to the second, each swapped with one up to itself."""
    bits = _bits_31()
    for size in range(len(owners), 1, -1):
        at = _below(size, bits)
        owners[size - 1], owners[at] = owners[at], owners[size - 1]


def _bits_31() -> Iterator[int]:
    """`Random.next(31)`, one after the other."""
    state = (_SEED ^ _MULTIPLIER) & _MASK
    while True:
        state = (state * _MULTIPLIER + _ADDEND) & _MASK
        yield state >> 17


def _below(bound: int, bits: Iterator[int]) -> int:
    """`Random.nextInt(bound)`."""
    if bound & (bound - 1) == 0:
        return (bound * next(bits)) >> 31
    drawn = next(bits)
    while drawn - drawn % bound + bound - 1 >= 1 << 31:
        drawn = next(bits)
    return drawn % bound
