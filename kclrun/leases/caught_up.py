"""What separates this manager from "caught up", as far as leases say.

Pure and read-only: for `--until caught-up` and for people. Only a lease process knows whether it is
at the tip of its shard; the shell asks the status board.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kclrun.leases.held_lease import HeldLease, State
from kclrun.leases.table_view import TableView, is_nobody
from kclrun.model.lease import LeaseKey, OwnerId

_SETTLED: Final = frozenset({State.RUNNING, State.HALTED})


def blockers(
    view: TableView, held_leases: Mapping[LeaseKey, HeldLease], me: OwnerId
) -> tuple[str, ...]:
    """One line for each lease that is not running here, not ended, and not another owner's.

    A halted lease blocks nothing: it stands still by decision, and in a job that only waits for the
    end an operator does not resume it. The end reports it (`LeaseManager.halted`).
    """
    lines = []
    for lease in view.unended:
        held_lease = held_leases.get(lease.key)
        if held_lease is not None:
            if held_lease.state not in _SETTLED and not held_lease.is_over:
                lines.append(f"{lease.key} is {held_lease.state.value}")
        elif lease.owner == me or is_nobody(lease.owner) or lease.key in view.expired:
            lines.append(f"{lease.key} is not being read by anybody")
    for lease in view.rows.values():
        if lease.is_ended:
            missing = sorted(child for child in lease.children if not view.has_row(child))
            lines += [f"{child}, a child of {lease.key}, has no lease" for child in missing]
    lines += [f"{key} has a row that cannot be read" for key in sorted(view.broken)]
    return tuple(lines)
