"""What the wheel puts into site-packages: kclrun, its registration for PySpark, nothing else."""

import json
import zipfile

import pytest

from kclrun import __version__
from kclrun.cli.init import starter_files, templates
from tests.packaging.wheel_rig import ROOT, Environment, build_wheel, plain_environment
from tests.support.programs import run_to_end

OWN = """
import json, sys
from pathlib import Path
from kclrun.loading import load_processor
found = load_processor("processors.mine:Mine", [Path(sys.argv[1])])
import kclrun.samples.flight_pipelines as sample
from kclrun import __version__
from kclrun.cli.init import starter_files, templates
starters = {name: sorted(starter_files(name)) for name in templates()}
print(json.dumps([found.__name__, sample.__file__, starters]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_no_package_named_processors_is_installed_and_the_samples_are_in_kclrun(wheel):
    names = zipfile.ZipFile(wheel).namelist()

    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "kclrun",
        "pyspark_kclrun",
        "pytest_kclrun",
    }
    samples = {name.rpartition("/")[2] for name in names if name.startswith("kclrun/samples/")}
    assert samples == {path.name for path in (ROOT / "processors").glob("*.py")}


def test_the_wheel_has_the_version_of_the_code(wheel):
    assert wheel.name == f"kclrun-{__version__}-py3-none-any.whl"


@pytest.mark.parametrize(
    "name",
    [
        "page/style.css",
        "observe/alarms.yaml",
        "observe/dashboard.yaml",
        "compat/kclpy/properties.yaml",
    ],
)
def test_a_data_file_of_the_package_is_in_the_wheel(wheel, name):
    assert f"kclrun/{name}" in zipfile.ZipFile(wheel).namelist()


def test_from_a_wheel_samples_load_and_a_folder_of_the_users_is_not_shadowed(wheel, tmp_path):
    environment = Environment(tmp_path / "venv")
    environment.install(wheel)
    project = tmp_path / "project"
    (project / "processors").mkdir(parents=True)  # without an __init__.py
    (project / "processors" / "mine.py").write_text(
        "from kclrun import RecordProcessor\n\n\nclass Mine(RecordProcessor):\n"
        "    def process_records(self, batch, checkpointer):\n        pass\n"
    )

    ran = run_to_end(
        [environment.python, "-P", "-c", OWN, project], cwd=project, env=plain_environment()
    )

    assert ran.returncode == 0, ran.stderr
    name, sample, starters = json.loads(ran.stdout)
    assert name == "Mine"
    assert sample == str(environment.packages / "kclrun" / "samples" / "flight_pipelines.py")
    assert starters == {name: sorted(starter_files(name)) for name in templates()}


@pytest.mark.long
def test_pytest_finds_the_fixtures_where_the_wheel_is_installed(wheel, tmp_path):
    environment = Environment(tmp_path / "venv")
    environment.install(wheel)
    (tmp_path / "project").mkdir()

    ran = run_to_end(
        [environment.python, "-m", "pytest", "--fixtures"],
        cwd=tmp_path / "project",
        env=plain_environment(),
    )

    assert "fixtures defined from pytest_kclrun" in ran.stdout, ran.stdout + ran.stderr
    for name in ("kclrun_aws", "kclrun_stream", "run_application"):
        assert f"\n{name} -- " in ran.stdout
