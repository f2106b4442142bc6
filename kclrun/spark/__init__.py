"""Kinesis on Spark, in Python: a source, a sink, and the runner of `engine: spark`.

The rows of a batch are always a function of its two offsets. The modules for positions, offsets,
options, lineage and planning are pure and do not know Spark. The package does not know the lease
manager or the lease processes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kclrun.spark.engine.session import open_session, register
    from kclrun.spark.listening import LagListener, SourceLag
    from kclrun.spark.processors.source import process
    from kclrun.spark.sink.writing import write

__all__ = ["LagListener", "SourceLag", "open_session", "process", "register", "write"]

# Imported on first use, so that the pure modules of this package can be imported without PySpark.
_HOMES: Final = {
    "LagListener": "listening",
    "SourceLag": "listening",
    "open_session": "engine.session",
    "process": "processors.source",
    "register": "engine.session",
    "write": "sink.writing",
}


def __getattr__(name: str) -> Any:
    """A public name. Raises: SettingsError if PySpark is missing or below 4.0."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kclrun.spark.engine.versions import installed

    installed()
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
