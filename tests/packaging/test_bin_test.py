"""The end of `bin/test` names the groups and the tests that failed, and says if by a time limit."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.shares import beyond_each_value
from tests.support.programs import run_to_end

ROOT = Path(__file__).parents[2]
GROUPS = ["quick tests", "real processes", "Spark"]
BUSY = "A time limit only says that a test hung, or that this machine is busy beyond measure."

# Ends as the file `status-N` says and notes what `failures-N` holds, where N numbers the groups:
# they run side by side. Group 2 lives on if there is a file `lives-on`, and group 1 waits for it.
FAKE_PYTHON = """#!/usr/bin/env bash
here=$(dirname -- "$0")
[ "$*" != '-m tests.support.spark_archive' ] || exit 0
echo "$*" >>"$here/calls"
echo "${PYTHONDONTWRITEBYTECODE-unset}" >"$here/bytecode"
echo "$KCLRUN_TEST_FAILURES" >"$here/notes"
case "$*" in *tests/unit*) n=1 ;; *tests/processes*) n=2 ;; *) n=3 ;; esac
if [ -f "$here/lives-on" ]; then
    [ $n != 2 ] || { echo $$ >"$here/pid"; exec tail -f /dev/null; }
    [ $n != 1 ] || until [ -s "$here/pid" ]; do sleep 0.01; done
fi
[ ! -f "$here/failures-$n" ] || cat "$here/failures-$n" >>"$KCLRUN_TEST_FAILURES"
exit "$(cat "$here/status-$n" 2>/dev/null || echo 0)"
"""


class Checkout:
    """A folder with the real bin/test, and a Python that only does what the test says."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        for name in ("test", "usage"):
            shutil.copy(ROOT / "bin" / name, folder / "bin" / name)
        self.use_python(folder / "python")
        self._script(folder / "python", FAKE_PYTHON)

    def use_python(self, python):
        self._script(self.folder / "bin" / "environment", f"#!/bin/sh\necho '{python}'\n")

    def use_conftest(self):
        """The real tests/conftest.py, for the real pytest."""
        self.use_python(sys.executable)
        tests = self.folder / "tests"
        tests.mkdir()
        for name in [
            "conftest.py",
            "examples.py",
            "foreground.py",
            "patience.py",
            "shares.py",
            "twice.py",
        ]:
            shutil.copy(ROOT / "tests" / name, tests)
        # No test of these asks AWS, and botocore is half of what a start of pytest imports.
        (tests / "support").mkdir()
        (tests / "support" / "quick_botocore.py").write_text("def make_quick(): ...\n")
        for name in ["programs.py", "spark_archive.py"]:
            shutil.copy(ROOT / "tests" / "support" / name, tests / "support")
        (self.folder / "pytest.ini").write_text(
            "[pytest]\npythonpath = .\naddopts = --import-mode=importlib\n"
            "markers =\n  slow\n  long\n  each_value\n"
        )

    def use_failing_environment(self, status):
        self._script(self.folder / "bin" / "environment", f"#!/bin/sh\nexit {status}\n")

    def group_ends(self, number, status, *failures):
        (self.folder / f"status-{number}").write_text(f"{status}\n")
        (self.folder / f"failures-{number}").write_text("".join(f"{each}\n" for each in failures))

    def run(self, *arguments, **environment):
        return run_to_end(
            [str(self.folder / "bin" / "test"), *arguments],
            # Not what an outer pytest says to its own workers.
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | environment,
        )

    def pytest_twice(self, *arguments, **more_environment):
        """The real tests/twice.py beside tests of this checkout."""
        noted = self.folder / "failures-noted"
        noted.touch()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        return run_to_end(
            [sys.executable, "-m", "tests.twice", *arguments],
            cwd=self.folder,
            env=environment | {"KCLRUN_TEST_FAILURES": str(noted)} | more_environment,
        )

    def calls(self):
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def reported(self, name):
        return (self.folder / name).read_text().strip()

    @staticmethod
    def _script(path, text):
        path.write_text(text)
        path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path / "a checkout")


