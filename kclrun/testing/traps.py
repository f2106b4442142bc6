"""What a test would pass with, and production would not: outputs that the settings do not have, and
events from after their arrival."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from kclrun.errors import SettingsError
from kclrun.methods import unused_event_time
from kclrun.model.output import MAIN_OUTPUT, no_output
from kclrun.state.event_times import EventTimes
from kclrun.state.timers import Step

_KIT: Final = str(Path(__file__).parent)


class EventTimeWarning(UserWarning):
    """The `event_time` of records of a test is after their arrival, or is not a time: the watermark
    does not follow it, and windows stay open."""


def known_outputs(
    outputs: Iterable[str] | None, schema: str | Mapping[str, str] | None
) -> frozenset[str] | None:
    """The outputs of a test that names them; None if it does not. Raises: SettingsError for the
    schema of another."""
    if outputs is None:
        return None
    names = {MAIN_OUTPUT, *([outputs] if isinstance(outputs, str) else outputs)}
    for name in () if schema is None or isinstance(schema, str) else schema:
        if name not in names:
            raise SettingsError(f"schema: {no_output(name, names)}")
    return frozenset(names)


def warn_of_times(times: EventTimes, watermark: Step) -> None:
    """Warn, at the line of the test, of times that the watermark did not follow."""
    if times.ahead:
        warn_at_the_test(
            f"the event_time of {_records(times.ahead)} is after the arrival, by up to"
            f" {times.ahead_s_max:.0f} s: for the watermark the arrival counts, so that windows may"
            " stay open. Give the records an arrival behind the events, with `arrived_at_s` or"
            " `first_arrival_s`; or let event_time return seconds since the epoch"
        )
    if times.unusable and watermark.watermark is None and watermark.upcoming is None:
        warn_at_the_test(
            f"the event_time of {_records(times.unusable)} raised, or was not a time, and none"
            " moved the watermark: event timers do not fire, and windows stay open"
        )


def warn_of_unused_time(processor: object) -> None:
    """Warn, at the line of the test, of an `event_time` that is never called."""
    if words := unused_event_time(processor):
        warn_at_the_test(words)


def _records(number: int) -> str:
    return "1 record" if number == 1 else f"{number} records"


def warn_at_the_test(words: str, category: type[Warning] = EventTimeWarning) -> None:
    # The line of the test, however many functions of the kit are between.
    frame, level = sys._getframe(1), 2  # noqa: SLF001 - there is no public way
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_KIT):
        frame, level = frame.f_back, level + 1
    warnings.warn(words, category, stacklevel=level)
