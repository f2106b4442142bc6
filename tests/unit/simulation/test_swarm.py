"""Storms as they are drawn: the same for the same seed, within bounds, with a few faults each."""

from functools import partial
from typing import get_args

import msgspec
import pytest

from kclrun.consuming.policy import batch_records_max
from kclrun.simulation.world import FleetSettings
from tests.support.storms.profile import Profile, StrikeKind
from tests.support.storms.swarm import draw_profile

SEEDS = 400


@pytest.fixture(scope="module")
def profiles():
    return [draw_profile(seed) for seed in range(SEEDS)]


def share(profiles, has):
    return sum(map(has, profiles)) / len(profiles)


def test_a_seed_draws_the_same_storm_every_time_and_another_seed_another(profiles):
    assert [draw_profile(seed) for seed in range(20)] == profiles[:20]
    assert len({msgspec.json.encode(profile) for profile in profiles}) == SEEDS


def test_a_storm_goes_through_json_and_comes_back(profiles):
    for profile in profiles[:20]:
        assert msgspec.json.decode(msgspec.json.encode(profile), type=Profile) == profile


def test_every_storm_is_small_enough_to_find_things_fast(profiles):
    for profile in profiles:
        assert 1 <= profile.hosts <= 5
        assert profile.java_workers <= 3
        assert 1 <= profile.groups <= profile.hosts
        assert 1 <= profile.shards <= 16
        assert 3600 <= profile.storm_s <= 6 * 3600
        assert 3 <= profile.settings.failover_s <= 20
        assert 1 <= profile.settings.poll_s <= 5
        assert profile.settings.leases_max >= profile.shards / profile.hosts
        assert sum(strike.kind == "add_host" for strike in profile.strikes) <= 3
        assert list(profile.strikes) == sorted(profile.strikes, key=lambda strike: strike.at_s)


@pytest.mark.parametrize(
    "kind", sorted(set(get_args(StrikeKind)) - {"delete_row", "recreate_stream"})
)
def test_each_strike_is_in_a_quarter_of_the_storms(profiles, kind):
    assert 0.15 < share(profiles, lambda p: any(s.kind == kind for s in p.strikes)) < 0.35


@pytest.mark.parametrize("fault", ["throttled", "unreachable", "lost_reply", "late"])
def test_each_fault_of_the_table_is_in_a_quarter_of_the_storms(profiles, fault):
    assert 0.15 < share(profiles, lambda p: getattr(p.table_faults, fault) > 0) < 0.35


@pytest.mark.parametrize(
    "fault", ["throttled", "unreachable", "expired_iterator", "listing_lag_max_s"]
)
def test_each_fault_of_the_stream_is_in_a_quarter_of_the_storms(profiles, fault):
    assert 0.15 < share(profiles, lambda p: getattr(p.stream_faults, fault) > 0) < 0.35


def test_one_storm_in_five_has_java_workers(profiles):
    assert 0.1 < share(profiles, lambda p: p.java_workers > 0) < 0.3


def test_rows_are_deleted_in_a_few_storms(profiles):
    has_deletions = partial(share, has=lambda p: any(s.kind == "delete_row" for s in p.strikes))

    assert 0.05 < has_deletions(profiles) < 0.15


def test_the_stream_is_made_again_in_a_few_storms_and_once_in_each(profiles):
    counts = [sum(s.kind == "recreate_stream" for s in p.strikes) for p in profiles]

    assert (
        0.01 < share(profiles, lambda p: any(s.kind == "recreate_stream" for s in p.strikes)) < 0.1
    )
    assert max(counts) == 1


def test_a_quarter_of_the_storms_begin_while_the_fleet_boots(profiles):
    assert 0.15 < share(profiles, lambda p: any(s.at_s < 2.5 for s in p.strikes)) < 0.35


def test_a_quarter_of_the_storms_have_a_cap_that_they_reach_and_can_live_with(profiles):
    default = FleetSettings().uncheckpointed_max
    capped = [p for p in profiles if p.settings.uncheckpointed_max != default]

    assert 0.15 < len(capped) / len(profiles) < 0.35
    for profile in capped:
        # Merges may leave one shard with all the records; a batch is half of the cap.
        batch_max = batch_records_max(profile.settings.uncheckpointed_max)
        assert batch_max >= 2 * profile.records_per_s * profile.user_code.batch_s
