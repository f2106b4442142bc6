"""When a lease was last seen to move. Expiry is observed by us, never stored [P9].

Knows: each row's owner, counter and ask, and the instant of the scan that first showed them.
May not know: any clock but the instants it is given. Rule: what is new to us was renewed just
now, however old it may be; so nothing that lives is ever called expired.
"""

from __future__ import annotations

from collections.abc import Iterable

from kclrun.model.lease import ASK_STALE_AFTER_S, OFFERED, Handoff, Lease, LeaseKey, OwnerId
from kclrun.model.time import Instant

__all__ = ["Observation", "is_nobody"]


def is_nobody(owner: OwnerId | None) -> bool:
    """Unowned and offered rows belong to nobody: takeable at once, and no owner in any count."""
    return owner is None or owner == OFFERED


class Observation:
    """The counters of the last scans. One instance a manager; grows and shrinks with the table."""

    def __init__(self, failover_s: float) -> None:
        self._failover_s = failover_s
        self._since: dict[LeaseKey, tuple[int, OwnerId | None, Instant]] = {}
        self._asks: dict[LeaseKey, tuple[Handoff, Instant]] = {}

    def update(self, leases: Iterable[Lease], now: Instant) -> None:
        """Take in a whole scan; rows that are no longer there are forgotten.

        `now` is when the scan was over, which is after each row was read. That is safe: a take
        names the counter, so an owner that renewed in between makes the take fail.
        """
        before = self._since
        since: dict[LeaseKey, tuple[int, OwnerId | None, Instant]] = {}
        asks: dict[LeaseKey, tuple[Handoff, Instant]] = {}
        for lease in leases:
            key, counter, owner = lease.key, lease.counter, lease.owner
            seen = before.get(key)
            if seen is None or seen[0] != counter or seen[1] != owner:
                seen = (counter, owner, now)
            since[key] = seen
            if lease.handoff is not None:
                asked = self._asks.get(key)
                if asked is None or asked[0] != lease.handoff:
                    asked = (lease.handoff, now)
                asks[key] = asked
        self._since = since
        self._asks = asks

    def unchanged_s(self, lease: Lease, now: Instant) -> float:
        """For how long we have seen this owner and this counter on the row."""
        return now - self._since[lease.key][2]

    def is_ask_stale(self, lease: Lease, now: Instant) -> bool:
        """Whether the very ask on this row has stood there for 30 s, as far as we have seen [P16].

        Never from the time on the row: hosts whose wall clock is off must not stop the balancing.
        """
        seen = self._asks.get(lease.key)
        return seen is not None and seen[0] == lease.handoff and now - seen[1] >= ASK_STALE_AFTER_S

    def has_expired(self, lease: Lease, now: Instant) -> bool:
        """Whether its counter stood still for a failover: the larger of ours and the row's."""
        failover_s = max(self._failover_s, lease.failover_s or 0.0)
        return self.unchanged_s(lease, now) >= failover_s

    def expired(self, leases: Iterable[Lease], now: Instant) -> frozenset[LeaseKey]:
        """The keys of those that have expired: `has_expired` for a whole table, in one pass."""
        since, shortest_s = self._since, self._failover_s
        candidates = [lease for lease in leases if now - since[lease.key][2] >= shortest_s]
        return frozenset(lease.key for lease in candidates if self.has_expired(lease, now))
