"""What the lease processes of the bench run as user code."""

from __future__ import annotations

from kclrun.model.record import RecordBatch
from kclrun.processor import Checkpointer, RecordProcessor

__all__ = ["NoOp"]


class NoOp(RecordProcessor):
    """Does nothing: what is left is what the runtime costs."""

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        pass
