"""What the settings name, made once: a DataFrame that can be started again, or a started query."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kclrun.config.schema import Settings
from kclrun.errors import SettingsError
from kclrun.loading import load_pipeline
from kclrun.model.time import WallTime
from kclrun.spark.engine.versions import Capabilities
from kclrun.spark.running.building import emitted_rows, pipeline_result, records_of, start_query
from kclrun.spark.running.source_options import source_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Query", "made_query"]


def made_query(
    settings: Settings, spark: SparkSession, paths: Sequence[Path], capabilities: Capabilities
) -> Query:
    """The pipeline's query, or that of the processor's emitted rows.

    Raises: ProcessorLoadError, SettingsError; and what PySpark raises for the source's options.
    """
    options = source_options(settings, WallTime(time.time()))
    if settings.pipeline is not None:
        pipeline = load_pipeline(settings.pipeline, paths)
        records = records_of(spark, options, capabilities)
        made = pipeline_result(pipeline, settings.pipeline, records, settings.options)
        return Query(settings, made, is_emitted=False)
    from kclrun.spark.fused.source import processor_stream

    output = settings.output
    rows = processor_stream(spark, settings, options, paths)
    frame = emitted_rows(rows, output.schema if output is not None else None)
    return Query(settings, frame, is_emitted=True)


class Query:
    """What is started, once or more often on the same checkpoint."""

    def __init__(
        self, settings: Settings, made: DataFrame | StreamingQuery, *, is_emitted: bool
    ) -> None:
        self._settings = settings
        self._made = made
        self._is_emitted = is_emitted
        if self._started is not None and settings.until is not None:
            self._started.stop()
            raise SettingsError(
                "until: caught-up needs a pipeline that returns a DataFrame: kclrun cannot change"
                " the trigger of a query that is started already"
            )
        if self._started is None and settings.output is None and not is_emitted:
            raise SettingsError(
                "output: is missing, and the pipeline returned a DataFrame\n"
                "Say where its rows go, such as output: {path: out, format: parquet}"
            )

    @property
    def _started(self) -> StreamingQuery | None:
        from pyspark.sql.streaming.query import StreamingQuery

        return self._made if isinstance(self._made, StreamingQuery) else None

    def start(self, trigger: float | str) -> StreamingQuery:
        """Raises: SettingsError where Spark refuses."""
        started = self._started
        if started is not None:
            return started
        assert self._settings.spark.checkpoint is not None, "the rules of the settings ask for it"
        return start_query(
            self._made,  # type: ignore[arg-type]
            name=self._settings.application,
            output=self._settings.output,
            checkpoint=self._settings.spark.checkpoint,
            trigger=trigger,
            is_emitted=self._is_emitted,
        )
