"""Small fleets for the tests of the simulator. Not a test."""

from kclrun.simulation.arrivals import Traffic
from kclrun.simulation.fleet import Fleet
from kclrun.simulation.world import FleetSettings
from tests.support.storms.coverage import StormOracles


def small_fleet(seed, *, hosts=3, shards=9, groups="abc"):
    """Five-second polls, so that a minute is a few milliseconds of work."""
    settings = FleetSettings(poll_s=5.0)
    fleet = Fleet(
        seed,
        shards=shards,
        traffic=Traffic(records_per_s=shards * 4.0),
        settings=settings,
        observer_kind=StormOracles,
    )
    for number in range(hosts):
        fleet.add_host(groups[number % len(groups)], f"h{number}")
    return fleet


def settled_fleet(seed, **wanted):
    fleet = small_fleet(seed, **wanted)
    fleet.run_for(60)
    assert fleet.is_balanced(), fleet.shards_by_owner()
    return fleet
