"""What the lease processes of the bench run as user code."""

from __future__ import annotations

import os
import time

from kclrun.model.record import RecordBatch
from kclrun.processor import Checkpointer, Context, RecordProcessor


class NoOp(RecordProcessor):
    """Does nothing: what is left is what the runtime costs."""

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        pass


class Marking(RecordProcessor):
    """Appends `shard pid instant` to a file at the first batch of each process."""

    def initialize(self, context: Context) -> None:
        self._context = context
        self._is_marked = False

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        if self._is_marked:
            return
        self._is_marked = True
        line = f"{self._context.shard_id} {os.getpid()} {time.monotonic()}\n"
        # One write to a file opened for appending: lines of several processes do not mix.
        fd = os.open(self._context.options["marks"], os.O_WRONLY | os.O_APPEND)
        os.write(fd, line.encode())
        os.close(fd)
