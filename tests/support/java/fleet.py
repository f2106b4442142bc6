"""A simulated fleet that workers of the Java KCL 2.x may join.

The worker is a twin of the Java KCL's requests, not of its code. Its requests, their conditions,
their rhythm and its reactions to each answer are written here a second time, from
`amazon-kinesis-client` 2.x. The folder does not use our cores.
"""

from typing import Any

from kclrun.simulation.fleet import Fleet
from tests.support.java.overlap import MixedOracles
from tests.support.java.worker import JavaWorker


class MixedFleet(Fleet):
    """Arguments as of `Fleet`. Its oracles know what holds beside Java workers."""

    oracles: MixedOracles

    def __init__(self, seed: int, **named: Any) -> None:
        super().__init__(seed, observer_kind=MixedOracles, **named)
        self.java_workers: list[JavaWorker] = []

    def add_java_worker(self, group: str, slot: str) -> JavaWorker:
        """A worker of the Java KCL 2.x starts, on a machine with clocks of its own."""
        worker = self.add_member(
            f"{group}-{slot}",
            lambda name, machine: JavaWorker(name, self.world, machine, self.observer),
        )
        self.java_workers.append(worker)
        worker.start()
        return worker
