"""A processor that counts records by the minute in their payload, which is far before their
arrival, as in a replay of old records; and what it has to give on every host."""

from __future__ import annotations

import operator

from kclrun import RecordProcessor
from kclrun.windows import Tumbling, Windows

# Seconds since the epoch: three minutes, then a record of the first one, then one that closes them.
FIRST_S = 1_000_000_020.0
TIMES = (FIRST_S, FIRST_S + 10, FIRST_S + 60, FIRST_S + 120, FIRST_S + 5, FIRST_S + 600)
ROWS = [
    {"from": FIRST_S, "count": 2},
    {"from": FIRST_S + 60, "count": 1},
    {"from": FIRST_S + 120, "count": 1},
]
LATE_WORDS = "1 record was late for the windows 'minutes'"


class Dated(RecordProcessor):
    """`Windows` without `time_of`: they follow `event_time`, as the watermark does."""

    def initialize(self, context):
        self.context = context
        self.minutes = Windows(context, "minutes", Tumbling(60), int, operator.add)

    def event_time(self, record):
        return float(bytes(record.data))

    def process_records(self, batch, checkpointer):
        for record in batch:
            self.minutes.add(record, 1)

    def on_timer(self, timer, checkpointer):
        for minute in self.minutes.closed(timer):
            self.context.emit({"from": minute.start, "count": minute.value})


class DatedSingly(Dated):
    """The same, of single records."""

    process_records = RecordProcessor.process_records

    def process_record(self, record, context):
        self.minutes.add(record, 1, context)
