"""Makes the format `kclrun`, or another name for it, known to a session."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from kclrun.errors import SettingsError
from kclrun.spark.engine.shipped import show_shipped_files_to_planners
from kclrun.spark.engine.versions import installed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]

_ALIAS: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}\Z")
# Spark keeps what installations make known apart, and lets nothing take their place.
_KNOWN_ALREADY: Final = "DATA_SOURCE_ALREADY_EXISTS"


def register(spark: SparkSession, alias: str | None = None) -> None:
    """Make `format("kclrun")` known to this session, and under `alias` too where one is given.

    An installed kclrun is known already, to every session on a driver that has it installed;
    this is for drivers that were only given it (`--py-files`), and for other names, such as
    `kinesis` where the platform has none of that name. May be called again.
    Raises: SettingsError for PySpark below 4.0, or a name that is none.
    """
    installed()
    from pyspark.errors import AnalysisException

    from kclrun.spark.source import KclrunDataSource

    show_shipped_files_to_planners()
    try:
        spark.dataSource.register(KclrunDataSource)
    except AnalysisException as error:
        if error.getCondition() != _KNOWN_ALREADY:  # by its installation
            raise
    if alias is not None:
        spark.dataSource.register(_aliased(KclrunDataSource, alias))


def _aliased(source: type[Any], alias: str) -> type[Any]:
    if not _ALIAS.match(alias):
        raise SettingsError(
            f"{alias[:60]!r} is no name for a format: expected a letter, then letters, digits,"
            " '_', '.' and '-'"
        )
    # Not to be found in any module, so it travels to the planner by value.
    return type("AliasedDataSource", (source,), {"name": classmethod(lambda _cls: alias)})
