"""A sample of the storms, for every build. The rest by command: `bin/prove storms --seeds A:B`."""

from functools import cache

import pytest

from kclrun.simulation.playing import play
from kclrun.simulation.swarm import draw_profile
from tests.simulation.proving.beginnings import beginning

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Half an hour each: twelve fleet-hours with their calms, and a minute of one core. Situations take
# seeds, not hours. Among them are fleets with Java members, small caps and deleted rows.
SEEDS = range(24)
MINUTES = 30


@cache
def played(seed):
    profile = beginning(draw_profile(seed), MINUTES * 60)
    line = f"bin/prove storms --minutes {MINUTES} --seeds {seed}:{seed + 1}"
    return play(profile, replay=line)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_breaks_no_promise_and_the_calm_after_it_mends_everything(seed):
    assert played(seed).virtual_s > MINUTES * 60
    assert played(seed).records > 0


def test_storms_strike_and_find_situations():
    storms = [played(seed) for seed in SEEDS]

    assert sum(each.strikes for each in storms) > 20
    assert sum(each.faults for each in storms) > 100
    assert len(frozenset.union(*(each.situations for each in storms))) > 30


def test_the_sample_has_what_few_storms_have():
    profiles = [beginning(draw_profile(seed), MINUTES * 60) for seed in SEEDS]

    assert any(profile.java_workers for profile in profiles)
    assert any(profile.settings.uncheckpointed_max < 100_000 for profile in profiles)
    assert any(s.kind == "delete_row" for profile in profiles for s in profile.strikes)
    assert any(s.at_s < 2.5 for profile in profiles for s in profile.strikes)
