"""Makes the query of one application: a DataFrame that can be started again, or a started query."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kclrun.config.destinations import OutputSettings
from kclrun.config.schema import (
    Settings,
    StartAtLeases,
)
from kclrun.config.units import parse_start
from kclrun.errors import ProcessorLoadError, SettingsError
from kclrun.loading import load_pipeline
from kclrun.model.sequence import LATEST, TRIM_HORIZON
from kclrun.model.time import WallTime
from kclrun.spark.engine.versions import Capabilities
from kclrun.spark.option_reading import Use, read_source_options, source_texts
from kclrun.spark.option_table import text_of
from kclrun.spark.options import SourceSettings, Start, StartKind
from kclrun.spark.running.failures import failure_of, own_failure_in
from kclrun.spark.running.progress import OBSERVED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


@contextmanager
def as_kclrun_errors() -> Iterator[None]:
    """Raises: a KclrunError in place of an exception of PySpark. Every call to the JVM can fail,
    also because the JVM is gone."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as error:
        raise failure_of(str(error) or f"the JVM is gone ({type(error).__name__})") from error


# The settings of the source, from `stream`, `start`, `aws`, `fetch` and `spark.source`. Pure.
#
# `config/rules.py` refuses a value in `spark.source` that is set elsewhere in the file.
def source_settings(settings: Settings, now: WallTime) -> SourceSettings:
    """The source of this application; `now` judges `start`.

    Raises: SettingsError for a `start` that lies in the future of `now`, and as the source for its
    options.
    """
    aws = settings.aws
    stream = "streamARN" if settings.only_stream.startswith("arn:") else "streamName"
    given = {
        stream: settings.only_stream,
        # An ARN contains its region; the option may not name another one.
        "region": aws.region if stream == "streamName" else None,
        "endpointUrl": aws.endpoints.get("kinesis", aws.endpoint),
        "roleArn": aws.role_arn,
        "pollInterval": settings.fetch.idle,
        **_consumer(settings),
        **_start(settings, now),
        **settings.spark.source,
    }
    present = {name: value for name, value in given.items() if value is not None}
    return read_source_options(present, Use.STREAM)


def _consumer(settings: Settings) -> dict[str, object]:
    if settings.fetch.mode == "polling":
        return {}
    name = settings.fetch.consumer or settings.application
    return {"consumerMode": settings.fetch.mode, "consumerName": name}


def as_option_texts(options: Mapping[str, str | int | float | bool]) -> dict[str, str]:
    """Options in the form that Spark takes."""
    return {name: text_of(value) for name, value in options.items()}


def _start(settings: Settings, now: WallTime) -> dict[str, object]:
    if isinstance(settings.start, StartAtLeases):
        url = settings.aws.endpoints.get("dynamodb", settings.aws.endpoint)
        return {"startingLeases": settings.start.leases, "startingLeasesEndpointUrl": url}
    start = parse_start(settings.start, now)
    if start.at is not None:
        at_ms = round(start.at * 1000)
        return {"startingOffsets": Start(StartKind.TIMESTAMP, timestamp_ms=at_ms)}
    kinds = {TRIM_HORIZON: StartKind.EARLIEST, LATEST: StartKind.LATEST}
    return {"startingOffsets": Start(kinds[start.sentinel])}


# The query of one application: its records, the result of user code, and the output.
#
# The result of user code is made once; the query can be started again on the same checkpoint with
# another trigger.
# So many shards of a batch are counted exactly; an account of AWS has 20,000 shards at most.
_SHARDS_COUNTED_MAX: Final = 100_000
AVAILABLE_NOW: Final = "available-now"
_ASAP: Final = "asap"


