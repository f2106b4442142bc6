"""Storms as they are drawn: the same for the same seed, within bounds, with a few faults each."""

from typing import get_args

import msgspec
import pytest

from kclrun.lease.policy import batch_records_max
from kclrun.simulation.world import FleetSettings
from tests.support.storms.profile import Profile, StrikeKind
from tests.support.storms.swarm import draw_profile

SEEDS = 400


@pytest.fixture(scope="module")
def profiles():
    return [draw_profile(seed) for seed in range(SEEDS)]


@pytest.mark.seconds
def test_a_seed_draws_the_same_storm_every_time_and_another_seed_another(profiles):
    assert [draw_profile(seed) for seed in range(20)] == profiles[:20]
    texts = [msgspec.json.encode(profile) for profile in profiles]
    assert len(set(texts)) == SEEDS
    assert [msgspec.json.decode(text, type=Profile) for text in texts] == profiles


@pytest.mark.seconds
def test_every_storm_is_small_enough_to_find_things_fast_and_can_be_lived_with(profiles):
    for profile in profiles:
        settings, kinds = profile.settings, [strike.kind for strike in profile.strikes]
        assert 1 <= profile.groups <= profile.hosts <= 5
        assert profile.java_workers <= 3
        assert 1 <= profile.shards <= 16
        assert 3600 <= profile.storm_s <= 6 * 3600
        assert 3 <= settings.failover_s <= 20
        assert 1 <= settings.poll_s <= 5
        assert settings.leases_max >= profile.shards / profile.hosts
        assert kinds.count("add_host") <= 3
        assert kinds.count("recreate_stream") <= 1
        assert list(profile.strikes) == sorted(profile.strikes, key=lambda strike: strike.at_s)
        # Merges may leave one shard with all the records; a batch is half of the cap.
        batch_max = batch_records_max(settings.uncheckpointed_max)
        assert batch_max >= 2 * profile.records_per_s * profile.user_code.batch_s


def strikes(kind):
    return lambda profile: any(strike.kind == kind for strike in profile.strikes)


def faults(of, name):
    return lambda profile: getattr(getattr(profile, of), name) > 0


QUARTER = (0.15, 0.35)
SHARES = {
    "delete_row": (strikes("delete_row"), 0.05, 0.15),
    "recreate_stream": (strikes("recreate_stream"), 0.01, 0.1),
    "Java workers": (lambda profile: profile.java_workers > 0, 0.1, 0.3),
    "while it boots": (lambda profile: any(s.at_s < 2.5 for s in profile.strikes), *QUARTER),
    "a cap it reaches": (
        lambda p: p.settings.uncheckpointed_max != FleetSettings().uncheckpointed_max,
        *QUARTER,
    ),
    **{
        kind: (strikes(kind), *QUARTER)
        for kind in get_args(StrikeKind)
        if kind not in {"delete_row", "recreate_stream"}
    },
    **{
        f"{of}: {name}": (faults(of, name), *QUARTER)
        for of, names in (
            ("table_faults", ("throttled", "unreachable", "lost_reply", "late")),
            ("stream_faults", ("throttled", "unreachable", "expired_iterator")),
            ("stream_faults", ("listing_lag_max_s",)),
        )
        for name in names
    },
}


@pytest.mark.parametrize("what", SHARES)
def test_each_thing_that_may_befall_a_fleet_is_in_its_share_of_the_storms(profiles, what):
    has, least, most = SHARES[what]

    assert least < sum(map(has, profiles)) / len(profiles) < most
