"""Looks for offered rows that find nothing are counted, and woken before one finds something."""

import pytest

from kclrun.simulation.table import CALM, FaultRates
from tests.unit.simulation.fleets import settled_fleet

# Every half second and a round trip of 6 ms in the middle.
LOOKS_A_MINUTE = 60 / 0.506


def looks_of(fleet, seconds):
    """As many looks as DynamoDB's read units of that time would pay for: half a unit each."""
    began = fleet.table.costs.read_units
    fleet.run_for(seconds)
    return (fleet.table.costs.read_units - began) / 0.5


def test_looks_of_a_calm_fleet_cost_what_they_would_and_are_no_events():
    fleet = settled_fleet(1, hosts=3, shards=9)
    events = fleet.scheduler.events_total

    looks = looks_of(fleet, 60)

    # The scans of three hosts come on top: 36, each of a unit, which is two looks.
    assert looks == pytest.approx(3 * LOOKS_A_MINUTE + 36 * 2, abs=3)
    # Three events a look would be over a thousand more than what nine leases do in a minute.
    assert fleet.scheduler.events_total - events < 1200


def test_where_requests_may_fail_each_look_is_an_event_and_in_calm_none_is():
    fleet = settled_fleet(2, hosts=3, shards=9)

    def events_in(seconds):
        began = fleet.scheduler.events_total
        fleet.run_for(seconds)
        return fleet.scheduler.events_total - began

    calm = events_in(60)
    fleet.table.faults = FaultRates(throttled=1e-9)
    stormy = events_in(60)
    fleet.table.faults = CALM
    fleet.run_for(2)  # the last look that was an event comes back

    assert stormy > calm + 2 * 3 * LOOKS_A_MINUTE
    assert events_in(60) < calm * 1.1


def test_a_dead_host_looks_no_more():
    fleet = settled_fleet(3, hosts=2, shards=4)
    before = looks_of(fleet, 60)

    fleet.hosts[0].kill()
    fleet.run_for(60)

    assert looks_of(fleet, 60) == pytest.approx(before / 2, rel=0.25)


def test_a_row_is_found_with_the_look_that_would_have_found_it():
    """The giver of a lease in a drain has it taken within a pause, a jitter and some requests."""
    fleet = settled_fleet(4, hosts=3, shards=9)
    began_s = fleet.scheduler.now

    fleet.hosts[0].drain()
    fleet.run_for(20)

    lengths = sorted(gap.length_s for gap in fleet.oracles.gaps.since(began_s))
    assert len(lengths) >= 3
    assert max(lengths) < 1.5
    # Not at once either: looks are as far apart as ever.
    assert max(lengths) - min(lengths) > 0.02
