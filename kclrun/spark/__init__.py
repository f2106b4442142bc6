"""Kinesis on Spark, in Python: a source, a sink, and the runner of `engine: spark`.

Holds, from the inside out: nouns and decisions that are pure and know no Spark (`positions.py`,
`offsets.py`, `ranges.py`, `settings.py`, `options.py`, `lineage.py`, `scout/`); what asks Kinesis
(`scouting.py` on the driver, `executor/` in tasks); what translates to PySpark's data source API
(`source.py`, `sink/`, `fused/` for processors); Spark itself (`engine/`) and its runs (`running/`).
May know: `aws`, `sinks`, `observe` and everything below them. May not know: the manager, the lease
processes. Rule: the rows of a batch are a function of its two offsets, always.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kclrun.spark.engine.registering import register
    from kclrun.spark.engine.session import open_session
    from kclrun.spark.sink.writing import write

__all__ = ["open_session", "register", "write"]

# Found on first use: the nouns and decisions of this room are imported without PySpark.
_HOMES: Final = {
    "open_session": "engine.session",
    "register": "engine.registering",
    "write": "sink.writing",
}


def __getattr__(name: str) -> Any:
    """A public function. Raises: SettingsError if PySpark is missing or below 4.0."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kclrun.spark.engine.versions import installed

    installed()
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
