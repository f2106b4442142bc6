"""The demo on Spark, as it is shipped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from processors.flight_pipelines import expected_hourly, hours

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_gives_what_the_file_of_flights_says(spark, tmp_path):
    report = tmp_path / "report.json"
    config = ROOT / "config" / "demo-spark.yaml"
    command = [sys.executable, "-m", "kclrun", "--config", str(config), "--report", str(report)]

    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"KCLRUN_OUT": str(tmp_path / "out")},
    )

    assert done.returncode == 0, done.stderr
    (folder,) = (each for each in (tmp_path / "out").iterdir() if each.suffix != ".checkpoint")
    assert hours(folder) == expected_hourly()
    assert "336,776 flights" in done.stdout
    told = json.loads(report.read_bytes())
    assert told["exit_reason"] == "caught up"
    # Every flight, and the heartbeat that closes the last hours.
    assert told["totals"]["records"] == 336_777
    assert told["totals"]["ended"] == 3
