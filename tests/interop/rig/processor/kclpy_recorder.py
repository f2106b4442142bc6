#!/usr/bin/env python3
"""amazon_kclpy's side of the common ledger ($KCLRUN_RIG_LEDGER); checkpoints every batch."""

import json
import os

from amazon_kclpy import kcl
from amazon_kclpy.v3 import processor


class Recorder(processor.RecordProcessorBase):
    def initialize(self, initialize_input):
        self.shard = initialize_input.shard_id
        path = os.environ["KCLRUN_RIG_LEDGER"]
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        position = [initialize_input.sequence_number, initialize_input.sub_sequence_number]
        self.write("began", **{"from": position})

    def process_records(self, process_records_input):
        self.write(
            "batch",
            records=[
                [record.sequence_number, record.sub_sequence_number, record.binary_data.decode()]
                for record in process_records_input.records
            ],
        )
        self.checkpoint(process_records_input)

    def lease_lost(self, lease_lost_input):
        self.write("lost")

    def shard_ended(self, shard_ended_input):
        shard_ended_input.checkpointer.checkpoint()
        self.write("ended")

    def shutdown_requested(self, shutdown_requested_input):
        self.checkpoint(shutdown_requested_input)

    def checkpoint(self, given):
        try:
            given.checkpointer.checkpoint()
        except kcl.CheckpointError:
            self.write("refused")  # The lease was stolen meanwhile.

    def write(self, what, **more):
        line = json.dumps({"what": what, "who": "kclpy", "shard": self.shard, **more})
        os.write(self.file, f"\n{line}\n".encode())


if __name__ == "__main__":
    kcl.KCLProcess(Recorder()).run()
