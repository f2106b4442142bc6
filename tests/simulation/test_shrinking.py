"""A storm that fails gets smaller by itself, and still fails."""

import subprocess

import msgspec
import pytest

from kclrun.simulation.table import FaultRates
from kclrun.simulation.world import FleetSettings
from tests.simulation.mutants.mutant import ROOT
from tests.support.storms.profile import Profile, Strike
from tests.support.storms.shrinking import shrink


def storm(**wanted):
    strikes = tuple(
        Strike(at_s=60.0 * number, kind=kind, target=number, lasts_s=5.0)
        for number, kind in enumerate(["kill_process", "freeze_host", "split_shard"] * 10, start=1)
    )
    profile = Profile(
        seed=7,
        hosts=5,
        groups=3,
        shards=16,
        settings=FleetSettings(poll_s=5.0, failover_s=20.0),
        storm_s=3600.0,
        table_faults=FaultRates(throttled=0.1, late=0.02),
        strikes=strikes,
    )
    return msgspec.structs.replace(profile, **wanted)


class Plays:
    """Counts how often a profile is played."""

    def __init__(self, fails):
        self.count = 0
        self._fails = fails

    def __call__(self, profile):
        self.count += 1
        return self._fails(profile)


def kinds_of(profile):
    return [strike.kind for strike in profile.strikes]


def test_everything_goes_that_the_failure_does_not_need():
    plays = Plays(
        lambda p: "freeze_host" in kinds_of(p) and p.hosts >= 2 and p.table_faults.late > 0
    )

    smallest = shrink(storm(), plays)

    assert kinds_of(smallest) == ["freeze_host"]
    assert (smallest.hosts, smallest.groups, smallest.shards) == (2, 1, 1)
    assert smallest.table_faults == FaultRates(late=0.02)
    assert smallest.settings == FleetSettings()
    assert smallest.strikes[0].at_s <= 60
    assert smallest.storm_s <= 100
    assert plays.count <= 300


def test_strikes_that_only_fail_together_stay_together():
    def needs_both(profile):
        kinds = kinds_of(profile)
        return kinds.count("kill_process") >= 2 and "split_shard" in kinds

    smallest = shrink(storm(), needs_both)

    assert sorted(kinds_of(smallest)) == ["kill_process", "kill_process", "split_shard"]


def test_a_smaller_storm_that_fails_under_another_seed_is_taken():
    smallest = shrink(storm(), lambda p: len(p.strikes) == 30 or p.seed == 8)

    assert smallest.strikes == ()
    assert smallest.seed == 8


def test_nothing_smaller_that_fails_leaves_the_storm_as_it_is():
    whole = storm()

    assert shrink(whole, lambda p: p == whole) == whole


@pytest.mark.parametrize("plays_max", [0, 1, 17])
def test_no_more_is_played_than_allowed(plays_max):
    plays = Plays(lambda p: "split_shard" in kinds_of(p))

    shrink(storm(), plays, plays_max=plays_max)

    assert plays.count <= plays_max


@pytest.mark.slow
def test_a_storm_that_catches_a_planted_bug_shrinks_to_a_handful_of_strikes(tmp_path):
    def prove(*arguments):
        command = [ROOT / "bin" / "prove", "storms", "--processes", "1", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    planted = ("--planted", "offer-without-its-checkpoint")
    found = prove(*planted, "--minutes", "30", "--seeds", "0:3", "--into", tmp_path)

    assert found.returncode == 1, found.stderr
    (kept,) = tmp_path.glob("I8-*.json")
    profile = msgspec.json.decode(kept.read_bytes(), type=Profile)
    assert len(profile.strikes) <= 5
    assert kept.stat().st_size < 2000
    assert "\nI8: " in prove(*planted, "--profile", kept).stderr
    assert prove("--profile", kept).returncode == 0
