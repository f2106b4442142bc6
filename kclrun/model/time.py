"""Two kinds of time that must not be mixed, and so have two types."""

from __future__ import annotations

from typing import NewType

__all__ = ["Instant", "WallTime"]

# Seconds on CLOCK_BOOTTIME of this host: counts through suspend, so a fence holds after a resume.
Instant = NewType("Instant", float)
# Seconds since the epoch, by the service's clock where it gave one, else by the host's.
WallTime = NewType("WallTime", float)
