"""The exceptions that end a run of the test kit: all others are those of user code."""

from __future__ import annotations

import itertools
from typing import Final

from kclrun.calling.in_memory.ends import Ends

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


class Crashes(Ends):
    """The process ends after so many records, or in the call of `checkpoint()` with this number."""

    def __init__(self, after: int | None, at_checkpoint: int | None) -> None:
        self._after = after
        self._at_checkpoint = at_checkpoint
        self._returned = itertools.count(1)
        self._checkpoints = itertools.count(1)

    def are_reached_by(self, error: BaseException) -> bool:
        return ends_test(error)

    def batch_max(self, delivered: int) -> int | None:
        return None if self._after is None else max(1, self._after - delivered)

    def given(self, count: int) -> None:
        if self._after is not None and count >= self._after:
            raise Crash

    def returned(self) -> None:
        if next(self._returned) == self._after:
            raise Crash

    def all_given(self) -> None:
        if self._after == 0:
            raise Crash

    def checkpointing(self) -> None:
        if next(self._checkpoints) == self._at_checkpoint:
            raise Crash
