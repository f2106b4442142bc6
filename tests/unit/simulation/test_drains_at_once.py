"""Managers that drain within milliseconds of each other: what they leave is read on at once [P17].

Each case is a fleet in which, with other rules, a shard was left unread for two to five seconds.
"""

import random

import pytest

from kclrun.simulation.arrivals import Traffic
from kclrun.simulation.fleet import Fleet
from kclrun.simulation.world import FleetSettings
from tests.support.oracles.watch import Oracles

pytestmark = pytest.mark.seconds

FAILOVER_S = 6.0
# The goal for a planned move: a fork and a claim are part of it.
UNREAD_MAX_S = 1.5


def five_hosts(seed):
    """One that had all sixteen shards for itself, and four that have just come."""
    settings = FleetSettings(failover_s=FAILOVER_S, poll_s=0.5)
    traffic = Traffic(records_per_s=100)
    fleet = Fleet(seed, shards=16, traffic=traffic, settings=settings, observer_kind=Oracles)
    fleet.add_host("g", "a")
    fleet.run_for(20)
    for name in "bcde":
        fleet.add_host("g", name)
    return fleet


def drain_the_four(fleet, chance):
    began_s = fleet.scheduler.now
    for host in fleet.hosts[1:]:
        fleet.after(chance.uniform(0, 0.02), host.drain)
    fleet.run_for(20)
    assert fleet.observer.gaps.unread() == {}
    assert fleet.observer.tally.duplicates == 0
    assert {host.name: host.is_finished for host in fleet.hosts[1:]} == {
        host.name: True for host in fleet.hosts[1:]
    }
    return [gap.length_s for gap in fleet.observer.gaps.since(began_s)]


def further(*seeds):
    return [pytest.param(seed, marks=pytest.mark.long) for seed in seeds]


@pytest.mark.parametrize("seed", [1, 67, *further(139, 149)])
def test_what_was_asked_for_by_managers_that_drain_is_read_on_by_the_one_that_stays(seed):
    chance = random.Random(seed)
    fleet = five_hosts(seed)
    fleet.run_for(chance.uniform(2, 15))

    unread_s = drain_the_four(fleet, chance)

    assert max(unread_s) < UNREAD_MAX_S


@pytest.mark.parametrize("seed", [0, 47, *further(74, 143)])
def test_a_child_that_was_created_while_managers_drain_is_read_on_by_the_one_that_stays(seed):
    chance = random.Random(seed)
    chance.uniform(0, 1)
    fleet = five_hosts(seed)
    fleet.run_for(60)

    def split():
        shards = [log for log in fleet.stream.shards() if log.closed_at is None]
        fleet.split(chance.choice(shards).shard_id)

    for _ in range(3):
        fleet.after(chance.uniform(0, 8), split)
    fleet.run_for(chance.uniform(0, 14))

    unread_s = drain_the_four(fleet, chance)

    assert max(unread_s) < UNREAD_MAX_S
