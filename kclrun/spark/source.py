"""The format `kclrun` in PySpark's data source API: translation, and nothing else.

Where Spark runs what: `schema` in a short process of the driver at `load()`; the stream reader's
offsets, partitions and commits in one process a query; `read` on executors, with a reader that was
pickled before it had asked anything. Spark 4.2 and later tell `latestOffset` where the query
stands; before, `_Standing` remembers it. Look next: `scouting.py`, `executor/reading.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)

from kclrun.errors import InvariantViolation, SettingsError
from kclrun.spark.engine.versions import installed
from kclrun.spark.offsets import Offset, decode_offset, encode_offset
from kclrun.spark.options import Use, read_source_options
from kclrun.spark.ranges import ShardRange, pack, ranges_between
from kclrun.spark.settings import SourceSettings

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kclrun.spark.scouting import Scouting

__all__ = ["BatchReader", "KclrunDataSource", "ShardsPartition", "StreamReader"]

# What Spark is told to limit batches by, where no option does: any limit but "all available",
# which stands for the trigger Once; the number itself is the scouting's business.
_BYTES_A_SHARD: Final = 64 * 2**20


class ShardsPartition(InputPartition):
    """What one task reads. Pickled with the task; its text names no iterator and no record."""

    def __init__(self, ranges: tuple[ShardRange, ...]) -> None:
        super().__init__(None)
        self.ranges = ranges

    def __repr__(self) -> str:
        named = ", ".join(f"{each.shard_id} {each.begin} to {each.end}" for each in self.ranges)
        return f"ShardsPartition({named})"


class KclrunDataSource(DataSource):
    """`format("kclrun")`: a stream read as a stream or over a range, or written to."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "kclrun"

    def schema(self) -> str:
        """The columns of records. Called by `load()`, so it is here that mistakes are told.

        Raises: SettingsError for wrong options; NotFound, AccessDenied or Unavailable where the
        stream does not answer.
        """
        from kclrun.spark.checking import require_stream
        from kclrun.spark.connecting import connected
        from kclrun.spark.executor.rows import SCHEMA

        settings = read_source_options(self.options, Use.EITHER)
        require_stream(connected(settings.reached).admin, settings.reached)
        return SCHEMA

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 - PySpark's name
        """The reader of `spark.readStream`. Raises: SettingsError."""
        _refuse_other_columns(schema)
        return StreamReader(read_source_options(self.options, Use.STREAM))

    def reader(self, schema: StructType) -> BatchReader:
        """The reader of `spark.read`. Raises: SettingsError."""
        _refuse_other_columns(schema)
        return BatchReader(read_source_options(self.options, Use.BATCH))

    def writer(self, schema: StructType, overwrite: bool) -> Any:  # noqa: FBT001 - PySpark's
        """The writer of `df.write`. Raises: SettingsError."""
        from kclrun.spark.sink.writers import batch_writer

        return batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: FBT001, N802
        """The writer of `df.writeStream`. Raises: SettingsError."""
        from kclrun.spark.sink.writers import stream_writer

        return stream_writer(self.options, schema, overwrite=overwrite)


