"""Implements Spark's data source API for the sink: `df.write` and `df.writeStream` of the format.

On the driver a writer is made for every batch: it checks options and columns, and gives the map of
open shards, at most 30 s old, to the tasks. `_Writer` describes delivery and order.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyspark.sql.datasource as api
from pyspark.sql.types import StructType

from kclrun.aws.kinesis import WireStreamAdmin
from kclrun.aws.put_records import WirePutter
from kclrun.errors import SettingsError
from kclrun.model.quotas import RECORD_BYTES_LARGEST
from kclrun.model.shard import Shard
from kclrun.ports import record_limit
from kclrun.producing.flow_control import Flow, ProducerSettings
from kclrun.producing.kinesis_producer import KinesisProducer
from kclrun.spark.option_reading import sink_settings
from kclrun.spark.options import SinkSettings, StreamAddress
from kclrun.spark.requests import connected
from kclrun.spark.sink.columns import check_columns
from kclrun.spark.sink.report import (
    BatchReport,
    TaskReport,
    batch_report,
    slowdown_line,
    task_report,
)
from kclrun.spark.sink.shards import list_open_shards, open_shards
from kclrun.spark.sink.writing import put_entries

# One task of the sink puts the rows of one partition into the stream, on an executor.
#
# The pace of each shard stays in the process: Spark keeps Python workers, and the next task of any
# partition begins with that pace.
# The same number of streams as a process keeps connections.
_STREAMS_MAX: Final = 16


def put_partition(
    settings: SinkSettings, shards: tuple[Shard, ...], batches: Iterator[pa.RecordBatch]
) -> TaskReport:
    """Put every row of one partition, in order; return once all are acknowledged.

    Raises: SinkError for a row that cannot be a record; Throttled or Unavailable once no record was
    accepted for `giveUpAfter`; AccessDenied, NotFound, InvalidRequest at once.
    """
    address = settings.address
    client = connected(address).client
    limit = settings.record_bytes_max or record_limit(WireStreamAdmin(client, address.stream))
    producer = KinesisProducer(
        WirePutter(client, address.stream),
        shards,
        ProducerSettings(
            keeps_order=settings.keeps_order,
            aggregates=settings.aggregates,
            give_up_after_s=settings.give_up_after_s,
            # `put_entries` has refused what is above the stream's own limit.
            record_bytes_max=settings.record_bytes_max or RECORD_BYTES_LARGEST,
        ),
        flow=_flow(address),
        relist=lambda: list_open_shards(address),
    )
    rows = 0
    try:
        for batch in batches:
            for entry in put_entries(batch, rows_before=rows, record_bytes_max=limit):
                producer.add(entry)
            rows += batch.num_rows
        producer.flush()
        return task_report(rows, producer.metrics())
    finally:
        producer.close()


# A Python worker runs one task at a time, so this is not locked.
_FLOWS: Final[OrderedDict[StreamAddress, Flow]] = OrderedDict()


def _flow(address: StreamAddress) -> Flow:
    flow = _FLOWS.setdefault(address, Flow())
    _FLOWS.move_to_end(address)
    if len(_FLOWS) > _STREAMS_MAX:
        _FLOWS.popitem(last=False)
    return flow


_LOG: Final = logging.getLogger("kclrun.spark.sink.writers")
# Only the process that commits micro-batches has loaded this module; processes that plan have not.
_COMMITTING: Final = "pyspark.sql.worker.python_streaming_sink_runner"
# PySpark 4.0 has no class of this name, and passes Arrow batches to any Arrow writer.
_StreamArrowWriter: Any = getattr(api, "DataSourceStreamArrowWriter", None) or type(
    "_StreamArrowWriter", (api.DataSourceArrowWriter, api.DataSourceStreamWriter), {}
)


def batch_writer(
    options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> api.DataSourceWriter:
    """The result of `DataSource.writer`.

    Raises: SettingsError for an option or a column that is refused, and for mode overwrite;
    NotFound, AccessDenied, Unavailable where the stream cannot be listed.
    """
    if overwrite:
        raise SettingsError(
            "a Kinesis stream cannot be overwritten, its records only expire: use"
            ' df.write.format("kclrun").mode("append")'
        )
    settings = _checked(options, schema)
    return _BatchWriter(settings, open_shards(settings.address))


def stream_writer(
    options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> api.DataSourceStreamWriter:
    """The result of `DataSource.streamWriter`; Spark calls it for each micro-batch, and once more
    to commit it.

    Raises: as `batch_writer`; SettingsError for output mode complete.
    """
    if overwrite:
        raise SettingsError(
            "output mode complete writes every row again in every batch, and a Kinesis stream"
            " cannot be overwritten: use append, or foreachBatch with kclrun.spark.write"
        )
    settings = _checked(options, schema)
    # A commit writes nothing: it must not fail because Kinesis is unavailable at that time.
    shards = () if _COMMITTING in sys.modules else open_shards(settings.address)
    return _StreamWriter(settings, shards)


class TaskDone(api.WriterCommitMessage):
    """The message of a successful task to the driver."""

    def __init__(self, report: TaskReport) -> None:
        self.report = report


class _Writer:
    """The common part of the writers of batches and of streams; travels to the tasks.

    On an executor `write` puts the rows of one partition and returns only once all are
    acknowledged. Otherwise it raises, and Spark tries the task again. So delivery is at least once:
    the records of a failed task are put again, and so is a batch whose query ended before its
    commit. Under `spark.speculation` two attempts may put the same rows at the same time.

    Order: within one partition the records of a key are put in the order of the rows, also while
    the stream throttles (unless `ordering` is none). The format does not bring the rows of a key
    together, because a Python sink cannot ask Spark for that; `kclrun.spark.write` does.

    Append only: a stream cannot be overwritten, and Spark does not pass update mode to Python
    sinks.
    """

    def __init__(self, settings: SinkSettings, shards: tuple[Shard, ...]) -> None:
        self._settings = settings
        self._shards = shards

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskDone:
        """Put one partition; return once every row is acknowledged. Raises: as `put_partition`."""
        return TaskDone(put_partition(self._settings, self._shards, iterator))

    def _log_commit(self, messages: Sequence[Any], batch: str) -> None:
        address = self._settings.address
        report = batch_report(
            message.report for message in messages if isinstance(message, TaskDone)
        )
        _SLOWED.log(address, f"stream {address.name}, {batch}", report)

    def _log_abort(self, messages: Sequence[Any], batch: str) -> None:
        done = [message.report for message in messages if isinstance(message, TaskDone)]
        _LOG.warning(
            "stream %s, %s: failed: %d of %d tasks had finished, their %d rows are in the stream;"
            " the others may have put some. All are put again if the batch is tried again",
            self._settings.address.name,
            batch,
            len(done),
            len(messages),
            sum(task.rows for task in done),
        )


class _BatchWriter(_Writer, api.DataSourceArrowWriter):
    def commit(self, messages: list[api.WriterCommitMessage | None]) -> None:
        self._log_commit(messages, "batch write")

    def abort(self, messages: list[api.WriterCommitMessage | None]) -> None:
        self._log_abort(messages, "batch write")


class _StreamWriter(_Writer, _StreamArrowWriter):  # type: ignore[misc]
    def commit(self, messages: list[api.WriterCommitMessage | None], batchId: int) -> None:
        self._log_commit(messages, f"batch {batchId}")

    def abort(self, messages: list[api.WriterCommitMessage | None], batchId: int) -> None:
        self._log_abort(messages, f"batch {batchId}")


class _Slowed:
    """The streams whose last batch was slowed, of the batches that this process committed."""

    def __init__(self) -> None:
        self._streams: dict[StreamAddress, None] = {}

    def log(self, address: StreamAddress, what: str, report: BatchReport) -> None:
        """Log the line about this batch, if it has one."""
        was_slow = address in self._streams
        line = slowdown_line(what, report, was_slow=was_slow)
        self._streams.pop(address, None)
        if report.was_slowed:
            self._streams[address] = None
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
