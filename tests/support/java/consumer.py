"""`ShardConsumer`: one shard as a Java worker reads it, from its parents' end to its own.

It has no fence. It reads until its worker's loop calls `lease_lost`, and then finishes its current
batch. User code checkpoints after a batch, sometimes in two phases. Every record that user code
gets is reported to the oracles. The module does not know other consumers.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kclrun.model.lease import LeaseKey
from kclrun.model.sequence import AT_TIMESTAMP, SHARD_END, TRIM_HORIZON
from kclrun.model.shard import ChildShard
from kclrun.simulation.machine import OsProcess
from kclrun.simulation.world import SimulatedWorld
from tests.support.java import rows
from tests.support.java.overlap import MixedOracles
from tests.support.java.renewer import Renewer
from tests.support.java.threads import (
    DependencyFailed,
    HeldLease,
    JavaClient,
    Steps,
    ThroughputExceeded,
    sleep,
    start,
)

# `LeaseCleanupManager`: rows of ended shards are deleted once their children have begun.
#
# Only the worker that shut a shard down has the shard on its list, also if another one owns the row
# by now. It does not know consumers.
# `completedLeaseCleanupIntervalMillis`.
_EVERY_S: Final = 300.0


class Cleanup:
    """The list of one worker, by lease key."""

    def __init__(self, jvm: OsProcess, client: JavaClient) -> None:
        self._jvm = jvm
        self._client = client
        self._pending: dict[LeaseKey, tuple[frozenset[str], tuple[str, ...]]] = {}

    def enqueue(self, lease: HeldLease, children: Sequence[ChildShard]) -> None:
        """The lease was ended by us, or was found ended when we took it."""
        names = tuple(child.shard_id for child in children)
        self._pending[lease.key] = (lease.parents, names)

    def run(self, is_running: Callable[[], bool]) -> Steps[None]:
        while is_running():
            yield from sleep(self._jvm, _EVERY_S)
            for key, (parents, children) in tuple(self._pending.items()):
                try:
                    is_over = yield from self._clean(key, parents, children)
                except (ThroughputExceeded, DependencyFailed):
                    continue
                if is_over:
                    del self._pending[key]

    def _clean(
        self, key: LeaseKey, parents: frozenset[str], children: tuple[str, ...]
    ) -> Steps[bool]:
        """Whether the cleanup of this lease is complete."""
        if (yield from self._client.row(key)) is None:
            return True
        for child in children:
            row = yield from self._client.row(LeaseKey(child))
            if row is None or row.checkpoint in {TRIM_HORIZON, AT_TIMESTAMP}:
                return False
        for parent in sorted(parents):
            if (yield from self._client.row(LeaseKey(parent))) is not None:
                return False
        yield from self._client.write(rows.delete(key))
        return True


# While a merge waits for the other parent's row, one try in thirty drops the lease instead, so that
# another worker tries.
_DROPS: Final = 1 / 30


def end_shard(
    client: JavaClient,
    renewer: Renewer,
    lease: HeldLease,
    children: Sequence[ChildShard],
    chance: random.Random,
) -> Steps[bool]:
    """One try: the children's rows, their names on our row, user code's checkpoint at SHARD_END.

    False while it has to be tried again. Raises: ThroughputExceeded, DependencyFailed.
    """
    if len(children) == 1 and not (yield from _are_parents_alike(client, children[0])):
        if chance.random() < _DROPS:
            renewer.drop(lease)
        return False
    for child in children:
        row = yield from client.row(LeaseKey(child.shard_id))
        if row is None:
            yield from client.write(rows.create(child.shard_id, child.parents, child.hash_range))
    names = frozenset(child.shard_id for child in children)
    yield from client.write(rows.name_children(lease.key, names))
    lease.children = names
    row = yield from client.row(lease.key)
    if row is None:
        return False
    is_ended: bool = row.is_ended or (yield from renewer.checkpoint(lease, SHARD_END))
    return is_ended


def _are_parents_alike(client: JavaClient, child: ChildShard) -> Steps[bool]:
    """The child of a merge is created while both parents have rows, or neither has."""
    found = []
    for parent in child.parents:
        row = yield from client.row(LeaseKey(parent))
        found.append(row is None)
    return len(set(found)) == 1


# `parentShardPollIntervalMillis`.
_PARENT_POLL_S: Final = 10.0
# `taskBackoffTimeMillis`.
_TASK_BACKOFF_S: Final = 0.5
# A page of GetRecords.
_BATCH_MAX: Final = 10_000
# While no record arrives we skip polls, and check the shard's end again after so many.
_IDLE_POLLS_MAX: Final = 10
# The share of checkpoints in two phases: a kind of application of its own, rare enough that most
# checkpoints are plain.
_TWO_PHASES: Final = 0.1


@dataclass(frozen=True)
class Kcl:
    """The state that all consumers of one worker share. `woke_s` is the time when it last continued
    after standing still."""

    jvm: OsProcess
    world: SimulatedWorld
    oracles: MixedOracles
    client: JavaClient
    renewer: Renewer
    cleanup: Cleanup
    woke_s: Callable[[], float]


class ShardConsumer:
    """The consumer of one held lease. `is_over` once it has shut down."""

    def __init__(self, kcl: Kcl, lease: HeldLease, who: str) -> None:
        self.key: LeaseKey = lease.key
        self.who = who
        self.lease = lease
        self.is_over = False
        self._woke_s = kcl.woke_s
        self._is_lost = self._is_asked_to_stop = False
        self._jvm = kcl.jvm
        self._world = kcl.world
        self._oracles = kcl.oracles
        self._client = kcl.client
        self._renewer = kcl.renewer
        self._cleanup = kcl.cleanup
        self._chance = kcl.world.scheduler.chance(f"{who}:user code")
        self._processed = self._checkpointed = 0
        self._checkpointed_instant = kcl.jvm.machine.instant()

    def start(self) -> None:
        start(self._jvm, self._run(), self._over)

    def lease_lost(self) -> None:
        """Called by the worker's loop. The consumer ends when its current task returns."""
        self._is_lost = True

    def shutdown_requested(self) -> None:
        """The batch is finished, user code checkpoints, the lease is dropped in memory."""
        self._is_asked_to_stop = True

    @property
    def answered_late_s(self) -> float:
        return self.lease.answered_late_s

    @property
    def woke_s(self) -> float:
        return self._woke_s()

    def _over(self) -> None:
        self.is_over = True
        self._oracles.java_stopped(self)

    @property
    def is_out_of_date(self) -> bool:
        """It shut down because its lease seemed lost; a renewal under way may have won it back."""
        return self.is_over and self._is_lost

    @property
    def _goes_on(self) -> bool:
        return not self._is_lost and not self._is_asked_to_stop

    def _run(self) -> Steps[None]:
        yield from self._wait_for_parents()
        if not self._goes_on:
            return
        yield from self._initialize()
        if self._goes_on:
            yield from self._process()
        if self._is_asked_to_stop and not self._is_lost:
            yield from self._checkpoint()
            self._renewer.drop(self.lease)

    def _wait_for_parents(self) -> Steps[None]:
        """`BlockOnParentShardTask`: until each parent's row is deleted or ended."""
        for parent in sorted(self.lease.parents):
            while self._goes_on:
                try:
                    row = yield from self._client.row(LeaseKey(parent))
                except DependencyFailed:
                    yield from sleep(self._jvm, _TASK_BACKOFF_S)
                    continue
                if row is None or row.is_ended:
                    break
                yield from sleep(self._jvm, _PARENT_POLL_S)

    def _initialize(self) -> Steps[None]:
        """`InitializeTask`: from the position that is on the row now."""
        while self._goes_on:
            try:
                row = yield from self._client.row(self.key)
            except DependencyFailed:
                yield from sleep(self._jvm, _TASK_BACKOFF_S)
                continue
            if row is None:
                self._is_lost = True
                return
            self.lease.position = row.checkpoint
            self._processed = self._world.stream.records.number_of(self.key, row.checkpoint)
            self._checkpointed = self._processed
            return

    def _process(self) -> Steps[None]:
        stream, poll_s = self._world.stream, self._world.settings.poll_s
        if self.lease.position == SHARD_END:
            self._cleanup.enqueue(self.lease, stream.children_of(self.key))
            return
        self._oracles.java_reads(self)
        while self._goes_on:
            now_s = self._world.scheduler.now
            fetched = stream.records.arrived(self.key, now_s)
            while self._goes_on and self._processed < fetched:
                yield from self._process_batch(min(fetched, self._processed + _BATCH_MAX))
            if self._goes_on and self._processed == stream.records.total(self.key):
                yield from self._end_shard()
                return
            arrives = stream.records.arrival_of(self.key, self._processed + 1)
            polls = math.ceil(min(max(0.0, arrives - now_s) / poll_s, _IDLE_POLLS_MAX))
            yield from sleep(self._jvm, max(1, polls) * poll_s)

    def _process_batch(self, last: int) -> Steps[None]:
        first = self._processed + 1
        self._oracles.java_batch_begun(self, first, last)
        yield from sleep(self._jvm, self._world.user_code.batch_s)
        self._processed = last
        self._oracles.batch_processed(self, first, last)
        every_s = self._world.settings.checkpoint_every_s
        if self._jvm.machine.instant() - self._checkpointed_instant >= every_s:
            yield from self._checkpoint()

    def _checkpoint(self) -> Steps[None]:
        """A checkpoint of user code, which leaves a failure to the next checkpoint."""
        if self._processed == self._checkpointed:
            return
        position = self._world.stream.records.position(self.key, self._processed)
        processed = self._processed
        try:
            if self._chance.random() < _TWO_PHASES:
                yield from self._renewer.prepare_checkpoint(self.lease, position)
            stands = yield from self._renewer.checkpoint(self.lease, position)
        except (ThroughputExceeded, DependencyFailed):
            return
        if stands:
            self._checkpointed = processed
            self._checkpointed_instant = self._jvm.machine.instant()

    def _end_shard(self) -> Steps[None]:
        """`ShutdownTask`, repeated until it succeeds or the lease is lost."""
        self._oracles.shard_exhausted(self)
        children = self._world.stream.children_of(self.key)
        while not self._is_lost:
            try:
                is_ended = yield from end_shard(
                    self._client, self._renewer, self.lease, children, self._chance
                )
            except (ThroughputExceeded, DependencyFailed):
                is_ended = False
            if is_ended:
                self._checkpointed = self._processed
                self._cleanup.enqueue(self.lease, children)
                return
            yield from sleep(self._jvm, _TASK_BACKOFF_S)
