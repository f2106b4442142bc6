"""A sample of the storms, for every build. The rest by command: `bin/prove storms --seeds A:B`."""

import pytest

from kclrun.simulation.playing import play
from kclrun.simulation.swarm import draw_profile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Some 20 fleet-hours and a minute or two of one core; the seeds of a full run begin at 0, too.
SEEDS = range(6)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_breaks_no_promise_and_the_calm_after_it_mends_everything(seed):
    played = play(draw_profile(seed), replay=f"bin/prove storms --seeds {seed}:{seed + 1}")

    assert played.virtual_s > 3600
    assert played.records > 0


def test_storms_strike_and_find_situations():
    played = [play(draw_profile(seed)) for seed in (8, 11)]

    assert sum(each.strikes for each in played) > 20
    assert sum(each.faults for each in played) > 100
    assert len(frozenset.union(*(each.situations for each in played))) > 15
