"""Leases that nobody takes: said once, when it is so, and once when it is over [L1].

Two things to tell people, and both need their hands: `capacity_short`, this manager is full while
leases are unclaimed; `leases_left_unread`, some lease stood free for three failovers and no
manager took it. Rule: one line for each change, none in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kclrun.leases.commands import Command, Note
from kclrun.leases.policy import ManagerPolicy
from kclrun.model.lease import LeaseKey

__all__ = ["CapacityWatch"]

# One scan may show leases that another manager is taking just then; three in a row do not.
_SCANS_IN_A_ROW: Final = 3
_KEYS_NAMED_MAX: Final = 10


class CapacityWatch:
    """What one manager saw of it, scan after scan."""

    def __init__(self, policy: ManagerPolicy, out: list[Command]) -> None:
        self._leases_max = policy.leases_max
        self._out = out
        self._short_scans = 0
        self._left_unread = 0

    def after_scan(self, unread: Sequence[LeaseKey], unclaimed: int, *, held: int) -> None:
        """`unread` nobody took in time; `unclaimed` counts what is free now, taken by nobody."""
        self._note_left_unread(unread, held)
        is_short = unclaimed > 0 and held >= self._leases_max
        if is_short:
            self._short_scans += 1
            if self._short_scans == _SCANS_IN_A_ROW:
                self._note("capacity_short", free=unclaimed, leases_max=self._leases_max)
        else:
            if self._short_scans >= _SCANS_IN_A_ROW:
                self._out.append(Note("capacity_enough"))
            self._short_scans = 0

    def _note_left_unread(self, keys: Sequence[LeaseKey], held: int) -> None:
        if len(keys) == self._left_unread:
            return
        self._left_unread = len(keys)
        if keys:
            named = ", ".join(sorted(keys)[:_KEYS_NAMED_MAX])
            self._note(
                "leases_left_unread",
                what=len(keys),
                keys=named,
                leases=held,
                leases_max=self._leases_max,
            )

    def _note(self, event: str, **fields: str | int) -> None:
        self._out.append(Note(event, "warning", fields={**fields}))
