"""Programs of the machine that a test starts: a slim image has few, and an ordinary user fewer."""

import shutil

import pytest


def missing(*programs):
    """Those that are not installed here."""
    return [program for program in programs if shutil.which(program) is None]


def needs(*programs):
    """Skip the test, in words, where one of these programs is not installed."""
    if absent := missing(*programs):
        pytest.skip(f"not installed here: {', '.join(absent)}")
