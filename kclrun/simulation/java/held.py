"""A lease as a Java worker has it in memory, from its take to its loss."""

from __future__ import annotations

from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.time import Instant
from kclrun.simulation.java.threads import Monitor

__all__ = ["HeldLease"]


class HeldLease:
    """Known by its identity, as Java's by its concurrency token: taken again, it is another.

    `incremented` is when a write of this worker was last *answered*; the KCL has no earlier
    instant. `answered_late_s`: how long before that it may have been applied.
    """

    def __init__(self, row: Lease, counter: int, incremented: Instant) -> None:
        self.key: LeaseKey = row.key
        self.counter = counter
        self.position: ExtendedSequenceNumber = row.checkpoint
        self.owner_switches = row.owner_switches
        self.parents = row.parents
        self.children = row.children
        self.hash_range: HashRange | None = row.hash_range
        self.incremented = incremented
        self.answered_late_s = 0.0
        self.monitor = Monitor()

    def has_expired(self, now: Instant, failover_s: float) -> bool:
        """`Lease.isExpired`: longer than a failover without an increment."""
        return now - self.incremented > failover_s
