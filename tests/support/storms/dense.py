"""Storms in which much happens in little time, to reach rare situations soon. Not a test."""

import random
from functools import partial

import msgspec

from kclrun.protocol.writes import ResumeLease
from kclrun.simulation.arrivals import Traffic
from kclrun.simulation.network import FaultRates
from kclrun.simulation.shards import StreamFaults
from kclrun.simulation.user_code import UserCode
from kclrun.simulation.world import FleetSettings
from tests.support.java.fleet import MixedFleet
from tests.support.storms.profile import Profile, Strike
from tests.support.storms.strikes import Strikes

# What a drawn storm has seldom and one by one strikes here again and again, and all together.
EVERY_S = {
    "kill_process": 40,
    "freeze_process": 60,
    "kill_manager": 120,
    "freeze_manager": 150,
    "kill_host": 300,
    "freeze_host": 150,
    "drain_host": 90,
    "cut_host": 150,
    "fail_forks": 200,
    "split_shard": 60,
    "merge_shards": 60,
    "release_lease": 60,
    "move_lease": 20,
    "delete_row": 50,
}
LASTS_S = (0.05, 0.5, 3.0, 9.0, 15.0, 40.0)


def dense_storm(seed, *, minutes=15, **changed):
    """Every kind of strike, every fault; what user code does is different from seed to seed. Rows
    are deleted in one seed of three: that excuses a lot."""
    chance = random.Random(f"dense {seed}")
    kinds = {kind for kind in EVERY_S if kind != "delete_row" or seed % 3 == 0}
    strikes = [
        Strike(at_s=at_s, kind=kind, target=chance.randrange(1000), lasts_s=chance.choice(LASTS_S))
        for kind, every_s in EVERY_S.items()
        if kind in kinds
        for at_s in times(chance, every_s, minutes * 60)
    ]
    # While the first lease processes are being forked.
    strikes += [
        Strike(at_s=chance.uniform(0.1, 0.5), kind=kind, target=target, lasts_s=15.0)
        for target, kind in enumerate(("drain_host", "freeze_host", "kill_process"))
    ]
    by_hand, never = seed % 4 == 1, seed % 8 == 7
    stream = {"throttled": 0.02, "unreachable": 0.02, "expired_iterator": 0.02}
    storm = {
        "seed": seed,
        "hosts": 4,
        "groups": 2,
        "shards": 6,
        "records_per_s": 12.0,
        "settings": FleetSettings(
            poll_s=1.0,
            checkpoint_every_s=chance.choice([1.0, 10.0, 60.0]),
            leases_max=chance.choice([4, 64]),
            uncheckpointed_max=chance.choice([80, 100_000]),
            fan_out=seed % 4 == 2,
        ),
        "storm_s": minutes * 60.0,
        "table_faults": FaultRates(throttled=0.02, unreachable=0.02, lost_reply=0.03, late=0.02),
        "stream_faults": StreamFaults(**stream, listing_lag_max_s=chance.choice([0.0, 3.0])),
        "user_code": UserCode(
            batch_s=chance.choice([0.02, 1.0]),
            raising=0.02,
            stalling=0.002,
            stall_s=chance.choice([12.0, 45.0]),
            checkpoints_by_hand=by_hand and not never,
            never_checkpoints=never,
        ),
        "strikes": tuple(sorted(strikes, key=lambda strike: strike.at_s)),
    }
    return Profile(**{**storm, **changed})


def expiring_storm(seed, *, minutes=8, **changed):
    """Shards split often, their readers are behind or halted, and the retention passes over them.
    No row is deleted by hand: that excuses a lot."""
    chance = random.Random(f"expiring {seed}")
    storm = dense_storm(seed, minutes=minutes)
    kept = [each for each in storm.strikes if each.kind not in {"delete_row", "expire_shards"}]
    expiries = [
        Strike(at_s=at_s, kind="expire_shards", lasts_s=chance.choice([1.0, 20.0, 60.0]))
        for at_s in times(chance, 30, minutes * 60)
    ]
    splits = [
        Strike(at_s=at_s, kind="split_shard", target=chance.randrange(1000))
        for at_s in times(chance, 40, minutes * 60)
    ]
    behind = {
        "shards": 3,
        "records_per_s": 20.0,
        "settings": FleetSettings(
            failover_s=chance.choice([3.0, 10.0]),
            poll_s=1.0,
            uncheckpointed_max=80,
            fan_out=seed % 4 == 2,
        ),
        "user_code": UserCode(batch_s=0.5, raising=chance.choice([0.0, 0.05])),
        "stream_faults": StreamFaults(
            not_found=chance.choice([0.0, 0.3]), listing_lag_max_s=chance.choice([0.0, 30.0])
        ),
        "strikes": tuple(sorted(kept + expiries + splits, key=lambda strike: strike.at_s)),
    }
    return msgspec.structs.replace(storm, **{**behind, **changed})


def recreating_storm(seed, *, minutes=8, **changed):
    """All of it befalls a fleet whose stream is made again in the middle; hosts come afterwards,
    and listings lag or do not."""
    chance = random.Random(f"recreating {seed}")
    storm = dense_storm(seed, minutes=minutes)
    recreated = Strike(at_s=minutes * 60 * chance.uniform(0.3, 0.9), kind="recreate_stream")
    stream = {
        "stream_faults": msgspec.structs.replace(
            storm.stream_faults, listing_lag_max_s=chance.choice([0.0, 0.0, 3.0, 30.0])
        ),
        "strikes": tuple(sorted((*storm.strikes, recreated), key=lambda strike: strike.at_s)),
    }
    return msgspec.structs.replace(storm, **{**stream, **changed})


def times(chance, every_s, until_s):
    at_s = 20 + chance.expovariate(1 / every_s)
    while at_s < until_s:
        yield round(at_s, 3)
        at_s += chance.expovariate(1 / every_s)


def cold_start(seed):
    """Many hosts boot at once over an empty table, and each leaves at once, a little later."""
    fleet = MixedFleet(seed, shards=16, traffic=Traffic(records_per_s=16.0))
    for number in range(10):
        fleet.after(0.0, partial(fleet.add_host, "ab"[number % 2], f"h{number}"))
    for number in range(10):
        fleet.after(0.1 + 0.05 * number, lambda number=number: fleet.hosts[number].drain())
    fleet.run_for(3)
    return fleet


def rage(profile):
    """The storm alone, without the calm after it; an operator resumes what is halted, now and then.
    Gives the fleet as it is then."""
    fleet = MixedFleet(
        profile.seed,
        shards=profile.shards,
        traffic=Traffic(records_per_s=profile.records_per_s),
        settings=profile.settings,
        user_code=profile.user_code,
        replay=f"tests/support/storms/dense.py: rage(dense_storm({profile.seed}))",
    )
    for number in range(profile.hosts):
        # At once: whoever finds the table empty fills it.
        fleet.after(number * 0.001, partial(fleet.add_host, "ab"[number % 2], f"h{number}"))
    Strikes(fleet).plan(profile.strikes)
    fleet.table.faults = profile.table_faults
    fleet.stream.faults = profile.stream_faults
    while fleet.scheduler.now < profile.storm_s:
        fleet.run_for(120)
        for row in list(fleet.table.leases()):
            if row.halt is not None:
                fleet.table.write("operator", ResumeLease(row.key), lambda _: None)
    return fleet
