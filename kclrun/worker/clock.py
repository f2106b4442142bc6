"""The clock of fences. It runs through suspend and is the same for all processes of the host."""

from __future__ import annotations

import time

from kclrun.model.time import Instant


def boottime() -> Instant:
    """Seconds on CLOCK_BOOTTIME [P7]."""
    return Instant(time.clock_gettime(time.CLOCK_BOOTTIME))
