"""The scripts of bin/ on machines that lack something: a clear message, never a traceback."""

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import HUNG_S
from tests.support.programs import run_to_end

ROOT = Path(__file__).parents[2]
TOOLS = [
    "bash",
    "cat",
    "cut",
    "dirname",
    "env",
    "flock",
    "ln",
    "mkdir",
    "mktemp",
    "paste",
    "rm",
    "sed",
]
TOOLS += ["sort", "tail", "tr", "grep"]


@pytest.fixture
def bare_machine(tmp_path):
    """A PATH with the tools a script may expect, and whatever Python the test puts there."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    return folder


def put_python(folder, script):
    python = folder / "python3"
    python.write_text(f"#!/usr/bin/env bash\n{script}\n")
    python.chmod(0o755)


def run_environment(tools, tmp_path, **more):
    return run_to_end(
        [str(ROOT / "bin" / "environment"), "local"],
        env={"PATH": str(tools), "KCLRUN_VENV": str(tmp_path / "venv"), "HOME": str(tmp_path)}
        | more,
    )


TOO_OLD = '[ "$1" = --version ] && echo "Python 3.8.10" && exit 0; exit 1'
# New enough by its answers, and unable to import venv: Debian's python3 by itself.
WITHOUT_VENV = 'case "$*" in *venv*) exit 1 ;; "-c "*) exit 0 ;; "- "*) echo fingerprint ;; esac'
NOWHERE = {"KCLRUN_PYTHON": "/no/such/python"}


@pytest.mark.parametrize(
    ("python", "environment", "said"),
    [
        (TOO_OLD, {}, ["Python 3.11 or newer is needed", "Python 3.8.10", "KCLRUN_PYTHON"]),
        (None, {}, ["no python3 at all"]),
        (WITHOUT_VENV, {}, ["venv module is missing", "python3-venv"]),
        ("exit 0", NOWHERE, ["KCLRUN_PYTHON=/no/such/python is not a Python 3.11 or newer"]),
    ],
    ids=["too old", "none", "without venv", "the named one, which is not there"],
)
def test_what_is_wrong_with_the_python_is_said_with_what_to_do(
    bare_machine, tmp_path, python, environment, said
):
    if python is not None:
        put_python(bare_machine, python)

    ran = run_environment(bare_machine, tmp_path, **environment)

    assert ran.returncode == 69
    assert [words for words in said if words not in ran.stderr] == []


@pytest.mark.parametrize("program", ["flock", "paste"])
def test_a_program_that_the_machine_lacks_is_named_with_its_package(
    bare_machine, tmp_path, program
):
    (bare_machine / program).unlink()

    ran = run_environment(bare_machine, tmp_path)

    assert ran.returncode == 69
    assert f"not installed: {program}." in ran.stderr
    assert "coreutils grep sed util-linux" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "expects_spark"),
    [
        (["--config", "FILE"], True),
        (["run", "--config=FILE"], True),
        (["check", "--config", "FILE"], True),
        (["--version"], False),
    ],
)
def test_the_spark_extra_is_asked_for_only_by_a_config_that_needs_it(
    tmp_path, arguments, expects_spark
):
    # A copy of the launcher beside an `environment` that only tells what it was asked for.
    copy = tmp_path / "bin"
    copy.mkdir()
    shutil.copy(ROOT / "bin" / "kclrun", copy / "kclrun")
    (copy / "environment").write_text('#!/usr/bin/env bash\necho "$@" >&2; echo true\n')
    (copy / "environment").chmod(0o755)
    config = tmp_path / "an app.yaml"
    config.write_text("application: orders\nengine: spark\n")

    ran = run_to_end(
        [str(copy / "kclrun"), *[each.replace("FILE", str(config)) for each in arguments]]
    )

    assert ("spark" in ran.stderr.split()) == expects_spark


def test_the_launcher_works_from_a_folder_that_holds_one_named_kclrun(tmp_path):
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "bin" / "kclrun", tmp_path / "bin" / "kclrun")
    environment = tmp_path / "bin" / "environment"
    environment.write_text(f"#!/usr/bin/env bash\necho {shlex.quote(sys.executable)}\n")
    environment.chmod(0o755)
    (tmp_path / "kclrun" / "config").mkdir(parents=True)  # as beside a fresh clone

    ran = run_to_end([tmp_path / "bin" / "kclrun", "--version"], cwd=tmp_path)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("kclrun ")


# As pip prints it; the last line stands until the script has said that it builds.
PIP = """
echo 'Collecting aiolib>=1 (from kclrun==0.1.0)'
echo '  Downloading aiolib-1.2-py3-none-any.whl (90 kB)'
echo '  Downloading pyspark-4.2.0.tar.gz (434.2 MB)'
echo 'Building wheel for pyspark (pyproject.toml): started'
until grep -q PySpark "$1"; do sleep 0.01; done
echo 'Installing collected packages: aiolib, pyspark'
"""


@pytest.fixture
def environment_functions(tmp_path):
    """A copy of bin/environment in a checkout of its own that only defines its functions."""
    (tmp_path / "bin").mkdir()
    for name in ("config", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    *functions, last = (ROOT / "bin" / "environment").read_text().splitlines()
    assert last == 'main "$@"'
    path = tmp_path / "bin" / "environment"
    path.write_text("\n".join(functions))
    return path


def test_an_installation_says_what_it_fetched_and_what_it_builds_while_pip_is_silent(
    tmp_path, environment_functions
):
    shown, log = tmp_path / "shown", tmp_path / "log"
    script = f"pip_prints() {{ {PIP} }}; SAY_EVERY_S=1; pip_prints {shown} | show_progress {log}"
    with shown.open("wb") as file:
        ran = subprocess.run(
            ["bash", "-c", f'. "$1"; {script}', "bash", environment_functions],
            stderr=file,
            timeout=HUNG_S,
        )

    assert ran.returncode == 0, shown.read_text()
    first, *_, last = shown.read_text().splitlines()
    assert first.startswith("kclrun: building PySpark from its source: the package index has no")
    assert "(2 files, 434 MB so far)" in first
    assert last == "kclrun: fetched 434 MB in 2 files"
    assert log.read_text().count("\n") == 5


def test_an_environment_has_the_versions_of_the_lock(tmp_path, environment_functions):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)

    ran = run_to_end(
        ["bash", "-c", '. "$1"; pinned', "bash", environment_functions],
        env={"PATH": os.environ["PATH"], "KCLRUN_VENV": str(tmp_path / "venv")},
    )

    lock = (ROOT / "config" / "requirements" / "everything.lock").read_text()
    pins = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stderr
    assert len(pins) == sum("==" in line for line in lock.splitlines() if line[0].isalnum())
    assert [pin for pin in pins if "--hash" in pin or "==" not in pin] == []
    assert any(pin.startswith("boto3==") for pin in pins)


def test_a_second_program_says_that_it_waits_for_the_environment(bare_machine, tmp_path):
    with (tmp_path / "venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [str(ROOT / "bin" / "environment"), "local"],
            env={
                "PATH": str(bare_machine),
                "KCLRUN_VENV": str(tmp_path / "venv"),
                "HOME": str(tmp_path),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        reported = process.stderr.readline()
    rest = process.communicate(timeout=HUNG_S)[1]

    assert "another program prepares" in reported
    assert "waiting for it" in reported
    # It went on once the lock was free, as far as this machine lets it.
    assert "no python3 at all" in rest


def test_a_version_that_cannot_be_had_is_said_aloud(bare_machine, tmp_path):
    ran = run_to_end(
        [str(ROOT / "bin" / "interpreter"), "3.99"],
        env={"PATH": str(bare_machine), "HOME": str(tmp_path)},
    )

    assert ran.returncode == 69
    assert ran.stdout == ""
    assert "Python 3.99 cannot be had here: this machine has no apt" in ran.stderr
