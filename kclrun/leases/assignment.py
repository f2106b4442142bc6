"""Which leases to take and to ask for, and why [P15, P16, P18, DESIGN 5 "Assignment"].

Knows: the standing of all owners, as one scan shows it. May not know: how anything is written or
started. Every decision carries its reason in words, for logs and for `kclrun leases --explain`.
Rule: target = ceil(work / owners), capped by `leases_max`. What is free is taken, all that is
missing at once. What another kclrun owner renews is asked for, never taken: from the most loaded
first, and only from those with two more than we have. When nothing is missing, one lease may move
between groups (`group_balance.py`). Then nothing does: a balanced fleet makes no decision at all.

Java workers cannot be asked. They are taken from as they take from each other: one lease a cycle,
from the most loaded, when it is above the target (or at it, and two are missing).
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable

import msgspec

from kclrun.leases.group_balance import giver_across_groups
from kclrun.leases.observation import Observation
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.standing import Hands, Standing, is_ours_kind
from kclrun.model.lease import Lease, LeaseKey, OwnerId

__all__ = ["Action", "Decision", "Plan", "left_unread", "plan"]

# Who comes first among the free: what a former self of ours left, children of shards that ended
# here, then all others in random order, so that managers seldom reach for the same row.
_FORMER, _CHILD, _OTHER = range(3)


class Action(enum.Enum):
    """What is to be done with a lease."""

    TAKE = "take"
    ASK = "ask"
    FORCE = "take by force"


class Decision(msgspec.Struct, frozen=True):
    """One lease to take or to ask for. `owner` is whom we ask or take it from, if anybody."""

    action: Action
    lease: Lease
    owner: OwnerId | None
    because: str


class Plan(msgspec.Struct, frozen=True):
    """All that one cycle decides; `summary` says in words how things stand."""

    decisions: tuple[Decision, ...]
    summary: str


def plan(
    standing: Standing,
    observation: Observation,
    policy: ManagerPolicy,
    hands: Hands,
    chance: Callable[[], float],
) -> Plan:
    """Decide one cycle, right after its scan. Offered rows have a rhythm of their own: `offers.py`.

    Beyond the target, up to `leases_max`, we take only what stood free for three failovers: then
    its fair owner is full or blind, and a shard must not wait.
    """
    planning = _Planning(standing, observation, policy, hands, chance)
    planning.take_free()
    planning.ask_the_most_loaded()
    if not planning.decisions and not standing.on_order:
        planning.take_from_java()
    if not planning.decisions and not standing.on_order:
        planning.balance_groups()
    return Plan(tuple(planning.decisions), planning.summary())


class _Planning:
    """The plan in the making. `mine` and `room` follow what is decided."""

    def __init__(
        self,
        standing: Standing,
        observation: Observation,
        policy: ManagerPolicy,
        hands: Hands,
        chance: Callable[[], float],
    ) -> None:
        self.decisions: list[Decision] = []
        self._standing = standing
        self._observation = observation
        self._policy = policy
        self._hands = hands
        self._chance = chance
        self._target = standing.target(policy.leases_max)
        self._mine = standing.mine
        self._room = max(0, policy.leases_max - standing.held - standing.on_order)

    def take_free(self) -> None:
        ranked = [
            (self._rank(lease), self._chance(), lease.key, lease)
            for lease in self._standing.free
            if lease.owner != self._policy.me and not self._hands.is_busy(lease.key)
        ]
        for *_, lease in sorted(ranked):
            if self._room <= 0:
                return
            if self._mine < self._target:
                self._take(lease, self._why_free(lease))
            elif self._is_overdue(lease):
                waited_s = self._policy.overdue_after_s
                why = f"{self._why_free(lease)}, and nobody took it for {waited_s:g} s"
                self._take(lease, why)

    def ask_the_most_loaded(self) -> None:
        """One lease after the other, each from whoever has most by then."""
        allowed = min(
            self._policy.moves_per_cycle - self._standing.on_order,
            self._target - self._mine,
            self._room,
        )
        if allowed <= 0:
            return
        heap = [
            (-count, self._chance(), owner)
            for owner, count in self._standing.counts.items()
            if count >= self._mine + 2 and owner != self._policy.me and is_ours_kind(owner)
        ]
        heapq.heapify(heap)
        rows: dict[OwnerId, list[Lease]] = {}
        while heap and allowed > 0:
            negative, tie, owner = heapq.heappop(heap)
            count = -negative
            if count < self._mine + 2:
                return
            if owner not in rows:
                rows[owner] = self._askable(owner)
            if not rows[owner]:
                continue
            why = f"it has {count}, we have {self._mine}, target {self._target}"
            self._ask(rows[owner].pop(), owner, why)
            allowed -= 1
            heapq.heappush(heap, (negative + 1, tie, owner))

    def take_from_java(self) -> None:
        """As `DynamoDBLeaseTaker.computeLeasesToTake`, with one lease a cycle, its default."""
        counts, target = self._standing.counts, self._target
        needed = min(target - self._mine, self._room)
        java = [(count, owner) for owner, count in counts.items() if not is_ours_kind(owner)]
        most, owner = max(java, default=(0, None))
        if needed <= 0 or not (most > target or (most == target and needed > 1)):
            return
        rows = [
            lease
            for lease in self._standing.view.work
            if lease.owner == owner
            and lease.key not in self._standing.view.expired
            and lease.checkpoint_owner is None
            and not self._hands.is_busy(lease.key)
        ]
        if rows:
            why = f"it has {most}, we have {self._mine}, target {target}"
            self._decide(Action.FORCE, self._one_of(rows), owner, why)

    def balance_groups(self) -> None:
        """Only a fleet that holds all its work, with room left at the target, has ties to break."""
        is_settled = not self._standing.free and not self._standing.offered
        if not is_settled or self._mine >= self._target or self._room <= 0:
            return
        owner = giver_across_groups(self._standing, self._chance)
        rows = self._askable(owner) if owner is not None else []
        if owner is not None and rows:
            why = f"it has {self._mine + 1}, we have {self._mine}, and our group has less"
            self._ask(rows[-1], owner, f"{why} than its share")

    def summary(self) -> str:
        fewest, most = self._standing.fewest_and_most()
        spread = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        owners, work = len(self._standing.owners), self._standing.work
        holds = f"{owners} owners hold {spread}" if owners > 1 else f"one owner holds {most}"
        what = f"{holds} of {work}; we have {self._mine}, target {self._target}"
        if self._standing.on_order:
            return f"{what}; {self._standing.on_order} on their way to us"
        if self._room <= 0 and self._mine < self._standing.target(work):
            return f"{what}; full: leases.max is {self._policy.leases_max}"
        return f"balanced: {what}" if not self.decisions else what

    def _rank(self, lease: Lease) -> int:
        if lease.owner in self._hands.gone:
            return _FORMER
        return _CHILD if lease.key in self._hands.children else _OTHER

    def _why_free(self, lease: Lease) -> str:
        if lease.owner in self._hands.gone:
            return f"left by {lease.owner}, a former self of ours that is proven dead"
        if lease.owner is None:
            is_child = lease.key in self._hands.children
            return "nobody owns it" + (", and its parent ended here" if is_child else "")
        still_s = self._observation.unchanged_s(lease, self._standing.view.seen_instant)
        return f"expired: {lease.owner} did not renew it for {still_s:.0f} s"

    def _is_overdue(self, lease: Lease) -> bool:
        still_s = self._observation.unchanged_s(lease, self._standing.view.seen_instant)
        return still_s >= self._policy.overdue_after_s

    def _askable(self, owner: OwnerId) -> list[Lease]:
        """Rows that may be asked for, in random order: not halted ones, which stay where people
        look for them, and none that the owner could not give away when it was asked before."""
        rows = [
            (self._chance(), lease.key, lease)
            for lease in self._standing.owned_by(owner)
            if lease.halt is None
            and lease.checkpoint_owner is None
            and lease.key not in self._hands.unanswered
            and lease.key not in self._hands.asked
            and not self._hands.is_busy(lease.key)
        ]
        return [lease for *_, lease in sorted(rows)]

    def _one_of(self, rows: list[Lease]) -> Lease:
        return rows[int(self._chance() * len(rows))]

    def _take(self, lease: Lease, because: str) -> None:
        self._decide(Action.TAKE, lease, None, because)

    def _ask(self, lease: Lease, owner: OwnerId, because: str) -> None:
        self._decide(Action.ASK, lease, owner, because)

    def _decide(self, action: Action, lease: Lease, owner: OwnerId | None, because: str) -> None:
        self.decisions.append(Decision(action, lease, owner, because))
        self._mine += 1
        self._room -= 1


def left_unread(
    standing: Standing,
    observation: Observation,
    policy: ManagerPolicy,
    is_busy: Callable[[LeaseKey], bool],
) -> tuple[LeaseKey, ...]:
    """The work that stood free for three failovers and that we do not take either: nobody reads
    it, because every owner is full or cannot see it. No shard may stand still unnoticed."""
    now = standing.view.seen_instant
    return tuple(
        lease.key
        for lease in standing.unclaimed
        if observation.unchanged_s(lease, now) >= policy.overdue_after_s and not is_busy(lease.key)
    )
