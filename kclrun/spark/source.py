"""The format `kclrun` in PySpark's data source API: it only translates.

`schema` runs in a short process of the driver at `load()`. The stream reader's offsets, partitions
and commits run in one process a query. `read` runs on executors, with a reader that was pickled
before its first request. Spark 4.2 and later pass the query's position to `latestOffset`; with
earlier Sparks the reader remembers the position.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)

from kclrun.errors import InvariantViolation, SettingsError
from kclrun.model.record import Record
from kclrun.spark.engine.versions import installed
from kclrun.spark.offsets import (
    Offset,
    ShardRange,
    decode_offset,
    encode_offset,
    pack,
    ranges_between,
)
from kclrun.spark.option_reading import Use, read_source_options
from kclrun.spark.options import SourceSettings, Start, StartKind
from kclrun.spark.stream_set import summaries_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kclrun.spark.offset_planner import OffsetPlanner


# Which shards, times and rows a batch read with filters (`where`) can leave out. Pure: PySpark's
# filters are known by the names of their classes.

# Far more than the jitter of arrival times, and only little extra data to read.
_MARGIN_MS: Final = 60_000
_HOUR_MS: Final = 3_600_000
_LATER: Final = frozenset({"GreaterThan", "GreaterThanOrEqual", "EqualTo"})
# The text columns, and the field of `Narrowing` for each.
_TEXTS: Final = {"stream": "streams", "shardId": "shard_ids", "partitionKey": "partition_keys"}
_EARLIER: Final = frozenset({"LessThan", "LessThanOrEqual", "EqualTo"})


class Narrowing(msgspec.Struct, frozen=True):
    """The values that a row must have; None is any. Times in milliseconds, without the margin.

    Spark judges every row again, so a filter may leave out too few rows and never too many. Arrival
    times need not grow within a shard, so times have a margin. A partition key does not determine a
    shard: a producer may have given an explicit hash key, and an aggregate travels under the key of
    another record. So a filter on the partition key leaves out rows, and no shard.
    """

    from_ms: int | None = None
    to_ms: int | None = None
    shard_ids: frozenset[str] | None = None
    partition_keys: frozenset[str] | None = None
    streams: frozenset[str] | None = None

    def narrowed(
        self, settings: SourceSettings, now_ms: int, created_ms: int, retention_hours: int
    ) -> SourceSettings:
        """The settings of a read that returns all matching rows.

        Start and end are narrowed only to times of which the stream certainly has all records.
        """
        start, end = settings.start, settings.end
        oldest_ms = max(created_ms, now_ms - retention_hours * _HOUR_MS) + _MARGIN_MS
        if self.from_ms is not None and start.kind in {StartKind.EARLIEST, StartKind.TIMESTAMP}:
            at_ms = min(self.from_ms, now_ms) - _MARGIN_MS
            if at_ms > max(oldest_ms, start.timestamp_ms):
                start = Start(StartKind.TIMESTAMP, at_ms)
        if self.to_ms is not None and end.kind in {StartKind.LATEST, StartKind.TIMESTAMP}:
            at_ms = self.to_ms + _MARGIN_MS
            is_earlier = end.kind is StartKind.LATEST or at_ms < end.timestamp_ms
            if oldest_ms < at_ms < now_ms - _MARGIN_MS and is_earlier:
                end = Start(StartKind.TIMESTAMP, at_ms)
        return dataclasses.replace(settings, start=start, end=end)

    def reads(self, stream: str, shard_id: str) -> bool:
        """Whether rows of this shard of this stream can match."""
        is_of_stream = self.streams is None or stream in self.streams
        return is_of_stream and (self.shard_ids is None or shard_id in self.shard_ids)

    def left(self, records: Sequence[Record]) -> Sequence[Record]:
        """The records that can match; aggregates must be opened."""
        if self.partition_keys is None:
            return records
        return [record for record in records if record.partition_key in self.partition_keys]


def narrowing_of(filters: Iterable[Any]) -> Narrowing:
    """The narrowing by all of the filters together; an unknown filter narrows nothing."""
    found = Narrowing()
    for pushed in filters:
        kind = type(pushed).__name__
        column: tuple[str, ...] = getattr(pushed, "attribute", ())
        if len(column) == 1 and column[0] in _TEXTS:
            values = _texts(kind, pushed)
            if values is not None:
                found = _with_texts(found, _TEXTS[column[0]], values)
        elif column == ("approximateArrivalTimestamp",):
            at_ms = _instant_ms(pushed)
            if at_ms is not None and kind in _LATER:
                found = msgspec.structs.replace(found, from_ms=max(at_ms, found.from_ms or at_ms))
            if at_ms is not None and kind in _EARLIER:
                to_ms = at_ms if found.to_ms is None else min(at_ms, found.to_ms)
                found = msgspec.structs.replace(found, to_ms=to_ms)
    return found


def _with_texts(found: Narrowing, field: str, values: frozenset[str]) -> Narrowing:
    former: frozenset[str] | None = getattr(found, field)
    both = values if former is None else former & values
    return msgspec.structs.replace(found, **{field: both})


def _texts(kind: str, given: Any) -> frozenset[str] | None:
    if kind == "EqualTo":
        values = (given.value,)
    elif kind == "In":
        values = given.value
    else:
        return None
    if not all(isinstance(value, str) for value in values):
        return None
    return frozenset(values)


def _instant_ms(given: Any) -> int | None:
    value = getattr(given, "value", None)
    # A time without a zone is in the session's zone, which is not known here.
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    return int(value.timestamp() * 1000)


# The limit that Spark gets: any limit but "all available", which stands for the trigger Once. The
# planner decides the real limit, so the number does not matter.
_BYTES_A_SHARD: Final = 64 * 2**20
# Only the PySpark process that passes filters on has loaded this module.
_PUSHING: Final = "pyspark.sql.worker.data_source_pushdown_filters"
_ALL_ROWS: Final = Narrowing()


class ShardsPartition(InputPartition):
    """The ranges of one task. Pickled with the task; its text has no iterator and no record."""

    def __init__(self, ranges: tuple[ShardRange, ...]) -> None:
        super().__init__(None)
        self.ranges = ranges

    def __repr__(self) -> str:
        named = ", ".join(
            f"{shard_range.shard_id} {shard_range.begin} to {shard_range.end}"
            for shard_range in self.ranges
        )
        return f"ShardsPartition({named})"


class KclrunDataSource(DataSource):
    """`format("kclrun")`: a stream read as a stream or over a range, or written to."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "kclrun"

    def schema(self) -> str:
        """The columns of records. `load()` calls it, so mistakes in the options are reported here.

        Raises: SettingsError for wrong options; NotFound, AccessDenied or Unavailable where the
        stream does not answer.
        """
        from kclrun.spark.executor.reading import SCHEMA
        from kclrun.spark.requests import connected, require_stream

        settings = read_source_options(self.options, Use.EITHER)
        for stream in settings.address.each():
            require_stream(connected(stream).admin, stream)
        return SCHEMA

    def streamReader(self, schema: StructType) -> StreamReader:
        """The reader of `spark.readStream`. Raises: SettingsError."""
        _refuse_other_columns(schema)
        return StreamReader(read_source_options(self.options, Use.STREAM))

    def reader(self, schema: StructType) -> BatchReader:
        """The reader of `spark.read`. Raises: SettingsError."""
        _refuse_other_columns(schema)
        settings = read_source_options(self.options, Use.BATCH)
        # PySpark refuses a reader that takes filters where the session has filters switched off. So
        # only its process for filters gets such a reader.
        return (_FilteredReader if _PUSHING in sys.modules else BatchReader)(settings)

    def writer(self, schema: StructType, overwrite: bool) -> Any:  # noqa: FBT001 - PySpark's
        """The writer of `df.write`. Raises: SettingsError."""
        from kclrun.spark.sink.writers import batch_writer

        return batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: FBT001
        """The writer of `df.writeStream`. Raises: SettingsError."""
        from kclrun.spark.sink.writers import stream_writer

        return stream_writer(self.options, schema, overwrite=overwrite)


