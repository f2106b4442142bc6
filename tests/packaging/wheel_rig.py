"""The wheel of this checkout, and environments to try it in without installing the world again."""

import os
import shutil
import sys
import sysconfig
import venv
from pathlib import Path

from tests.support.programs import run_to_end

ROOT = Path(__file__).parents[2]
# What an environment for development has and an installation of the dependencies has not.
_OURS = (
    "kclrun",
    "pyspark_kclrun",
    "pytest_kclrun",
    "__editable__",
    "_distutils_hack",
    "distutils-",
    "__pycache__",
)


def build_wheel(folder):
    """The wheel of what is in the checkout, built apart from it."""
    source, built = folder / "source", folder / "dist"
    for package in ("kclrun", "processors"):
        shutil.copytree(
            ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", built, source)
    (wheel,) = built.glob("kclrun-*.whl")
    return wheel


class Environment:
    """A Python that has all of kclrun's dependencies, by links to those of this one, and not
    kclrun itself; `without` names packages it lacks, too."""

    def __init__(self, folder, *, without=()):
        venv.create(folder, symlinks=True, with_pip=False)
        self.python = folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.startswith((*_OURS, *without)):
                (self.packages / entry.name).symlink_to(entry)
        if "pyspark" not in without:
            self._own_spark_home()

    def install(self, wheel):
        """The wheel, and nothing else; no index is asked."""
        pip("--python", self.python, "install", "--no-deps", "--no-index", wheel)

    @property
    def spark_home(self):
        """Spark's folder, with a folder `work` of its own: executors of a local cluster run
        there."""
        return self.packages / "pyspark"

    def _own_spark_home(self):
        shared = self.spark_home.resolve()
        self.spark_home.unlink()
        self.spark_home.mkdir()
        for entry in shared.iterdir():
            if entry.name != "work":
                (self.spark_home / entry.name).symlink_to(entry)


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    ran = run_to_end(command)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def plain_environment():
    """The variables of this process, without those that change Python, Java, Spark or kclrun."""
    changing = ("KCLRUN", "PYTHON", "JAVA", "PYSPARK", "SPARK", "VIRTUAL_ENV", "AWS")
    return {name: value for name, value in os.environ.items() if not name.startswith(changing)}


def programs_but_java(folder):
    """A PATH with everything that this machine's has, except java."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            link = folder / program.name
            if program.name != "java" and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)
