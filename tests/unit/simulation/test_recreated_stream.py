"""A simulated fleet whose stream is deleted and made again stops, and none begins on its rows."""

import pytest

from kclrun.errors import InvariantViolation
from kclrun.leases.manager import LeaseManager
from kclrun.simulation.network import FaultRates
from tests.examples import seeds
from tests.support.storms.dense import recreating_storm
from tests.support.storms.playing import play
from tests.unit.simulation.fleets import settled_fleet

pytestmark = pytest.mark.seconds

# A scan and a listing notice it; the drain finishes a batch and gives the leases up.
NOTICED_S = 60
STORM = FaultRates(throttled=0.02, unreachable=0.02, lost_reply=0.03, late=0.02)


def made_again(seed, shards, **faults):
    fleet = settled_fleet(seed, hosts=3, shards=6)
    for name, value in faults.items():
        setattr(fleet.table, name, value)
    fleet.stream.make_again(shards, fleet.scheduler.now)
    records = fleet.observer.tally.records
    fleet.run_for(NOTICED_S)
    return fleet, records


@pytest.mark.parametrize("shards", [1, 6, 9])
@pytest.mark.parametrize("seed", seeds(0, 3))
def test_every_manager_gives_its_leases_up_and_stops_refused(seed, shards):
    fleet, records = made_again(seed, shards, faults=STORM)

    assert [(host.is_refused, host.is_finished) for host in fleet.hosts] == [(True, True)] * 3
    assert not any(row.is_ended for row in fleet.table.leases())
    assert all(row.owner is None or "offered" in row.owner for row in fleet.table.leases())
    # What was fetched before is processed; of the new stream nothing can be.
    assert fleet.observer.tally.records - records < 6 * 4 * 10


@pytest.mark.parametrize("seed", seeds(0, 3))
def test_a_manager_that_starts_on_the_old_rows_takes_none_of_them(seed):
    fleet, _ = made_again(seed, 6)
    takes = fleet.observer.tally.takes

    host = fleet.add_host("a", "new")
    fleet.run_for(30)

    assert (host.is_refused, host.is_finished) == (True, True)
    assert fleet.observer.tally.takes == takes


def test_a_fleet_whose_stream_is_resharded_and_trimmed_is_not_refused():
    fleet = settled_fleet(0, hosts=3, shards=6)

    fleet.reshard(12)
    fleet.run_for(60)
    fleet.expire(30.0)
    fleet.run_for(60)

    assert not any(host.is_refused for host in fleet.hosts)
    assert fleet.is_balanced()


# In the storms of 0, 2 and 35 listings lag by up to 30 s, and a new stream is empty at first.
@pytest.mark.parametrize("seed", [0, 2, 5, 35])
def test_in_a_storm_every_manager_notices_and_those_that_come_later_do(seed):
    played = play(recreating_storm(seed, minutes=5))

    assert "stream_recreated" in played.situations
    assert not played.is_short


class Deaf(LeaseManager):
    """Never believes that the stream is another."""

    def _refuse(self, _):
        return []


def test_who_goes_on_over_a_stream_that_was_made_again_breaks_a_promise():
    with pytest.raises(InvariantViolation, match="P13: "):
        play(recreating_storm(5, minutes=5), core_kind=Deaf)
