"""Decides which leases to take and which to ask for, with reasons [P15, P16, P18].

Knows: the loads of all owners, as one scan shows it. Must not know: how a row is written or how
a process is started. Every decision carries its reason in words, for logs and for
`kclrun leases --explain`. `plan` explains the rules.
"""

from __future__ import annotations

import enum
import functools
import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Set
from typing import Final, cast

import msgspec

from kclrun.leases.capacity import STRETCH
from kclrun.leases.policy import ManagerPolicy, ScanPace, owner_hash
from kclrun.leases.table_view import Observation, TableView
from kclrun.model.lease import ANYBODY, OFFERED, OWNER_PREFIX, Lease, LeaseKey, Owner, OwnerId


class LocalHoldings(msgspec.Struct, frozen=True, kw_only=True):
    """The leases of this manager. `held` fill places, including takes under way. `asked` are our
    asks under way. `unanswered` are rows that were asked for in vain; they are not asked for again
    for now. `children` belong to shards that ended here. `gone` are owners that are proven gone.
    `busy` are rows that we hold, or that have a write of ours under way. `places`: how many leases
    we may hold; None means `leases_max`.
    """

    held: Collection[LeaseKey] = ()
    asked: Collection[LeaseKey] = ()
    unanswered: Collection[LeaseKey] = ()
    children: Collection[LeaseKey] = ()
    gone: Set[OwnerId] = frozenset()
    busy: Collection[LeaseKey] = frozenset()
    places: int | None = None


