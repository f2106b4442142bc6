"""kclrun: Python over Amazon Kinesis Data Streams, on a fleet of plain machines or on Spark.

The front door: the names a processor needs. Everything else is a room behind it.
"""

import sys

# Here, for every way in: a Mac would meet whatever fails first instead (pidfds, `epoll`, `/proc`).
if sys.platform != "linux" or sys.version_info < (3, 11):
    raise ImportError(
        "kclrun runs on Linux (x86-64, aarch64) with CPython 3.11 or later; this is"
        f" {sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]} on {sys.platform}."
        ' Elsewhere, run it in a container: the page "Run in Docker" of the documentation'
    )

from typing import TYPE_CHECKING, Any

from kclrun.errors import FailedRecords, HaltShard, RetryLater
from kclrun.model.lease import PendingCheckpoint
from kclrun.model.record import Record, RecordBatch
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.output import Output, OutputContext
from kclrun.processor import Checkpointer, Context, RecordContext, RecordProcessor
from kclrun.state.keyed import Counter, KeyState, State, Table
from kclrun.state.timers import Timer

if TYPE_CHECKING:
    from kclrun.producer import AsyncProducer, Producer
    from kclrun.producing.delivery import Delivered, Delivery
    from kclrun.producing.flow_control import ProducerMetrics, ShardMetrics
    from kclrun.reading.stream import Reading, ShardRecord, read
    from kclrun.running import RunResult, run

# The one place of the version: pyproject.toml reads it, without an import, and all that prints one.
__version__ = "1.0.0"

__all__ = [
    "AsyncProducer",
    "Checkpointer",
    "Context",
    "Counter",
    "Delivered",
    "Delivery",
    "ExtendedSequenceNumber",
    "FailedRecords",
    "HaltShard",
    "KeyState",
    "PendingCheckpoint",
    "Output",
    "OutputContext",
    "Producer",
    "ProducerMetrics",
    "Reading",
    "Record",
    "RecordBatch",
    "RecordContext",
    "RecordProcessor",
    "RetryLater",
    "RunResult",
    "ShardMetrics",
    "ShardRecord",
    "State",
    "Table",
    "Timer",
    "read",
    "run",
]

# Imported at their first use: they load botocore, and a processor needs none.
_LATER = {
    "AsyncProducer": "kclrun.producer",
    "Delivered": "kclrun.producing.delivery",
    "Delivery": "kclrun.producing.delivery",
    "Producer": "kclrun.producer",
    "ProducerMetrics": "kclrun.producing.flow_control",
    "Reading": "kclrun.reading.stream",
    "RunResult": "kclrun.running",
    "ShardMetrics": "kclrun.producing.flow_control",
    "ShardRecord": "kclrun.reading.stream",
    "read": "kclrun.reading.stream",
    "run": "kclrun.running",
}


def __getattr__(name: str) -> Any:
    """The names of programs that are not processors, each from its module."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATER[name]), name)
