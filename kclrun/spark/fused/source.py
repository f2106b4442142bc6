"""A `RecordProcessor` on Spark, fused in the reader: its emitted rows are the DataFrame.

The source's own reader, offsets and ranges; only what `read` makes of the records differs. A range
of a micro-batch is to the processor what the tenure of a lease is on the fleet:

    initialize            where the range begins, unless an instance of this Python worker stands
                          exactly there: then it goes on, with a greater fencing token
    process_records       all records of the range, in order
    shard_ended           where the range ends with its shard
    lease_lost            when an instance is found to stand elsewhere: another worker, or a
                          repetition, has had the shard since
    shutdown_requested    only after `context.release()`: a worker that Spark ends says nothing

Spark's commit of a micro-batch is the checkpoint; `checkpointer.checkpoint()` is checked and
remembered, not durable before. A task that is tried again, or twice at once (speculation), calls
`process_records` again: at least once for what the processor does elsewhere, exactly once for the
rows. They are those of whole tasks: do not put `limit` on the DataFrame, which leaves records
unread. A batch read has no order between parents and children, so there is none here.
Next: `task.py`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

from pyspark.sql.datasource import InputPartition

from kclrun.config.schema import Settings
from kclrun.consuming.error_policy import ErrorPolicy
from kclrun.errors import SettingsError
from kclrun.spark.executor.reading import ReadPage, read_ranges
from kclrun.spark.fused.emitting import ACK, ROW, SCHEMA
from kclrun.spark.fused.hosting import ProcessorJob
from kclrun.spark.fused.task import ProcessorTask
from kclrun.spark.fused.tenure import fencing_token
from kclrun.spark.options import Use, read_source_options
from kclrun.spark.ranges import ShardRange
from kclrun.spark.settings import SourceSettings
from kclrun.spark.source import KclrunDataSource, ShardsPartition, StreamReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

__all__ = [
    "OBSERVED",
    "ProcessorPartition",
    "ProcessorReader",
    "ProcessorSource",
    "processor_stream",
]

# The name of the observed metric: what tasks say of their ranges, in the query's progress.
OBSERVED: Final = "kclrun"
# An `Ack`, as Spark reads it.
_ACK_SCHEMA: Final = (
    "shardId string, records bigint, bytes bigint, rows bigint, position string, checkpoint string,"
    " processingS double"
)


def processor_stream(
    spark: SparkSession,
    settings: Settings,
    source_options: Mapping[str, str],
    paths: Sequence[Path],
) -> DataFrame:
    """The rows that `settings.processor` emits, as a streaming DataFrame.

    Columns: `shardId`; `sequenceNumber` and `subSequenceNumber` of the last record given when the
    row was emitted (SHARD_END from `shard_ended`); `row`, a JSON object. Rows of one shard and one
    micro-batch stand in the order of the calls, in one partition.
    `source_options` are those of `format("kclrun")`. The processor is imported on the executors:
    from `paths` where they exist there, else from what `--py-files`, a wheel or an archive brought.
    The query's progress has the observed metric `kclrun`: `records`, `bytes`, `rows`, and
    `by_shard` with item, count, bytes, rows, position, checkpoint and processingS.

    `checkpoint.every: manual` is refused by the rules of the settings: a processor cannot keep a
    checkpoint of its own here.
    Raises: SettingsError, and what `load()` of the source raises. The query ends with
    ProcessorLoadError where the class cannot be imported, with ProcessorError where it raised on
    every attempt: those of `on_error` within a task, then Spark's at the task.
    """
    assert settings.processor is not None, "the rules of the settings see to it"
    stream = read_source_options(source_options, Use.STREAM).reached.name
    job = ProcessorJob(
        application=settings.application,
        stream=stream,
        processor=settings.processor,
        paths=tuple(str(path) for path in paths),
        options=settings.options,
        batch_max=settings.fetch.batch_max,
        uncheckpointed_max=settings.checkpoint.uncheckpointed_max,
        on_error=ErrorPolicy(settings.on_error.retries, float(settings.on_error.backoff)),
        run=uuid.uuid4().hex,
    )
    source = _source_of(job)
    spark.dataSource.register(source)
    loaded = spark.readStream.format(source.name()).options(**source_options).load()
    return _observed(loaded).where(f"kind = '{ROW}'").drop("kind")


class ProcessorPartition(ShardsPartition):
    """The ranges of one task; `began_s` is when the query was started (seconds since the epoch)."""

    def __init__(self, ranges: tuple[ShardRange, ...], began_s: int) -> None:
        super().__init__(ranges)
        self.began_s = began_s


class ProcessorReader(StreamReader):
    """The stream's reader, with a processor between its records and Spark."""

    def __init__(self, settings: SourceSettings, job: ProcessorJob) -> None:
        super().__init__(settings)
        self._job = job
        self._began_s: int | None = None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """As the source's: the same records at every call."""
        if self._began_s is None:
            self._began_s = int(time.time())  # in the one process that plans for this query
        return [
            ProcessorPartition(each.ranges, self._began_s)
            for each in super().partitions(start, end)
            if isinstance(each, ShardsPartition)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs the processor over one partition; on executors. Raises: as `ProcessorTask.run`."""
        assert isinstance(partition, ProcessorPartition)
        self._job.user_code()  # before anything is asked of the stream
        task = ProcessorTask(self._job, _token(partition.began_s))
        return task.run(_pages(partition.ranges, self._settings))


class ProcessorSource(KclrunDataSource):
    """The source whose rows are emitted ones. Subclasses name the processor; see `_source_of`."""

    job: ClassVar[ProcessorJob]

    def schema(self) -> str:
        """As that of the source, with the columns of emitted rows."""
        super().schema()
        return SCHEMA

    def streamReader(self, schema: StructType) -> ProcessorReader:  # noqa: ARG002, N802 - PySpark's
        """The reader of the stream. Raises: SettingsError."""
        return ProcessorReader(read_source_options(self.options, Use.STREAM), self.job)

    def reader(self, schema: StructType) -> NoReturn:  # noqa: ARG002 - PySpark's
        """Refused: in one batch read, children would not wait for their parents."""
        raise SettingsError(
            "a RecordProcessor runs on a stream only; to read what is there and stop, use"
            " readStream with trigger(availableNow=True)"
        )


def _source_of(job: ProcessorJob) -> type[ProcessorSource]:
    """A format for one processor. What it is given stands in no option, and so in no plan."""
    name = f"kclrun-processor-{job.application}"
    # Not to be found in any module, so it travels to the planner by value, the job with it.
    members = {"name": classmethod(lambda _cls: name), "job": job}
    return type("BoundProcessorSource", (ProcessorSource,), members)


def _observed(loaded: DataFrame) -> DataFrame:
    """The rows, with the tasks' accounts of their ranges summed up beside them."""
    from pyspark.sql import functions as F  # noqa: N812 - the name it has in Spark's documents

    ack = F.when(F.col("kind") == ACK, F.from_json("row", _ACK_SCHEMA))
    by_shard = F.struct(
        F.col("shardId").alias("item"),
        ack["records"].alias("count"),
        *(ack[name].alias(name) for name in ("bytes", "rows", "position", "checkpoint")),
        ack["processingS"].alias("processingS"),
    )
    return loaded.observe(
        OBSERVED,
        *(F.sum(ack[name]).alias(name) for name in ("records", "bytes", "rows")),
        F.collect_list(F.when(F.col("kind") == ACK, by_shard)).alias("by_shard"),
    )


def _token(began_s: int) -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "read is called in a task"
    return fencing_token(began_s, context.taskAttemptId())


def _pages(
    ranges: tuple[ShardRange, ...], settings: SourceSettings
) -> Generator[ReadPage, None, None]:
    from kclrun.spark.connecting import connected

    connection = connected(settings.reached)
    yield from read_ranges(connection.reader, ranges, settings, admin=connection.admin)
