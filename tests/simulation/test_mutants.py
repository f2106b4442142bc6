"""The simulator is graded by bugs planted into the product: each must be caught.

The same share of them in each run; `bin/prove mutants` hunts them all."""

import ast
import functools
import os
import subprocess
import sys

import pytest

from tests.shares import asked_share, share_of
from tests.simulation.mutants.catalogue import MUTANTS
from tests.simulation.mutants.hunting import hunt, replay_line
from tests.simulation.mutants.mutant import ROOT, WORLDS, Mutant, is_ground
from tests.support.programs import run_to_end

# Two or three bugs in a run; `bin/prove mutants` has them all.
SHARES = 24
ALL = list(MUTANTS.values())
# Those of which it is known where to look: a storm or two each, or one file of tests.
QUICK = [mutant for mutant in ALL if mutant.is_quick]
# If the product moves on, the next storm that shows a bug may be dozens of seeds away.
SECONDS_MAX = 150.0


@functools.cache
def dumped(source):
    return ast.dump(ast.parse(source))


def named(mutant):
    return mutant.name


@pytest.mark.parametrize("mutant", ALL, ids=named)
def test_a_planted_bug_still_applies_to_the_code_as_it_is(mutant):
    source = (ROOT / mutant.file).read_text()

    patched = mutant.patched(source)

    assert ast.dump(ast.parse(patched)) != dumped(source)


def test_a_bug_whose_place_is_gone_or_there_twice_is_refused():
    mutant = Mutant(
        name="any", file="any.py", old="a = 1\n", new="a = 2\n", breaks="a", source="nobody"
    )

    for source in ("b = 1\n", "a = 1\na = 1\n"):
        with pytest.raises(ValueError, match="mutant any does not apply"):
            mutant.patched(source)


def test_there_are_thirty_bugs_and_more_and_each_has_somebody_to_catch_it():
    assert len(ALL) >= 30
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in ALL}) == len(ALL)
    for mutant in ALL:
        is_known = is_ground(mutant.layer) or mutant.layer.startswith(WORLDS)
        assert is_known or (ROOT / mutant.layer.partition("::")[0]).exists(), mutant.name


def fence_of_ten_seconds(*planting):
    code = (
        *planting,
        "from kclrun.protocol.fence import fence_instant",
        "print(fence_instant(0.0, 10.0))",
    )
    done = run_to_end(
        [sys.executable, "-c", ";".join(code)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    return float(done.stdout)


def test_a_planted_bug_is_in_its_process_and_nowhere_else():
    plant = "from tests.simulation.mutants.planting import plant_named"

    assert fence_of_ten_seconds(plant, "plant_named('fence-without-margins')") == 10.0
    assert fence_of_ten_seconds() == pytest.approx(9.8)


def test_a_bug_is_not_planted_after_its_module_is_imported():
    plant = "from tests.simulation.mutants.planting import plant_named"
    early = "import kclrun.protocol.fence"

    with pytest.raises(subprocess.CalledProcessError) as failed:
        fence_of_ten_seconds(early, plant, "plant_named('fence-without-margins')")

    assert "comes too late" in failed.value.stderr


def test_a_test_that_does_not_end_in_time_has_caught_nothing_and_ends_no_hunt(monkeypatch):
    def endless(command, **given):
        raise subprocess.TimeoutExpired(command, given["timeout"])

    monkeypatch.setattr(subprocess, "run", endless)
    mutant = MUTANTS["turn-kept-by-a-fenced-lease"]

    caught = hunt(mutant, seconds_max=20.0)

    assert (caught.is_caught, caught.words) == (
        False,
        "tests/unit/worker/test_worker_delivery_queue.py is not over after 200 s",
    )


def test_all_shares_together_are_all_bugs_of_which_it_is_known_where_to_look():
    shares = [share_of(QUICK, number, SHARES) for number in range(1, SHARES + 1)]

    assert sorted(named(each) for share in shares for each in share) == sorted(map(named, QUICK))
    assert len(QUICK) >= 40


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_bug_of_the_share_is_caught():
    number, of = asked_share("KCLRUN_MUTANTS_SHARE", SHARES)
    survivors = []
    for mutant in share_of(QUICK, number, of):
        caught = hunt(mutant, first=mutant.found_at or 0, seconds_max=SECONDS_MAX)
        print(f"{mutant.name}: {caught}; {replay_line(mutant, caught)}")
        if not caught.is_caught:
            survivors.append(mutant.name)

    assert survivors == [], f"bin/prove mutants {' '.join(survivors)}"
