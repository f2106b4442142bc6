"""The small pure parts: timers, observation, lineage, the view of a scan, fates of writes."""

import random
import time

import pytest

from kclrun.leases.manager import blockers
from kclrun.leases.policy import ManagerPolicy, lists_shards, scan_delay_s
from kclrun.leases.shard_sync import Listing
from kclrun.leases.table_view import (
    Observation,
    TableView,
    covers_all_hash_keys,
    have_ended,
    parent_keys,
    seem_over,
)
from kclrun.model.lease import Halt, Lease
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.protocol import writes as ch
from kclrun.protocol.in_flight import Fate, InFlight
from tests.support.tables import over_rows

HALF = (HASH_KEY_MAX + 1) // 2


def lease(key="s0", **fields):
    return Lease(key=key, checkpoint=fields.pop("checkpoint", TRIM_HORIZON), **fields)


def view_of(*leases, broken=(), me="me", gone=frozenset()):
    observation = Observation(10.0)
    observation.update(leases, 0.0)
    return TableView(leases, broken, observation, me=me, gone=gone, now=0.0)


def test_the_timers_are_those_of_the_java_kcl_at_its_default_failover():
    policy = ManagerPolicy(me="me")

    assert policy.renew_every_s == pytest.approx(3.308, abs=0.001)
    assert policy.scan_every_s == 5.0
    assert policy.seldom_scan_every_s(17) == 20.0
    assert policy.overdue_after_s == 30.0


def test_a_tiny_failover_still_leaves_time_between_renewals():
    assert ManagerPolicy(me="me", failover_s=0.06).renew_every_s == pytest.approx(0.01)


def test_up_to_sixteen_managers_scan_often_and_of_more_exactly_sixteen():
    owners = [f"kclrun:g:h{n}:x" for n in range(40)]

    def frequent(count):
        pool = frozenset(owners[:count])
        return sum(scan_delay_s(ManagerPolicy(me=owner), pool) == 5.0 for owner in pool)

    assert [frequent(n) for n in (1, 16, 17, 40)] == [1, 16, 16, 16]


def test_alone_or_in_two_a_manager_always_lists_and_in_a_crowd_two_do():
    chances = [n / 1000 for n in range(1000)]

    def lists(owners, chance):
        return lists_shards(ManagerPolicy(me="me"), ["me"] * owners, chance)

    assert all(lists(1, chance) and lists(2, chance) for chance in chances)
    assert sum(lists(100, chance) for chance in chances) == 20


def test_a_lease_first_seen_counts_as_just_renewed():
    observation = Observation(10.0)
    observation.update([lease(owner="a", counter=5)], 100.0)

    assert not observation.has_expired(lease(owner="a", counter=5), 109.9)
    assert observation.has_expired(lease(owner="a", counter=5), 110.0)


@pytest.mark.parametrize("moved", [{"counter": 6, "owner": "a"}, {"counter": 5, "owner": "b"}])
def test_a_moved_counter_or_another_owner_starts_the_count_again(moved):
    observation = Observation(10.0)
    observation.update([lease(owner="a", counter=5)], 100.0)
    observation.update([lease(**moved)], 108.0)

    assert observation.unchanged_s(lease(**moved), 112.0) == 4.0


def test_a_row_that_vanished_and_came_back_is_new():
    observation = Observation(10.0)
    observation.update([lease(owner="a")], 0.0)
    observation.update([], 5.0)
    observation.update([lease(owner="a")], 20.0)

    assert not observation.has_expired(lease(owner="a"), 20.0)


def test_parents_are_over_when_each_is_ended_or_absent():
    ended, unended = lease("p", checkpoint=SHARD_END), lease("q")

    assert have_ended((ended, None))
    assert not have_ended((ended, unended))
    assert parent_keys(lease(parents=frozenset({"q", "p"}))) == ("p", "q")
    assert seem_over(lease(parents=frozenset({"p", "gone"})), {"p": ended})
    assert not seem_over(lease(parents=frozenset({"p", "q"})), {"p": ended, "q": unended})
    assert not seem_over(lease(parents=frozenset({"b"})), {}, frozenset({"b"}))


