"""The format `kclrun` is known to every Spark session of an installation, with nothing to call:
from the wheel, and from the environment of a checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE = "pyspark_kclrun"

FIND = f"""
import pkgutil
print([module.name for module in pkgutil.iter_modules() if module.name == "{MODULE}"])
import {MODULE}, kclrun
print({MODULE}.__file__, kclrun.__file__, {MODULE}.DefaultSource.name())
"""
# A plain session: nothing of kclrun is imported or called on this side.
LOAD = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
try:
    spark.readStream.format("kclrun").load()
except Exception as error:
    print(error)
finally:
    spark.stop()
"""

PIP_WHEEL = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")


def run(program, folder, **environment):
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | {"PYSPARK_PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The wheel of this checkout, unpacked as an installation would."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for folder in ("kclrun", "processors"):
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run(
        [*PIP_WHEEL, "--wheel-dir", built, source],
        check=True,
        timeout=240,
    )
    (wheel,) = built.glob("kclrun-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(built / "site")
    return built / "site"


def test_pyspark_would_find_it_in_the_environment_of_this_checkout(tmp_path):
    found, said = run(FIND, tmp_path).splitlines()
    module, package, name = said.split()

    assert found == f"['{MODULE}']"
    assert Path(module).resolve().is_relative_to(ROOT / "kclrun" / "spark")
    assert Path(package).resolve().is_relative_to(ROOT)
    assert name == "kclrun"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pyspark_would_find_it_in_the_wheel(unpacked, tmp_path):
    found, said = run(FIND, tmp_path, PYTHONPATH=str(unpacked)).splitlines()
    module, package, name = said.split()

    assert found == f"['{MODULE}']"
    assert Path(module) == unpacked / MODULE / "__init__.py"
    assert Path(package).is_relative_to(unpacked)
    assert name == "kclrun"
    assert (unpacked / "kclrun" / "spark" / "log4j2.properties").is_file()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_plain_session_knows_the_format_from_the_environment_of_this_checkout(tmp_path):
    assert "the kclrun source cannot be used: streamName: is needed" in run(LOAD, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_plain_session_knows_the_format_from_the_wheel(unpacked, tmp_path):
    told = run(LOAD, tmp_path, PYTHONPATH=str(unpacked))

    assert "the kclrun source cannot be used: streamName: is needed" in told
    assert str(unpacked / "kclrun") in told, "the wheel's, by the traceback"
