"""How a stop goes: drain, then the end of patience; and what each further signal makes of it.

Pure. Rule: a stop in good order is never cut short by us, only by its grace or by a person.

    first TERM or INT     drain; the grace of `shutdown.grace` begins
    second TERM or INT    two seconds more
    QUIT                  no more patience: processes are ended, rows left to expire
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from typing import Final

from kclrun.model.time import Instant

__all__ = ["Stage", "StopPlan", "next_force"]

# As gunicorn and uvicorn users expect of the second Ctrl-C.
_HURRIED_S: Final = 2.0
# After ABRT, the time to write the stacks of all threads; then KILL, which nothing survives.
_LAST_WORDS_S: Final = 1.0
# After the last process was forced, for the releases of its rows: a write and one retry.
_LAST_WRITES_S: Final = 5.0


class Stage(enum.Enum):
    """How far the stop is."""

    RUNNING = "running"
    DRAINING = "draining"
    HURRIED = "hurried"
    QUITTING = "quitting"


class StopPlan:
    """One manager's stop. `force_instant` is when lease processes are forced."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self.stage = Stage.RUNNING
        self.force_instant: Instant | None = None

    def drain(self, now: Instant) -> bool:
        """A stop is wanted; whether it is the first word of it."""
        if self.stage is not Stage.RUNNING:
            return False
        self.stage = Stage.DRAINING
        self.force_instant = Instant(now + self._grace_s)
        return True

    def press(self, number: signal.Signals, now: Instant) -> Stage:
        """A stop signal came; the stage it led to."""
        if number is signal.SIGQUIT:
            self.stage = Stage.QUITTING
            self.force_instant = now
        elif self.stage in (Stage.DRAINING, Stage.HURRIED):
            self.stage = Stage.HURRIED
            hurried = Instant(now + _HURRIED_S)
            self.force_instant = min(self.force_instant or hurried, hurried)
        elif self.stage is Stage.RUNNING:
            self.drain(now)
        return self.stage

    def force_instant_from(self, now: Instant) -> Instant:
        """When the patience of a drain that begins now ends: the grace, or what is left of it."""
        graced = Instant(now + self._grace_s)
        return min(self.force_instant, graced) if self.force_instant is not None else graced

    @property
    def leave_instant(self) -> Instant | None:
        """When to leave, whatever is still open: rows of ours then expire."""
        if self.force_instant is None:
            return None
        return Instant(self.force_instant + _LAST_WORDS_S + _LAST_WRITES_S)


def next_force(
    force_instant: Instant | None, forced: Sequence[signal.Signals]
) -> tuple[signal.Signals | None, Instant | None]:
    """The next signal for a process whose patience ends at `force_instant`, and when it is due."""
    if force_instant is None or signal.SIGKILL in forced:
        return None, None
    if signal.SIGABRT in forced:
        return signal.SIGKILL, Instant(force_instant + _LAST_WORDS_S)
    return signal.SIGABRT, force_instant
