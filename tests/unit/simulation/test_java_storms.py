"""Storms over fleets with Java members: nothing is lost, and what I4 still promises holds."""

import msgspec
import pytest

from tests.examples import seeds
from tests.support.storms.playing import play
from tests.support.storms.swarm import draw_profile

pytestmark = pytest.mark.seconds

# Long enough for each kind of strike and a few rounds of every timer, Java's cleanup included.
STORM_S = 900.0


def mixed_profile(seed):
    """The storm of a seed, its first quarter of an hour, with one to three Java workers."""
    drawn = draw_profile(seed)
    return msgspec.structs.replace(
        drawn,
        java_workers=1 + seed % 3,
        storm_s=STORM_S,
        strikes=tuple(strike for strike in drawn.strikes if strike.at_s < STORM_S),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(0, 6))
def test_a_storm_over_a_mixed_fleet_loses_nothing(seed):
    played = play(mixed_profile(seed), replay=f"the mixed profile of seed {seed}")

    assert played.records > 0
    assert played.virtual_s > STORM_S


def test_the_same_mixed_storm_tells_the_same_story():
    profile = mixed_profile(1)

    assert play(profile).story_hash == play(profile).story_hash
