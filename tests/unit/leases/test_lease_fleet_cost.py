"""What a fleet at rest costs, from the policy's own functions, and how soon it sees a dead host."""

import functools
import random

import pytest

from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.leases.balancing import find_every_s
from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import (
    ManagerPolicy,
    is_seldom,
    kcl3_mode_every_s,
    lists_shards,
    scan_delay_s,
)
from kclrun.leases.table_view import Observation
from kclrun.model.lease import Lease
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from tests.support.tables import over_rows

ROW_BYTES = 392  # measured: a checkpoint of 56 digits, owner, range, what we publish
READ_UNIT_BYTES = 4096
QUERY_UNITS = 0.5
NEW_TABLE_UNITS_PER_S = 12_000
PAGES_OF_10_000_SHARDS = 10


def fleet(count):
    return [f"kclrun:az{n % 3}:host{n}:nonce" for n in range(count)]


@functools.cache
def scanners(count):
    """Of each manager of a fleet, whether it scans seldom, and its delay at rest."""
    pool = frozenset(fleet(count))
    policies = [ManagerPolicy(me=owner) for owner in fleet(count)]
    return [(is_seldom(policy, pool), scan_delay_s(policy, pool)) for policy in policies]


def read_units_per_s(owners, rows):
    """Of a fleet at rest: scans and looks for offers."""
    scan = rows * ROW_BYTES / READ_UNIT_BYTES
    scans = sum((0.5 if seldom else 1.0) * scan / delay_s for seldom, delay_s in scanners(owners))
    return scans + owners * QUERY_UNITS / find_every_s(owners)


def test_fifty_managers_over_five_hundred_rows_read_244_units_a_second():
    assert read_units_per_s(50, 500) == pytest.approx(244, abs=1)


def test_a_thousand_managers_over_ten_thousand_rows_stay_below_what_a_new_table_serves():
    assert read_units_per_s(1000, 10_000) == pytest.approx(9_153, abs=1)
    assert read_units_per_s(1000, 10_000) < NEW_TABLE_UNITS_PER_S


@over_rows("count", [1, 5, 16, 17, 1000])
def test_a_fleet_of_any_size_reads_the_mode_of_a_kcl_3_fleet_once_a_minute(count):
    pool = frozenset(fleet(count))
    readers = [seldom for seldom, _ in scanners(count)].count(False)

    assert readers * 60 / kcl3_mode_every_s(pool) == pytest.approx(1)


def test_beyond_256_managers_more_of_them_read_no_more():
    few, many = read_units_per_s(272, 10_000), read_units_per_s(1000, 10_000)

    assert many < 1.1 * few


def test_up_to_256_managers_the_seldom_scans_keep_the_pace_of_a_java_workers_taker():
    assert {delay_s for _, delay_s in scanners(256)} == {5.0, 20.0}


def test_while_a_hole_waits_eight_of_a_thousand_managers_list_in_a_cycle():
    pool, listings_per_s, shares = frozenset(fleet(1000)), 0.0, {}
    for owner, (seldom, delay_s) in zip(fleet(1000), scanners(1000), strict=True):
        if seldom not in shares:  # those that scan as often are alike
            policy, chances = ManagerPolicy(me=owner), [n / 500 for n in range(500)]
            listed = sum(lists_shards(policy, pool, one, is_needed=True) for one in chances)
            shares[seldom] = listed / len(chances)
        listings_per_s += shares[seldom] / delay_s

    assert listings_per_s == pytest.approx(8 / 5, rel=0.1)
    assert listings_per_s * PAGES_OF_10_000_SHARDS < 20  # of 1,000 calls a second


@pytest.mark.parametrize("owners", [1, 2, 8])
def test_a_few_managers_each_list_while_a_hole_waits(owners):
    pool = frozenset(fleet(owners))

    assert all(
        lists_shards(ManagerPolicy(me=me), pool, 0.999, is_needed=True) for me in fleet(owners)
    )


def seen_expired_s(chance, owners, lost):
    """From the death of a host to the first scan that shows one of its leases expired. Those that
    scan seldom are left out: they see it no sooner."""
    row = Lease(key="s0", checkpoint=TRIM_HORIZON, owner=owners[0], counter=7, failover_s=10.0)
    died_at = chance.uniform(0.0, 3.308)  # its last renewal was at 0
    found = []
    for me, (seldom, delay_s) in zip(owners, scanners(len(owners)), strict=True):
        if seldom or me in lost:
            continue
        observation = Observation(10.0)
        at = chance.uniform(0.0, delay_s)
        observation.update([row], at)
        while not observation.has_expired(row, at):
            at += delay_s + 0.4  # four pages
            observation.update([row], at)
        found.append(at - died_at)
    return min(found)


@pytest.mark.parametrize(
    "zones_lost", [0, 1], ids=["one host is lost", "a third of the hosts is lost"]
)
def test_a_dead_host_among_a_thousand_is_seen_within_a_failover_and_three_seconds(zones_lost):
    chance, owners = random.Random(7), fleet(1000)
    lost = {owners[0], *(owner for owner in owners if zones_lost and ":az0:" in owner)}

    seen = sorted(seen_expired_s(chance, owners, lost) for _ in range(200))

    # Host loss to reading again is failover + 5 s: two are left for take, start and claim.
    assert seen[-1] <= 10.0 + 3.0


def manager_of(count, me):
    width = (HASH_KEY_MAX + 1) // count + 1
    rows = tuple(
        Lease(
            key=f"s{n}",
            checkpoint=TRIM_HORIZON,
            owner=owner,
            counter=1,
            hash_range=HashRange(n * width, min(HASH_KEY_MAX, (n + 1) * width - 1)),
        )
        for n, owner in enumerate(fleet(count))
    )
    core = LeaseManager(ManagerPolicy(me=me), lambda: 0.999)
    core.handle(e.Started(), 0.0)
    core.handle(e.LeasesScanned(rows), 0.0)
    core.handle(e.RowRead(f"s{fleet(count).index(me)}", None), 0.0)
    return core


def next_scan(core):
    now = 0.0
    while True:
        now = max(now + 0.01, core.next_deadline(now))
        for command in core.handle(e.Ticked(), now):
            if isinstance(command, c.ScanTable):
                return command, now


def test_a_seldom_scan_may_be_a_moment_old_and_a_frequent_one_is_not():
    pool = frozenset(fleet(300))
    seldom = next(me for me in fleet(300) if is_seldom(ManagerPolicy(me=me), pool))
    frequent = next(me for me in fleet(300) if not is_seldom(ManagerPolicy(me=me), pool))

    scan, at = next_scan(manager_of(300, seldom))
    assert (scan, at > 20.0) == (c.ScanTable(consistent=False), True)
    scan, at = next_scan(manager_of(300, frequent))
    assert (scan, at < 5.1) == (c.ScanTable(), True)


def test_a_scan_that_something_waits_for_is_consistent_with_a_seldom_scanner_too():
    pool = frozenset(fleet(300))
    seldom = next(me for me in fleet(300) if is_seldom(ManagerPolicy(me=me), pool))
    core = manager_of(300, seldom)

    core.handle(e.FormerOwnersProvenGone(frozenset({"kclrun:az0:host0:old"})), 0.1)

    assert next_scan(core)[0] == c.ScanTable()
