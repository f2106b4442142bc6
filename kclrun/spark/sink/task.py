"""One task of the sink: the rows of one partition into the stream, on an executor.

Returns only once every row is acknowledged. What it learnt of the shards' pace stays in the
process: Python workers are kept, and the next task of any partition begins with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from kclrun.aws.put_records import WirePutter
from kclrun.model.shard import Shard
from kclrun.sinks.flow_control import Flow
from kclrun.sinks.kinesis_producer import KinesisProducer, ProducerSettings
from kclrun.spark.connecting import connected
from kclrun.spark.settings import Reached
from kclrun.spark.sink.entries import put_entries
from kclrun.spark.sink.options import SinkSettings
from kclrun.spark.sink.report import TaskReport, task_report
from kclrun.spark.sink.shards import list_open_shards

__all__ = ["put_partition"]

# As many streams as a process keeps connections.
_STREAMS_MAX: Final = 16


def put_partition(
    settings: SinkSettings, shards: tuple[Shard, ...], batches: Iterator[pa.RecordBatch]
) -> TaskReport:
    """Put every row of one partition, in order; return once all are acknowledged.

    Raises: SinkError for a row that cannot be a record; Throttled or Unavailable once nothing was
    taken for the settings' budget; AccessDenied, NotFound, InvalidRequest as the service said.
    """
    reached = settings.reached
    producer = KinesisProducer(
        WirePutter(connected(reached).client, reached.stream),
        shards,
        ProducerSettings(
            keeps_order=settings.keeps_order,
            aggregates=settings.aggregates,
            give_up_after_s=settings.give_up_after_s,
            record_bytes_max=settings.record_bytes_max,
        ),
        flow=_flow(reached),
        relist=lambda: list_open_shards(reached),
    )
    rows = 0
    try:
        for batch in batches:
            for entry in put_entries(
                batch, rows_before=rows, record_bytes_max=settings.record_bytes_max
            ):
                producer.add(entry)
            rows += batch.num_rows
        producer.flush()
        return task_report(rows, producer.metrics())
    finally:
        producer.close()


# A Python worker runs one task at a time, so nothing here is locked.
_FLOWS: Final[OrderedDict[Reached, Flow]] = OrderedDict()


def _flow(reached: Reached) -> Flow:
    flow = _FLOWS.setdefault(reached, Flow())
    _FLOWS.move_to_end(reached)
    if len(_FLOWS) > _STREAMS_MAX:
        _FLOWS.popitem(last=False)
    return flow
