"""An editable installation that type checkers see, as docs/contributing.md describes it."""

import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.packaging.wheel_rig import Environment, copied_source, pip, plain_environment
from tests.patience import HUNG_S
from tests.unit.test_user_program_types import PROGRAM, TYPOS, errors_in, lines_that_are_wrong

pytestmark = pytest.mark.slow

IMPORTS = """
import importlib.util
print([name for name in {names} if importlib.util.find_spec(name)])
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("editable")
    source = copied_source(folder / "source")
    for name in ("tests", "config", "bin", "docs"):  # what a checkout has besides
        (source / name).mkdir()
        (source / name / "__init__.py").touch()
    environment = Environment(folder / "venv")
    hack = "_distutils_hack"  # setuptools builds there, and imports it
    (environment.packages / hack).symlink_to(Path(sysconfig.get_path("purelib")) / hack)
    pip(
        "--python", environment.python, "install", "--no-deps", "--no-index",
        "--no-build-isolation", "--config-settings", "editable_mode=strict", "--editable", source,
    )  # fmt: skip
    environment.source = source
    return environment


def ran(environment, folder, *arguments):
    return subprocess.run(
        [environment.python, *arguments],
        cwd=folder,
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=HUNG_S,
    )


def checked_by_mypy(environment, folder):
    return ran(environment, folder, "-m", "mypy", "--strict", "program.py")


def checked_by_pyright(environment, folder):
    pytest.importorskip("basedpyright")
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    python = str(environment.python)
    return ran(environment, folder, "-m", "basedpyright", "--pythonpath", python, "program.py")


@pytest.mark.parametrize("checker", [checked_by_mypy, checked_by_pyright])
@pytest.mark.parametrize("text", [PROGRAM, TYPOS], ids=["right", "typos"])
def test_type_checkers_see_kclrun_in_a_strict_editable_installation(
    environment, tmp_path, checker, text
):
    (tmp_path / "program.py").write_text(text)
    done = checker(environment, tmp_path)
    assert errors_in(done.stdout) == lines_that_are_wrong(text), done.stdout + done.stderr


def test_the_installation_has_the_packages_of_the_wheel_and_no_folder_of_the_checkout(
    environment, tmp_path
):
    ours = ["kclrun", "kclrun.samples.hello", "pyspark_kclrun", "pytest_kclrun"]
    others = ["processors", "tests", "config", "bin", "docs"]
    done = ran(environment, tmp_path, "-P", "-c", IMPORTS.format(names=[*ours, *others]))
    assert done.stdout.strip() == str(ours), done.stderr


def test_a_change_of_a_file_is_seen_without_installing_again(environment, tmp_path):
    with (environment.source / "kclrun" / "windows.py").open("a") as file:
        file.write("\nPLANTED = 7\n")
    done = ran(environment, tmp_path, "-P", "-c", "import kclrun.windows as w; print(w.PLANTED)")
    assert done.stdout == "7\n", done.stderr
