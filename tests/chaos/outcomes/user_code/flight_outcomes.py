"""The sample `DelayByCarrier` over one flight at a time: one row, into two outputs.

A line with a surplus column is what it raises for, until the file `repaired` (an option) exists.
"""

from pathlib import Path

from kclrun.samples.flights import FIELDS, DelayByCarrier

from kclrun import Record


class FlightOutcomes(DelayByCarrier):
    def initialize(self, context):
        super().initialize(context)
        self._emit = context.emit
        self._is_repaired = Path(context.options["repaired"]).exists()
        self._context = self  # the sample emits its row here
        self._row = {}

    def emit(self, row):
        self._row = row

    def process_records(self, batch, checkpointer):
        for given in batch:
            record, fields = given, given.data.decode().split(",")
            if self._is_repaired and len(fields) > len(FIELDS):
                fields = fields[: len(FIELDS)]
                record = Record(
                    data=",".join(fields).encode(),
                    partition_key=record.partition_key,
                    sequence_number=record.sequence_number,
                    approximate_arrival_timestamp=record.approximate_arrival_timestamp,
                )
            super().process_records([record], checkpointer)
            of = dict(zip(FIELDS, fields, strict=True))
            flight = (
                f"{of['carrier']}{of['flight']} {of['origin']} {of['time_hour']} {of['minute']}"
            )
            row = {"flight": flight, **self._row}
            for name in ("table", "archive"):
                self._emit(row, to=name)
