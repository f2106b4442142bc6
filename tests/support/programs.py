"""Programs and packages that a test needs: a slim image has few, and an ordinary user fewer."""

import contextlib
import shutil
import subprocess
from importlib.util import find_spec

import psutil
import pytest

from tests.patience import HUNG_S

# `bin/test --quick` does without: PySpark is a source of 450 MB that pip builds.
HAS_SPARK = find_spec("pyspark") is not None
needs_spark = pytest.mark.skipif(not HAS_SPARK, reason="needs PySpark; bin/test installs it")


def missing(*programs):
    """Those that are not installed here."""
    return [program for program in programs if shutil.which(program) is None]


def needs(*programs):
    """Skip the test, in words, where one of these programs is not installed."""
    if absent := missing(*programs):
        pytest.skip(f"not installed here: {', '.join(absent)}")


def started(command, log_path, **how):
    """A program that runs on; all that it writes is added to a file."""
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            **how,
        )


def run_to_end(command, *, timeout_s=HUNG_S, **how):
    """Run a program: how it ended, and both its outputs as text. A limit says that it hangs."""
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=timeout_s, **how
    )


def end_family(process):
    """Kill a program that a test started, and all that it started, whatever became of the test."""
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait(HUNG_S)
