"""Storms that found something once, each shrunk to what it takes: they pass for ever."""

from pathlib import Path

import msgspec
import pytest

from tests.simulation.mutants.mutant import ROOT
from tests.support.storms.profile import Profile
from tests.support.storms.states import play_any

FILES = sorted((Path(__file__).parent / "regressions").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_storm_that_once_broke_a_promise_breaks_none(path):
    profile = msgspec.json.decode(path.read_bytes(), type=Profile)

    played = play_any(profile, f"bin/prove storms --profile {path.relative_to(ROOT)}")

    assert played.records > 0
