"""Whole fleets over skewed streams: what heavy owners exchange, and that nothing is lost by it."""

import pytest

from kclrun.leases.load import HEAVY_ABOVE
from kclrun.simulation.arrivals import Traffic
from kclrun.simulation.fleet import Fleet
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.world import FleetSettings
from tests.support.oracles.watch import Oracles

HOSTS, SHARDS = 4, 24


def fleet_of(skew, balance="load", seed=3):
    fleet = Fleet(
        seed,
        shards=SHARDS,
        traffic=Traffic(records_per_s=SHARDS * 4.0, record_bytes=50_000, skew=skew),
        settings=FleetSettings(balance=balance, poll_s=5.0),
        observer_kind=Oracles,
    )
    for number in range(HOSTS):
        fleet.after(number * 0.5, lambda number=number: fleet.add_host("a", f"h{number}"))
    fleet.run_for(60)
    return fleet


def spread(fleet):
    """The largest load of an owner, in the mean."""
    loads = fleet.loads_by_owner().values()
    return max(loads) / (sum(loads) / len(loads))


@pytest.mark.long
@pytest.mark.seconds
@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_skewed_fleet_evens_out_its_loads_and_rests_with_even_counts_and_no_record_twice(seed):
    fleet = fleet_of(0.9, seed=seed)
    before, moves = spread(fleet), fleet.observer.tally.moves

    fleet.run_for(1800)
    after, moved = spread(fleet), fleet.observer.tally.moves - moves
    fleet.run_for(1800)

    assert before > 1.2
    assert after <= HEAVY_ABOVE
    assert fleet.observer.tally.moves - moves == moved > 0, "it rests"
    assert fleet.is_balanced()
    assert fleet.observer.tally.duplicates == 0
    fleet.require_all_read(20.0)


@pytest.mark.long
@pytest.mark.seconds
def test_with_counts_alone_no_lease_moves():
    fleet = fleet_of(0.9, balance="counts")
    before, moves = spread(fleet), fleet.observer.tally.moves

    fleet.run_for(1800)

    assert (spread(fleet), fleet.observer.tally.moves) == (before, moves)


@pytest.mark.long
@pytest.mark.seconds
def test_an_even_stream_moves_no_lease():
    fleet = fleet_of(0.0)
    moves = fleet.observer.tally.moves

    fleet.run_for(1800)

    assert fleet.observer.tally.moves == moves


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.5])
def test_shards_share_the_traffic_of_the_stream_also_after_a_reshard(skew):
    stream = ShardStream(5, Traffic(records_per_s=100.0, record_bytes=1000, skew=skew))

    assert sum(map(stream.records.records_per_s, stream.open_ids())) == pytest.approx(100.0)
    parent = max(stream.open_ids(), key=stream.records.records_per_s)
    before = stream.records.records_per_s(parent)
    stream.split(parent, 10.0)

    children = [child.shard_id for child in stream.children_of(parent)]
    assert sum(map(stream.records.records_per_s, children)) == pytest.approx(before)
    assert sum(map(stream.records.bytes_per_s, stream.open_ids())) == pytest.approx(100_000.0)


def test_a_skew_makes_shards_unequal():
    even, skewed = (ShardStream(10, Traffic(records_per_s=100.0, skew=skew)) for skew in (0.0, 1.0))

    assert max(map(even.records.records_per_s, even.open_ids())) == pytest.approx(10.0)
    assert max(map(skewed.records.records_per_s, skewed.open_ids())) > 15.0
