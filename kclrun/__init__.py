"""kclrun: Python over Amazon Kinesis Data Streams, on a fleet of plain machines or on Spark.

The front door: the names a processor needs. Everything else is a room behind it.
"""

from kclrun.model.record import Record, RecordBatch
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.processor import Checkpointer, Context, RecordProcessor

__all__ = [
    "Checkpointer",
    "Context",
    "ExtendedSequenceNumber",
    "Record",
    "RecordBatch",
    "RecordProcessor",
]