def test_hash_keys_are_covered_by_ranges_that_touch_or_overlap():
    whole = [HashRange(0, HALF - 1), HashRange(HALF, HASH_KEY_MAX)]

    assert covers_all_hash_keys(whole)
    assert covers_all_hash_keys([*reversed(whole), HashRange(5, HALF + 5)])
    assert not covers_all_hash_keys([HashRange(0, HALF - 2), whole[1]])
    assert not covers_all_hash_keys(whole[:1])
    assert not covers_all_hash_keys([])


def test_a_hole_is_seen_and_a_row_without_a_range_is_helped_by_the_listing():
    view = view_of(lease("a", hash_range=HashRange(0, HALF - 1)), lease("b"))

    assert view.has_hole(lambda _: None)
    assert not view.has_hole(lambda _: HashRange(HALF, HASH_KEY_MAX))


def test_an_ended_lease_leaves_a_hole_and_named_children_without_rows_are_missed():
    view = view_of(lease("a", checkpoint=SHARD_END, children=frozenset({"b"})))

    assert view.has_hole(lambda _: HashRange(0, HASH_KEY_MAX))
    assert view.lacks_children()
    assert not view_of(lease("a", children=frozenset({"b"})), broken=("b",)).lacks_children()


def test_owners_are_the_living_and_me_and_the_offered_are_nobody():
    view = view_of(
        lease("a", owner="java"),
        lease("b", owner="kclrun:g:h:n"),
        lease("c", owner="kclrun:offered"),
        lease("d", owner="kclrun:g:h:old"),
        me="kclrun:g:me:n",
        gone=frozenset({"kclrun:g:h:old"}),
    )

    assert view.owners == {"java", "kclrun:g:h:n", "kclrun:g:me:n"}
    assert view.kclrun_owners == {"kclrun:g:h:n", "kclrun:g:me:n"}
    assert not view.is_empty
    assert not view_of(broken=("x",)).is_empty


def test_a_listing_follows_names_of_trimmed_parents():
    child = Shard("c", HashRange(0, HASH_KEY_MAX), "5", None, "trimmed")
    listing = Listing((child,), 0.0, 0.0)

    assert listing.children_named("trimmed") == ("c",)
    assert "trimmed" not in listing
    assert listing.range_of("trimmed") is None
    assert listing.range_of("c") == child.hash_range
    assert listing.inconsistency is None


TAKE = ch.Take("s0", "me", "them", 4, 10.0, "LATEST")
HALT = Halt("poison", 1.0)


@over_rows(
    ("change", "row", "verdict"),
    [
        (TAKE, lease(owner="me", counter=5), Fate.APPLIED),
        (TAKE, lease(owner="them", counter=4), Fate.UNMOVED),
        (TAKE, lease(owner="them", counter=5), Fate.LOST),
        (TAKE, lease(owner="third", counter=4), Fate.LOST),
        (ch.Renew("s0", "me", 4), lease(owner="me", counter=5), Fate.APPLIED),
        (ch.Renew("s0", "me", 4), lease(owner="me", counter=4), Fate.UNMOVED),
        (ch.Renew("s0", "me", 4), lease(owner="them", counter=5), Fate.LOST),
        (ch.Renew("s0", "me", 4), lease(owner=None, counter=5), Fate.LOST),
        (ch.HaltLease("s0", "me", 4, HALT), lease(owner="me", counter=5, halt=HALT), "APPLIED"),
        (ch.HaltLease("s0", "me", 4, HALT), lease(owner="me", counter=5), Fate.MISSING),
        (ch.HaltLease("s0", "me", 4, HALT), lease(owner="me", counter=4), Fate.UNMOVED),
        (ch.Release("s0", "me", 4, TRIM_HORIZON, TRIM_HORIZON), lease(counter=5), "APPLIED"),
        (
            ch.Release("s0", "me", 4, TRIM_HORIZON, TRIM_HORIZON),
            lease(owner="them", counter=6),
            Fate.APPLIED,  # and taken since
        ),
        (
            ch.Release("s0", "me", 4, TRIM_HORIZON, TRIM_HORIZON),
            lease(owner="them", counter=4),
            Fate.LOST,
        ),
        (
            ch.Release("s0", "me", 4, TRIM_HORIZON, TRIM_HORIZON),
            lease(owner="me", counter=5),
            Fate.MISSING,
        ),
    ],
)
def test_the_fate_of_a_write_is_read_from_the_row(change, row, verdict):
    in_flight = InFlight()
    in_flight.begin(change)
    in_flight.unresolved.append(0.0)

    fate = in_flight.judge(row, "me", 4)
    assert fate is (Fate[verdict] if isinstance(verdict, str) else verdict)


