"""What bin/environment shows while it installs, and the three ends of bin/audit, with a Python that
only does what the test says."""

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import HUNG_S
from tests.support.descriptors import everything_on
from tests.support.programs import run_to_end

ROOT = Path(__file__).parents[2]

# Whatever it is asked of itself is fine; it makes itself an environment, and its pip says `lines`.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$1 ${2:-}" in
    '-m venv') mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    '-m pip') cat "$FAKE_LINES"; exit "$FAKE_STATUS" ;;
    '-c import sysconfig'*) echo "$FAKE_PLACE" ;;
    '-c '*'print(sys.version)') echo 3.11 ;;
    '-c '*) ;;
    '- '*) cat >/dev/null; echo fingerprint ;;
esac
"""
LINES = """Collecting boto3==1.40
  Downloading boto3-1.40-py3-none-any.whl (139 kB)
Requirement already satisfied: pip
Collecting urllib3
  Building wheel for kclrun (pyproject.toml): started
Installing collected packages: urllib3, boto3
"""


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def install(tmp_path):
    """Run bin/environment, its standard error a terminal or a pipe: (status, what it showed)."""
    shutil.copytree(ROOT / "bin", tmp_path / "bin")
    script(tmp_path / "fake-python", FAKE_PYTHON)
    (tmp_path / "lines").write_text(LINES)

    def run(*, on_terminal=False, status=0):
        ours, theirs = pty.openpty() if on_terminal else os.pipe()
        done = subprocess.run(
            [str(tmp_path / "bin" / "environment"), "local"],
            env={
                "PATH": os.environ["PATH"],
                "KCLRUN_PYTHON": str(tmp_path / "fake-python"),
                "KCLRUN_VENV": str(tmp_path / "venv"),
                "FAKE_LINES": str(tmp_path / "lines"),
                "FAKE_STATUS": str(status),
                "FAKE_PLACE": str(tmp_path),
            },
            stdout=subprocess.PIPE,
            stderr=theirs if on_terminal else subprocess.PIPE,
            timeout=HUNG_S,
            check=False,
        )
        os.close(theirs)
        shown = everything_on(ours) if on_terminal else done.stderr
        os.close(ours)
        return done.returncode, shown.decode().replace("\r\n", "\n")

    return run


def test_on_a_terminal_one_line_says_what_pip_does_and_is_gone_afterwards(install):
    status, shown = install(on_terminal=True)

    assert status == 0, shown
    begun, *steps, ended = shown.split("\r\x1b[K")
    assert "installing into" in begun
    assert steps == [
        "kclrun: looking up boto3==1.40",
        "kclrun: downloading boto3-1.40-py3-none-any.whl (139 kB) (1 files, 0 MB so far)"[:79],
        "kclrun: looking up urllib3 (1 files, 0 MB so far)",
        "kclrun: building kclrun (pyproject.toml): started (1 files, 0 MB so far)",
        "kclrun: installing the packages (1 files, 0 MB so far)",
    ]
    assert "kclrun: installed in " in ended


def test_elsewhere_a_short_installation_is_three_lines(install):
    status, shown = install()

    assert status == 0, shown
    first, fetched, last = shown.splitlines()
    assert "installing into" in first
    assert fetched == "kclrun: fetched 0 MB in 1 files"
    assert last.startswith("kclrun: installed in ")


def test_an_installation_that_fails_ends_with_69_and_pips_last_lines(install):
    status, shown = install(status=1)

    assert status == 69, shown
    assert "Installing collected packages: urllib3, boto3" in shown
    assert "Is the package index reachable?" in shown


MENDED = {"id": "PYSEC-1", "fix_versions": ["2.0"]}
OPEN = {"id": "PYSEC-2", "fix_versions": []}


@pytest.fixture
def audit(tmp_path):
    """Run bin/audit with these answers of the index: (status, what it told)."""
    shutil.copytree(ROOT / "bin", tmp_path / "bin")

    def run(*packages, answers=True):
        text = json.dumps({"dependencies": packages}) if answers else ""
        (tmp_path / "answers").write_text(text)
        place = f'while [ $# -gt 0 ]; do [ "$1" != --output ] || cp \'{tmp_path}/answers\' "$2"'
        script(
            tmp_path / "python",
            "#!/usr/bin/env bash\n"
            f'[ "$1" = -m ] || exec \'{sys.executable}\' "$@"\n'
            f"{place}; shift; done\n",
        )
        script(tmp_path / "bin" / "environment", f"#!/bin/sh\necho '{tmp_path}/python'\n")
        done = run_to_end([tmp_path / "bin" / "audit"])
        return done.returncode, done.stdout.splitlines()

    return run


def package(name, *vulnerabilities):
    return {"name": name, "version": "1.0", "vulns": vulnerabilities}


def test_an_audit_without_a_known_vulnerability_says_how_many_were_asked_for(audit):
    skipped = {"name": "odd", "skip_reason": "not on the index"}

    assert audit(package("a"), package("b"), skipped) == (
        0,
        ["2 packages audited, 0 vulnerabilities known.", "NOT AUDITED: odd"],
    )


def test_each_known_vulnerability_is_reported_with_the_version_that_repairs_it(audit):
    assert audit(package("a", MENDED, OPEN), package("b")) == (
        1,
        [
            "a 1.0: PYSEC-1, repaired in 2.0",
            "a 1.0: PYSEC-2, repaired in no version yet",
            "2 packages audited, 2 vulnerabilities known.",
        ],
    )


@pytest.mark.parametrize("answers", [True, False], ids=["every package skipped", "no answer"])
def test_where_the_index_answers_for_nothing_nothing_was_audited(audit, answers):
    status, reported = audit({"name": "a", "skip_reason": "no such question"}, answers=answers)

    assert (status, len(reported)) == (69, 1)
    assert reported[0].startswith("NOT AUDITED")
