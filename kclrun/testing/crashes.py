"""The exceptions that end a run of the test kit: all others are those of user code."""

from __future__ import annotations

from typing import Final

# What a test ends with in the middle of a call: `pytest.fail` and `pytest.skip`, and Hypothesis.
_OF_TESTS: Final = frozenset({"_pytest", "hypothesis"})


class Crash(BaseException):
    """The process ends here. Not an Exception, so that `except Exception` does not catch it."""


def ends_test(error: BaseException) -> bool:
    """Whether this error ends the run: a crash, Ctrl-C, and what ends the test itself. Production
    gives a call again whatever else it raised, also a SystemExit."""
    if isinstance(error, Exception):
        return False
    if isinstance(error, Crash | KeyboardInterrupt):
        return True
    packages = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return not packages.isdisjoint(_OF_TESTS)
