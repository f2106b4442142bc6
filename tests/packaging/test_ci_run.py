"""What `.ci/run` could not test stands in its last lines, and ends no stage."""

import re
from pathlib import Path

import pytest

from tests.packaging.test_bin_test import Checkout
from tests.support.programs import run_to_end

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / ".ci" / "run").read_text()

PROGRAMS = {"javac", "mvn", "npm"}

SKIPPED = """
import pytest

@pytest.fixture
def jvm():
    pytest.skip("not installed here:\\n  java, mvn")

def test_one(jvm):
    pass

def test_two():
    pytest.skip("nothing ran beside the real Java KCL")

@pytest.mark.skipif(True, reason="there is no Chromium")
def test_three():
    pass

@pytest.mark.xfail
def test_four():
    assert False

def test_five():
    pass
"""


def function(name):
    """A function of the script, as text."""
    [text] = re.findall(rf"^{name}\(\) {{\n.*?^}}$", SCRIPT, re.MULTILINE | re.DOTALL)
    return text


def bash(*lines, **environment):
    return run_to_end(["/bin/bash", "-euo", "pipefail", "-c", "\n".join(lines)], env=environment)


def test_each_reason_is_one_line_at_the_end_with_its_count(tmp_path):
    notes = tmp_path / "notes"
    notes.touch()

    ran = bash(
        *map(function, ("skipped", "show_skipped")),
        "skipped 'Python 3.14 was not tested.'; skipped 'no Java'; skipped 'no Java'; show_skipped",
        PATH="/usr/bin:/bin",
        KCLRUN_TEST_SKIPPED=str(notes),
    )

    assert ran.stdout.splitlines() == [
        "SKIPPED: Python 3.14 was not tested.",
        "SKIPPED: no Java (2 times)",
    ]
    assert ran.returncode == 0


def test_the_reasons_are_behind_the_last_stage():
    assert SCRIPT.index("\nshow_skipped\n") > SCRIPT.index("\nprintf '\\n== done ")
    assert "printf 'SKIPPED: " not in SCRIPT.replace(function("show_skipped"), "")


def test_tests_with_a_second_try_are_in_the_last_lines_each_once(tmp_path):
    notes = tmp_path / "notes"
    notes.write_text("tests/a.py::test_b (call): late\n" * 2)

    ran = bash(
        function("show_second_tries"),
        "show_second_tries",
        PATH="/usr/bin:/bin",
        KCLRUN_TEST_SECOND_TRIES=str(notes),
    )

    assert ran.stdout == "SECOND TRY: tests/a.py::test_b (call): late\n"
    assert SCRIPT.index("\nshow_second_tries\n") > SCRIPT.index("\nprintf '\\n== done ")


def test_a_word_that_is_not_a_run_is_refused_and_nothing_begins():
    ran = run_to_end([ROOT / ".ci" / "run", "nigth"])

    assert (ran.returncode, ran.stdout) == (64, "")
    assert ran.stderr == "Not known: nigth. .ci/run, or .ci/run night\n"


@pytest.mark.parametrize("lacks", sorted(PROGRAMS))
def test_a_machine_without_java_maven_or_node_and_without_packages_goes_on(tmp_path, lacks):
    for name in {"python3", "git", "useradd"} | PROGRAMS - {lacks}:
        program(tmp_path / name, "exit 0")
    program(tmp_path / "apt-get", "exit 100")

    ran = bash(
        function("from_debian"),
        function("install_packages").replace("/usr/bin/python3", "python3"),
        "install_packages",
        PATH=str(tmp_path),
        what="night",
    )

    assert ran.returncode == 0, ran.stderr
    assert "Not to be had: " in ran.stdout


@pytest.mark.seconds
@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "worker"])
def test_the_reason_of_each_skipped_test_is_noted_in_one_line(tmp_path, workers):
    checkout = Checkout(tmp_path / "a checkout")
    checkout.use_conftest()
    (checkout.folder / "tests" / "test_small.py").write_text(SKIPPED)
    notes = tmp_path / "skipped"

    ran = checkout.pytest_twice("tests", "-q", *workers, KCLRUN_TEST_SKIPPED=str(notes))

    assert ran.returncode == 0, ran.stdout
    assert sorted(notes.read_text().splitlines()) == [
        "not installed here: java, mvn",
        "nothing ran beside the real Java KCL",
        "there is no Chromium",
    ]


def program(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
