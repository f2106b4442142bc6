"""Times on the command line. Every option that asks for a time has one of these two types: a
duration (`30s`, `2h`), or a time in the past (an instant, a date, a duration for so long ago, now).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click
import msgspec

from kclrun.config.units import TIME_FORMS, Duration, StartPosition, parse_time
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import WallTime, utc_text

C = TypeVar("C", bound=Callable[..., Any])


class DurationType(click.ParamType[Duration]):
    """Seconds, parsed by `config.units.Duration`."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Duration:
        if isinstance(value, Duration):
            return value
        try:
            return Duration.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


DURATION: Final = DurationType()
_NUMBER: Final = re.compile(r"(?:0|[1-9][0-9]{0,128})\Z")


def is_sequence_number(text: str) -> bool:
    """Whether this is the sequence number of a record, for the option of a `TimeType`."""
    return _NUMBER.match(text) is not None


class GivenTime(msgspec.Struct, frozen=True):
    """A time of the command line. `text` means the same later, too: for `10m`, which `is_relative`,
    it is the instant. `start` None: one of the other forms that the option takes, such as a
    file."""

    text: str
    start: StartPosition | None = None
    is_relative: bool = False

    @property
    def at(self) -> WallTime | None:
        """The instant; None for a position such as LATEST."""
        return None if self.start is None else self.start.at


class TimeType(click.ParamType[GivenTime]):
    """A time in the past, or one of `sentinels`, read by `config.units.parse_time`. A text that
    `is_other` accepts is left as it is."""

    name = "time"

    def __init__(
        self,
        *sentinels: ExtendedSequenceNumber,
        is_other: Callable[[str], bool] = lambda _: False,
        older: re.Pattern[str] | None = None,
    ) -> None:
        """`older`: a form without a zone that the option took as UTC, and still takes."""
        self._sentinels = sentinels
        self._is_other = is_other
        self._older = older

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> GivenTime:
        if isinstance(value, GivenTime):
            return value
        if self._is_other(value):
            return GivenTime(value)
        if self._older is not None and self._older.fullmatch(value):
            value = f"{value}Z"
        try:
            start = parse_time(value, WallTime(time.time()), self._sentinels)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if start.at is None:
            return GivenTime(start.sentinel.sequence_number, start)
        if "T" in value:
            return GivenTime(value, start)
        is_relative = "-" not in value
        return GivenTime(utc_text(start.at, "milliseconds"), start, is_relative)


def time_option(
    *names: str,
    help_text: str,
    kind: TimeType | None = None,
    metavar: str = "TIME",
    required: bool = False,
    default: str | None = None,
) -> Callable[[C], C]:
    """An option that takes a time; its help names the forms."""
    return click.option(
        *names,
        type=kind or TimeType(),
        metavar=metavar,
        required=required,
        default=default,
        help=f"{help_text} TIME: {TIME_FORMS}.",
    )