def summary(ran):
    """What stands after the last group."""
    return ran.stdout.split("\nFailed, after ")[1].splitlines()[1:]


def test_when_all_groups_pass_the_end_says_so_and_the_exit_code_is_0(checkout):
    ran = checkout.run()

    assert ran.returncode == 0
    assert [line for line in ran.stdout.splitlines() if line.startswith("-- ")] == [
        f"-- {each}" for each in GROUPS
    ]
    assert "\nAll groups passed in " in ran.stdout
    assert "Failed" not in ran.stdout


def test_groups_that_fail_end_no_run_and_are_named_with_their_tests_at_the_end(checkout):
    checkout.group_ends(1, 1, "tests/unit/test_a.py::test_x (call): assert 1 == 2")
    checkout.group_ends(2, 5)  # without a failed test
    checkout.group_ends(3, 4, "tests/spark/test_b.py::test_y (setup): OSError: no Java")

    ran = checkout.run()

    assert ran.returncode == 1
    assert len(checkout.calls()) == 3
    first, second, third, *tests = summary(ran)
    assert first.startswith("  quick tests (")
    assert first.endswith(" s, pytest ended with 1)")
    assert second.startswith("  real processes (")
    assert second.endswith(" s, pytest ended with 5)")
    assert third.startswith("  Spark (")
    assert third.endswith(" s, pytest ended with 4)")
    assert sorted(tests) == [
        "    tests/spark/test_b.py::test_y (setup): OSError: no Java",
        "    tests/unit/test_a.py::test_x (call): assert 1 == 2",
    ]
    assert "All groups passed" not in ran.stdout


def test_a_time_limit_among_the_failures_is_explained(checkout):
    checkout.group_ends(2, 1, "tests/chaos/test_c.py::test_z (call): time limit: Failed: Timeout")

    ran = checkout.run()

    assert ran.returncode == 1
    assert summary(ran)[-2:] == [
        "    tests/chaos/test_c.py::test_z (call): time limit: Failed: Timeout",
        BUSY,
    ]


def test_an_interrupt_ends_all_groups_and_the_end_still_names_what_failed(checkout):
    checkout.group_ends(1, 2, "tests/unit/test_a.py::test_x (call): assert 1 == 2")
    (checkout.folder / "lives-on").touch()

    ran = checkout.run()

    assert ran.returncode == 1
    assert "pytest ended with 2" in summary(ran)[0]
    assert "test_x" in summary(ran)[1]
    assert not psutil.pid_exists(int(checkout.reported("pid")))


def test_only_all_examples_tries_all_of_a_random_test_and_the_longest_tests(checkout):
    assert checkout.run().returncode == checkout.run("--all-examples").returncode == 0

    quick = [call for call in checkout.calls() if "tests/unit" in call]
    assert ["--hypothesis-profile quarter" in call for call in quick] == [True, False]
    assert ["not long" in call for call in checkout.calls()] == [True] * 3 + [False] * 3
    assert len(checkout.calls()) == 6


@pytest.mark.parametrize("arguments", [[], ["--quick"], ["--all-examples"]])
def test_quick_tests_have_no_second_try_and_those_of_real_processes_have(checkout, arguments):
    checkout.run(*arguments)

    for call in checkout.calls():
        assert call.startswith("-m pytest " if "tests/unit" in call else "-m tests.twice ")


def test_quick_runs_two_shares_of_one_group_with_few_examples(checkout):
    ran = checkout.run("--quick")

    assert ran.returncode == 0
    calls = sorted(checkout.calls())
    assert [call.partition(" --share ")[2].split()[0] for call in calls] == ["1/2", "2/2"]
    for call in calls:
        assert "--hypothesis-profile quick" in call
        assert "tests/spark" not in call


