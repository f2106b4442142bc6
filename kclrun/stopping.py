"""How a stop goes, on either engine: in good order, and what each further signal makes of it.

Pure. Rule: a stop in good order is never cut short by us, only by its grace or by a person.

    first TERM or INT     finish what runs; the grace of `shutdown.grace` begins
    second TERM or INT    two seconds more
    QUIT                  no more patience
"""

from __future__ import annotations

import enum
import signal
from typing import Final

from kclrun.model.time import Instant

__all__ = ["Stage", "StopPlan"]

# As gunicorn and uvicorn users expect of the second Ctrl-C.
_HURRIED_S: Final = 2.0


class Stage(enum.Enum):
    """How far the stop is."""

    RUNNING = "running"
    DRAINING = "draining"
    HURRIED = "hurried"
    QUITTING = "quitting"


class StopPlan:
    """One run's stop. `force_instant` is when what still runs is cut short."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self.stage = Stage.RUNNING
        self.force_instant: Instant | None = None

    @property
    def is_wanted(self) -> bool:
        return self.stage is not Stage.RUNNING

    def drain(self, now: Instant) -> bool:
        """A stop is wanted; whether it is the first word of it."""
        if self.is_wanted:
            return False
        self.stage = Stage.DRAINING
        self.force_instant = Instant(now + self._grace_s)
        return True

    def finish_by(self, instant: Instant) -> None:
        """A wanted stop has until `instant` at the latest: the machine itself ends soon after."""
        assert self.force_instant is not None, "a stop is wanted"
        self.force_instant = min(self.force_instant, instant)

    def hurry(self, now: Instant) -> None:
        """Two seconds more, or what is left. Nobody who quits is called back."""
        if self.stage is Stage.QUITTING:
            return
        self.stage = Stage.HURRIED
        hurried = Instant(now + _HURRIED_S)
        self.force_instant = min(self.force_instant or hurried, hurried)

    def press(self, number: signal.Signals, now: Instant) -> Stage:
        """A stop signal came; the stage it led to."""
        if number is signal.SIGQUIT:
            self.stage = Stage.QUITTING
            self.force_instant = now
        elif self.stage in (Stage.DRAINING, Stage.HURRIED):
            self.hurry(now)
        else:
            self.drain(now)
        return self.stage

    def force_instant_from(self, now: Instant) -> Instant:
        """When the patience of a drain that begins now ends: the grace, or what is left of it."""
        graced = Instant(now + self._grace_s)
        return min(self.force_instant, graced) if self.force_instant is not None else graced

    def is_over(self, now: Instant) -> bool:
        """Whether the patience with what still runs has ended."""
        return self.force_instant is not None and now >= self.force_instant
