"""The data source of a `RecordProcessor` on Spark: the emitted rows are the DataFrame.

It uses the source's own reader, offsets and ranges; only `read` differs.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

import msgspec
from pyspark.sql.datasource import InputPartition

from kclrun.calling.method_checks import require_fit
from kclrun.config.policies import concurrency_of, error_policy
from kclrun.config.processing import ConcurrencySettings
from kclrun.config.schema import (
    FetchSettings,
    OnErrorSettings,
    Settings,
    stream_name,
)
from kclrun.config.state import state_place
from kclrun.emit_calls import emit_calls, refuse_unknown_outputs
from kclrun.errors import SettingsError
from kclrun.loading import decoded_options, load_decoding, load_processor
from kclrun.model.output import MAIN_OUTPUT
from kclrun.model.policies import Order, Then
from kclrun.ports import LetterStore
from kclrun.spark.engine.versions import installed
from kclrun.spark.executor.reading import ReadPage, read_ranges
from kclrun.spark.keyed.names import BEGINS, BatchState, QueryPlace, lineage_of, marked, unmarked
from kclrun.spark.keyed.query_state import FleetState, QueryState
from kclrun.spark.offsets import ShardRange, decode_offset
from kclrun.spark.option_reading import Use, read_source_options, source_texts
from kclrun.spark.options import SourceSettings
from kclrun.spark.processors.arguments import processor_settings
from kclrun.spark.processors.hosting import ACK, ROW, SCHEMA, ProcessorJob
from kclrun.spark.processors.range_progress import fencing_token
from kclrun.spark.processors.tasks import Keyed, ProcessorTask
from kclrun.spark.requests import connected
from kclrun.spark.source import KclrunDataSource, ShardsPartition, StreamReader
from kclrun.spark.stream_set import summaries_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

# An argument of `process` that is left out is what its setting is without a line in a file.
_CONCURRENCY: Final = ConcurrencySettings()
_FETCH: Final = FetchSettings()
_ON_ERROR: Final = OnErrorSettings()
# The name of the observed metric: the tasks' accounts of their ranges, in the query's progress.
OBSERVED: Final = "kclrun"
_APPLICATION: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")
_SUMS: Final = ("records", "bytes", "rows", "deadLetters", "skipped")
# An `RangeReport` in Spark's types.
_ACK_SCHEMA: Final = (
    "shardId string, records bigint, bytes bigint, rows bigint, position string, checkpoint string,"
    " processingS double, deadLetters bigint, skipped bigint"
)


def processor_stream(
    spark: SparkSession,
    settings: Settings,
    source: SourceSettings,
    paths: Sequence[Path],
) -> DataFrame:
    """The rows that `settings.processor` emits, as a streaming DataFrame.

    Columns: `shardId`; `sequenceNumber` and `subSequenceNumber` of the last record given when the
    row was emitted (SHARD_END from `shard_ended`); `row`, a JSON object. The rows of one shard in
    one micro-batch are in one partition, in the order of the calls. `source` is the stream and how
    it is read. The processor is imported on the executors: from `paths` where they exist there,
    else from `--py-files`, a wheel or an archive of the job. The query's progress has the observed
    metric `kclrun`: `records`, `bytes`, `rows`, `deadLetters`, `skipped`, and `by_shard` with item,
    count, bytes, rows, position, checkpoint and processingS.

    `checkpoint.every: manual` is refused by the rules of the settings: a processor cannot keep a
    checkpoint of its own here.
    Raises: SettingsError, and the errors of the source's `load()`. The query ends with
    ProcessorLoadError where the class cannot be imported, and with ProcessorError where it raised
    on every attempt: those of `on_error` within a task, then Spark's attempts at the task.
    """
    job = _job(
        settings,
        application=settings.application,
        stream=source.address.name,
        paths=paths,
        state=query_place(settings, source),
    )
    return _emitted(spark, job, source_texts(source))


def _job(
    settings: Settings,
    *,
    application: str,
    stream: str,
    paths: Sequence[str | Path],
    state: QueryPlace | None = None,
) -> ProcessorJob:
    assert settings.processor is not None, "the rules of the settings require it"
    return ProcessorJob(
        application=application,
        stream=stream,
        processor=settings.processor,
        paths=tuple(str(path) for path in paths),
        options=settings.options,
        batch_max=settings.fetch.batch_max,
        uncheckpointed_max=settings.checkpoint.uncheckpointed_max,
        on_error=error_policy(settings.on_error),
        concurrency=concurrency_of(settings.concurrency, settings),
        letters=settings.letter_place,
        decode=settings.decode,
        glue_url=settings.aws.url_of("glue"),
        schema=settings.output.schema if settings.output is not None else None,
        state=state,
        run=uuid.uuid4().hex,
    )


def query_place(settings: Settings, source: SourceSettings) -> QueryPlace | None:
    """Where the query's state is; None without state. Raises: SettingsError for a Spark that does
    not pass a query's position, in which the lineage of the state travels."""
    place = state_place(settings)
    if place is None:
        return None
    if not installed().passes_start:
        raise SettingsError("state: needs PySpark 4.2 or newer with engine: spark")
    if place.path is not None:  # executors may have another working folder
        place = msgspec.structs.replace(place, path=str(Path(place.path).absolute()))
    return QueryPlace(place, settings.application, stream_name(source.address.name))