def test_each_file_of_tests_is_in_one_share_and_a_failure_of_each_is_told_at_once(checkout):
    checkout.use_conftest()
    tests = checkout.folder / "tests"
    names = [f"test_{letter}.py" for letter in "abcdef"]
    for folder in ["architecture", "unit", "scenarios", "properties", "fuzz"]:
        (tests / folder).mkdir(parents=True)
    for name in names:
        (tests / "unit" / name).write_text("def test_it():\n    assert False, __file__\n")

    ran = checkout.run("--quick")

    assert ran.returncode == 1, ran.stdout + ran.stderr
    for name in names:
        # A share that prints to a file tells it beside, and shows it with all else at its end.
        assert ran.stdout.count(f"FAILED tests/unit/{name}::test_it (call)") in {1, 2}, ran.stdout
    assert len(re.findall(r"^[1-5] failed in ", ran.stdout, re.MULTILINE)) == 2
    assert len(summary(ran)) == 1 + len(names)


def test_other_arguments_go_to_pytest_whose_exit_code_is_the_answer(checkout):
    checkout.group_ends(1, 5)

    ran = checkout.run("tests/unit", "-k", "one or two")

    assert ran.returncode == 5
    assert checkout.calls() == ["-m pytest tests/unit -k one or two"]


def test_without_an_environment_nothing_runs_and_its_exit_code_is_the_answer(checkout):
    checkout.use_failing_environment(69)

    assert checkout.run().returncode == 69
    assert checkout.calls() == []


def test_nothing_is_left_of_the_notes_about_failures(checkout):
    checkout.group_ends(1, 1, "tests/unit/test_a.py::test_x (call): assert 1 == 2")

    checkout.run()

    assert checkout.reported("notes")
    assert not Path(checkout.reported("notes")).exists()


@pytest.mark.parametrize("arguments", [[], ["--quick"], ["tests/unit"]])
def test_what_is_compiled_once_is_kept_for_all_interpreters_of_the_run(checkout, arguments):
    checkout.run(*arguments, PYTHONDONTWRITEBYTECODE="1")

    assert checkout.reported("bytecode") == "unset"


HANGS = """
import threading

import pytest


@pytest.mark.timeout(0.1)
def test_hangs():
    threading.Event().wait()
"""

SMALL_TESTS = """
import threading

import pytest


def test_passes(): ...


def test_fails():
    assert 1 + 1 == 3, "a sum"


@pytest.fixture
def broken():
    raise OSError("no disk")


def test_needs(broken): ...


@pytest.mark.timeout(0.1)
def test_hangs():
    threading.Event().wait()


@pytest.mark.slow
def test_is_left_out():
    raise AssertionError
"""


def test_real_tests_that_fail_are_named_with_their_reasons_and_a_hung_one_with_its_limit(checkout):
    """The real pytest, and the real tests/conftest.py beside a limit that a test can wait for."""
    checkout.use_conftest()
    tests = checkout.folder / "tests"
    for folder in ["architecture", "unit", "scenarios", "properties", "fuzz"]:
        (tests / folder).mkdir(parents=True)
    (tests / "unit" / "test_small.py").write_text(SMALL_TESTS)
    (tests / "patience.py").write_text("HUNG_S = TEST_S = 0.2\n")

    ran = checkout.run("--quick")

    assert ran.returncode == 1, ran.stdout + ran.stderr
    group, *failures, explained = summary(ran)
    assert group.endswith("pytest ended with 1)")
    small = "    tests/unit/test_small.py::"
    assert sorted(failures)[:2] == [
        f"{small}test_fails (call): AssertionError: a sum",
        f"{small}test_hangs (call): time limit: Failed: Timeout (>0.2s) from pytest-timeout.",
    ]
    assert sorted(failures)[2] == f"{small}test_needs (setup): OSError: no disk"
    assert len(failures) == 3
    assert explained == BUSY


