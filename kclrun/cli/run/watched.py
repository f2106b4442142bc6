"""The live table of a run on a terminal, with the log lines as text above it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kclrun.config.schema import Settings
    from kclrun.local.filling import Filling
    from kclrun.observe.sample import ManagerSample

OnSample = Callable[["ManagerSample"], None]


@contextmanager
def watched(
    settings: Settings, filling: Callable[[], Filling | None] = lambda: None
) -> Iterator[tuple[Settings, OnSample | None]]:
    """The settings for a run, and the function that takes its samples (None without a terminal).

    `filling` returns the progress of the fill of an embedded stream.
    """
    if not (settings.log.format == "auto" and sys.stdout.isatty() and sys.stderr.isatty()):
        yield settings, None
        return
    from kclrun.cli.run.live_table import Bars, LiveDisplay

    # Log lines go through the display as text, because their descriptor is not a terminal then.
    log = msgspec.structs.replace(settings.log, format="text")
    bars = Bars(filling, is_until=settings.until is not None)
    with LiveDisplay(bars) as display:
        yield msgspec.structs.replace(settings, log=log), display.show
