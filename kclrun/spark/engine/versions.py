"""The capabilities of each PySpark for the source and the sink, decided from its version text.

    4.2 and later   all of them
    4.0, 4.1        without admission control: Spark passes no start to sources, and under
                    AvailableNow calls once for the whole run, so the first answer of a run is
                    complete
    before          refused: no fitting data sources in Python

Pure, except for `installed`, which asks the package.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from kclrun.errors import SettingsError

_NUMBER: Final = re.compile(r"(\d+)\.(\d+)")
_FULL: Final = (4, 2)
_LEAST: Final = (4, 0)
_COUNTS_BY_VALUE: Final = (4, 1)


class Capabilities(msgspec.Struct, frozen=True):
    """The capabilities of one PySpark.

    `passes_start`: `latestOffset` gets the query's position and the limit of the next batch.
    `counts_by_value`: rows can be counted by value beside a query (`approx_top_k`).
    """

    version: str
    passes_start: bool
    counts_by_value: bool


def capabilities(version: str) -> Capabilities:
    """The capabilities of this version of PySpark. Raises: SettingsError below 4.0."""
    match = _NUMBER.match(version)
    if match is None or (int(match[1]), int(match[2])) < _LEAST:
        raise SettingsError(
            f"kclrun needs PySpark 4.0 or later; found {version[:40]}\n"
            "Install it with: pip install 'kclrun[spark]', and run on a cluster of the same version"
        )
    found = (int(match[1]), int(match[2]))
    return Capabilities(
        version=version,
        passes_start=found >= _FULL,
        counts_by_value=found >= _COUNTS_BY_VALUE,
    )


def installed() -> Capabilities:
    """The capabilities of the installed PySpark. Raises: SettingsError if it is too old or
    missing."""
    try:
        import pyspark
    except ImportError:
        raise SettingsError(
            "PySpark is not installed in this environment\nInstall it: pip install 'kclrun[spark]'"
        ) from None
    return capabilities(pyspark.__version__)
