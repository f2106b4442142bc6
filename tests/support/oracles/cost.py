"""I12, the cost: nothing is written, scanned or requested more often than the protocol needs.

It does not know cores.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kclrun.protocol.writes import Checkpoint, Claim, CreateChildren, CreateLease, End, Renew, Take
from kclrun.simulation.observer import ManagerRequests, WatchPolicy
from kclrun.simulation.stories import RuleBroken

# Three renewals in one failover, 25 ms early each [P9]; and half a per cent for a fast clock.
_RENEWALS_PER_FAILOVER: Final = 3
_RENEW_EPSILON_S: Final = 0.025
_FAST_CLOCK: Final = 1.005
# A change of owner: the manager's renewal before the start, one of its regular ones, the process's
# first one; and one for a start that failed.
_RENEWALS_A_START: Final = 4.0
# The last checkpoint of an incarnation (a drain, a halt), and the first one of the next.
_CHECKPOINTS_A_START: Final = 2.0
# An early checkpoint is due at half of `uncheckpointed_max`.
_EARLY_SHARE: Final = 0.5
# A start of a manager: frequent scans until it has settled once (at most eight), its first scan in
# phase, and those that the three tries of a Java leader stand for.
_SCANS_A_START: Final = 16.0
# Rows created, taken or ended, or a former owner proven gone: a manager that sees one of these
# scans the table at once, and once more to see the result.
_CALL_FOR_A_SCAN: Final = frozenset({CreateLease, CreateChildren, Take, End})
_SCANS_AN_EVENT: Final = 2.0
# Managers look for offers every half a second [P17]; each change of owner may cause one more at
# once.
_QUERIES_PER_S: Final = 2.0
_QUERIES_IN_A_ROW: Final = 10.0


class _Budget(msgspec.Struct):
    """Fills at a pace up to `most`, and beyond it by events; each request spends one."""

    left: float
    at_s: float
    events_known: int = 0

    def spend(self, now: float, pace: float, most: float) -> bool:
        """Whether the budget was enough."""
        self.left = max(self.left, min(most, self.left + (now - self.at_s) * pace)) - 1
        self.at_s = now
        return self.left >= 0


class CostWatch(ManagerRequests):
    """Counts every write that applied, and the requests of managers.

    Each row and each manager has a budget that fills at the pace of P9 and P17 and is spent request
    by request, so that no bound is met only on average: a fix that polls more is caught within
    seconds. An allowance beside the pace is for an event that happened, and is named at the place
    where it is given.
    """

    def __init__(self, policy: WatchPolicy) -> None:
        self._renewals_per_s = _renewals_per_s(policy)
        self._checkpoints_per_s = (
            0.0 if policy.is_manual else _FAST_CLOCK / policy.checkpoint_every_s
        )
        # After each scan comes a fixed delay of half a failover.
        self._scans_per_s = _FAST_CLOCK * 2 / policy.failover_s
        self._early_at = policy.uncheckpointed_max * _EARLY_SHARE
        self._renewals: dict[str, _Budget] = {}
        self._checkpoints: dict[str, _Budget] = {}
        self._looks: dict[tuple[str, str], _Budget] = {}
        self._events = 0

    def written(self, change: Any, key: str, now: float) -> None:
        """A write applied. Raises: RuleBroken for a row that is written too often."""
        kind = type(change)
        if kind is Renew:
            budget = self._renewals.get(key)
            pace, most = self._renewals_per_s, _RENEWALS_A_START
            if budget is not None and not budget.spend(now, pace, most):
                raise RuleBroken("I12", key, f"renewed more often than {pace:.3f}/s")
        elif kind is Checkpoint:
            budget = self._checkpoints.get(key)
            pace, most = self._checkpoints_per_s, _CHECKPOINTS_A_START
            if budget is not None and not budget.spend(now, pace, most):
                raise RuleBroken("I12", key, f"checkpointed more often than {pace:.3f}/s")
        elif kind is Take or kind is Claim:
            self._renewals[key] = _Budget(_RENEWALS_A_START, now)
            self._checkpoints[key] = _Budget(_CHECKPOINTS_A_START, now)
        if kind in _CALL_FOR_A_SCAN:
            self._events += 1

    def answered(self, change: Any) -> None:
        """A write did not apply, or its outcome is unknown: its sender may scan the table again."""
        if type(change) in _CALL_FOR_A_SCAN:
            self._events += 1

    def asked_to_checkpoint(self, key: str) -> None:
        """User code asked for a checkpoint."""
        budget = self._checkpoints.get(key)
        if budget is not None:
            budget.left += 1

    def delivered(self, key: str, records: int) -> None:
        """Count a batch: with the records that wait for a checkpoint it may cause one that covers
        them, and one of its own."""
        budget = self._checkpoints.get(key)
        if budget is not None:
            beside = max(1.0, self._early_at - records)
            budget.left += min(2.0, 2.0 * records / beside)

    def proven_gone(self) -> None:
        """A manager has proof that a former owner is gone."""
        self._events += 1

    def scanned(self, manager: str, now: float) -> None:
        """Raises: RuleBroken for a manager that scans too often."""
        self._look("scans the table", manager, now)

    def listed(self, manager: str, now: float) -> None:
        """At most once a scan. Raises: RuleBroken for a manager that lists too often."""
        self._look("lists the shards", manager, now)

    def queried(self, manager: str, now: float) -> None:
        """A query for offers. Raises: RuleBroken for a manager that looks too often."""
        budget = self._looks.setdefault(("offers", manager), _Budget(_QUERIES_IN_A_ROW, now))
        if not budget.spend(now, _QUERIES_PER_S * _FAST_CLOCK, _QUERIES_IN_A_ROW):
            raise RuleBroken(
                "I12", "", f"{manager} looks for offers more often than twice a second"
            )

    def _look(self, what: str, manager: str, now: float) -> None:
        budget = self._looks.get((what, manager))
        if budget is None:
            budget = self._looks[what, manager] = _Budget(_SCANS_A_START, now, self._events)
        budget.left += _SCANS_AN_EVENT * (self._events - budget.events_known)
        budget.events_known = self._events
        if not budget.spend(now, self._scans_per_s, _SCANS_A_START):
            raise RuleBroken("I12", "", f"{manager} {what} more often than twice a failover")


def _renewals_per_s(policy: WatchPolicy) -> float:
    """Never below half of that pace: the floor of the managers, for short failovers."""
    third_s = policy.failover_s / _RENEWALS_PER_FAILOVER - _RENEW_EPSILON_S
    return _FAST_CLOCK / max(third_s, policy.failover_s / 6)
