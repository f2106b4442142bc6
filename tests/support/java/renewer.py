"""`DynamoDBLeaseRenewer`: the leases that a Java worker believes to hold, and all writes to them.

It does not know shards.
"""

from collections.abc import Callable
from typing import Final

from kclrun.model.lease import Lease, LeaseKey, OwnerId, PendingCheckpoint
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.simulation.machine import OsProcess
from tests.support.java import rows
from tests.support.java.threads import (
    DependencyFailed,
    HeldLease,
    JavaClient,
    Steps,
    ThroughputExceeded,
    sleep,
    together,
)

# `DynamoDBLeaseCoordinator`: every failover / 3 - epsilon, at a fixed rate.
_EPSILON_S: Final = 0.025
# `RENEWAL_RETRIES`.
_TRIES_MAX: Final = 2


class Renewer:
    """`owned` are the leases in memory, expired ones included; `held` leaves those out.

    As in the KCL: a lease ends when the condition of a renewal or checkpoint fails, unless a
    renewal finds its own write on the row. Other failures are tried again at the next run. A lease
    that was not renewed for a failover is not renewed any more, and is not held. Each lease is
    written by one thread at a time.
    """

    def __init__(self, jvm: OsProcess, client: JavaClient, me: OwnerId, failover_s: float) -> None:
        self.owned: dict[LeaseKey, HeldLease] = {}
        self._jvm = jvm
        self._client = client
        self._me = me
        self._failover_s = failover_s

    def add(self, row: Lease, counter: int) -> None:
        """`addLeasesToRenew`: taken, and answered at this moment."""
        self.owned[row.key] = HeldLease(row, counter, self._jvm.machine.instant())

    def held(self) -> list[HeldLease]:
        """`getCurrentlyHeldLeases`."""
        return [lease for lease in self.owned.values() if self.is_held(lease)]

    def is_held(self, lease: HeldLease) -> bool:
        return self.owned.get(lease.key) is lease and not self._has_expired(lease)

    def drop(self, lease: HeldLease) -> None:
        """`dropLease`: in memory only; the row stays as it is."""
        if self.owned.get(lease.key) is lease:
            del self.owned[lease.key]

    def initialize(self) -> Steps[None]:
        """Leases of a former run under this name are renewed even if expired.

        Raises: DependencyFailed.
        """
        for row in (yield from self._client.rows()):
            if row.owner == self._me:
                self.add(row, row.counter)
                yield from self._renew(self.owned[row.key], even_if_expired=True)

    def run(self, is_running: Callable[[], bool]) -> Steps[None]:
        """Runs at a fixed rate: a run that took too long is followed by the next at once."""
        due = self._jvm.machine.instant()
        while is_running():
            yield from together(self._jvm, [self._renew(lease) for lease in self.owned.values()])
            due = Instant(due + self._failover_s / 3 - _EPSILON_S)
            yield from sleep(self._jvm, due - self._jvm.machine.instant())

    def checkpoint(self, lease: HeldLease, position: ExtendedSequenceNumber) -> Steps[bool]:
        """Whether the row has the position; if not, the lease is lost. Raises: DependencyFailed."""
        stands: bool = yield from self._update(lease, position, None)
        return stands

    def prepare_checkpoint(self, lease: HeldLease, position: ExtendedSequenceNumber) -> Steps[bool]:
        """The first half of a two-phase checkpoint. As `checkpoint`."""
        pending = PendingCheckpoint(position)
        stands: bool = yield from self._update(lease, lease.position, pending)
        return stands

    def _renew(self, lease: HeldLease, *, even_if_expired: bool = False) -> Steps[None]:
        yield from lease.monitor.enter()
        try:
            for _ in range(_TRIES_MAX):
                if self.owned.get(lease.key) is not lease:
                    return
                try:
                    yield from self._renew_once(lease, even_if_expired=even_if_expired)
                except ThroughputExceeded:
                    continue
                except DependencyFailed:
                    pass
                return
        finally:
            lease.monitor.leave()

    def _renew_once(self, lease: HeldLease, *, even_if_expired: bool) -> Steps[None]:
        began = self._jvm.machine.instant()
        if self._has_expired(lease) and not even_if_expired:
            self.drop(lease)
            return
        is_renewed = yield from self._client.write(rows.renew(lease.key, lease.counter))
        if not is_renewed:
            row = yield from self._client.row(lease.key)
            is_renewed = (
                row is not None and row.owner == self._me and row.counter == lease.counter + 1
            )
        if is_renewed:
            self._incremented(lease, began)
        else:
            self.drop(lease)

    def _update(
        self,
        lease: HeldLease,
        position: ExtendedSequenceNumber,
        pending: PendingCheckpoint | None,
    ) -> Steps[bool]:
        yield from lease.monitor.enter()
        try:
            if not self.is_held(lease):
                return False
            began = self._jvm.machine.instant()
            is_prepared = pending is not None
            change = rows.update(
                lease.key,
                lease.counter,
                position,
                pending=pending,
                owner_switches=lease.owner_switches if is_prepared else 0,
                children=lease.children,
                hash_range=lease.hash_range,
            )
            is_updated: bool = yield from self._client.write(change)
            if not is_updated:
                self.drop(lease)
                return False
            lease.position = position
            lease.owner_switches = lease.owner_switches if is_prepared else 0
            self._incremented(lease, began)
            return True
        finally:
            lease.monitor.leave()

    def _incremented(self, lease: HeldLease, began: float) -> None:
        lease.counter += 1
        lease.incremented = self._jvm.machine.instant()
        lease.answered_late_s = lease.incremented - began

    def _has_expired(self, lease: HeldLease) -> bool:
        return lease.has_expired(self._jvm.machine.instant(), self._failover_s)
