"""`ShardConsumer`: one shard as a Java worker reads it, from its parents' end to its own.

There is no fence. It reads until its worker's loop tells it that the lease is lost, and finishes
the batch it is at; user code checkpoints after a batch, now and then in two phases. What reaches
user code is told to those who watch. May not know: other consumers. Look next: `shard_end.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kclrun.model.lease import LeaseKey
from kclrun.model.sequence import SHARD_END
from kclrun.simulation.java.cleanup import Cleanup
from kclrun.simulation.java.client import DependencyFailed, JavaClient, ThroughputExceeded
from kclrun.simulation.java.held import HeldLease
from kclrun.simulation.java.overlap import MixedOracles
from kclrun.simulation.java.renewer import Renewer
from kclrun.simulation.java.shard_end import end_shard
from kclrun.simulation.java.threads import Steps, sleep, start
from kclrun.simulation.machine import OsProcess
from kclrun.simulation.world import World

__all__ = ["Kcl", "ShardConsumer"]

# `parentShardPollIntervalMillis`.
_PARENT_POLL_S: Final = 10.0
# `taskBackoffTimeMillis`.
_TASK_BACKOFF_S: Final = 0.5
# A page of GetRecords.
_BATCH_MAX: Final = 10_000
# While nothing arrives we skip polls, and look at the shard's end again after so many.
_IDLE_POLLS_MAX: Final = 10
# How often user code checkpoints in two phases: a kind of application of its own, seldom enough
# that most checkpoints are plain.
_TWO_PHASES: Final = 0.1


@dataclass(frozen=True)
class Kcl:
    """What all consumers of one worker share. `woke_s` tells when it last went on after standing
    still."""

    jvm: OsProcess
    world: World
    oracles: MixedOracles
    client: JavaClient
    renewer: Renewer
    cleanup: Cleanup
    woke_s: Callable[[], float]


class ShardConsumer:
    """Of one held lease. `is_over` once it has shut down."""

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
        """Told by the worker's loop. Once the task under way returns, it is over."""
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
        """`BlockOnParentShardTask`: until each parent's row is gone or ended."""
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
        """`InitializeTask`: from the position that stands on the row now."""
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
            self._processed = self._world.stream.number_of(self.key, row.checkpoint)
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
            fetched = stream.arrived(self.key, now_s)
            while self._goes_on and self._processed < fetched:
                yield from self._process_batch(min(fetched, self._processed + _BATCH_MAX))
            if self._goes_on and self._processed == stream.total(self.key):
                yield from self._end_shard()
                return
            arrives = stream.arrival_of(self.key, self._processed + 1)
            polls = min(math.ceil(max(0.0, arrives - now_s) / poll_s), _IDLE_POLLS_MAX)
            yield from sleep(self._jvm, max(1, polls) * poll_s)

    def _process_batch(self, last: int) -> Steps[None]:
        self._oracles.java_batch_begun(self, self._processed + 1, last)
        yield from sleep(self._jvm, self._world.user_code.batch_s)
        self._processed = last
        self._oracles.batch_processed(self, last)
        every_s = self._world.settings.checkpoint_every_s
        if self._jvm.machine.instant() - self._checkpointed_instant >= every_s:
            yield from self._checkpoint()

    def _checkpoint(self) -> Steps[None]:
        """User code's, which leaves a failure to the next one."""
        if self._processed == self._checkpointed:
            return
        position = self._world.stream.position(self.key, self._processed)
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