def process(  # noqa: PLR0913 - public: the settings of the query, by name
    spark: SparkSession,
    processor: str,
    source: Mapping[str, str],
    *,
    options: Mapping[str, Any] | None = None,
    application: str | None = None,
    paths: Sequence[str | Path] = (),
    batch_max: int = _FETCH.batch_max,
    retries: int = _ON_ERROR.retries,
    backoff_s: float = float(_ON_ERROR.backoff),
    then: Then = _ON_ERROR.then,
    dead_letter: Mapping[str, str] | None = None,
    limit: int = _ON_ERROR.limit,
    decode: str | None = None,
    schema: str | None = None,
    concurrency: int | None = None,
    order: Order = _CONCURRENCY.order,
    timeout_s: float | None = None,
) -> DataFrame:
    """A `RecordProcessor` in a Spark program of one's own: the rows it emits, as a stream.

    `processor` is `module:Class`, imported on the driver now and on the executors later, from
    `paths` where they exist there, else from what the job brought (`--py-files`, a wheel).
    `source` are options of `format("kclrun")`, such as `{"streamName": "orders"}`; the processor
    finds `options` in `context.options`. `application` names it in `context` and in Spark's plans;
    the default is the class's name. Two queries of one session that run a class over the same
    stream need different names. A call gets `batch_max` records at most. A call that raises is
    repeated `retries` times, the first time after `backoff_s` seconds; then the task fails, and
    Spark tries it as often as `spark.task.maxFailures` allows. With `then="dead-letter"` or
    `"skip"` only the records at fault are given up, at most `limit` of a shard in ten minutes, and
    the batch goes on. `dead_letter` is the setting of that name, such as
    `{"s3": "s3://bucket/prefix"}`; a `path` must be a folder that all executors share. A letter is
    durable before its task ends, and may be kept again by another attempt at the task. `decode`,
    `schema`, `order` and `timeout_s` are the settings `decode`, `output.schema`,
    `concurrency.order` and `concurrency.timeout`. `concurrency` is how many records of a shard
    `process_record` gets at the same time.

    Columns: `shardId`, `sequenceNumber`, `subSequenceNumber` of the last record given when the row
    was emitted, and `row`, a JSON object. With several streams `stream` comes before them, because
    shards of two streams have the same ids. The rows are in the DataFrame exactly once. Everything
    else that the processor does happens at least once, because Spark may run a task again. Spark's
    commit of a batch is the checkpoint. Do not put `limit` on the DataFrame: it leaves records
    unread.
    Raises: ProcessorLoadError, SettingsError, and the errors of the source's `load()`.
    """
    stream = read_source_options(source, Use.STREAM).address.name
    settings = processor_settings(
        processor,
        stream.split(","),
        options=options,
        batch_max=batch_max,
        retries=retries,
        backoff_s=backoff_s,
        then=then,
        dead_letter=dead_letter,
        limit=limit,
        decode=decode,
        schema=schema,
        concurrency=concurrency,
        order=order,
        timeout_s=timeout_s,
    )
    folders = [Path(path) for path in paths]
    user_code = load_processor(processor, folders)
    # Only to check them.
    load_decoding(decode, user_code, folders, lambda: bytes)
    decoded_options(user_code, settings.options)
    refuse_unknown_outputs(emit_calls(user_code), [MAIN_OUTPUT])
    named = application or user_code.__name__
    if not _APPLICATION.match(named):
        raise SettingsError(f"application: expected letters, digits, '_', '.', '-', not {named!r}")
    job = _job(settings, application=named, stream=stream, paths=paths)
    require_fit(user_code, processor, job.concurrency, is_manual=False)
    return _emitted(spark, job, source)