class OwnerLoads:
    """The work of one view, counted by owner. All assignment is decided from it.

    `free` is work without an owner or with an expired owner. `offered` is work that was given away
    and waits for its taker. All other work counts in `counts`, by owner. `mine` is our count: the
    work that we hold, that we asked for and that is offered to us, less the work that others ask us
    for. `held` counts the filled places, `on_order` the asks among `mine`. `me` is always among the
    owners. `left` is `leaving` of the previous loads.

    Rule: a lease counts for its *future* owner. A row with a fresh ask counts for the asker. An
    offered row counts for the owner that it is meant for. So several managers that plan at once do
    not ask for the same share twice. The asker and that owner count as owners already, for the
    target.

    An owner that offers rows without naming a taker is leaving (a drain) or wants fewer leases
    (`leases release`). It does not count as an owner while one of these rows waits: otherwise its
    leases would be above the target of every owner and would wait for three failovers. Afterwards
    it does not count either, as long as it owns only ended leases.
    """

    def __init__(
        self,
        view: TableView,
        observation: Observation,
        holdings: LocalHoldings,
        *,
        me: OwnerId,
        left: Set[OwnerId] = frozenset(),
    ) -> None:
        self.view = view
        self.me = me
        self.work = len(view.work)
        self.free: list[Lease] = []
        self.offered: list[Lease] = []
        self.counts: Counter[OwnerId] = Counter()
        # Owners that offered leases without naming a taker.
        self.leaving: set[OwnerId] = set(left & view.owners_of_ended)
        self._joining: set[OwnerId] = set()
        self._promised: set[LeaseKey] = set()  # offered to us or asked for by us, not ours yet
        self._asked_away: set[LeaseKey] = set()  # ours; another owner has asked for them
        self._owned: dict[OwnerId, list[Lease]] | None = None
        self._observation = observation
        self._count(view)
        self._work_keys = view.work_keys
        self._settle_owners()
        self.hold(holdings)

    def _count(self, view: TableView) -> None:
        expired, counts = view.expired, self.counts
        if not expired and not view.asked:
            named = Counter([lease.owner for lease in view.work])
            if None not in named and OFFERED not in named:  # the usual case
                self.counts = cast("Counter[OwnerId]", named)
                return
        for lease in view.work:
            owner = lease.owner
            if owner is None or lease.key in expired:
                if self._is_takeable(lease):
                    self.free.append(lease)
            elif owner == OFFERED:
                self.offered.append(lease)
                self._count_offer(lease, lease.offered_to)
            elif lease.handoff is None or self.is_settled(lease):
                counts[owner] = counts.get(owner, 0) + 1  # `+=` calls Python code for a new key
            else:
                self._count_ask(lease, owner, lease.handoff.to)

    def hold(self, holdings: LocalHoldings) -> None:
        """Count our own leases again: they change between two scans."""
        held = set(holdings.held)
        is_mine = self._work_keys.__contains__
        # A row that we hold and that the scan did not show was created since then: it is work.
        work = {key for key in held if is_mine(key) or key not in self.view.rows}
        incoming = self._promised.union(holdings.asked) - held
        self.held = len(held)
        self.on_order = len(incoming)
        self.mine = len(work - self._asked_away) + len(incoming)
        self.counts[self.me] = self.mine

    def note_offers(self, offers: Iterable[Lease]) -> None:
        """Take in offered rows found since the scan. A giver that names no taker is leaving."""
        leaving = {
            lease.offered_by
            for lease in offers
            if lease.offered_to is None and lease.offered_by is not None
        }
        if not leaving <= self.leaving:
            self.leaving |= leaving
            self._settle_owners()

    def target(self, leases_max: int) -> int:
        return target_of(self.work, len(self.owners), leases_max)

    def is_work(self, key: LeaseKey) -> bool:
        return key in self._work_keys

    def owned_by(self, owner: OwnerId) -> tuple[Lease, ...]:
        """The work that this owner renews and that no other owner asks for."""
        if self._owned is None:
            self._owned = {}
            for lease in self.view.work:
                holder, has_expired = lease.owner, lease.key in self.view.expired
                if holder is not None and not has_expired and self.is_settled(lease):
                    self._owned.setdefault(holder, []).append(lease)
        return tuple(self._owned.get(owner, ()))

    def fewest_and_most(self) -> tuple[int, int]:
        """The smallest and the largest count of the owners."""
        counts = [self.counts[owner] for owner in self.owners]
        return min(counts), max(counts)

    def is_settled(self, lease: Lease) -> bool:
        """Whether no owner waits for this row. Java workers do not know asks and ignore them."""
        if lease.handoff is None or lease.owner is None or not is_ours_kind(lease.owner):
            return True
        return self._observation.is_ask_stale(lease, self.view.seen_instant)

    def _count_offer(self, lease: Lease, to: OwnerId | None) -> None:
        if to is None or to in self.view.silent:
            if to is None and lease.offered_by is not None:
                self.leaving.add(lease.offered_by)
        elif to == self.me:
            self._promised.add(lease.key)
        else:
            self.counts[to] += 1
            self._joining.add(to)

    def _count_ask(self, lease: Lease, owner: OwnerId, to: OwnerId) -> None:
        """Count a row with an ask. For an expired or unspecified asker it counts for its owner."""
        if to == ANYBODY or to in self.view.silent:
            self.counts[owner] += 1
            return
        if to == self.me:
            self._promised.add(lease.key)
            return
        self.counts[to] += 1
        self._joining.add(to)
        if owner == self.me:
            self._asked_away.add(lease.key)

    def _is_takeable(self, lease: Lease) -> bool:
        """False while a KCL 3 handoff moves the row: `checkpointOwner` works on it [P8, R8]."""
        is_handed_over = lease.owner is None and lease.checkpoint_owner is not None
        return not is_handed_over or self._observation.has_expired(lease, self.view.seen_instant)

    def _settle_owners(self) -> None:
        self.owners, self.kclrun_owners = self.view.owners, self.view.kclrun_owners
        if self._joining or self.leaving:
            joining = self._joining - self.view.silent
            self.owners = (self.owners | joining) - (self.leaving - {self.me})
            self.kclrun_owners = frozenset(filter(is_ours_kind, self.owners))


