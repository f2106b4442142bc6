"""The query of one application: what it reads, what user code makes of it, where it is written.

Rule: the same query can be started again on the same checkpoint with another trigger: what user
code returned is built once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kclrun.config.schema import OutputSettings
from kclrun.errors import ProcessorLoadError, SettingsError
from kclrun.spark.engine.versions import Capabilities
from kclrun.spark.running.failures import own_failure_in
from kclrun.spark.running.progress import OBSERVED
from kclrun.spark.running.source_options import as_option_texts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["emitted_rows", "pipeline_result", "records_of", "start_query"]

# Shards of a batch that are counted exactly; far beyond what an account may have (20,000).
_SHARDS_COUNTED_MAX: Final = 100_000
_AVAILABLE_NOW: Final = "available-now"
_ASAP: Final = "asap"


def records_of(
    spark: SparkSession, options: Mapping[str, str], capabilities: Capabilities
) -> DataFrame:
    """The records of the stream, counted on their way for the report.

    Rows by shard are counted where this Spark has a sketch that can be observed, which is exact
    below its limit; else rows in all.
    """
    from pyspark.sql import functions as F  # noqa: N812 - the name it has in Spark's documents

    metrics = [
        F.count(F.lit(1)).alias("records"),
        F.sum(F.octet_length("data")).alias("bytes"),
    ]
    if capabilities.counts_by_value:
        top = f"approx_top_k(shardId, {_SHARDS_COUNTED_MAX}, {_SHARDS_COUNTED_MAX})"
        metrics.append(F.expr(top).alias("by_shard"))
    records = spark.readStream.format("kclrun").options(**options).load()
    return records.observe(OBSERVED, *metrics)


def pipeline_result(
    pipeline: Callable[..., Any], reference: str, records: DataFrame, options: Mapping[str, Any]
) -> DataFrame | StreamingQuery:
    """What the user's function makes of the records.

    Raises: ProcessorLoadError where it raises, or returns something else.
    """
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    given = (records, options)[: _parameters(pipeline)]
    try:
        result = pipeline(*given)
    except Exception as error:
        said = str(error).strip().split("\n", 1)[0]
        raise ProcessorLoadError(
            f"pipeline: {reference} raised {type(error).__name__}: {said}"
        ) from error
    if isinstance(result, StreamingQuery):
        return result
    if not isinstance(result, DataFrame) or not result.isStreaming:
        kind = "a DataFrame that is no stream" if isinstance(result, DataFrame) else type(result)
        raise ProcessorLoadError(
            f"pipeline: {reference} returned {kind}\n"
            "Return a DataFrame made of `records`, or a query that was started on it"
        )
    return result


def emitted_rows(rows: DataFrame, schema: str | None) -> DataFrame:
    """A processor's rows (JSON objects in the column `row`), typed where there is a schema.

    A row that does not have the schema's types fails the query, by name of the column.
    """
    from pyspark.sql import functions as F  # noqa: N812 - the name it has in Spark's documents

    if schema is None:
        return rows.select(F.col("row").alias("value"))
    parsed = F.from_json("row", schema, {"mode": "FAILFAST"})
    return rows.select(parsed.alias("row")).select("row.*")


def start_query(
    frame: DataFrame,
    *,
    name: str,
    output: OutputSettings | None,
    checkpoint: str,
    trigger: float | str,
    is_emitted: bool,
) -> StreamingQuery:
    """Begin to write `frame` to `output`, or nowhere. Raises: SettingsError where Spark refuses."""
    from pyspark.errors import AnalysisException, IllegalArgumentException

    writer = frame.writeStream.queryName(name).option("checkpointLocation", checkpoint)
    if output is None:
        writer = writer.format("noop")
    else:
        writer = writer.format(_format(output, is_emitted=is_emitted)).outputMode(output.mode)
        writer = writer.options(**as_option_texts(output.options))
        if output.partition_by:
            writer = writer.partitionBy(*output.partition_by)
        if output.path is not None:
            writer = writer.option("path", output.path)
    if trigger == _AVAILABLE_NOW:
        writer = writer.trigger(availableNow=True)
    elif trigger != _ASAP:
        writer = writer.trigger(processingTime=f"{round(float(trigger) * 1000)} milliseconds")
    try:
        return writer.start()
    except (AnalysisException, IllegalArgumentException) as error:
        ours = own_failure_in(str(error))  # of the sink's options, for instance
        if ours is not None:
            raise ours from error
        said = str(error).strip().split("\n", 1)[0]
        raise SettingsError(f"output: Spark cannot write the DataFrame so: {said}") from error


def _format(output: OutputSettings, *, is_emitted: bool) -> str:
    """JSON lines unless the settings say another; emitted rows without a schema are lines."""
    if is_emitted and output.schema is None and output.format in {None, "json"}:
        return "text"
    return output.format or "json"


def _parameters(pipeline: Callable[..., Any]) -> int:
    """How many arguments it takes: records, and options if it wants them."""
    try:
        inspect.signature(pipeline).bind(None, None)
    except TypeError:
        return 1
    return 2
