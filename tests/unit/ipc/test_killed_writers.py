"""A SIGKILL of a writer going flat out, at random instants: nothing torn, nothing hung."""

import json
import sys
from pathlib import Path

import pytest

from tests.seeds import seed_of
from tests.support.programs import run_to_end

pytestmark = pytest.mark.alone

RIG = Path(__file__).with_name("killed_writers_rig.py")


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_writer_killed_going_flat_out_leaves_nothing_torn_and_the_next_one_goes_on(kills):
    seed = seed_of()
    print(f"replay: {sys.executable} {RIG} {kills} {seed}")

    done = run_to_end([sys.executable, str(RIG), str(kills), str(seed)])

    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    print(seen)
    assert seen["faults"] == []
    assert seen["incarnations"] == kills, "every life was seen by at least one entry"
    assert seen["entries"] > kills * 10
    assert seen["entries_after_death"] > 0
