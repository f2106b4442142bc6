"""The source distribution has what its own tests need, and installs into an empty environment of
each Python, as the wheel does, with and without extras."""

import json
import os
import shutil
import subprocess
import tarfile
import tomllib

import pytest

from tests.packaging.release.building import extract_all
from tests.packaging.wheel_rig import (
    INSTALLED_MAX_S,
    ROOT,
    build_sdist,
    build_wheel,
    check_requirements,
    install,
    new_environment,
    run,
    tracked,
)
from tests.support.programs import needs

PYTHONS = [
    name.rpartition(" ")[2]
    for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    if ":: Python :: 3." in name
]
HAS_MOTO = "import importlib.util; print(importlib.util.find_spec('moto') is not None)"
# A program without an extra: its processor is called by the test kit, with records in memory.
WITHOUT_EXTRAS = """
import kclrun
from kclrun.testing import run_processor

class Sizes(kclrun.RecordProcessor):
    def initialize(self, context):
        self.context = context
    def process_records(self, batch, checkpointer):
        for record in batch:
            self.context.emit({"bytes": len(record.data)})

print([row["bytes"] for row in run_processor(Sizes, ["first", "second!"]).rows])
"""

pytestmark = pytest.mark.skipif(
    tracked() is None, reason="needs a git checkout: its source distribution has what git tracks"
)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def unpack(sdist, folder):
    with tarfile.open(sdist) as files:
        extract_all(files, folder)
    (inside,) = folder.iterdir()
    return inside


def test_each_file_of_the_checkout_is_in_the_source_distribution(sdist, tmp_path):
    inside = unpack(sdist, tmp_path)

    missing = [name for name in tracked() if not (inside / name).is_file()]
    assert missing == []
    assert os.access(inside / "bin" / "test", os.X_OK)
    assert list(inside.rglob("*.pyc")) == []


@pytest.mark.slow
@pytest.mark.timeout(2 * INSTALLED_MAX_S)
@pytest.mark.parametrize("python", PYTHONS)
def test_both_archives_run_in_an_empty_environment_with_and_without_extras(
    sdist, wheel, python, tmp_path
):
    found = subprocess.run([ROOT / "bin" / "interpreter", python], capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip(f"Python {python} is not to be had on this machine")
    venv = tmp_path / "empty"
    new_environment(venv, found.stdout.strip())
    programs = venv / "bin"

    install(venv, sdist)

    assert run(programs / "python", "-c", HAS_MOTO, cwd=tmp_path) == "False\n"
    assert run(programs / "python", "-c", WITHOUT_EXTRAS, cwd=tmp_path) == "[5, 7]\n"
    run(programs / "kclrun", "init", "hello", cwd=tmp_path)
    project = tmp_path / "hello"
    check = (programs / "kclrun", "check", "--config", "app.yaml", "--no-environment")
    assert "user code" in run(*check, cwd=project)

    install(venv, "--force-reinstall", "--no-deps", wheel)
    install(venv, f"{wheel}[local]")

    check_requirements(venv)
    report = project / "report.json"
    run(programs / "kclrun", "--config", "app.yaml", "--report", report, cwd=project)
    reported = json.loads(report.read_text())
    assert (reported["exit_reason"], reported["totals"]["records"]) == ("caught up", 1000)
    shutil.rmtree(venv)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(3 * INSTALLED_MAX_S)
def test_the_quick_tests_of_an_unpacked_source_distribution_pass(sdist, tmp_path):
    """It is not a checkout of git; what needs one says so and is skipped."""
    needs("flock")
    inside = unpack(sdist, tmp_path)

    printed = run(inside / "bin" / "test", "--quick", cwd=tmp_path)

    assert "All groups passed" in printed, printed
    shutil.rmtree(inside)
