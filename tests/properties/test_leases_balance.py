"""Fleets of planners settle: owners within one lease, groups within one of their share, then rest.

Each owner plans from the table as it stood a cycle ago, in random order, and its asks are answered
a cycle later; nothing is faulty. What must come out is a fixed point: ten more cycles, no move.
A failing case prints its seed; `Fleet(seed, …)` replays it.
"""

import random
from collections import Counter, defaultdict

import msgspec
import pytest

from kclrun.leases.assignment import Action, LocalHoldings, OwnerLoads, group_of, plan
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.table_view import Observation, TableView
from kclrun.model.lease import OFFERED, Handoff, Lease
from kclrun.model.sequence import TRIM_HORIZON
from tests.examples import seeds
from tests.support.tables import over_rows

replace = msgspec.structs.replace
CYCLE_S = 5.0
# Each owner asks for eight leases a cycle at most, and what a move changed is seen three cycles on;
# the largest of these fleets needs 25 cycles, the unluckiest of the small ones as many.
CYCLES_MAX = 60


class Fleet:
    """`groups` owners each; `counts` what they hold at first, the rest of `work` is unowned."""

    def __init__(self, seed, groups, work, counts=None, java=0):
        self.random = random.Random(seed)
        self.owners = [
            f"kclrun:{group}:h{number}:n"
            for group, members in groups.items()
            for number in range(members)
        ]
        self.now = 0.0
        self.moves = 0
        self.rows = {}
        holders = [owner for owner, count in (counts or {}).items() for _ in range(count)]
        for number in range(work):
            owner = holders[number] if number < len(holders) else None
            key = f"s{number}"
            self.rows[key] = Lease(key=key, checkpoint=TRIM_HORIZON, owner=owner)
        self.before = dict(self.rows)
        self.observation = Observation(10.0)  # of one view, which all of them plan from
        self.asked_at = 0
        self.java = [f"java-{number}" for number in range(java)]
        self.full = frozenset()  # owners whose leases.max is what they hold

    def cycle(self):
        self.now += CYCLE_S
        if round(self.now / CYCLE_S) % 4 == 0:
            for owner in self.random.sample(self.java, len(self.java)):
                self.plan_java(owner)
        seen, self.before = tuple(self.before.values()), dict(self.rows)
        self.observation.update(seen, self.now)
        self.held, self.asked = defaultdict(set), defaultdict(set)
        for row in self.rows.values():
            self.held[row.owner].add(row.key)
            self.asked[row.handoff.to if row.handoff is not None else row.offered_to].add(row.key)
        for owner in self.random.sample(self.owners, len(self.owners)):
            self.plan(owner, seen)
        for key, row in self.rows.items():
            asked = self.before[key].handoff
            if asked is not None and row.handoff == asked:
                if not self.answers(row):
                    continue
                self.write(row, owner=OFFERED, offered_to=asked.to, handoff=None)
            elif row.owner == OFFERED and self.before[key].owner == OFFERED:
                self.moves += 1
                self.write(row, owner=row.offered_to, offered_to=None)
            elif row.owner is not None:
                self.write(row)

    def answers(self, row):
        """Whether the owner gives the lease that it was asked for."""
        return True

    def write(self, row, **changed):
        self.rows[row.key] = replace(row, counter=row.counter + 1, **changed)

    def plan(self, me, seen):
        observation = self.observation
        view = TableView(seen, (), observation, me=me, gone=frozenset(), now=self.now)
        held = self.held[me]
        asked = self.asked[me]
        holdings = LocalHoldings(held=held, asked=asked, busy=held)
        loads = OwnerLoads(view, observation, holdings, me=me)
        policy = ManagerPolicy(me=me, leases_max=len(held) if me in self.full else 10_000)
        decided = plan(loads, observation, policy, holdings, self.random.random).decisions
        for decision in decided:
            row = self.rows[decision.lease.key]
            if decision.action is Action.TAKE:
                if row.owner is None:
                    self.moves += 1
                    self.write(row, owner=me)
            elif decision.action is Action.FORCE:
                if row.owner == decision.owner:
                    self.moves += 1
                    self.write(row, owner=me)
            elif row.owner == decision.owner and row.handoff is None:
                self.asked_at += 1
                self.rows[row.key] = replace(row, handoff=Handoff(me, self.asked_at))

    def plan_java(self, me):
        """A Java worker's taker, which steals one lease from the most loaded (B3)."""
        rows = list(self.rows.values())
        free = [row for row in rows if row.owner is None]
        counts = dict(Counter(row.owner for row in rows if row.owner))
        counts.setdefault(me, 0)
        target = -(-len(rows) // len(counts))
        needed = target - counts[me]
        if needed <= 0:
            return
        if free:
            for row in self.random.sample(free, min(needed, len(free))):
                self.moves += 1
                self.write(row, owner=me)
            return
        most = max(counts, key=counts.__getitem__)
        over = counts[most] - target
        if over > 0 or (over == 0 and needed > 1):
            row = self.random.choice([row for row in rows if row.owner == most])
            self.moves += 1
            self.write(row, owner=me)

    def is_settled(self):
        if any(row.owner in (None, OFFERED) or row.handoff for row in self.rows.values()):
            return False
        counts = self.counts()
        totals, members = Counter(), Counter(group_of(owner) for owner in self.owners)
        for owner, count in counts.items():
            totals[group_of(owner)] += count
        shares = {g: len(self.rows) * n / len(self.owners) for g, n in members.items()}
        is_even = max(counts.values()) - min(counts.values()) <= 1
        return is_even and all(abs(totals[g] - shares[g]) <= 1 for g in members)

    def counts(self):
        counts = Counter(row.owner for row in self.rows.values())
        return {owner: counts[owner] for owner in (*self.owners, *self.java)}


def rests(fleet, seed, for_cycles=10):
    """Runs the fleet until nothing moved for so many cycles."""
    # Java workers move one lease in four cycles each.
    cycles_max = CYCLES_MAX + for_cycles + (4 * len(fleet.rows) if fleet.java else 0)
    cycles = resting = 0
    while resting < for_cycles:
        moves = fleet.moves
        fleet.cycle()
        resting = resting + 1 if fleet.moves == moves else 0
        cycles += 1
        assert cycles < cycles_max, f"seed {seed}: no rest after {cycles} cycles"


def settles(fleet, seed, rests_for=10):
    """Once it rests, it must be balanced."""
    rests(fleet, seed, rests_for)
    assert fleet.is_settled(), f"seed {seed}: at rest, and not balanced: {fleet.counts()}"


def named(group, counts):
    return {f"kclrun:{group}:h{number}:n": count for number, count in enumerate(counts)}


@pytest.mark.parametrize("seed", seeds(0, 40))
@pytest.mark.parametrize(
    ("groups", "work"), [({"a": 5, "b": 5}, 25), ({"a": 4, "b": 8}, 30)], ids=["5+5", "4+8"]
)
def test_a_fleet_that_starts_on_unowned_leases_settles_and_rests(seed, groups, work):
    settles(Fleet(seed, groups, work), seed)


@pytest.mark.parametrize("seed", seeds(0, 20))
def test_a_group_that_joins_a_full_one_gets_its_share(seed):
    settles(Fleet(seed, {"a": 4, "b": 8}, 30, named("a", [8, 8, 7, 7])), seed)


def test_one_owner_with_everything_gives_each_newcomer_its_part_and_no_lease_moves_twice():
    fleet = Fleet(1, {"a": 5}, 50, named("a", [50]))

    settles(fleet, 1)

    assert fleet.moves == 40


@over_rows("seed", seeds(100, 160))
def test_random_fleets_settle_from_anywhere(seed):
    draw = random.Random(seed)
    groups = {group: draw.randint(1, 6) for group in "abc"[: draw.randint(1, 3)]}
    work = draw.randint(1, 60)
    held = draw.randint(0, work)
    owners = [f"kclrun:{group}:h{n}:n" for group, members in groups.items() for n in range(members)]
    counts = Counter(draw.choice(owners) for _ in range(held))

    settles(Fleet(seed, groups, work, counts), seed)


@pytest.mark.seconds
def test_the_stable_imbalance_of_300_and_200_is_undone_by_fifty_moves_and_no_more():
    held = {**named("a", [3] * 100), **named("b", [2] * 100)}
    fleet = Fleet(1, {"a": 100, "b": 100}, 500, held)

    settles(fleet, 1)

    assert fleet.moves == 50


@pytest.mark.slow
def test_a_hundred_machines_that_join_a_hundred_settle_at_half_of_500_shards_each():
    fleet = Fleet(1, {"a": 100, "b": 100}, 500, named("a", [5] * 100))

    settles(fleet, 1)

    totals = Counter(group_of(row.owner) for row in fleet.rows.values())
    assert totals == {"a": 250, "b": 250}


def test_an_owner_that_is_full_does_not_keep_its_group_from_its_share():
    """The list of moves may name an owner that cannot take; now and then another one goes first."""
    held = {**named("a", [2] * 6), **named("b", [3] * 6)}
    fleet = Fleet(3, {"a": 6, "b": 6}, 30, held)
    fleet.full = set(fleet.owners[:2])

    settles(fleet, 3, rests_for=300)

    assert sum(fleet.counts()[owner] for owner in fleet.owners[:6]) in (14, 15, 16)


@pytest.mark.parametrize("seed", seeds(500, 530))
def test_beside_java_workers_the_fleet_comes_to_rest_and_nobody_has_more_than_the_target(seed):
    draw = random.Random(seed)
    ours, java, work = draw.randint(1, 4), draw.randint(1, 4), draw.randint(8, 40)
    held = {"java-0": work} if draw.random() < 0.5 else None
    fleet = Fleet(seed, {"a": ours}, work, held, java=java)

    rests(fleet, seed, for_cycles=20)

    counts = fleet.counts()
    assert max(counts.values()) <= -(-work // (ours + java)), f"seed {seed}: {counts}"
