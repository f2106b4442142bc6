"""I12: what a fleet costs, and what its cores hold. Who polls more than the protocol is caught."""

import pytest

from kclrun.consuming.policy import LifePolicy
from kclrun.consuming.state_machine import LeaseStateMachine
from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import ManagerPolicy
from kclrun.model.lease import Lease
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.protocol.writes import Checkpoint, CreateLease, Renew, Take
from kclrun.simulation.oracles import WatchPolicy
from kclrun.simulation.oracles.cost import CostWatch
from kclrun.simulation.stories import RuleBroken
from tests.support.storms.playing import HELD_BESIDES_MAX, require_bounded, sizes_of

ME = "kclrun:a:h:1"
TAKE = Take("s0", ME, None, 0, 10.0, "TRIM_HORIZON")
RENEW = Renew("s0", ME, 1)
CHECKPOINT = Checkpoint("s0", ME, 1, TRIM_HORIZON, TRIM_HORIZON)


def watch(**policy):
    cost = CostWatch(WatchPolicy(**policy))
    cost.written(TAKE, "s0", 0.0)
    return cost


def repeat(act, every_s, times=400):
    for number in range(1, times + 1):
        act(number * every_s)


def test_a_lease_renewed_at_its_pace_for_an_hour_is_within_its_budget():
    cost = watch()

    repeat(lambda now: cost.written(RENEW, "s0", now), 10 / 3 - 0.025, times=1088)


def test_a_lease_renewed_twice_as_often_is_caught_within_half_a_minute():
    cost, caught_at = watch(), []

    def renew(now):
        caught_at[:] = [now]
        cost.written(RENEW, "s0", now)

    with pytest.raises(RuleBroken, match="I12: renewed more often"):
        repeat(renew, 1.65)
    assert caught_at[0] < 30


def test_a_change_of_hands_pays_for_the_renewals_it_takes():
    cost = watch()

    for start in range(0, 1000, 10):
        cost.written(TAKE, "s0", float(start))
        for number in range(4):
            cost.written(RENEW, "s0", start + number / 10)


def test_a_checkpoint_after_each_batch_is_caught_where_one_each_ten_seconds_is_asked_for():
    cost = watch()

    with pytest.raises(RuleBroken, match="I12: checkpointed more often"):
        repeat(lambda now: cost.written(CHECKPOINT, "s0", now), 1.0)


def test_checkpoints_that_user_code_asks_for_are_its_own_affair():
    cost = watch(is_manual=True)

    def by_hand(now):
        cost.asked_to_checkpoint("s0")
        cost.written(CHECKPOINT, "s0", now)

    repeat(by_hand, 0.1)


def test_batches_that_fill_the_cap_may_be_checkpointed_at_once():
    cost = watch(uncheckpointed_max=40)

    def full(now):
        cost.delivered("s0", 25)
        cost.written(CHECKPOINT, "s0", now)

    repeat(full, 0.5)


def test_small_batches_may_not():
    cost = watch(uncheckpointed_max=100_000)

    def small(now):
        cost.delivered("s0", 25)
        cost.written(CHECKPOINT, "s0", now)

    with pytest.raises(RuleBroken, match="I12: checkpointed"):
        repeat(small, 0.5)


def test_a_scan_each_half_failover_is_within_its_budget_and_two_are_not():
    cost = watch()
    repeat(lambda now: cost.scanned("a:h:1", now), 5.0)

    with pytest.raises(RuleBroken, match="I12: b:h:2 scans the table more often"):
        repeat(lambda now: cost.scanned("b:h:2", now), 2.5)


def test_what_happens_to_the_rows_pays_for_scans():
    cost = watch()
    row = Lease(key="s1", checkpoint=TRIM_HORIZON)

    def create(now):
        cost.written(CreateLease(row), "s1", now)
        cost.scanned("a:h:1", now)
        cost.scanned("a:h:1", now + 0.25)

    repeat(create, 1.0)


def test_a_listing_with_each_scan_is_within_its_budget_and_more_are_not():
    cost = watch()
    repeat(lambda now: cost.listed("a:h:1", now), 5.0)

    with pytest.raises(RuleBroken, match="I12: b:h:2 lists the shards more often"):
        repeat(lambda now: cost.listed("b:h:2", now), 1.0)


def test_offers_are_looked_for_twice_a_second_and_no_more():
    cost = watch()
    repeat(lambda now: cost.queried("a:h:1", now), 0.5)

    with pytest.raises(RuleBroken, match="I12: b:h:2 looks for offers more often"):
        repeat(lambda now: cost.queried("b:h:2", now), 0.4)


# What a core holds.


class Hoarder(LeaseManager):
    """Remembers every row it ever saw."""

    def __init__(self, policy, chance):
        super().__init__(policy, chance)
        self.past = dict.fromkeys(range(1000))


def test_a_manager_that_remembers_too_much_is_caught():
    hoarder = Hoarder(ManagerPolicy(me=ME), lambda: 0.5)

    with pytest.raises(RuleBroken, match=r"I12: a:h:1 holds 1000 entries in Hoarder\.past"):
        require_bounded("a:h:1", "", hoarder, 10)


def test_what_is_deep_inside_a_core_is_found():
    manager = LeaseManager(ManagerPolicy(me=ME), lambda: 0.5)
    manager._balancer._asker._asks.update(dict.fromkeys(map(str, range(500))))

    with pytest.raises(RuleBroken, match=r"500 entries in LeaseManager\._balancer\._asker\._asks"):
        require_bounded("a:h:1", "", manager, 100)


def test_a_core_that_has_just_begun_holds_next_to_nothing():
    life = LeaseStateMachine(
        LifePolicy(key="s0", me=ME, seen_counter=1, expires_instant=10.0, failover_s=10.0),
        lambda: 0.5,
    )

    assert max(size for _, size in sizes_of(life)) <= HELD_BESIDES_MAX
    require_bounded("a:h:1/1", "s0", life, 0)
