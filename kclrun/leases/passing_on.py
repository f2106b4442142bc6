"""Leases of the dead that we have no place for, given to whoever has: offers in their name.

In a large fleet few managers look at the table often enough to see what expired [P9], and each
takes up to its target. What is left over they write as offered, by the dead owner to nobody in
particular: an index hit that every manager with a free place looks at each half second [P17]. So
a lease waits for the first manager that sees it expired, and not for one that lacks a lease.

Why it is safe: the write is an `Offer` with the condition of a take of an expired lease, the owner
and the counter as seen, and the position as it stands. Only who has itself seen the counter stand
still for a failover may send it [P9]; whoever takes the row then need not wait, as after any
offer. If the owner lives after all, either its renewal came first and this write fails, or its
fence has passed and its own next write fails [P2, P7].
Rule: it is never repeated; what came of it, the next scan or the index shows.
"""

from __future__ import annotations

from kclrun.errors import InvariantViolation
from kclrun.leases.commands import Command, Note, WriteRow
from kclrun.model.changes import Offer
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.outcomes import Applied, Outcome, Refused

__all__ = ["PassingOn"]


class PassingOn:
    """One instance a manager: the offers in the name of others that are under way."""

    def __init__(self, out: list[Command]) -> None:
        self._out = out
        self._under_way: set[LeaseKey] = set()
        self._refusal: str | None = None

    @property
    def has_writes_under_way(self) -> bool:
        return bool(self._under_way)

    def is_writing(self, key: LeaseKey) -> bool:
        """Whether such an offer of this row is on its way."""
        return key in self._under_way

    def offer(self, lease: Lease) -> None:
        """Offer an expired lease in its owner's name. Raises: InvariantViolation without one."""
        if lease.owner is None:
            raise InvariantViolation(f"lease {lease.key}: nobody owns it, in whose name to offer?")
        at = lease.checkpoint
        self._under_way.add(lease.key)
        self._out.append(WriteRow(Offer(lease.key, lease.owner, lease.counter, at, at)))

    def resolved(self, change: Offer, outcome: Outcome) -> None:
        """Take in what became of the write, in whatever way: the table shows the rest."""
        if change.key not in self._under_way:
            raise InvariantViolation(f"lease {change.key}: an outcome of no offer under way")
        self._under_way.discard(change.key)
        if isinstance(outcome, Applied):
            self._refusal = None
            self._out.append(
                Note("lease_passed_on", key=change.key, fields={"row_owner": change.owner})
            )
        elif isinstance(outcome, Refused) and outcome.code != self._refusal:
            self._refusal = outcome.code
            fields: dict[str, str | int | float | bool | None] = {
                "code": outcome.code,
                "message": outcome.message,
            }
            self._out.append(Note("write_refused", "error", change.key, fields))
