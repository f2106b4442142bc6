"""The small pure parts: timers, observation, lineage, the view of a scan, fates of writes."""

import random
import time

import pytest

from kclrun.leases.caught_up import blockers
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.shard_sync import Listing
from kclrun.leases.table_view import (
    Observation,
    TableView,
    covers_all_hash_keys,
    have_ended,
    parent_keys,
    seem_over,
)
from kclrun.model.lease import Halt
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.protocol import writes as ch
from kclrun.protocol.in_flight import Fate, InFlight
from tests.support.build import lease
from tests.support.tables import over_rows

HALF = (HASH_KEY_MAX + 1) // 2


def view_of(*leases, broken=(), me="me", gone=frozenset()):
    observation = Observation(10.0)
    observation.update(leases, 0.0)
    return TableView(leases, broken, observation, me=me, gone=gone, now=0.0)


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
