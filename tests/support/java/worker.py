"""One Java worker: a JVM with the KCL 2.x in it, on a machine of its own.

Its threads are those of `Scheduler` and `DynamoDBLeaseCoordinator`: the loop that starts and stops
consumers, the renewer, the taker, the periodic shard sync, the cleanup. From outside it is like any
host: started, drained, killed, frozen. It does not know other workers.
"""

from typing import Final

from kclrun.model.lease import OwnerId
from kclrun.simulation.machine import Machine
from kclrun.simulation.world import SimulatedWorld
from tests.support.java.consumer import Cleanup, Kcl, ShardConsumer
from tests.support.java.leader import ShardSyncs
from tests.support.java.overlap import MixedOracles
from tests.support.java.renewer import Renewer
from tests.support.java.taker import Taker
from tests.support.java.threads import (
    DependencyFailed,
    HeldLease,
    JavaClient,
    Steps,
    ThroughputExceeded,
    sleep,
    start,
)

# `shardConsumerDispatchPollIntervalMillis`.
_LOOP_S: Final = 1.0


class JavaWorker:
    """`name` is its worker id, `<group>-<slot>-<nonce>`; new at every start."""

    def __init__(
        self, name: str, world: SimulatedWorld, machine: Machine, oracles: MixedOracles
    ) -> None:
        self.name = name
        self.owner = OwnerId(name)
        self.group, self.slot, _ = name.rsplit("-", 2)
        self.is_finished = False
        self.machine = machine
        self._woke_s = 0.0
        self._was_still = False
        self.consumers: dict[HeldLease, ShardConsumer] = {}
        self._world = world
        self._oracles = oracles
        self._jvm = machine.run(on_still=self._stands_still)
        self._is_draining = False
        self._runs = 0
        settings = world.settings
        client = JavaClient(self._jvm, world, name)
        self._renewer = Renewer(self._jvm, client, self.owner, settings.failover_s)
        self._cleanup = Cleanup(self._jvm, client)
        self._kcl = Kcl(
            self._jvm,
            world,
            oracles,
            client,
            self._renewer,
            self._cleanup,
            woke_s=self._last_woke_s,
        )
        self._taker = Taker(
            self._jvm,
            client,
            self._renewer,
            self.owner,
            failover_s=settings.failover_s,
            chance=world.scheduler.chance(f"{name}:taker"),
        )
        self._syncs = ShardSyncs(
            self._jvm, client, self.owner, world.scheduler.chance(f"{name}:sync")
        )

    # The interface of a host.

    def start(self) -> None:
        start(self._jvm, self._main())

    def drain(self) -> None:
        """`startGracefulShutdown`. It gives no row away: other workers take the rows by expiry."""
        self._jvm.act(self._begin_drain)

    def kill(self) -> None:
        """The machine loses power."""
        self.machine.power_off()
        for consumer in self.consumers.values():
            if not consumer.is_over:
                self._oracles.java_stopped(consumer)

    def freeze(self) -> None:
        self.machine.freeze()

    def thaw(self) -> None:
        self.machine.thaw()

    @property
    def is_dead(self) -> bool:
        return self.machine.is_dead

    @property
    def is_frozen(self) -> bool:
        return self.machine.is_frozen

    @property
    def is_up(self) -> bool:
        """It takes part: it has not ended and does not drain."""
        return not (self.is_dead or self.is_finished or self._is_draining)

    # Its threads.

    def _main(self) -> Steps[None]:
        yield from self._initialize()
        start(self._jvm, self._renewer.run(self._is_running))
        start(self._jvm, self._taker.run(self._takes_leases))
        start(self._jvm, self._syncs.run(self._takes_leases))
        start(self._jvm, self._cleanup.run(self._is_running))
        yield from self._loop()

    def _initialize(self) -> Steps[None]:
        """`Scheduler.initialize`, until it succeeds."""
        while True:
            try:
                yield from self._syncs.at_start()
                yield from self._renewer.initialize()
            except (ThroughputExceeded, DependencyFailed):
                yield from sleep(self._jvm, _LOOP_S)
            else:
                return

    def _stands_still(self) -> None:
        self._was_still = True

    def _last_woke_s(self) -> float:
        """The time of the first action after standing still."""
        if self._was_still and not self.is_frozen:
            self._was_still = False
            self._woke_s = self._world.scheduler.now
        return self._woke_s

    def _loop(self) -> Steps[None]:
        while self._is_running():
            self._last_woke_s()
            held = self._renewer.held()
            for lease in held:
                consumer = self.consumers.get(lease)
                if (consumer is None or consumer.is_out_of_date) and not self._is_draining:
                    self._consume(lease)
            for lease, consumer in tuple(self.consumers.items()):
                if lease not in held:
                    consumer.lease_lost()
                    if consumer.is_over:
                        del self.consumers[lease]
            if self._is_draining and all(each.is_over for each in self.consumers.values()):
                self.is_finished = True
            yield from sleep(self._jvm, _LOOP_S)

    def _consume(self, lease: HeldLease) -> None:
        self._runs += 1
        consumer = ShardConsumer(self._kcl, lease, f"{self.name}/{self._runs}")
        self.consumers[lease] = consumer
        consumer.start()

    def _begin_drain(self) -> None:
        self._is_draining = True
        for consumer in self.consumers.values():
            consumer.shutdown_requested()

    def _is_running(self) -> bool:
        return not self.is_finished

    def _takes_leases(self) -> bool:
        return not self.is_finished and not self._is_draining