# Beside what fails: a test whose own pytest has a failure, which must not be counted, and one that
# sends an interrupt, which must arrive.
FAILS_AT_FIRST = """
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("number", range(MANY))
def test_at_first(number, request):
    tried = Path(__file__).with_name(f"tried-{number}")
    if not tried.exists():
        tried.touch()
        raise AssertionError("the machine stood still")


def test_always():
    assert PASSES, "broken"


@pytest.mark.skipif(MANY != 3, reason="a fourth failure would be one too many")
def test_runs_pytest():
    inner = Path(__file__).with_name("inner.py")
    inner.write_text("def test_a(): assert 0")
    assert subprocess.run([sys.executable, "-m", "pytest", "-q", inner], check=False).returncode


def test_an_interrupt_arrives():
    started = subprocess.Popen(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    started.stdout.readline()
    started.send_signal(signal.SIGINT)
    assert started.wait(300) == -signal.SIGINT
"""


@pytest.fixture
def ignored_interrupts():
    """As a shell without job control starts what is in its background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ignored_interrupts")
@pytest.mark.parametrize(
    ("many", "passes", "code", "workers"),
    [
        (1, True, 0, []),
        pytest.param(3, True, 0, ["-n", "2"], marks=pytest.mark.long),
        (4, True, 1, []),
        (1, False, 1, ["-n", "2"]),
    ],
)
def test_what_fails_is_given_one_second_try_and_more_than_three_are_not_chance(
    checkout, many, passes, code, workers
):
    checkout.use_conftest()
    text = FAILS_AT_FIRST.replace("MANY", str(many)).replace("PASSES", str(passes))
    (checkout.folder / "tests" / "test_small.py").write_text(text)

    listed = checkout.folder / "second-tries"

    ran = checkout.pytest_twice("tests", "-q", *workers, KCLRUN_TEST_SECOND_TRIES=str(listed))

    assert ran.returncode == code, ran.stdout
    assert ran.stdout.count("E           AssertionError: the machine stood still") == many
    failed = many + (not passes)
    assert (f"{failed} failed at first and had a second try" in ran.stdout) == (failed <= 3)
    assert ("this checkout can be trusted" in ran.stdout) == (code == 0)
    assert ran.stdout.count("FAILED tests/test_small.py::test_always") == (not passes) * 4
    assert checkout.reported("failures-noted").count("test_always") == (not passes)
    assert "test_an_interrupt_arrives" not in ran.stdout
    lines = listed.read_text().splitlines() if listed.exists() else []
    assert len(lines) == (failed if failed <= 3 else 0)


def test_a_test_that_hung_is_not_tried_again(checkout):
    checkout.use_conftest()
    (checkout.folder / "tests" / "patience.py").write_text("HUNG_S = TEST_S = 0.2\n")
    (checkout.folder / "tests" / "test_small.py").write_text(HANGS)

    ran = checkout.pytest_twice("tests", "-q")

    assert ran.returncode == 1
    assert "second try" not in ran.stdout
    assert "time limit: " in checkout.reported("failures-noted")


def test_without_what_is_left_out_each_value_still_has_a_case():
    cases = [{"a": a, "b": b, "c": c} for a in "12" for b in (None, 3, {}) for c in ("x", "y", "z")]

    kept = [case for n, case in enumerate(cases) if n not in beyond_each_value(cases)]

    assert len(kept) == 3
    for name in "abc":
        values = {repr(case[name]) for case in cases}
        assert {repr(case[name]) for case in kept} == values


EACH_VALUE = """
import pytest


@pytest.mark.each_value
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [1, 2])
def test_pairs(a, b): ...
"""


def test_of_all_pairs_two_are_not_long(checkout):
    checkout.use_conftest()
    (checkout.folder / "tests" / "test_pairs.py").write_text(EACH_VALUE)

    ran = checkout.run("-q", "-m", "not long", "tests")

    assert "2 passed, 2 deselected" in ran.stdout
