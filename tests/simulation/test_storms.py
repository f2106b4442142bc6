"""A sample of the storms, for every build. The rest by command: `bin/prove storms --seeds A:B`."""

from typing import get_args

import pytest

from tests.simulation.proving.beginnings import beginning
from tests.support.storms.playing import play
from tests.support.storms.profile import StrikeKind
from tests.support.storms.swarm import draw_profile

# Half an hour each: twelve fleet-hours with their calms, and 40 s of one core. The storm of seed 15
# is left to `bin/prove`: its fleet takes a third of the time of all. Among these are
# fleets with Java members, small caps and deleted rows. That strikes hit, and that every situation
# is reached, is shown with `tests/unit/simulation` (`test_playing.py`, `test_situations.py`).
SEEDS = [seed for seed in range(24) if seed != 15]
MINUTES = 30
# In these the hosts that are left have no places for all leases: nothing is demanded in their calm.
SHORT = {1, 8, 20}


def profile_of(seed):
    return beginning(draw_profile(seed), MINUTES * 60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_breaks_no_promise_and_the_calm_after_it_repairs_everything(seed):
    profile = profile_of(seed)

    played = play(profile, replay=f"bin/prove storms --minutes {MINUTES} --seeds {seed}:{seed + 1}")

    assert played.virtual_s > MINUTES * 60
    assert played.records > 0
    assert played.is_short == (seed in SHORT)


def test_the_sample_has_every_strike_and_what_few_storms_have():
    profiles = [profile_of(seed) for seed in SEEDS]

    assert {s.kind for profile in profiles for s in profile.strikes} == set(get_args(StrikeKind))
    assert any(profile.table_faults.total for profile in profiles)
    assert any(profile.java_workers for profile in profiles)
    assert any(profile.settings.uncheckpointed_max < 100_000 for profile in profiles)
    assert any(s.kind == "delete_row" for profile in profiles for s in profile.strikes)
    assert any(s.at_s < 2.5 for profile in profiles for s in profile.strikes)