def test_the_keys_of_a_change_are_those_it_writes_and_not_those_it_checks():
    children = (lease("a"), lease("b"))

    assert ch.keys_of(ch.CreateChildren(children, (ch.EndedParent("p"),))) == ("a", "b")
    assert ch.keys_of(ch.CreateLease(lease("a"))) == ("a",)
    assert ch.keys_of(ch.DeleteEnded("p")) == ("p",)


def test_the_sync_of_a_year_of_generations_needs_no_deep_recursion():
    from kclrun.leases.shard_sync import sync_table

    whole = HashRange(0, HASH_KEY_MAX)
    count = 5000
    shards = [
        Shard(f"s{n}", whole, str(n + 1), None if n == count - 1 else str(n + 2), f"s{n - 1}")
        for n in range(count)
    ]
    random.Random(1).shuffle(shards)

    plan = sync_table(Listing(shards, 0.0, 0.0), lambda _: False, TRIM_HORIZON)

    assert [created.key for created in plan.leases] == ["s0"]


LOW, HIGH = HashRange(0, 49), HashRange(50, 99)


@pytest.mark.parametrize(
    ("number", "hash_range", "heirs"),
    [
        pytest.param(5, LOW, [7], id="listed: its children by name"),
        pytest.param(6, LOW, [8], id="trimmed, with children that name it"),
        pytest.param(1, LOW, [5], id="trimmed with its children: the eldest of its keys"),
        pytest.param(1, HIGH, [8], id="of the other keys"),
        pytest.param(1, HashRange(0, 99), [5, 8], id="of both"),
        pytest.param(1, None, [], id="its keys are not known"),
        pytest.param(9, LOW, [], id="newer than the eldest"),
    ],
)
def test_the_heirs_of_a_shard_are_its_children_or_the_eldest_of_its_hash_keys(
    number, hash_range, heirs
):
    def name(at):
        return f"shardId-{at:012d}"

    shards = [  # 5 and 8 have lost their parents; 0 is of the stream's beginning
        Shard(name(0), HashRange(0, 99), "1"),
        Shard(name(5), LOW, "1", "2", name(3)),
        Shard(name(7), LOW, "3", None, name(5)),
        Shard(name(8), HIGH, "3", None, name(4), name(6)),
    ]

    found = Listing(shards, 0.0, 0.0).heirs_of(lease(name(number), hash_range=hash_range))

    assert [*found] == [name(each) for each in heirs]


@pytest.mark.alone
def test_a_scan_of_ten_thousand_leases_of_a_thousand_owners_is_planned_in_time():
    from kclrun.leases import events as e
    from kclrun.leases.manager import LeaseManager

    width = (HASH_KEY_MAX + 1) // 10_000 + 1
    leases = tuple(
        lease(
            f"shardId-{n:012d}",
            owner=f"kclrun:az{n % 3}:host{n % 1000}:nonce",
            hash_range=HashRange(n * width, min(HASH_KEY_MAX, (n + 1) * width - 1)),
            parents=frozenset({f"shardId-gone-{n}"}),
        )
        for n in range(10_000)
    )
    manager = LeaseManager(ManagerPolicy(me="kclrun:az1:me:nonce"), lambda: 0.5)
    manager.handle(e.Started(), 0.0)

    spent = []
    for scan in range(5):
        began = time.process_time()
        manager.handle(e.LeasesScanned(leases), 20.0 * scan)
        spent.append(time.process_time() - began)
        manager.handle(e.Ticked(), 20.0 * scan + 19.0)

    # 50 ms on an idle machine (about 25 measured); here only what quadratic work would break.
    assert min(spent) < 0.25, spent


def test_a_row_of_our_own_that_no_process_serves_is_not_caught_up_and_anothers_is_its_own():
    mine, others = lease("a", owner="me"), lease("b", owner="other")

    assert blockers(view_of(mine, others), {}, "me") == ("a is not being read",)
