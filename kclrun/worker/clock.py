"""The clock of fences: runs through suspend, is the same for all processes of the host."""

from __future__ import annotations

import time

from kclrun.model.time import Instant

__all__ = ["boottime"]


def boottime() -> Instant:
    """Seconds on CLOCK_BOOTTIME [P7]."""
    return Instant(time.clock_gettime(time.CLOCK_BOOTTIME))
