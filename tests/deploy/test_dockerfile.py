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
FROMS = [number for number, line in enumerate(LINES) if line.startswith("FROM ")]
STAGES = [LINES[FROMS[0] : FROMS[1]], LINES[FROMS[1] :]]


def of(stage, instruction):
    return [line.split(None, 1)[1] for line in stage if line.startswith(f"{instruction} ")]


def test_the_base_is_the_builders_choice_and_a_build_without_one_is_refused():
    # An ARG without a default is empty, and FROM refuses an empty name.
    assert LINES[: FROMS[0]] == ["ARG BASE"]
    assert [of(stage, "FROM") for stage in STAGES] == [["${BASE} AS build"], ["${BASE}"]]


def test_the_command_told_pins_by_digest_a_python_that_kclrun_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    for text in (TEXT, (ROOT / "docs" / "how-to" / "docker.md").read_text()):
        reported = set(re.findall(r"RepoDigests 0}}' python:(\d+\.\d+)-slim", text))
        assert reported
        assert {f"Programming Language :: Python :: {each}" for each in reported} <= set(
            project["classifiers"]
        )


def test_what_pip_installs_is_pinned_by_hashes():
    installs = [line for stage in STAGES for line in of(stage, "RUN") if "pip install" in line]

    locked, package = installs
    assert "--require-hashes --requirement base.lock" in locked
    # Nothing is resolved again, neither to run nor to build.
    assert {"--no-deps", "--no-build-isolation"} <= set(package.split())
    [copied] = [line for line in of(STAGES[0], "COPY") if "base.lock" in line]
    assert (ROOT / copied.split()[0]).is_file()


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
