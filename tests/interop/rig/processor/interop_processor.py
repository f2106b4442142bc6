"""kclrun's side of the common ledger: the same lines as `LedgerConsumer.java` writes.

Options: `ledger`, the file; `hold_after`, to checkpoint after so many records of a shard and then
no more (with `checkpoint: manual`); `several`, to write the stream's name before that of the shard.
"""

import json
import os

from kclrun import RecordProcessor


class Recorder(RecordProcessor):
    def initialize(self, context):
        several = context.options.get("several", False)
        self.shard = f"{context.stream}:{context.shard_id}" if several else context.shard_id
        self.hold_after = context.options.get("hold_after", 0)
        self.given = 0
        self.file = os.open(context.options["ledger"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        position = context.position
        self.write("began", **{"from": [position.sequence_number, position.sub_sequence_number]})

    def process_records(self, batch, checkpointer):
        records = list(batch)
        self.write(
            "batch",
            records=[[r.sequence_number, r.sub_sequence_number, r.data.decode()] for r in records],
        )
        before, self.given = self.given, self.given + len(records)
        if before < self.hold_after <= self.given:
            at = records[self.hold_after - before - 1]
            checkpointer.checkpoint(at)
            self.write("checkpointed", at=[at.sequence_number, at.sub_sequence_number])

    def shard_ended(self, checkpointer):
        checkpointer.checkpoint()
        self.write("ended")

    def lease_lost(self):
        self.write("lost")

    def shutdown_requested(self, checkpointer):
        self.write("asked to stop")

    def write(self, what, **more):
        who = os.environ["KCLRUN_RIG_MANAGER"]
        line = json.dumps({"what": what, "who": who, "shard": self.shard, **more})
        os.write(self.file, f"\n{line}\n".encode())
