"""Pauses in the middle of storms: a paused lease is not read, a resume loses nothing."""

import msgspec
import pytest

from kclrun.errors import InvariantViolation
from kclrun.lease.state_machine import LeaseStateMachine
from tests.support.storms.dense import dense_storm
from tests.support.storms.playing import play

# The hosts that their storms leave have places for all leases, so that the calm demands all.
SEEDS = (3, 5, 6)


def storm(seed, minutes=6):
    """Every strike and fault of a dense storm, and a decision of an operator in eight seconds."""
    return msgspec.structs.replace(dense_storm(seed, minutes=minutes), pause_every_s=8.0)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.long) for seed in SEEDS[1:])]
)
def test_no_paused_lease_is_read_and_in_the_calm_after_the_pauses_everything_is(seed):
    played = play(storm(seed), replay=f"tests/simulation/test_pauses.py: storm({seed})")

    assert played.records > 0
    assert not played.is_short


@pytest.mark.seconds
def test_a_process_that_ignores_pauses_is_found(monkeypatch):
    monkeypatch.setattr(LeaseStateMachine, "_is_paused", False)

    with pytest.raises(InvariantViolation, match="reads it, paused for"):
        play(storm(SEEDS[0]))
