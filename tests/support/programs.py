"""Programs and packages that a test needs: a slim image has few, and an ordinary user fewer."""

import shutil
from importlib.util import find_spec

import pytest

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
