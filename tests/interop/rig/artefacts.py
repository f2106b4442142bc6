"""What Maven fetches and builds: a consumer on each KCL, and DynamoDB Local.

Artefacts go to Maven's own cache, class files to `$KCLRUN_INTEROP_BUILD`, else a folder beside it;
nothing binary is committed. A build is kept while the sources and versions stay.
"""

import fcntl
import hashlib
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from tests.support.programs import missing, run_to_end

# Of SQLite's native library there are builds for these alone.
_SQLITE_MACHINES = {"x86_64": "libsqlite4java-linux-amd64"}
_PROJECT = Path(__file__).parents[1] / "java"
# Some 180 MB come from Maven Central at the first build.
_FETCH_MAX_S = 900


class NotToBeHad(Exception):
    """No Java, no Maven, or no answer from its repository: the text says which."""


def consumer_classpath(version):
    """The class path of the consumer on this KCL. Raises: NotToBeHad."""
    folder = _built("kcl", version)
    return f"{folder / 'classes'}{os.pathsep}{(folder / 'classpath').read_text()}"


def dynamodb_local(port):
    """The command that serves DynamoDB Local in memory. Raises: NotToBeHad."""
    library = _SQLITE_MACHINES.get(platform.machine())
    if library is None:
        raise NotToBeHad(f"DynamoDB Local has no SQLite for {platform.machine()}")
    classpath = (_built("dynamodb", "") / "classpath").read_text()
    natives = next(Path(each).parent for each in classpath.split(os.pathsep) if library in each)
    return [
        *("java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
        *(f"-Dsqlite4java.library.path={natives}", "-cp", classpath),
        *("com.amazonaws.services.dynamodbv2.local.main.ServerRunner", "-inMemory"),
        *("-sharedDb", "-port", str(port), "-disableTelemetry"),
    ]


def kclpy(version):
    """The Python of an environment that holds amazon_kclpy, and the class path of its daemon. Its
    jars come from Maven Central while pip builds it. Raises: NotToBeHad."""
    folder = _kept("kclpy", version, version, _install)
    python = folder / "venv" / "bin" / "python"
    jars = sorted((folder / "venv").glob("lib/python3*/site-packages/amazon_kclpy/jars/*.jar"))
    return python, os.pathsep.join(map(str, jars))


def async_kinesis(version):
    """The Python of an environment that holds async-kinesis. Raises: NotToBeHad."""
    return _kept("async-kinesis", version, version, _install) / "venv" / "bin" / "python"


def _built(profile, version):
    return _kept(profile, version or "local", _fingerprint(), _build)


def _kept(kind, version, fingerprint, make):
    """A folder that `make(kind, version, folder)` has filled, now or for the same fingerprint."""
    if absent := missing("java", "javac", "mvn"):
        raise NotToBeHad(f"not installed: {', '.join(absent)} (a JDK of 17 or newer, and Maven)")
    root = Path(
        os.environ.get("KCLRUN_INTEROP_BUILD", Path.home() / ".m2" / "kclrun-interop")
    ).resolve()
    folder = root / f"{kind}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    # Two programs started at once must not build into each other.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = folder / "stamp"
        if not stamp.exists() or stamp.read_text() != fingerprint:
            make(kind, version, folder)
            stamp.write_text(fingerprint)
    return folder


_PACKAGES = {"kclpy": "amazon_kclpy", "async-kinesis": "async-kinesis"}


def _install(kind, version, folder):
    package = f"{_PACKAGES[kind]}=={version}"
    venv = folder / "venv"
    pip = [venv / "bin" / "python", "-m", "pip", "install", "-q", "setuptools"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", venv],
        [*pip, package],
    ):
        done = run_to_end(command, timeout_s=_FETCH_MAX_S)
        if done.returncode:
            last = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
            raise NotToBeHad(f"{package} could not be installed:\n{last}")


def _fingerprint():
    sources = sorted(path for path in _PROJECT.rglob("*") if path.is_file())
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


def _build(profile, version, folder):
    goals = ["dependency:build-classpath", f"-Dmdep.outputFile={folder / 'classpath'}"]
    if profile == "kcl":
        goals = ["compile", *goals, f"-Dkcl.version={version}"]
    command = ["mvn", "-q", "-B", f"-P{profile}", f"-Dbuild.folder={folder}", *goals]
    try:
        done = run_to_end(command, cwd=_PROJECT, timeout_s=_FETCH_MAX_S)
    except subprocess.TimeoutExpired as error:
        raise NotToBeHad(f"Maven was not done within {_FETCH_MAX_S} s") from error
    if done.returncode:
        raise maven_failure(done.stdout + done.stderr)


# What Maven says where its repository does not answer, or a JDK is older than 17. All else, a wrong
# version or a source that does not compile, is a failure of the test.
_NOT_HERE = (
    "Could not transfer",
    "Could not resolve",
    "No plugin found for prefix",
    "in offline mode",
    "invalid target release",
    "release version 17 not supported",
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def maven_failure(printed):
    """The error that Maven's last words stand for: NotToBeHad or RuntimeError."""
    lines = [line for line in _COLOUR.sub("", printed).splitlines() if line.strip()]
    for line in lines:
        if any(words in line for words in _NOT_HERE):
            return NotToBeHad(f"Maven: {line.removeprefix('[ERROR] ')}")
    return RuntimeError("Maven failed:\n" + "\n".join(lines[-8:]))
