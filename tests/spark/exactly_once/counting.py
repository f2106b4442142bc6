"""What a killed driver runs with keyed state: it says of each record how many of its key came."""

import json

from kclrun import RecordProcessor


class Counts(RecordProcessor):
    """The producer numbers the records of a key, so that a row shows a wrong count by itself."""

    def initialize(self, context):
        """Remember where the counts are."""
        self.context, self.seen = context, context.counter("seen")

    def process_records(self, batch, checkpointer):
        """Count each record, and emit its number and the count."""
        for record in batch:
            n = json.loads(record.data)["n"]
            row = {"key": record.partition_key, "n": n, "seen": self.seen.add(record)}
            self.context.emit(row)