class BatchReader(DataSourceReader):
    """One read over a range: its ends are found when the read is planned, once."""

    def __init__(self, settings: SourceSettings) -> None:
        self._settings = settings

    def partitions(self) -> Sequence[InputPartition]:
        """The range's shards, shared out to tasks. Raises: ServiceError leaves, DataLoss."""
        scouting = _scouting(self._settings)
        try:
            start, end = scouting.bounded()
        finally:
            scouting.close()
        packed = _packed(start, end, {}, self._settings)
        # Spark gives the reader of no partition one of its own, which has no ranges.
        return packed or [ShardsPartition(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition; on executors. Raises: as `read_ranges`."""
        return _rows(partition, self._settings)


class StreamReader(DataSourceStreamReader):
    """The stream as Spark's micro-batches ask for it; offsets are those of `offsets.py`."""

    def __init__(self, settings: SourceSettings) -> None:
        self._settings = settings
        self._says_start = installed().says_start
        self._scouting: Scouting | None = None
        self._stands_at: Offset | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Executors get the settings, and nothing that is connected or remembered.
        return {**self.__dict__, "_scouting": None, "_stands_at": None}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - PySpark's name
        """Where a query without a checkpoint begins; the same at every call of this process."""
        return encode_offset(self._scouts().initial_offset())

    def getDefaultReadLimit(self) -> Any:  # noqa: N802 - PySpark's name
        """What Spark passes to `latestOffset` unless the trigger is to take all at once."""
        from pyspark.sql.streaming.datasource import ReadMaxBytes, ReadMaxRows

        rows = self._settings.records_per_trigger_max
        if rows is not None:
            return ReadMaxRows(rows)
        return ReadMaxBytes(self._settings.bytes_per_trigger_max or _BYTES_A_SHARD)

    def latestOffset(  # noqa: N802 - PySpark's name
        self, start: dict[str, Any] | None = None, limit: Any = None
    ) -> dict[str, Any]:
        """Where the next batch ends; `start` itself where nothing is new, after a second at most.

        Raises: OffsetRefused for a checkpoint of another stream or of a newer version.
        """
        begin = self._remembered() if start is None else decode_offset(start)
        takes_all = limit is not None and type(limit).__name__ == "ReadAllAvailable"
        end = self._scouts().latest_offset(begin, takes_all=takes_all)
        if end == begin and start is not None:
            return start
        return encode_offset(end)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - PySpark's name
        """From here on, only what is in the stream now is new."""
        self._scouts().prepare_available_now()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - PySpark's name
        """Not an offset: lag, rates and throttles of every shard, for the query's progress."""
        return self._scouts().report()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The batch (start, end], shared out to tasks: the same rows at every call.

        Raises: OffsetRefused for a checkpoint of another stream or of a newer version.
        """
        begin, finish = decode_offset(start), decode_offset(end)
        self._stands_at = finish
        scouting = self._scouts()
        # A batch that the last run left over is planned before any end is looked for.
        scouting.check(finish)
        hints = scouting.hints(begin, finish)
        return _packed(begin, finish, hints, self._settings)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition; on executors. Raises: as `read_ranges`."""
        return _rows(partition, self._settings)

    def commit(self, end: dict[str, Any]) -> None:
        """Spark has stored the batch that ends here."""
        self._stands_at = decode_offset(end)

    def stop(self) -> None:
        """The query has ended."""
        if self._scouting is not None:
            self._scouting.close()

    def _scouts(self) -> Scouting:
        if self._scouting is None:
            self._scouting = _scouting(self._settings)
        return self._scouting

    def _remembered(self) -> Offset:
        if self._says_start:
            raise InvariantViolation("Spark did not say where the query stands")
        return self._stands_at or self._scouts().initial_offset()


def _scouting(settings: SourceSettings) -> Scouting:
    from kclrun.spark.connecting import connected
    from kclrun.spark.scouting import CALLS_AT_ONCE, Scouting

    connection = connected(settings.reached, CALLS_AT_ONCE)
    leases = settings.start.leases
    table = None if leases is None else connection.lease_table(leases)
    return Scouting(connection.reader, connection.admin, settings, table=table)


def _packed(
    start: Offset, end: Offset, hints: Mapping[str, Any], settings: SourceSettings
) -> list[InputPartition]:
    ranges = ranges_between(start, end, hints)
    tasks = pack(ranges, settings.shards_per_task, settings.partitions_max)
    return [ShardsPartition(task) for task in tasks]


def _rows(partition: InputPartition, settings: SourceSettings) -> Iterator[pa.RecordBatch]:
    from kclrun.spark.connecting import connected
    from kclrun.spark.executor.reading import read_ranges
    from kclrun.spark.executor.rows import record_batches

    assert isinstance(partition, ShardsPartition)
    connection = connected(settings.reached)
    pages = read_ranges(connection.reader, partition.ranges, settings, admin=connection.admin)
    for page in pages:
        yield from record_batches(page.records, settings.reached.name, page.range.shard_id)


def _refuse_other_columns(schema: StructType) -> None:
    """A schema that the user gave replaces ours unseen, and rows would not fit it."""
    from pyspark.sql.pandas.types import from_arrow_schema

    from kclrun.spark.executor.rows import ARROW_SCHEMA, SCHEMA

    ours = from_arrow_schema(ARROW_SCHEMA)
    if [(each.name, each.dataType) for each in schema] != [
        (each.name, each.dataType) for each in ours
    ]:
        raise SettingsError(
            "the kclrun source has columns of its own: leave schema(…) out, and take what you"
            f" need with select\n  they are: {SCHEMA}"
        )


def _claim_available_now() -> None:
    """Spark 4.2 and later pass AvailableNow on to readers of this class; before, there is none."""
    try:
        from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
    except ImportError:
        return
    SupportsTriggerAvailableNow.register(StreamReader)


_claim_available_now()
