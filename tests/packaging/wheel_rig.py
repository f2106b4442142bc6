"""The wheel of this checkout, and environments to try it in without installing the world again."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.patience import HUNG_S, TEST_S
from tests.support.programs import run_to_end

ROOT = Path(__file__).parents[2]
# An installation of Spark downloads 500 MB on a machine that has none of it yet.
INSTALLED_MAX_S = 2 * TEST_S
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


def copied_source(source):
    """What a wheel is made of, copied into a folder."""
    for package in ("kclrun", "processors"):
        shutil.copytree(
            ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    return source


def build_wheel(folder):
    """The wheel of what is in the checkout, built apart from it."""
    source, built = copied_source(folder / "source"), folder / "dist"
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", built, source)
    (wheel,) = built.glob("kclrun-*.whl")
    return wheel


def tracked():
    """The paths of the files of this checkout. None: it is not one of git, as an unpacked source
    distribution."""
    if shutil.which("git") is None:
        return None
    ran = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    names = [name for name in ran.stdout.decode().split("\0") if name and (ROOT / name).exists()]
    return names or None


def build_sdist(folder):
    """The source distribution of what git tracks in the checkout, built apart from it."""
    source, built = folder / "source", folder / "dist"
    for name in tracked():
        place = source / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place)
    built.mkdir()
    program = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    ran = subprocess.run(
        [sys.executable, "-c", program, built],
        cwd=source,
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (sdist,) = built.iterdir()
    return sdist


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


def run(*command, cwd=None, **environment):
    """What a command prints, as a user without our variables runs it."""
    ran = run_to_end(
        command,
        timeout_s=INSTALLED_MAX_S,
        cwd=cwd,
        env=plain_environment() | environment,
        stdin=subprocess.DEVNULL,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def new_environment(venv, python):
    """An empty environment, of this Python."""
    without_pip = ["--without-pip"] if os.environ.get("KCLRUN_UV") else []
    run(python, "-m", "venv", *without_pip, venv, cwd=venv.parent)


def install(venv, *what):
    """From the cache of the uv that KCLRUN_UV names, or by the environment's own pip. What is not
    in the requirements of the package itself is not there."""
    _installer(venv, "install", *what)


def check_requirements(venv):
    """Of all packages of the environment: each is there, in a version that fits."""
    _installer(venv, "check")


def _installer(venv, verb, *what):
    if uv := os.environ.get("KCLRUN_UV"):
        command = [uv, "pip", verb, "--quiet", "--python", venv / "bin" / "python", *what]
    else:
        command = [venv / "bin" / "python", "-m", "pip", "--quiet", verb, *what]
    run(*command, cwd=venv.parent)


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
