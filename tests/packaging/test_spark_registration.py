"""The format `kclrun` is known to every Spark session of an installation, with nothing to call:
from the wheel, and from the environment of a checkout."""

import os
import sys
from pathlib import Path

import pyspark
import pytest

from kclrun.spark.engine.java import provide_java
from tests.packaging.wheel_rig import ROOT, Environment, build_wheel, plain_environment
from tests.support.programs import run_to_end

MODULE = "pyspark_kclrun"

FIND = f"""
import pkgutil
print([module.name for module in pkgutil.iter_modules() if module.name == "{MODULE}"])
import {MODULE}, kclrun
print({MODULE}.__file__, kclrun.__file__, {MODULE}.DefaultSource.name(), sep="\\n")
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


def run(program, folder, python=sys.executable):
    # A plain session finds no Java by itself where the machine has none.
    java = provide_java(os.environ, pyspark.__version__)
    ran = run_to_end(
        [python, "-c", program],
        cwd=folder,
        env=plain_environment() | {"PYSPARK_PYTHON": str(python), "JAVA_HOME": str(java)},
        timeout_s=240,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment with the dependencies, and the wheel of this checkout installed by pip."""
    folder = tmp_path_factory.mktemp("installed")
    environment = Environment(folder / "venv")
    environment.install(build_wheel(folder))
    return environment


def test_pyspark_would_find_it_in_the_environment_of_this_checkout(tmp_path):
    found, module, package, name = run(FIND, tmp_path).splitlines()

    assert found == f"['{MODULE}']"
    assert Path(module).resolve().is_relative_to(ROOT / "kclrun" / "spark")
    assert Path(package).resolve().is_relative_to(ROOT)
    assert name == "kclrun"


@pytest.mark.slow
def test_pyspark_would_find_it_where_the_wheel_is_installed(installed, tmp_path):
    found, module, package, name = run(FIND, tmp_path, installed.python).splitlines()

    assert found == f"['{MODULE}']"
    assert Path(module) == installed.packages / MODULE / "__init__.py"
    assert Path(package) == installed.packages / "kclrun" / "__init__.py"
    assert name == "kclrun"
    assert (installed.packages / "kclrun" / "spark" / "engine" / "log4j2.properties").is_file()


@pytest.mark.slow
def test_a_plain_session_knows_the_format_from_the_environment_of_this_checkout(tmp_path):
    # Spark looks for formats only if a shell finds its Python, whose path it does not quote: by a
    # link, the environment of a checkout in a folder with spaces has a path without.
    environment = tmp_path / "environment"
    environment.symlink_to(sys.prefix)
    python = environment / "bin" / "python"

    assert "the kclrun source cannot be used: streamName: is needed" in run(LOAD, tmp_path, python)


@pytest.mark.slow
def test_a_plain_session_knows_the_format_from_the_wheel(installed, tmp_path):
    reported = run(LOAD, tmp_path, installed.python)

    assert "the kclrun source cannot be used: streamName: is needed" in reported
    assert str(installed.packages / "kclrun") in reported, "the wheel's, by the traceback"
