"""Whether a person looks on: then a run has a live table, and its log lines are text above it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kclrun.config.schema import Settings
    from kclrun.observe.snapshot import Snapshot

__all__ = ["OnSnapshot", "watched"]

OnSnapshot = Callable[["Snapshot"], None]


@contextmanager
def watched(settings: Settings) -> Iterator[tuple[Settings, OnSnapshot | None]]:
    """For the time of a run: its settings, and whom to give snapshots to, if anybody."""
    if not (settings.log.format == "auto" and sys.stdout.isatty() and sys.stderr.isatty()):
        yield settings, None
        return
    from kclrun.cli.live_display import LiveDisplay

    # Log lines go through the display, as text: their descriptor is then no terminal any more.
    log = msgspec.structs.replace(settings.log, format="text")
    with LiveDisplay() as display:
        yield msgspec.structs.replace(settings, log=log), display.show
