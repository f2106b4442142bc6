"""One row of each record, into the output that the record names. `calls` (an option) is a folder: a
file of each process there has a line for each call, with its time and the number of its records."""

import json
import os
import time
from pathlib import Path

from kclrun import RecordProcessor


class NumberedRows(RecordProcessor):
    def initialize(self, context):
        self._emit = context.emit
        path = Path(context.options["calls"]) / str(os.getpid())
        self._calls = path.open("a", buffering=1)

    def process_records(self, batch, checkpointer):
        self._calls.write(f"{time.monotonic()} {len(batch)}\n")
        for record in batch:
            row = json.loads(record.data)
            self._emit(row, to=row.pop("to"))
