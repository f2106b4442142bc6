"""The sink as Spark's data source API wants it: `df.write` and `df.writeStream` of format kclrun.

On the driver a writer is made for every batch: options and columns are checked, and the map of
open shards, at most 30 s old, is given to the tasks. On an executor `write` puts the rows of one
partition and returns only once all are acknowledged; it raises otherwise, and Spark tries the task
again. So delivery is at least once: what a failed task had put is put again, and so is a batch
whose query ended before its commit. Under `spark.speculation` two attempts may put the same rows at
the same time.

Order: within one partition the records of a key are put in the order of the rows, also while the
stream throttles (unless `ordering` is none). The format does not bring the rows of a key together,
because Spark lets no Python sink ask for that; `kclrun.spark.write` does.

Append only: a stream cannot be overwritten, and Spark passes update mode to no Python sink.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyspark.sql.datasource as api
from pyspark.sql.types import StructType

from kclrun.errors import SettingsError
from kclrun.model.shard import Shard
from kclrun.spark.settings import Reached
from kclrun.spark.sink.columns import check_columns
from kclrun.spark.sink.options import SinkSettings, sink_settings
from kclrun.spark.sink.report import BatchReport, TaskReport, batch_report, slowdown_line
from kclrun.spark.sink.shards import open_shards
from kclrun.spark.sink.task import put_partition

__all__ = ["TaskDone", "batch_writer", "stream_writer"]

_LOG: Final = logging.getLogger("kclrun.spark.sink.writers")
# As many streams as a process keeps connections.
_STREAMS_MAX: Final = 16
# The process that only commits micro-batches has loaded this module; no process that plans has.
_COMMITTING: Final = "pyspark.sql.worker.python_streaming_sink_runner"
# PySpark 4.0 has no class of this name, and hands Arrow batches to whatever is an Arrow writer.
_StreamArrowWriter: Any = getattr(api, "DataSourceStreamArrowWriter", None) or type(
    "_StreamArrowWriter", (api.DataSourceArrowWriter, api.DataSourceStreamWriter), {}
)


def batch_writer(
    options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> api.DataSourceWriter:
    """What `DataSource.writer` returns.

    Raises: SettingsError for an option or a column that is refused, and for mode overwrite;
    NotFound, AccessDenied, Unavailable where the stream cannot be listed.
    """
    if overwrite:
        raise SettingsError(
            "a Kinesis stream cannot be overwritten, its records only expire: use"
            ' df.write.format("kclrun").mode("append")'
        )
    settings = _checked(options, schema)
    return _BatchWriter(settings, open_shards(settings.reached))


def stream_writer(
    options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> api.DataSourceStreamWriter:
    """What `DataSource.streamWriter` returns; Spark calls it for each micro-batch, and once more
    to commit it.

    Raises: as `batch_writer`; SettingsError for output mode complete.
    """
    if overwrite:
        raise SettingsError(
            "output mode complete writes every row again in every batch, and a Kinesis stream"
            " cannot be overwritten: use append, or foreachBatch with kclrun.spark.write"
        )
    settings = _checked(options, schema)
    # A commit writes nothing: it must not fail because Kinesis is away just then.
    shards = () if _COMMITTING in sys.modules else open_shards(settings.reached)
    return _StreamWriter(settings, shards)


class TaskDone(api.WriterCommitMessage):
    """What a task that put everything tells the driver."""

    def __init__(self, report: TaskReport) -> None:
        self.report = report


class _Writer:
    """What writers of batches and of streams have in common; travels to the tasks."""

    def __init__(self, settings: SinkSettings, shards: tuple[Shard, ...]) -> None:
        self._settings = settings
        self._shards = shards

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskDone:
        """Put one partition; return once every row is acknowledged. Raises: as `put_partition`."""
        return TaskDone(put_partition(self._settings, self._shards, iterator))

    def _tell(self, messages: Sequence[Any], batch: str) -> None:
        reached = self._settings.reached
        report = batch_report(each.report for each in messages if isinstance(each, TaskDone))
        _SLOWED.tell(reached, f"stream {reached.name}, {batch}", report)

    def _tell_abort(self, messages: Sequence[Any], batch: str) -> None:
        done = [each.report for each in messages if isinstance(each, TaskDone)]
        _LOG.warning(
            "stream %s, %s: failed: %d of %d tasks had finished, their %d rows are in the stream;"
            " the others may have put some. All are put again if the batch is tried again",
            self._settings.reached.name,
            batch,
            len(done),
            len(messages),
            sum(each.rows for each in done),
        )


class _BatchWriter(_Writer, api.DataSourceArrowWriter):
    def commit(self, messages: list[api.WriterCommitMessage | None]) -> None:
        self._tell(messages, "batch write")

    def abort(self, messages: list[api.WriterCommitMessage | None]) -> None:
        self._tell_abort(messages, "batch write")


class _StreamWriter(_Writer, _StreamArrowWriter):  # type: ignore[misc]
    def commit(self, messages: list[api.WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        self._tell(messages, f"batch {batchId}")

    def abort(self, messages: list[api.WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        self._tell_abort(messages, f"batch {batchId}")


class _Slowed:
    """The streams whose last batch was slowed, as far as this process committed it."""

    def __init__(self) -> None:
        self._streams: dict[Reached, None] = {}

    def tell(self, reached: Reached, what: str, report: BatchReport) -> None:
        """Log the line that a batch is worth, if it is."""
        was_slow = reached in self._streams
        line = slowdown_line(what, report, was_slow=was_slow)
        self._streams.pop(reached, None)
        if report.was_slowed:
            self._streams[reached] = None
            if len(self._streams) > _STREAMS_MAX:
                del self._streams[next(iter(self._streams))]
        if line is not None:
            _LOG.log(logging.INFO if was_slow else logging.WARNING, "%s", line)
        _LOG.debug("%s: %s", what, report)


_SLOWED: Final = _Slowed()


def _checked(options: Mapping[str, str], schema: StructType) -> SinkSettings:
    settings = sink_settings(options)
    check_columns([(field.name, field.dataType.simpleString()) for field in schema.fields])
    return settings
