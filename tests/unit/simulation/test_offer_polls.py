"""Looks for offered rows that find nothing are counted, and woken before one finds something."""

import pytest

from kclrun.simulation.clocks import Scheduler
from kclrun.simulation.network import CALM, FaultRates
from kclrun.simulation.table import SimulatedTable
from kclrun.simulation.uplink import OfferPolls, Uplink
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


class Looker:
    """Looks `pause_s` after each look, as a manager does, at a table without a row."""

    def __init__(self, faults):
        self.scheduler = scheduler = Scheduler(7)
        self.table = SimulatedTable(scheduler, watcher=None)
        self.table.faults = faults
        self.uplink = Uplink(self.table, scheduler.after, scheduler.chance("uplink"))
        self.polls = OfferPolls(
            self.uplink, now=lambda: scheduler.now, after=scheduler.after, looked=self.looked
        )
        self.found = []
        self.pause_s = 0.5
        self.polls.look(10)

    def looked(self, rows):
        self.found.append(rows)
        self.scheduler.after(self.pause_s, lambda: self.polls.look(10))


@pytest.mark.parametrize("share", [0.01, 0.1, 0.4])
def test_looks_fail_as_often_as_each_by_itself_would_and_only_those_are_events(share):
    looker = Looker(FaultRates(throttled=share / 2, late=share / 2))

    looker.scheduler.run_until(40_000)

    costs, failed = looker.table.costs, looker.found.count(None)
    assert costs.requests > 30_000
    assert costs.faults == pytest.approx(failed, abs=1)  # one may be under way
    # Four times what chance makes of so many looks, each with a fate of its own.
    assert abs(failed / costs.requests - share) < 4 * (share * (1 - share) / costs.requests) ** 0.5
    # The one that fails, the first one after it, and the steps of both.
    assert looker.scheduler.events_total <= 8 * failed + 8


def test_every_look_fails_where_every_request_does():
    looker = Looker(FaultRates(throttled=1.0))

    looker.scheduler.run_until(100)

    assert set(looker.found) == {None}


def test_a_manager_that_stood_still_looks_as_often_as_before():
    # One long pause would be taken for its rhythm, and a row found after as long again.
    looker = Looker(CALM)
    looker.scheduler.run_until(10)
    looker.pause_s = 300.0
    looker.uplink.wake(looker.polls)
    looker.scheduler.run_until(20)
    looker.pause_s = 0.5
    looker.scheduler.run_until(400)
    reads = looker.table.costs.read_units

    looker.scheduler.run_until(460)

    assert (looker.table.costs.read_units - reads) / 0.5 == pytest.approx(LOOKS_A_MINUTE, abs=3)


def test_looks_that_were_to_fail_do_not_once_it_is_calm():
    looker = Looker(FaultRates(throttled=0.01))
    looker.scheduler.run_until(30)

    looker.table.faults = CALM
    looker.scheduler.run_until(33)
    looker.found.clear()
    looker.scheduler.run_until(10_000)

    assert None not in looker.found


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

    lengths = sorted(gap.length_s for gap in fleet.observer.gaps.since(began_s))
    assert len(lengths) >= 3
    assert max(lengths) < 1.5
    # Not at once either: looks are as far apart as ever.
    assert max(lengths) - min(lengths) > 0.02
