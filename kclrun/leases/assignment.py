"""Which leases to take and to ask for, and why [P15, P16, P18, DESIGN 5 "Assignment"].

Knows: the standing of all owners, as one scan shows it. May not know: how anything is written or
started. Every decision carries its reason in words, for logs and for `kclrun leases --explain`.
Rule: target = ceil(work / owners), capped by `leases_max`. What is free is taken up to it, and
children of shards that ended here beyond it. What another kclrun owner renews is asked for, never
taken: from the most loaded first, and only from those with two more than we have. When nothing is
missing, one lease may move between groups (`group_balance.py`). Then nothing does: a balanced
fleet makes no decision at all.

Why children beyond the target: their parent's other records were read here, so whoever ended it
knows first that they may be read [L3]. While a stream doubles, targets grow shard by shard; who
kept to them would leave children to scans of others, seconds later. An owner has too many at most
until others ask, and a lease that is asked for is read all the while.

Why takes double: a fleet that starts sees itself grow. The first manager sees no other, and its
target is everything it may hold; ten such would take all, and thirty more ask it back from them
one by one. So at most as many as we hold are taken at once, but always eight; a tenth of a failover
later we look again: the others own something then, and the target is nearer to the truth.

Java workers cannot be asked. They are taken from as they take from each other: one lease a cycle,
from the most loaded, when it is above the target (or at it, and two are missing).
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable
from typing import Final

import msgspec

from kclrun.leases.group_balance import giver_across_groups
from kclrun.leases.observation import Observation
from kclrun.leases.pacing import Pace
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.standing import Hands, Standing, is_ours_kind
from kclrun.model.lease import Lease, LeaseKey, OwnerId

__all__ = ["Action", "Decision", "Plan", "left_unread", "plan"]

# Who comes first among the free: what a former self of ours left, children of shards that ended
# here, then all others in random order, so that managers seldom reach for the same row.
_FORMER, _CHILD, _OTHER = range(3)

# So many free leases are taken at once by who holds none: no start of few shards is slowed down.
_TAKES_AT_ONCE_MIN: Final = 8
# What the dead left is offered in parts: one look at the index shows no more at once, and a burst
# of writes from each manager that sees it would be for nothing but the first of them.
_OFFERS_AT_ONCE_MAX: Final = 100


class Action(enum.Enum):
    """What is to be done with a lease."""

    TAKE = "take"
    ASK = "ask"
    FORCE = "take by force"
    OFFER = "offer"


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
    pace: Pace


def plan(
    standing: Standing,
    observation: Observation,
    policy: ManagerPolicy,
    hands: Hands,
    chance: Callable[[], float],
) -> Plan:
    """Decide one cycle, right after its scan. Offered rows have a rhythm of their own: `offers.py`.

    What the dead left beyond our target is passed on to whoever has a place (`passing_on.py`).
    Where that cannot be, we take beyond the target, up to `leases_max`, what stood free for three
    failovers: then its fair owner is full or blind, and a shard must not wait.
    """
    planning = _Planning(standing, observation, policy, hands, chance)
    planning.take_free()
    planning.ask_the_most_loaded()
    if not planning.decisions and not standing.on_order:
        planning.take_from_java()
    if not planning.decisions and not standing.on_order:
        planning.balance_groups()
    return Plan(tuple(planning.decisions), planning.summary(), planning.pace())


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
        self._pace = Pace.REST
        self._standing = standing
        self._observation = observation
        self._policy = policy
        self._hands = hands
        self._chance = chance
        self._target = standing.target(policy.leases_max)
        self._mine = standing.mine
        self._room = max(0, policy.leases_max - standing.held - standing.on_order)
        self._others_left = max(standing.held, _TAKES_AT_ONCE_MIN)
        self._offers_left = _OFFERS_AT_ONCE_MAX

    def take_free(self) -> None:
        ranked = [
            (self._rank(lease), self._chance(), lease.key, lease)
            for lease in self._standing.free
            if lease.owner != self._policy.me and not self._hands.is_busy(lease.key)
        ]
        for rank, _, _, lease in sorted(ranked):
            if self._room > 0 and (rank == _CHILD or self._mine < self._target):
                self._take_now_or_soon(lease, rank)
            elif self._room > 0 and self._is_overdue(lease):
                waited_s = self._policy.overdue_after_s
                why = f"{self._why_free(lease)}, and nobody took it for {waited_s:g} s"
                self._take(lease, why)
            elif self._can_pass_on(lease):
                self._pass_on_now_or_soon(lease)

    def _take_now_or_soon(self, lease: Lease, rank: int) -> None:
        if rank == _OTHER:
            self._pace = Pace.GRAB
            if self._others_left == 0:
                return
            self._others_left -= 1
        self._take(lease, self._why_free(lease))

    def _pass_on_now_or_soon(self, lease: Lease) -> None:
        if self._offers_left == 0:
            self._pace = Pace.GRAB
            return
        self._offers_left -= 1
        why = f"{self._why_free(lease)}, and we are at our target"
        self.decisions.append(Decision(Action.OFFER, lease, lease.owner, why))

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

    def pace(self) -> Pace:
        if self._pace is Pace.REST and (self.decisions or self._standing.on_order):
            return Pace.MOVE
        return self._pace

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

    def _can_pass_on(self, lease: Lease) -> bool:
        """Whether an offer in its owner's name finds a taker sooner than its silence does.

        Not where Java workers live: to them an offer is an owner whose silence begins anew. Not
        where the owners in sight have no places for all the work: the others are yet to be seen.
        """
        standing = self._standing
        are_all_ours = len(standing.kclrun_owners) == len(standing.owners) > 1
        have_room = standing.target(standing.work) <= self._policy.leases_max
        is_left = lease.owner is not None and lease.checkpoint_owner is None
        return is_left and are_all_ours and have_room

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
