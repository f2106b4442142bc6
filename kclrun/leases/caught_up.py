"""What separates the fleet from "caught up", as far as the lease table shows it. Pure.

Rule: what is not known is not caught up. A lease counts only if it runs here, or if its owner was
seen to write its row. Whether the records of such a shard are read is not in the table alone: the
shell reads on from the row's checkpoint (`manager/tips.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from kclrun.leases.auditing import Audits
from kclrun.leases.held_lease import HeldLease
from kclrun.leases.held_leases import HeldLeases
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.table_view import LastScan, Observation, TableView, is_unowned
from kclrun.leases.transitions import State
from kclrun.model.lease import OWNER_PREFIX, Lease, LeaseKey, OwnerId
from kclrun.model.time import Instant

_SETTLED: Final = frozenset({State.RUNNING, State.HALTED})
# Large fleets scan every second failover. A view that is older says nothing about other owners.
_VIEW_OLD_FAILOVERS: Final = 4.0


class LeasesElsewhere:
    """The unended leases that other live owners hold, at the last scan, and their facts.

    `halted` stand still until an operator resumes them, as our own do. `reading` were seen to be
    renewed. `unknown` are the others, each with the reason in words.
    """

    def __init__(
        self,
        view: TableView,
        held_leases: Mapping[LeaseKey, HeldLease],
        observation: Observation,
        *,
        me: OwnerId,
    ) -> None:
        self.halted: list[LeaseKey] = []
        self.reading: list[Lease] = []
        self.unknown: list[str] = []
        wall = observation.wall_time(view.seen_instant)
        for lease in view.unended:
            if lease.key in held_leases or _is_unread(lease, view, me):
                continue
            assert lease.owner is not None, "it has another owner"
            if not observation.is_seen_alive(lease):
                self.unknown.append(f"{lease.key} is of {lease.owner}, not seen to renew it yet")
            elif lease.owner.startswith(OWNER_PREFIX) and lease.halt is not None:
                self.halted.append(lease.key)
            elif _is_paused(lease) and lease.pause is not None and lease.pause.stands_at(wall):
                self.unknown.append(f"{lease.key} is paused, at {lease.owner}")
            else:
                self.reading.append(lease)


def _is_paused(lease: Lease) -> bool:
    """A Java worker does not know pauses: it reads."""
    return lease.pause is not None and (lease.owner or "").startswith(OWNER_PREFIX)


def _is_unread(lease: Lease, view: TableView, me: OwnerId) -> bool:
    """Whether it has no live owner but us. Of ours only the held ones are read."""
    return lease.owner == me or is_unowned(lease.owner) or lease.key in view.expired


def blockers(
    view: TableView, held_leases: Mapping[LeaseKey, HeldLease], me: OwnerId
) -> tuple[str, ...]:
    """What separates the fleet from "caught up", by the leases alone: one line for each lease that
    is not running here, not ended, and not another owner's (`LeasesElsewhere` has those). A lease
    process knows whether it is at the tip of its shard.

    A halted lease blocks nothing: it stands still by decision, and in a job that only waits for the
    end an operator does not resume it. The end reports it (`CaughtUp.halted`).
    """
    lines = []
    for lease in view.unended:
        held_lease = held_leases.get(lease.key)
        if held_lease is not None:
            if held_lease.state not in _SETTLED:
                lines.append(f"{lease.key} is {held_lease.state.value}")
        elif _is_unread(lease, view, me):
            lines.append(f"{lease.key} is not being read")
    for lease in view.rows.values():
        if lease.is_ended:
            missing = sorted(child for child in lease.children if not view.has_row(child))
            lines += [f"{child}, a child of {lease.key}, has no lease" for child in missing]
    lines += [f"{key} has a row that cannot be read" for key in sorted(view.broken)]
    return tuple(lines)


def is_view_old(view: TableView, failover_s: float, now: Instant) -> bool:
    """Whether the last scan is too old to say what other owners do."""
    return now - view.seen_instant >= _VIEW_OLD_FAILOVERS * failover_s


class CaughtUp:
    """Whether the fleet is caught up, as of the last scan. `children` are those of shards that
    ended here and that no owner is known to have."""

    def __init__(
        self,
        policy: ManagerPolicy,
        seen: LastScan,
        held: HeldLeases,
        audits: Audits,
        observation: Observation,
        *,
        children: Collection[LeaseKey],
    ) -> None:
        self._policy = policy
        self._children = children
        self._seen = seen
        self._held = held
        self._audits = audits
        self._observation = observation

    def blockers(self, now: Instant | None = None) -> tuple[str, ...]:
        """Why the fleet is not caught up, in words; empty when every lease runs or ended.

        The shell checks whether the running leases are at the tip of their shards: ours by their
        processes, those of `read_elsewhere` by reading on from their checkpoints. `now`: a scan
        that is old by then says nothing; None: the age is not judged.
        """
        seen, view = self._seen, self._seen.view
        if view is None or not self._audits.have_synced:
            return ("the first scan and the first listing are not over",)
        if now is not None and is_view_old(view, self._policy.failover_s, now):
            return ("the lease table was not scanned for too long",)
        if self._audits.is_creating or seen.began_instant < seen.changed_instant:
            return ("leases were created or ended since the last scan",)
        if self._children:
            children = ", ".join(sorted(self._children)[:5])
            return (f"children of a shard that just ended are not taken yet: {children}",)
        lines = blockers(view, self._held.held_leases, self._policy.me)
        return (*lines, *self._elsewhere(view).unknown) or self._audits.not_synced()

    def halted(self) -> tuple[LeaseKey, ...]:
        """The leases, ours and those of other live owners, that stand still until an operator
        resumes them."""
        held_leases, view = self._held.held_leases.values(), self._seen.view
        ours = (lease.key for lease in held_leases if lease.state is State.HALTED)
        return (*ours, *(() if view is None else self._elsewhere(view).halted))

    def read_elsewhere(self) -> tuple[Lease, ...]:
        """The rows of the leases that other live owners read."""
        view = self._seen.view
        return () if view is None else tuple(self._elsewhere(view).reading)

    def _elsewhere(self, view: TableView) -> LeasesElsewhere:
        held, me = self._held.held_leases, self._policy.me
        return LeasesElsewhere(view, held, self._observation, me=me)
