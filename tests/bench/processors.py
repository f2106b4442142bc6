"""What the lease processes of the bench run as user code."""

import os
import time
from pathlib import Path

from kclrun.model.record import RecordBatch
from kclrun.processor import Checkpointer, Context, RecordProcessor


class NoOp(RecordProcessor):
    """Does nothing: what is left is what the runtime costs."""

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        pass


class Counts(RecordProcessor):
    """Appends the number of records of each batch to a file."""

    def initialize(self, context: Context) -> None:
        self._fd = os.open(context.options["marks"], os.O_WRONLY | os.O_APPEND)

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        os.write(self._fd, f"{len(batch)}\n".encode())


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


class Lags(RecordProcessor):
    """Appends to a file, in ms, how long each record took since the instant that is its data."""

    def initialize(self, context: Context) -> None:
        self._path = context.options["marks"]

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        now = time.monotonic()
        lines = "".join(f"{1000 * (now - float(each.data))}\n" for each in batch.records)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        os.write(fd, lines.encode())
        os.close(fd)


class Cpu(RecordProcessor):
    """Writes the CPU seconds of this process from `initialize` to the last of so many records."""

    def initialize(self, context: Context) -> None:
        self._options = context.options
        self._left = context.options["records"]
        self._began_s = time.process_time()

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        self._left -= len(batch.records)
        if self._left == 0:
            taken_s = time.process_time() - self._began_s
            Path(self._options["marks"]).write_text(f"{taken_s}\n")