class BatchReader(DataSourceReader):
    """One read over a range: its ends are found when the read is planned, once."""

    def __init__(self, settings: SourceSettings) -> None:
        self._settings = settings
        self._narrowing = Narrowing()

    def partitions(self) -> Sequence[InputPartition]:
        """The range's shards, distributed to tasks. Raises: ServiceError leaves, DataLoss."""
        planner = _open_planner(self._settings, self._narrowing)
        try:
            start, end = planner.bounded()
        finally:
            planner.close()
        packed = _packed(start, end, {}, self._settings, self._narrowing)
        # Without partitions Spark would pass a partition of its own, which has no ranges.
        return packed or [ShardsPartition(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition; on executors. Raises: as `read_ranges`."""
        return _rows(partition, self._settings, self._narrowing)


class _FilteredReader(BatchReader):
    """A batch read for which Spark has passed its filters (PySpark 4.1 and later)."""

    def pushFilters(self, filters: list[Any]) -> list[Any]:
        """Note the filters. Returns: all of them, so that Spark judges every row."""
        self._narrowing = narrowing_of(filters)
        return filters


class StreamReader(DataSourceStreamReader):
    """The stream as Spark's micro-batches request it; offsets are those of `offsets.py`."""

    def __init__(self, settings: SourceSettings) -> None:
        self._settings = settings
        self._passes_start = installed().passes_start
        self._planner: OffsetPlanner | None = None
        self._polls = settings.consumer is None
        self._stands_at: Offset | None = None
        self._was_asked = False

    def __getstate__(self) -> dict[str, Any]:
        # Executors get the settings, without connections and remembered state.
        return {**self.__dict__, "_planner": None, "_stands_at": None}

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins; the same at every call of this process."""
        return encode_offset(self._planned().initial_offset())

    def getDefaultReadLimit(self) -> Any:
        """The limit that Spark passes to `latestOffset` unless the trigger takes all at once."""
        from pyspark.sql.streaming.datasource import ReadMaxBytes, ReadMaxRows

        rows = self._settings.records_per_trigger_max
        if rows is not None:
            return ReadMaxRows(rows)
        return ReadMaxBytes(self._settings.bytes_per_trigger_max or _BYTES_A_SHARD)

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: Any = None
    ) -> dict[str, Any]:
        """The end of the next batch; `start` itself without new records, after a second at most.

        Raises: OffsetRefused for a checkpoint of another stream or of a newer version.
        """
        if start is None:
            return encode_offset(self._answer_without_start())
        begin = decode_offset(start)
        takes_all = limit is not None and type(limit).__name__ == "ReadAllAvailable"
        end = self._planned().latest_offset(begin, takes_all=takes_all)
        return start if end == begin else encode_offset(end)

    def prepareForTriggerAvailableNow(self) -> None:
        """From here on, only the records that exist now count as new. They are read by polling."""
        self._polls = True
        self._planned().prepare_available_now()

    def reportLatestOffset(self) -> dict[str, Any]:
        """Not an offset: lag, rates and throttles of every shard, for the query's progress."""
        return self._planned().report()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The batch (start, end], distributed to tasks: the same rows at every call.

        Raises: OffsetRefused for a checkpoint of another stream or of a newer version.
        """
        planner = self._planned()
        # A batch that the last run left unfinished is planned before any end is looked for.
        begin, finish = (planner.known(decode_offset(offset)) for offset in (start, end))
        self._stands_at = finish
        hints = planner.hints(begin, finish)
        return _packed(begin, finish, hints, self._settings)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition; on executors. Raises: as `read_ranges`."""
        return _rows(partition, self._settings)

    def commit(self, end: dict[str, Any]) -> None:
        """Spark has stored the batch that ends here."""
        self._stands_at = decode_offset(end)

    def stop(self) -> None:
        """The query has ended."""
        if self._planner is not None:
            self._planner.close()

    def _planned(self) -> OffsetPlanner:
        if self._planner is None:
            self._planner = _open_planner(self._settings, subscribes=not self._polls)
        return self._planner

    def _answer_without_start(self) -> Offset:
        """For PySpark 4.0 and 4.1: under AvailableNow and Once Spark calls a single time, and ends
        the query with success after that batch. Under other triggers the first call is the same. So
        the first answer of every run holds all existing records, whatever the limits."""
        if self._passes_start:
            raise InvariantViolation("Spark did not pass the query's position")
        begin = self._stands_at or self._planned().initial_offset()
        if self._was_asked:
            return self._planned().latest_offset(begin)
        end = self._planned().everything(begin)
        self._was_asked = True
        return end


def _open_planner(
    settings: SourceSettings, narrowing: Narrowing | None = None, *, subscribes: bool = False
) -> OffsetPlanner:
    from kclrun.spark.offset_planner import CALLS_AT_ONCE, OffsetPlanner
    from kclrun.spark.requests import connected
    from kclrun.spark.subscribed import SubscribedReader

    connection = connected(settings.address, CALLS_AT_ONCE)
    if narrowing is not None and narrowing != Narrowing():
        streams = summaries_of(connection.admin).values()
        created_ms = max(int(stream.created_at * 1000) for stream in streams)
        retention_hours = min(stream.retention_hours for stream in streams)
        now_ms = int(time.time() * 1000)
        settings = narrowing.narrowed(settings, now_ms, created_ms, retention_hours)
    leases = settings.start.leases
    table = None if leases is None else connection.lease_table(leases)
    reader = connection.reader
    if subscribes:
        assert settings.consumer is not None, "the options require it with fan-out"
        reader = SubscribedReader(
            reader,
            connection.subscriber(settings.consumer),
            now=time.monotonic,
            service_time=connection.client.service_time,
        )
    return OffsetPlanner(reader, connection.admin, settings, table=table)


def _packed(
    start: Offset,
    end: Offset,
    hints: Mapping[str, Any],
    settings: SourceSettings,
    narrowing: Narrowing = _ALL_ROWS,
) -> list[InputPartition]:
    ranges = [
        shard_range
        for shard_range in ranges_between(start, end, hints)
        if narrowing.reads(*settings.address.named(shard_range.shard_id))
    ]
    tasks = pack(ranges, settings.shards_per_task, settings.partitions_max)
    return [ShardsPartition(task) for task in tasks]


def _rows(
    partition: InputPartition, settings: SourceSettings, narrowing: Narrowing = _ALL_ROWS
) -> Iterator[pa.RecordBatch]:
    from kclrun.spark.executor.reading import read_ranges, record_batches
    from kclrun.spark.requests import connected

    assert isinstance(partition, ShardsPartition)
    connection = connected(settings.address)
    pages = read_ranges(connection.reader, partition.ranges, settings, admin=connection.admin)
    for page in pages:
        left = narrowing.left(page.records)
        yield from record_batches(left, *settings.address.named(page.range.shard_id))


def _refuse_other_columns(schema: StructType) -> None:
    """Spark would take a schema of the user in place of ours, and the rows would not fit it."""
    from pyspark.sql.pandas.types import from_arrow_schema

    from kclrun.spark.executor.reading import ARROW_SCHEMA, SCHEMA

    ours = from_arrow_schema(ARROW_SCHEMA)
    if [(column.name, column.dataType) for column in schema] != [
        (column.name, column.dataType) for column in ours
    ]:
        raise SettingsError(
            "the kclrun source has columns of its own: leave schema(…) out, and take what you"
            f" need with select\n  they are: {SCHEMA}"
        )


def _claim_available_now() -> None:
    """Spark 4.2 and later pass AvailableNow on to readers of this class; earlier ones lack it."""
    try:
        from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
    except ImportError:
        return
    SupportsTriggerAvailableNow.register(StreamReader)


_claim_available_now()