def target_of(work: int, owners: int, leases_max: int) -> int:
    """How many leases each owner should hold, so that the owners together hold all the work."""
    return min(-(-work // owners), leases_max)


def is_ours_kind(owner: OwnerId) -> bool:
    """Whether this owner is a kclrun manager, which can be asked; a Java worker cannot."""
    return owner.startswith(OWNER_PREFIX)


@functools.lru_cache(maxsize=4096)
def group_of(owner: OwnerId) -> str:
    """The group of an owner. The group of a Java worker is its id up to the first dash, as
    `seeds/001_*` names its clusters. A worker with a random id is then a group of its own, which
    moves no lease.
    """
    parsed = Owner.parse(owner)
    return parsed.group if parsed is not None else owner.partition("-")[0]


# The receiver that the list of moves names may be full, and then no lease would move. Therefore
# one cycle in ten, counted over all receivers of a group, another receiver puts itself first.
_OUT_OF_TURN_ONCE_IN = 10


def giver_across_groups(loads: OwnerLoads, chance: Callable[[], float]) -> OwnerId | None:
    """Break ties between groups: the owner to ask for one lease, or None.

    The owner belongs to another group and holds exactly one lease more than we do.

    With 100 + 100 machines over 500 shards each owner holds 2 or 3 leases. A target asks for no
    more, yet one group may hold 300 leases and the other 200. So among owners within one lease of
    each other, one lease moves if that brings the groups' totals closer to their shares. A group's
    share of the work is its share of the owners.

    Rule: every manager computes the *same* list of moves from the same view and makes only its own
    move. So a hundred managers that plan at once make as many moves as are needed, not a hundred.
    Each move makes the sum of squared distances from the shares smaller, so the moves come to an
    end.

    With `surplus` = total - share, a move from one group to another pays while their surpluses
    differ by more than one. At the end every group is within one lease of its share.
    """
    me, mine = loads.me, loads.mine
    receivers, givers = defaultdict(list), defaultdict(list)
    totals: dict[str, int] = defaultdict(int)
    members: dict[str, int] = defaultdict(int)
    for owner in loads.owners:
        group, count = group_of(owner), loads.counts[owner]
        totals[group] += count
        members[group] += 1
        if not is_ours_kind(owner):
            continue
        if count == mine:
            receivers[group].append(owner)
        elif count == mine + 1:
            givers[group].append(owner)
    if not givers or len(members) == 1:
        return None
    owners = len(loads.owners)
    surplus = {g: totals[g] * owners - loads.work * members[g] for g in members}
    first = me if chance() * _OUT_OF_TURN_ONCE_IN * len(receivers[group_of(me)]) < 1 else None
    for queue in (*receivers.values(), *givers.values()):
        queue.sort(key=lambda owner: (owner == first, owner_hash(owner)))  # the last one is next
    return _my_giver(me, surplus, receivers, givers, step=owners)


def _my_giver(
    me: OwnerId,
    surplus: dict[str, int],
    receivers: dict[str, list[OwnerId]],
    givers: dict[str, list[OwnerId]],
    *,
    step: int,
) -> OwnerId | None:
    """Go through the moves, from the fullest group to the emptiest, up to our own.

    Surpluses are multiplied by the number of owners (`step`), so that they are whole numbers.
    """
    rich = [(-surplus[group], group) for group in givers]
    poor = [(surplus[group], group) for group in receivers]
    heapq.heapify(rich)
    heapq.heapify(poor)
    while rich and poor:
        giving, taking = rich[0][1], poor[0][1]
        if surplus[giving] - surplus[taking] <= step:
            return None
        giver, receiver = givers[giving].pop(), receivers[taking].pop()
        if receiver == me:
            return giver
        surplus[giving] -= step
        surplus[taking] += step
        _renew_head(rich, -surplus[giving], giving, has_more=bool(givers[giving]))
        _renew_head(poor, surplus[taking], taking, has_more=bool(receivers[taking]))
    return None


def _renew_head(heap: list[tuple[int, str]], rank: int, group: str, *, has_more: bool) -> None:
    if has_more:
        heapq.heapreplace(heap, (rank, group))
    else:
        heapq.heappop(heap)


# The order of free leases: first those of a previous run of this manager, then children of shards
# that ended here, then all others in random order, so that managers seldom take the same row.
_FORMER, _CHILD, _OTHER = range(3)

# An owner without leases takes this many free leases at once: a start with few shards is not
# slow.
_TAKES_AT_ONCE_MIN: Final = 8
# Expired leases are offered in parts of this size. One look at the index shows no more at once,
# and when several managers see the same expired leases, only the first write for each row applies.
_OFFERS_AT_ONCE_MAX: Final = 100


class Action(enum.Enum):
    """The action that is decided for a lease."""

    TAKE = "take"
    ASK = "ask"
    FORCE = "take by force"
    OFFER = "offer"


class Decision(msgspec.Struct, frozen=True):
    """One lease to take or to ask for. `owner` is the owner that we ask or take it from, if any."""

    action: Action
    lease: Lease
    owner: OwnerId | None
    because: str


class AssignmentPlan(msgspec.Struct, frozen=True):
    """All decisions of one cycle. `summary` describes the situation in words."""

    decisions: tuple[Decision, ...]
    summary: str
    pace: ScanPace


def plan(
    loads: OwnerLoads,
    observation: Observation,
    policy: ManagerPolicy,
    holdings: LocalHoldings,
    chance: Callable[[], float],
) -> AssignmentPlan:
    """Decide one cycle, right after its scan. `balancing.py` decides about offered rows.

    Target = ceil(work / owners), capped by `leases_max`. Free leases are taken up to the target,
    and children of shards that ended here beyond it. A lease that another kclrun owner renews is
    asked for, never taken: from the most loaded owner first, and only from owners with at least two
    leases more than we have. When no lease is missing, one lease may move between groups
    (`giver_across_groups`). Then no lease moves: a balanced fleet makes no decision.

    Expired leases beyond our target are offered to any owner with a place (`ExpiredLeaseOffers`).
    Where that cannot be done, we take those that stood free for three failovers, beyond the target
    and up to `leases_max`. After that time their fair owner is full or cannot see them, and a shard
    must not wait.

    Why children beyond the target: the parent's records were read here, so the owner that ended the
    parent knows first that the children may be read [L3]. While a stream doubles, targets grow
    shard by shard. An owner that kept to its target would leave children to the scans of others,
    seconds later. An owner has too many leases only until others ask for them, and a lease that is
    asked for is read all the while.

    Why takes double: the first manager of a starting fleet sees no other owner, and its target is
    everything that it may hold. Ten such managers would take all leases, and thirty more would ask
    for them one by one. So a manager takes at most as many leases at once as it holds, but always
    eight. It looks again after a tenth of a failover. By then the others own leases, and the target
    is closer to the final one.

    Java workers cannot be asked. We take leases from them as they take from each other: one lease a
    cycle, from the most loaded worker, when it is above the target (or at the target while we lack
    two).
    """
    planning = _Planning(loads, observation, policy, holdings, chance)
    planning.take_free()
    planning.ask_the_most_loaded()
    if not planning.decisions and not loads.on_order:
        planning.take_from_java()
    if not planning.decisions and not loads.on_order:
        planning.balance_groups()
    return AssignmentPlan(tuple(planning.decisions), planning.summary(), planning.pace())


class _Planning:
    """A plan while it is made. `mine` and `room` follow the decisions."""

    def __init__(
        self,
        loads: OwnerLoads,
        observation: Observation,
        policy: ManagerPolicy,
        holdings: LocalHoldings,
        chance: Callable[[], float],
    ) -> None:
        self.decisions: list[Decision] = []
        self._pace = ScanPace.REST
        self._loads = loads
        self._observation = observation
        self._policy = policy
        self._holdings = holdings
        self._chance = chance
        places = policy.leases_max if holdings.places is None else holdings.places
        filled = loads.held + loads.on_order
        self._target = loads.target(places)
        self._mine = loads.mine
        self._room = max(0, places - filled)
        self._room_for_overdue = max(0, min(policy.leases_max, places + STRETCH) - filled)
        self._others_left = max(loads.held, _TAKES_AT_ONCE_MIN)
        self._offers_left = _OFFERS_AT_ONCE_MAX

    def take_free(self) -> None:
        ranked = [
            (self._rank(lease), self._chance(), lease.key, lease)
            for lease in self._loads.free
            if lease.key not in self._holdings.busy
        ]
        for rank, _, _, lease in sorted(ranked):
            if self._room > 0 and (rank == _CHILD or self._mine < self._target):
                self._take_now_or_soon(lease, rank)
            elif self._room_for_overdue > 0 and self._is_overdue(lease):
                waited_s = self._policy.overdue_after_s
                why = f"{self._why_free(lease)}, and no owner took it for {waited_s:g} s"
                self._take(lease, why)
            elif self._can_pass_on(lease):
                self._pass_on_now_or_soon(lease)

    def _take_now_or_soon(self, lease: Lease, rank: int) -> None:
        if rank == _OTHER:
            self._pace = ScanPace.FAST
            if self._others_left == 0:
                return
            self._others_left -= 1
        self._take(lease, self._why_free(lease))

    def _pass_on_now_or_soon(self, lease: Lease) -> None:
        if self._offers_left == 0:
            self._pace = ScanPace.FAST
            return
        self._offers_left -= 1
        why = f"{self._why_free(lease)}, and we are at our target"
        self.decisions.append(Decision(Action.OFFER, lease, lease.owner, why))

    def ask_the_most_loaded(self) -> None:
        """Ask for one lease after the other, each from the owner that has most leases by then."""
        allowed = min(
            self._policy.moves_per_cycle - self._loads.on_order,
            self._target - self._mine,
            self._room,
        )
        if allowed <= 0:
            return
        heap = [
            (-count, self._chance(), owner)
            for owner, count in self._loads.counts.items()
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
        """Take as `DynamoDBLeaseTaker.computeLeasesToTake`, by its default one lease a cycle."""
        counts, target = self._loads.counts, self._target
        needed = min(target - self._mine, self._room)
        java = [(count, owner) for owner, count in counts.items() if not is_ours_kind(owner)]
        most, owner = max(java, default=(0, None))
        if needed <= 0 or not (most > target or (most == target and needed > 1)):
            return
        rows = [
            lease
            for lease in self._loads.view.work
            if lease.owner == owner
            and lease.key not in self._loads.view.expired
            and lease.checkpoint_owner is None
            and lease.key not in self._holdings.busy
        ]
        if rows:
            why = f"it has {most}, we have {self._mine}, target {target}"
            self._decide(Action.FORCE, self._one_of(rows), owner, why)

    def balance_groups(self) -> None:
        """Move a lease between groups. Only a fleet that holds all its work, with room at the
        target, has ties to break."""
        is_settled = not self._loads.free and not self._loads.offered
        if not is_settled or self._mine >= self._target or self._room <= 0:
            return
        owner = giver_across_groups(self._loads, self._chance)
        rows = self._askable(owner) if owner is not None else []
        if owner is not None and rows:
            why = f"it has {self._mine + 1}, we have {self._mine}, and our group has less"
            self._ask(rows[-1], owner, f"{why} than its share")

    def pace(self) -> ScanPace:
        if self._pace is ScanPace.REST and (self.decisions or self._loads.on_order):
            return ScanPace.MOVE
        return self._pace

    def summary(self) -> str:
        fewest, most = self._loads.fewest_and_most()
        spread = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        owners, work = len(self._loads.owners), self._loads.work
        holds = f"{owners} owners hold {spread}" if owners > 1 else f"one owner holds {most}"
        what = f"{holds} of {work}; we have {self._mine}, target {self._target}"
        if self._loads.on_order:
            return f"{what}; {self._loads.on_order} on their way to us"
        if self._room <= 0 and self._mine < self._loads.target(work):
            return f"{what}; full: leases.max is {self._policy.leases_max}"
        return f"balanced: {what}" if not self.decisions else what

    def _rank(self, lease: Lease) -> int:
        if lease.owner in self._holdings.gone:
            return _FORMER
        return _CHILD if lease.key in self._holdings.children else _OTHER

    def _why_free(self, lease: Lease) -> str:
        if lease.owner in self._holdings.gone:
            return f"left by {lease.owner}, a previous run of this manager that has ended"
        if lease.owner is None:
            is_child = lease.key in self._holdings.children
            return "it has no owner" + (", and its parent ended here" if is_child else "")
        still_s = self._observation.unchanged_s(lease, self._loads.view.seen_instant)
        return f"expired: {lease.owner} did not renew it for {still_s:.0f} s"

    def _can_pass_on(self, lease: Lease) -> bool:
        """Whether an offer in the owner's name finds a taker sooner than the owner's silence does.

        Not where Java workers live: to them an offer is an owner whose silence begins anew. Not
        where the visible owners lack places for all the work: then further owners are not visible
        yet.
        """
        loads = self._loads
        are_all_ours = len(loads.kclrun_owners) == len(loads.owners) > 1
        have_room = loads.target(loads.work) <= self._policy.leases_max
        is_left = lease.owner is not None and lease.checkpoint_owner is None
        return is_left and are_all_ours and have_room

    def _is_overdue(self, lease: Lease) -> bool:
        still_s = self._observation.unchanged_s(lease, self._loads.view.seen_instant)
        return still_s >= self._policy.overdue_after_s

    def _askable(self, owner: OwnerId) -> list[Lease]:
        """Rows that may be asked for, in random order. Halted rows are left out: they stay where
        operators look for them. Rows that were asked for in vain are left out, too."""
        rows = [
            (self._chance(), lease.key, lease)
            for lease in self._loads.owned_by(owner)
            if lease.halt is None
            and lease.checkpoint_owner is None
            and lease.key not in self._holdings.unanswered
            and lease.key not in self._holdings.asked
            and lease.key not in self._holdings.busy
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
        self._room_for_overdue -= 1


def left_unread(
    loads: OwnerLoads, observation: Observation, policy: ManagerPolicy, held: Collection[LeaseKey]
) -> tuple[LeaseKey, ...]:
    """The work that stood free for three failovers and that we do not take either. It is not read,
    because every owner is full or cannot see it. A shard must not stand still unnoticed."""
    now, overdue_after_s = loads.view.seen_instant, policy.overdue_after_s
    return tuple(
        lease.key
        for lease in (*loads.free, *loads.offered)
        if observation.unchanged_s(lease, now) >= overdue_after_s and lease.key not in held
    )
