"""How a stop goes on Spark: after the running batch, or when the patience is over.

Pure. Rule: a batch that runs is committed unless its grace ends or a person cuts it short; what
was not committed is read again.

    first TERM or INT     end after the running batch; the grace of `shutdown.grace` begins
    second TERM or INT    two seconds more
    QUIT                  at once
"""

from __future__ import annotations

import enum
import signal
from typing import Final

from kclrun.model.time import Instant

__all__ = ["Stage", "StopPlan"]

# As on the fleet, and as gunicorn and uvicorn users expect of the second Ctrl-C.
_HURRIED_S: Final = 2.0


class Stage(enum.Enum):
    """How far the stop is."""

    RUNNING = "running"
    DRAINING = "draining"
    HURRIED = "hurried"
    QUITTING = "quitting"


class StopPlan:
    """One run's stop. `force_instant` is when the running batch is cut short."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self.stage = Stage.RUNNING
        self.force_instant: Instant | None = None

    @property
    def is_wanted(self) -> bool:
        return self.stage is not Stage.RUNNING

    def press(self, number: signal.Signals, now: Instant) -> Stage:
        """A stop signal came; the stage it led to."""
        if number is signal.SIGQUIT:
            self.stage = Stage.QUITTING
            self.force_instant = now
        elif self.stage is Stage.RUNNING:
            self.stage = Stage.DRAINING
            self.force_instant = Instant(now + self._grace_s)
        elif self.force_instant is not None and self.stage is not Stage.QUITTING:
            self.stage = Stage.HURRIED
            self.force_instant = min(self.force_instant, Instant(now + _HURRIED_S))
        return self.stage

    def is_over(self, now: Instant) -> bool:
        """Whether the patience with the running batch has ended."""
        return self.force_instant is not None and now >= self.force_instant
