"""What separates the fleet from "caught up", as far as the lease table shows it. Pure.

Rule: what is not known is not caught up. A lease counts only if it runs here, or if its owner was
seen to write its row. Whether the records of such a shard are read is not in the table alone: the
shell reads on from the row's checkpoint (`manager/tips.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kclrun.leases.held_lease import HeldLease
from kclrun.leases.table_view import Observation, TableView, is_unowned
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
    end an operator does not resume it. The end reports it (`LeaseManager.halted`).
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
