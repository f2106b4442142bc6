"""The Dockerfile, read: nobody builds images here. `test_as_process_1.py` runs what it starts."""

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "config" / "deploy" / "Dockerfile").read_text()
# One instruction a line: continued lines joined, comments left out.
LINES = [
    line
    for line in re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()
    if line
]
STAGES = [LINES[: LINES.index(next(x for x in LINES[1:] if x.startswith("FROM ")))]]
STAGES.append(LINES[len(STAGES[0]) :])


def of(stage, instruction):
    return [line.split(None, 1)[1] for line in stage if line.startswith(f"{instruction} ")]


def test_the_image_is_slim_and_its_python_is_one_that_kclrun_runs_on():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    least = tuple(map(int, wanted.removeprefix(">=").split(".")))

    for stage in STAGES:
        [base] = of(stage, "FROM")
        found = re.match(r"python:(\d+)\.(\d+)-slim", base)
        assert (int(found[1]), int(found[2])) >= least


def test_what_is_copied_is_there_and_is_all_that_a_build_needs():
    copied = {name for line in of(STAGES[0], "COPY") for name in line.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "kclrun", "processors", project["readme"]} <= copied
    assert set(project["license-files"]) <= copied


def test_it_runs_as_nobody_in_particular():
    [user] = of(STAGES[1], "USER")

    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    # The last word: nothing after it is done as root again.
    assert not of(STAGES[1][STAGES[1].index(f"USER {user}") :], "RUN")


def test_kclrun_is_process_1_and_is_told_to_stop_by_a_signal_that_it_drains_at():
    [entry] = of(STAGES[1], "ENTRYPOINT")

    assert json.loads(entry) == ["/opt/kclrun/bin/kclrun"]
    assert json.loads(of(STAGES[1], "CMD")[0])[0] == "--config"
    assert of(STAGES[1], "STOPSIGNAL") == ["SIGTERM"]
