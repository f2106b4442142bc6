"""When a Java worker looks at the shards: once at its start, then as the leader, on a hole."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final

from kclrun.model.lease import Lease, OwnerId
from kclrun.simulation.java.client import DependencyFailed, JavaClient, ThroughputExceeded
from kclrun.simulation.java.leader import leader_of
from kclrun.simulation.java.shard_sync import first_hole, rows_of_a_sync
from kclrun.simulation.java.threads import Steps, sleep
from kclrun.simulation.machine import OsProcess

__all__ = ["ShardSyncs"]

# While the table is empty: a wait of 1 to 30 s, looking every 3 s.
_EMPTY_WAIT_MIN_S: Final = 1.0
_EMPTY_WAIT_MAX_S: Final = 30.0
_EMPTY_LOOK_S: Final = 3.0
# `PeriodicShardSyncManager`: first after a minute, then every `leasesRecoveryAuditor...` 2 minutes.
_FIRST_AUDIT_S: Final = 60.0
_AUDIT_EVERY_S: Final = 120.0
# The same hole so many times in a row is one.
_CONFIDENCE: Final = 3
# The leader is looked up at the first question, a minute later, then every five minutes.
_LEADER_SECOND_S: Final = 60.0
_LEADER_EVERY_S: Final = 300.0


class ShardSyncs:
    """Of one worker."""

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
        """Wait for whoever may be filling the table, then sync. Raises: DependencyFailed,
        ThroughputExceeded."""
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