def _emitted(
    spark: SparkSession, job: ProcessorJob, source_options: Mapping[str, str]
) -> DataFrame:
    source = _source_of(job)
    spark.dataSource.register(source)
    loaded = spark.readStream.format(source.name()).options(**source_options).load()
    emitted = _observed(loaded).where(f"kind = '{ROW}'").drop("kind")
    # With one stream, an additional column would change the tables of existing queries.
    return emitted if "," in job.stream else emitted.drop("stream")


class ProcessorPartition(ShardsPartition):
    """The ranges of one task; `began_s` is when the query was started (seconds since the epoch).
    `state` is of the shards of these ranges."""

    def __init__(
        self, ranges: tuple[ShardRange, ...], began_s: int, state: BatchState | None = None
    ) -> None:
        super().__init__(ranges)
        self.began_s = began_s
        self.state = state


class ProcessorReader(StreamReader):
    """The stream's reader, with a processor between its records and Spark.

    For the processor, a range of a micro-batch is like a lease that one process holds on the fleet:

        initialize            where the range begins. An instance of this Python worker whose
                              position is exactly there continues instead, with a greater fencing
                              token
        process_records       all records of the range, in order
        shard_ended           where the range ends with its shard
        lease_lost            when an instance is found at another position: another worker, or a
                              repetition, has had the shard since
        shutdown_requested    only after `context.release()`; not when Spark ends a worker

    Spark's commit of a micro-batch is the checkpoint. `checkpointer.checkpoint()` is checked and
    remembered, and is not durable before that commit. A task that is tried again, or runs twice at
    once (speculation), calls `process_records` again: the processor's own effects happen at least
    once, the rows appear exactly once. The rows are those of whole tasks: do not put `limit` on the
    DataFrame, which leaves records unread. A batch read does not order parents before children, so
    it is refused.
    """

    def __init__(self, settings: SourceSettings, job: ProcessorJob) -> None:
        super().__init__(settings)
        self._job = job
        self._began_s: int | None = None
        self._state: QueryState | None = None
        self._lineage = uuid.uuid4().hex  # of a query that begins now

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_state": None}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - PySpark's name
        """As in the source. With state it carries an empty lineage; the first end has the real
        one."""
        offset = super().initialOffset()
        return offset if self._job.state is None else marked(offset, BEGINS)

    def latestOffset(  # noqa: N802 - PySpark's name
        self, start: dict[str, Any] | None = None, limit: Any = None
    ) -> dict[str, Any]:
        """As in the source. Raises: SettingsError for a checkpoint of a query without state."""
        if self._job.state is None or start is None:
            return super().latestOffset(start, limit)
        lineage = self._lineage_of(start)
        bare = unmarked(start)
        end = super().latestOffset(bare, limit)
        return start if end is bare else marked(end, lineage or self._lineage)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """As in the source: the same records at every call. The state that the query begins with is
        durable before its first batch is read."""
        if self._began_s is None:
            self._began_s = int(time.time())  # in the one process that plans for this query
        found = [
            partition.ranges
            for partition in super().partitions(start, end)
            if isinstance(partition, ShardsPartition)
        ]
        lineage = lineage_of(end)
        if self._job.state is None or not lineage:
            return [ProcessorPartition(ranges, self._began_s) for ranges in found]
        state = self._kept_state(self._job.state, self._began_s)
        if self._lineage_of(start) != lineage:
            state.begin(lineage, decode_offset(start), decode_offset(end))
        return [
            ProcessorPartition(
                ranges,
                self._began_s,
                state.batch(lineage, [shard_range.shard_id for shard_range in ranges]),
            )
            for ranges in found
        ]

    def commit(self, end: dict[str, Any]) -> None:
        """As in the source; versions of the state that no batch reads any more are removed."""
        super().commit(end)
        lineage = lineage_of(end)
        if self._state is not None and lineage:
            self._state.committed(lineage, decode_offset(end))

    def _lineage_of(self, start: Mapping[str, Any]) -> str | None:
        lineage = lineage_of(start)
        assert self._job.state is not None, "asked with state only"
        if lineage is None and not self._job.state.place.may_begin_empty:
            raise SettingsError(
                "the checkpoint is of a query without state: its records were processed without it."
                " To begin with an empty state at its position, set state.begin: empty; to have the"
                " state of those records, too, begin with a new spark.checkpoint"
            )
        return lineage

    def _kept_state(self, place: QueryPlace, began_s: int) -> QueryState:
        if self._state is None:
            connection, leases = connected(self._settings.address), self._settings.start.leases

            def fleet() -> FleetState:
                from kclrun.spark.offset_planner import leases_of  # which executors do not need

                assert leases is not None, "asked with leases only"
                table = connection.lease_table(leases)
                rows = leases_of(table, leases.table, summaries_of(connection.admin))
                return FleetState(rows, connection.versions(place.place, place.folder_of_fleet))

            self._state = QueryState(
                lambda lineage: connection.versions(place.place, place.folder(lineage)),
                self._planned().shards,
                None if leases is None else fleet,
                token=fencing_token(began_s, 0),
                retain_s=place.place.retain_s,
                may_begin_empty=place.place.may_begin_empty,
            )
        return self._state

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs the processor over one partition; on executors. Raises: as `ProcessorTask.run`."""
        assert isinstance(partition, ProcessorPartition)
        self._job.user_code()  # before any request for the stream
        task = ProcessorTask(
            self._job,
            _token(partition.began_s),
            letters=self._letters,
            registry=lambda: connected(self._settings.address).registry(self._job.glue_url),
            keyed=self._keyed(partition.state),
        )
        return task.run(_pages(partition.ranges, self._settings))

    def _keyed(self, batch: BatchState | None) -> Keyed | None:
        place = self._job.state
        if place is None or batch is None:
            return None
        folder = place.folder(batch.lineage)
        return Keyed(
            batch,
            place.place.max_bytes,
            lambda: connected(self._settings.address).versions(place.place, folder),
        )

    def _letters(self) -> LetterStore:
        return connected(self._settings.address).letters(self._job.letters)


class ProcessorSource(KclrunDataSource):
    """The source of emitted rows. A subclass has the job: see `_source_of`."""

    job: ClassVar[ProcessorJob]

    def schema(self) -> str:
        """The columns of emitted rows; checks and raises as the source does."""
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
    """A format for one processor. Its arguments are in no option, and therefore in no plan."""
    name = f"kclrun-processor-{job.application}"
    # The class is not in any module, so it travels to the planner by value, the job with it.
    members = {"name": classmethod(lambda _cls: name), "job": job}
    return type("BoundProcessorSource", (ProcessorSource,), members)


def _observed(loaded: DataFrame) -> DataFrame:
    """The rows, and beside them the sums of the tasks' accounts of their ranges."""
    from pyspark.sql import functions as F  # noqa: N812 - the name it has in Spark's documents

    report = F.when(F.col("kind") == ACK, F.from_json("row", _ACK_SCHEMA))
    by_shard = F.struct(
        F.col("shardId").alias("item"),
        report["records"].alias("count"),
        *(report[name].alias(name) for name in ("bytes", "rows", "position", "checkpoint")),
        report["processingS"].alias("processingS"),
    )
    return loaded.observe(
        OBSERVED,
        *(F.sum(report[name]).alias(name) for name in _SUMS),
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
    connection = connected(settings.address)
    yield from read_ranges(connection.reader, ranges, settings, admin=connection.admin)
