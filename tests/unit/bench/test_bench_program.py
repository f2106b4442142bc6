"""`bin/bench` as it is run: its rows work, whatever their figures are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

TESTS = Path(__file__).parents[2]


def run_bench(*arguments):
    return subprocess.run(
        [sys.executable, "-P", "-m", "bench", *arguments],
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("row", "rounds"),
    [
        ("aggregates", 2),
        ("start", 2),
        ("local", 2),
        ("poison", 1),
        ("spark-sink", 1),
    ],
)
def test_a_row_yields_figures(row, rounds, tmp_path):
    path = tmp_path / "figures.json"

    done = run_bench(row, "--rounds", str(rounds), "--json", str(path))

    document = json.loads(path.read_text())
    assert done.returncode == 0, done.stderr
    assert {each["row"] for each in document["figures"]} == {row}
    assert all(0 < each["least"] <= each["median"] for each in document["figures"])
    assert document["not_measured"] == []
    assert len(done.stdout.splitlines()) == len(document["figures"])


def test_the_help_names_every_row_with_its_target():
    done = run_bench("--help")

    for row in ("fetch", "aggregates", "runtime", "idle", "start", "local", "crash", "spark"):
        assert f"\n  {row} " in done.stdout
    assert done.stdout.count("≥") + done.stdout.count("≤") >= 8
