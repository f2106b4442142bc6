"""Durations on the command line, written as in the configuration: `30s`, `5m`, `1m30s`."""

from __future__ import annotations

from typing import Any, Final

import click

from kclrun.config.units import Duration

__all__ = ["DURATION"]


class _DurationType(click.ParamType[Duration]):
    """Seconds, as `config.units.Duration` reads them."""

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


DURATION: Final = _DurationType()
