"""Where kclrun runs: refused in words elsewhere, and one list of Pythons in all places."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.programs import run_to_end

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("pretence", "reported"),
    [
        ("sys.platform = 'darwin'", r"on darwin\."),
        ("sys.platform = 'win32'", r"on win32\."),
        ("sys.version_info = (3, 10, 4)", r"cpython 3\.10 on linux\."),
    ],
)
def test_an_import_elsewhere_says_what_kclrun_runs_on(pretence, reported):
    ran = run_to_end([sys.executable, "-c", f"import sys; {pretence}; import kclrun"], cwd=ROOT)

    last_line = ran.stderr.splitlines()[-1]
    assert ran.returncode == 1
    assert last_line.startswith("ImportError: kclrun runs on Linux (x86-64, aarch64) with CPython")
    assert re.search(reported, last_line)


def test_ci_runs_on_every_python_that_the_package_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r":: Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    [listed] = re.findall(r"^PYTHONS=\((.*)\)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)

    assert listed.split() == named
    assert project["requires-python"] == f">={named[0]}"
