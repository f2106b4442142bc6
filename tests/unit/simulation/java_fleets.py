"""Fleets with Java workers for the tests of the simulator. Not a test."""

from kclrun.simulation.arrivals import Traffic
from kclrun.simulation.world import FleetSettings
from tests.support.java.fleet import MixedFleet


def mixed_fleet(
    seed, *, java=2, hosts=0, shards=6, each_per_s=4.0, poll_s=5.0, checkpoint_every_s=10.0
):
    """Java workers start first, then kclrun hosts, two groups in turn. Each shard gets `each_per_s`
    records a second."""
    settings = FleetSettings(poll_s=poll_s, checkpoint_every_s=checkpoint_every_s)
    traffic = Traffic(records_per_s=shards * each_per_s)
    fleet = MixedFleet(seed, shards=shards, traffic=traffic, settings=settings)
    for number in range(java):
        fleet.add_java_worker("ab"[number % 2], f"j{number}")
    for number in range(hosts):
        fleet.add_host("ab"[number % 2], f"h{number}")
    return fleet


def owners(fleet):
    """How many rows each owner has that are not ended."""
    counts = {}
    for lease in fleet.table.leases():
        if not lease.is_ended:
            counts[lease.owner] = counts.get(lease.owner, 0) + 1
    return counts
