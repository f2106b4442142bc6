"""Storms, played: each strike is overcome, and the same profile plays the same storm."""

import math
import os
import subprocess
import sys
from typing import get_args

import msgspec
import pytest

from kclrun.errors import InvariantViolation
from kclrun.simulation.arrivals import Traffic
from kclrun.simulation.delivery_queue import SimulatedDeliveryQueue
from kclrun.simulation.fleet import Fleet
from kclrun.simulation.network import FaultRates
from kclrun.simulation.process import LeaseProcess
from kclrun.simulation.shards import StreamFaults
from kclrun.simulation.user_code import UserCode
from kclrun.simulation.world import FleetSettings
from tests.support.oracles.watch import Oracles
from tests.support.storms.calm import Calm
from tests.support.storms.playing import play
from tests.support.storms.profile import Profile, Strike, StrikeKind

pytestmark = pytest.mark.seconds

SETTINGS = FleetSettings(poll_s=5.0)


def storm(*strikes, seed=1, hosts=3, shards=6, storm_s=300.0, settings=SETTINGS, **more):
    return Profile(
        seed=seed,
        hosts=hosts,
        shards=shards,
        records_per_s=shards * 2.0,
        storm_s=storm_s,
        settings=settings,
        strikes=strikes,
        **more,
    )


def struck(kind, *, times=4, lasts_s=20.0):
    return [
        Strike(at_s=40.0 + 50.0 * number, kind=kind, target=7 * number, lasts_s=lasts_s)
        for number in range(times)
    ]


@pytest.mark.parametrize("kind", get_args(StrikeKind))
def test_every_strike_hits_somebody_and_is_overcome(kind):
    # There must be closed shards for the retention to pass over.
    before = struck("split_shard") if kind == "expire_shards" else []
    times = 1 if kind == "recreate_stream" else 4

    played = play(storm(*before, *struck(kind, times=times)))

    assert played.strikes >= len(before) + min(times, 3)
    assert played.records > 0
    assert not played.is_short


@pytest.mark.parametrize(
    "faults",
    [
        {"table_faults": FaultRates(throttled=0.1, unreachable=0.1, lost_reply=0.1, late=0.1)},
        {"stream_faults": StreamFaults(throttled=0.1, unreachable=0.1, expired_iterator=0.1)},
        pytest.param(
            {"stream_faults": StreamFaults(listing_lag_max_s=20.0)}, marks=pytest.mark.long
        ),
        pytest.param({"scan_page_rows": 2}, marks=pytest.mark.long),
        pytest.param({"user_code": UserCode(stalling=0.02, stall_s=180.0)}, marks=pytest.mark.long),
        {"user_code": UserCode(raising=0.05, checkpoints_by_hand=True)},
    ],
    ids=lambda faults: next(iter(faults)),
)
def test_every_kind_of_fault_is_overcome(faults):
    strikes = [*struck("split_shard"), *struck("merge_shards"), *struck("kill_process")]

    played = play(storm(*strikes, storm_s=600.0, **faults))

    assert played.records > 0


def test_the_strikes_of_planned_stops_repeat_nothing():
    strikes = [*struck("drain_host", lasts_s=1.0), *struck("add_host", times=1)]

    assert play(storm(*strikes)).duplicates == 0


def test_a_fleet_without_a_place_for_every_lease_says_so():
    settings = FleetSettings(poll_s=5.0, leases_max=2)
    killed = Strike(at_s=100.0, kind="kill_host", lasts_s=1000.0)

    assert play(storm(killed, settings=settings)).is_short
    assert not play(storm(settings=settings)).is_short


class HeedlessQueue(SimulatedDeliveryQueue):
    """Starts batches whatever the fence says."""

    def allow_delivery(self, permit):
        super().allow_delivery(msgspec.structs.replace(permit, fence=math.inf))


class HeedlessProcess(LeaseProcess):
    queue_kind = HeedlessQueue


def test_what_breaks_is_reported_with_its_rule_its_seed_the_story_and_how_to_replay_it():
    strikes = struck("freeze_host", lasts_s=25.0)

    with pytest.raises(InvariantViolation) as caught:
        play(storm(*strikes), replay="bin/prove storms --seeds 1:2", process_kind=HeedlessProcess)

    reported = str(caught.value)
    assert reported.startswith("I4: ")
    assert "\nseed 1: at 00:0" in reported
    assert "Renew(" in reported
    assert reported.endswith("\nreplay: bin/prove storms --seeds 1:2")


def demanded(fleet, *, in_the_calm, after_s=90.0):
    """What the calm of this fleet says, where something happens within it."""
    calm = Calm(fleet)
    calm.begin()
    fleet.after(after_s, in_the_calm)
    return calm.demand_all()


def resharded_fleet():
    """Two hosts with eight children."""
    fleet = Fleet(
        1,
        shards=4,
        traffic=Traffic(records_per_s=8.0),
        settings=FleetSettings(poll_s=1.0),
        observer_kind=Oracles,
    )
    hosts = [fleet.add_host("a", "one"), fleet.add_host("a", "two")]
    fleet.run_for(60.0)
    for shard_id in fleet.stream.open_ids():
        fleet.split(shard_id)
    fleet.run_for(60.0)
    return fleet, hosts


def test_children_that_are_read_soon_in_the_calm_keep_its_promise():
    fleet, _ = resharded_fleet()
    began_s = fleet.scheduler.now

    assert demanded(fleet, in_the_calm=lambda: fleet.split(fleet.stream.open_ids()[0]))

    assert [gap.key for gap in fleet.observer.gaps.since(began_s)]


def test_a_shard_that_no_process_reads_for_a_failover_in_the_calm_breaks_its_promise():
    fleet, hosts = resharded_fleet()

    with pytest.raises(InvariantViolation, match=r"^L3: .*unread for 1\d\.\d s"):
        demanded(fleet, in_the_calm=hosts[0].kill)


def test_a_shard_whose_parents_row_was_deleted_by_hand_may_wait_for_a_failover():
    fleet, hosts = resharded_fleet()
    for row in [row for row in fleet.table.leases() if row.is_ended]:
        fleet.table.delete_by_hand(row)

    assert demanded(fleet, in_the_calm=hosts[0].kill)


def busy_storm(seed):
    kinds = ("kill_manager", "freeze_process", "cut_host", "split_shard", "merge_shards")
    strikes = [strike for kind in kinds for strike in struck(kind)]
    faults = FaultRates(throttled=0.02, unreachable=0.02, lost_reply=0.02, late=0.02)
    return storm(*strikes, seed=seed, table_faults=faults, java_workers=1)


def test_the_same_profile_plays_the_same_storm_and_another_seed_another():
    played = play(busy_storm(1))

    assert play(busy_storm(1)) == played
    assert play(busy_storm(2)).story_hash != played.story_hash


@pytest.mark.long
def test_the_order_of_sets_in_a_process_changes_no_storm():
    code = (
        "from tests.support.storms.playing import play;"
        "from tests.unit.simulation.test_playing import busy_storm;"
        "print(play(busy_storm(3)).story_hash)"
    )

    def story_hash(hash_seed):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": ":".join(sys.path),
        }
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, capture_output=True, check=True).stdout

    assert story_hash("1") == story_hash("2")
