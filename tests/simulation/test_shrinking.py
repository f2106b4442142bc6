"""A storm that fails gets smaller by itself, and still fails."""

import msgspec
import pytest

from tests.simulation.mutants.mutant import ROOT
from tests.support.programs import run_to_end
from tests.support.storms.profile import Profile


@pytest.mark.slow
def test_a_storm_that_catches_a_planted_bug_shrinks_to_a_handful_of_strikes(tmp_path):
    def prove(*arguments):
        command = [ROOT / "bin" / "prove", "storms", "--processes", "1", *arguments]
        return run_to_end(command, timeout_s=None)

    planted = ("--planted", "offer-without-its-checkpoint")
    found = prove(*planted, "--minutes", "30", "--seeds", "0:3", "--into", tmp_path)

    assert found.returncode == 1, found.stderr
    (kept,) = tmp_path.glob("I8-*.json")
    profile = msgspec.json.decode(kept.read_bytes(), type=Profile)
    assert len(profile.strikes) <= 5
    assert kept.stat().st_size < 2000
    assert "\nI8: " in prove(*planted, "--profile", kept).stderr
    assert prove("--profile", kept).returncode == 0
