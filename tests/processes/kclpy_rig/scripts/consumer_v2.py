#!/usr/bin/env python
"""Written for amazon_kclpy, interface 2: one `shutdown` for every end, a record as checkpoint.

consumer_v2.py NOTES
"""

import sys

from amazon_kclpy import kcl
from amazon_kclpy.v2 import processor
from noting import Note


class Consumer(processor.RecordProcessorBase):
    def __init__(self, path):
        self._note = Note(path)

    def initialize(self, initialize_input):
        given = initialize_input
        self._shard = given.shard_id
        self._note("initialize", self._shard, at=[given.sequence_number, given.sub_sequence_number])

    def process_records(self, process_records_input):
        records = process_records_input.records
        self._note(
            "process_records",
            self._shard,
            records=[
                [each.sequence_number, str(each.sub_sequence_number), each.binary_data.decode()]
                for each in records
            ],
        )
        last = records[-1]
        self._checkpoint(
            process_records_input.checkpointer, last.sequence_number, last.sub_sequence_number
        )

    def shutdown(self, shutdown_input):
        self._note("shutdown", self._shard, reason=shutdown_input.reason)
        if shutdown_input.reason == "TERMINATE":
            self._checkpoint(shutdown_input.checkpointer)

    def shutdown_requested(self, shutdown_requested_input):
        self._note("shutdown_requested", self._shard)

    def _checkpoint(self, checkpointer, *position):
        try:
            checkpointer.checkpoint(*position)
        except kcl.CheckpointError as error:
            self._note("refused", self._shard, value=error.value)


if __name__ == "__main__":
    kcl.KCLProcess(Consumer(sys.argv[1])).run()