def records_of(
    spark: SparkSession, source: SourceSettings, capabilities: Capabilities
) -> DataFrame:
    """The records of the stream, counted on their way for the report.

    Rows are counted by shard where this Spark has a sketch that can be observed, which is exact
    below its limit; otherwise only in total.
    """
    from pyspark.sql import functions as F  # noqa: N812 - the name it has in Spark's documents

    metrics = [
        F.count(F.lit(1)).alias("records"),
        F.sum(F.octet_length("data")).alias("bytes"),
    ]
    if capabilities.counts_by_value:
        top = f"approx_top_k(shardId, {_SHARDS_COUNTED_MAX}, {_SHARDS_COUNTED_MAX})"
        metrics.append(F.expr(top).alias("by_shard"))
    records = spark.readStream.format("kclrun").options(**source_texts(source)).load()
    return records.observe(OBSERVED, *metrics)


def pipeline_result(
    pipeline: Callable[..., Any], reference: str, records: DataFrame, options: Mapping[str, Any]
) -> DataFrame | StreamingQuery:
    """The result of the user's function for the records.

    Raises: ProcessorLoadError where it raises, or returns another type.
    """
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    given = (records, options)[: _parameters(pipeline)]
    try:
        result = pipeline(*given)
    except Exception as error:
        first_line = str(error).strip().split("\n", 1)[0]
        raise ProcessorLoadError(
            f"pipeline: {reference} raised {type(error).__name__}: {first_line}"
        ) from error
    if isinstance(result, StreamingQuery):
        return result
    if not isinstance(result, DataFrame) or not result.isStreaming:
        kind = "a DataFrame that is not a stream" if isinstance(result, DataFrame) else type(result)
        raise ProcessorLoadError(
            f"pipeline: {reference} returned {kind}\n"
            "Return a DataFrame made of `records`, or a query that was started on it"
        )
    return result


def emitted_rows(rows: DataFrame, schema: str | None) -> DataFrame:
    """A processor's rows (JSON objects in the column `row`), typed where there is a schema.

    A row that does not have the schema's types fails the query; the error names the column.
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
    """Begin to write `frame` to `output`, if any. Raises: SettingsError if Spark refuses."""
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
    if trigger == AVAILABLE_NOW:
        writer = writer.trigger(availableNow=True)
    elif trigger != _ASAP:
        writer = writer.trigger(processingTime=f"{round(float(trigger) * 1000)} milliseconds")
    try:
        return writer.start()
    except (AnalysisException, IllegalArgumentException) as error:
        ours = own_failure_in(str(error))  # for instance an error of the sink's options
        if ours is not None:
            raise ours from error
        first_line = str(error).strip().split("\n", 1)[0]
        raise SettingsError(f"output: Spark cannot write the DataFrame so: {first_line}") from error


def _format(output: OutputSettings, *, is_emitted: bool) -> str:
    """JSON lines unless the settings name another format; emitted rows without schema are lines."""
    if is_emitted and output.schema is None and output.format in {None, "json"}:
        return "text"
    return output.format or "json"


def _parameters(pipeline: Callable[..., Any]) -> int:
    """The number of arguments: records, and options if the function takes them."""
    try:
        inspect.signature(pipeline).bind(None, None)
    except TypeError:
        return 1
    return 2


def made_query(
    settings: Settings, spark: SparkSession, paths: Sequence[Path], capabilities: Capabilities
) -> Query:
    """The pipeline's query, or that of the processor's emitted rows.

    Raises: ProcessorLoadError, SettingsError; and PySpark's errors for the source's options.
    """
    source = source_settings(settings, WallTime(time.time()))
    if settings.pipeline is not None:
        pipeline = load_pipeline(settings.pipeline, paths)
        records = records_of(spark, source, capabilities)
        made = pipeline_result(pipeline, settings.pipeline, records, settings.options)
        return Query(settings, made, is_emitted=False)
    from kclrun.spark.processors.source import processor_stream

    output = settings.output
    rows = processor_stream(spark, settings, source, paths)
    frame = emitted_rows(rows, output.schema if output is not None else None)
    return Query(settings, frame, is_emitted=True)


class Query:
    """A query that can be started once, or more often on the same checkpoint."""

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
        """Raises: SettingsError if Spark refuses."""
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
