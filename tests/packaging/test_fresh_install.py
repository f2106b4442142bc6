"""What a newcomer does: a fresh clone in some folder, and the wheel in an empty environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SLOWEST = "F9       Frontier Airlines Inc."


def run(*command, cwd, **environment):
    outer = {name: value for name, value in os.environ.items() if not name.startswith("KCLRUN_")}
    ran = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=outer | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_a_fresh_clone_in_a_path_with_spaces_runs_the_demo_from_any_folder(tmp_path):
    clone = tmp_path / "a fresh clone"
    elsewhere = tmp_path / "some where else"
    elsewhere.mkdir()
    run("git", "clone", "--quiet", ROOT, clone, cwd=tmp_path)

    said = run(clone / "bin" / "kclrun", "--config", clone / "config" / "demo.yaml", cwd=elsewhere)

    assert "336,776 flights" in said
    assert SLOWEST in said
    assert (clone / ".venv").is_dir()


def test_the_wheel_in_an_empty_environment_runs_the_demo(tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "dist", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv = tmp_path / "empty"
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    run(venv / "bin" / "pip", "install", "--quiet", f"{wheel}[local,demo]", cwd=tmp_path)
    (tmp_path / "demo.yaml").write_text((ROOT / "config" / "demo.yaml").read_text())

    said = run(venv / "bin" / "kclrun", "--config", "demo.yaml", cwd=tmp_path)

    assert "336,776 flights" in said
    assert SLOWEST in said
