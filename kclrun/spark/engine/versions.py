"""What each PySpark can do for the source and the sink, decided from its version text.

    4.2 and later   all of it
    4.0, 4.1        no admission control and no AvailableNow: Spark asks sources without a start
    before          no data sources in Python that fit: refused

Pure, but for `installed`, which asks the package.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from kclrun.errors import SettingsError

__all__ = ["Capabilities", "capabilities", "installed"]

_NUMBER: Final = re.compile(r"(\d+)\.(\d+)")
_FULL: Final = (4, 2)
_LEAST: Final = (4, 0)
_ARROW_STREAM_WRITER: Final = (4, 1)
_COUNTS_BY_VALUE: Final = (4, 1)


class Capabilities(msgspec.Struct, frozen=True):
    """What this PySpark offers.

    `says_start`: `latestOffset` is told where the query stands, and with how much it may go on.
    `stops_when_caught_up`: the trigger AvailableNow is passed on to the source.
    `streams_arrow_out`: a streaming sink may take Arrow record batches.
    `counts_by_value`: rows can be counted by value beside a query (`approx_top_k`).
    """

    version: str
    says_start: bool
    stops_when_caught_up: bool
    streams_arrow_out: bool
    counts_by_value: bool

    def require_available_now(self) -> None:
        """Raises: SettingsError where the trigger would read one batch and say it was all."""
        if not self.stops_when_caught_up:
            raise SettingsError(
                f"the trigger AvailableNow needs PySpark 4.2 or later; this is {self.version}\n"
                "Here, run the query with a processing-time trigger and stop it when its lag is 0"
            )


def capabilities(version: str) -> Capabilities:
    """What the PySpark of this version offers. Raises: SettingsError below 4.0."""
    match = _NUMBER.match(version)
    if match is None or (int(match[1]), int(match[2])) < _LEAST:
        raise SettingsError(
            f"kclrun needs PySpark 4.0 or later; found {version[:40]}\n"
            "Install it with: pip install 'kclrun[spark]', and run on a cluster of the same version"
        )
    found = (int(match[1]), int(match[2]))
    return Capabilities(
        version=version,
        says_start=found >= _FULL,
        stops_when_caught_up=found >= _FULL,
        streams_arrow_out=found >= _ARROW_STREAM_WRITER,
        counts_by_value=found >= _COUNTS_BY_VALUE,
    )


def installed() -> Capabilities:
    """What the PySpark of this environment offers. Raises: SettingsError if it is too old, or
    there is none."""
    try:
        import pyspark
    except ImportError:
        raise SettingsError(
            "PySpark is not installed in this environment\nInstall it: pip install 'kclrun[spark]'"
        ) from None
    return capabilities(pyspark.__version__)
