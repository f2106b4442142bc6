"""Random bugs: each is one change that still parses, and a run tells which of them live."""

import ast
import os
import sys

import msgspec
import pytest

from tests.simulation.mutants import meeting
from tests.simulation.mutants.at_random import PACKAGES, AskedRandom, drawn
from tests.simulation.mutants.meeting import Meeting, Order
from tests.simulation.mutants.mutant import ROOT
from tests.support.programs import run_to_end


@pytest.mark.slow
def test_bugs_are_drawn_from_each_package_of_the_product():
    code = {path.parent.name for path in (ROOT / "kclrun").glob("*/__init__.py")}

    # Fixtures, which pytest has loaded before a bug is planted; and a list of folders.
    assert set(PACKAGES) == code - {"pytest_plugin", "samples"}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_has_spots_that_parse_and_change_something(package):
    asked = AskedRandom(number=5, seed=1, packages=(package,), is_wider=False, processes=1)

    for owner, spot in drawn(asked):
        source = (ROOT / spot.file).read_bytes()
        assert owner == package
        assert ast.dump(ast.parse(spot.patched(source))) != ast.dump(ast.parse(source))


@pytest.mark.slow
def test_a_run_tells_the_rate_and_the_line_that_repeats_it():
    program = [sys.executable, "-m", "tests.simulation.proving", "mutants"]
    done = run_to_end(
        [*program, "--random", "2", "--seed", "5", "--processes", "1", "testing"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout_s=None,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same again: bin/prove mutants --random 2 --seed 5 testing" in done.stdout
    assert done.stdout.splitlines()[-1].split()[:2] == ["all", "2"]


TESTS = """
import os, runpy, subprocess, threading, time

some = runpy.run_path(os.path.abspath("kclrun/some.py"))
called = some["called"]
MADE = some["made"]()

def test_far(): pass
def test_near():
    thread = threading.Thread(target=called)
    thread.start()
    thread.join()
def test_that_hangs(): time.sleep(600)
def test_that_starts_one(): subprocess.run(["true"])
"""


@pytest.fixture
def played(tmp_path):
    """Plays the tests of a checkout of their own, some of them by name."""
    (tmp_path / "kclrun").mkdir()
    (tmp_path / "kclrun" / "some.py").write_text("\ndef called(): pass\ndef made(): pass\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").touch()

    def play(names, **asked):
        return run_to_end(
            [sys.executable, "-m", "pytest", "-v", "-p", meeting.__name__, "-k", names],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **asked},
        )

    return play


def test_what_a_test_calls_is_recorded_in_threads_too_and_for_that_test_alone(played, tmp_path):
    record = tmp_path / "record.json"
    done = played("near or far or starts", **{meeting.RECORD: str(record)})

    assert done.returncode == 0, done.stdout + done.stderr
    meetings = msgspec.json.decode(record.read_bytes(), type=list[Meeting])
    assert [(each.test, set(each.met), each.starts_processes) for each in meetings] == [
        ("test_some.py::", {("kclrun/some.py", 3)}, False),
        ("test_some.py::test_far", set(), False),
        ("test_some.py::test_near", {("kclrun/some.py", 2)}, False),
        ("test_some.py::test_that_starts_one", set(), True),
    ]


def test_an_order_puts_tests_first_and_a_test_beyond_its_limit_ends_the_run_as_hung(
    played, tmp_path
):
    order = tmp_path / "order.json"
    near, hangs = "test_some.py::test_near", "test_some.py::test_that_hangs"
    order.write_bytes(msgspec.json.encode(Order((near, hangs), {hangs: 0.1})))

    done = played("test", **{meeting.ORDER: str(order)})

    assert done.returncode == meeting.HUNG, done.stdout + done.stderr
    assert "test_near PASSED" in done.stdout
    assert "test_far" not in done.stdout
