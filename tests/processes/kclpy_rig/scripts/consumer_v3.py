#!/usr/bin/env python
"""Written for amazon_kclpy, interface 3, in the shape of its sample application.

    consumer_v3.py NOTES SECONDS

appends what it is given to NOTES, and checkpoints at the largest position every SECONDS.
"""

import sys
import time

from amazon_kclpy import kcl
from amazon_kclpy.v3 import processor
from noting import Note


class Consumer(processor.RecordProcessorBase):
    RETRIES = 5
    PAUSE_S = 0.5

    def __init__(self, path, every_s):
        self._note = Note(path)
        self._every_s = every_s
        self._largest = None

    def initialize(self, initialize_input):
        given = initialize_input
        self._shard = given.shard_id
        self._checkpointed_at = time.time()
        self._note("initialize", self._shard, at=[given.sequence_number, given.sub_sequence_number])

    def process_records(self, process_records_input):
        records = []
        for record in process_records_input.records:
            position = (int(record.sequence_number), record.sub_sequence_number)
            if self._largest is None or position > self._largest:
                self._largest = position
            records.append([*map(str, position), record.binary_data.decode()])
        self._note("process_records", self._shard, records=records)
        if time.time() - self._checkpointed_at > self._every_s:
            number, sub = self._largest
            self._checkpoint(process_records_input.checkpointer, str(number), sub)
            self._checkpointed_at = time.time()

    def lease_lost(self, lease_lost_input):
        self._note("lease_lost", self._shard)

    def shard_ended(self, shard_ended_input):
        self._note("shard_ended", self._shard)
        self._checkpoint(shard_ended_input.checkpointer)

    def shutdown_requested(self, shutdown_requested_input):
        self._note("shutdown_requested", self._shard)
        self._checkpoint(shutdown_requested_input.checkpointer)

    def _checkpoint(self, checkpointer, number=None, sub=None):
        for attempt in range(self.RETRIES):
            try:
                checkpointer.checkpoint(number, sub)
                return
            except kcl.CheckpointError as error:
                self._note("refused", self._shard, value=error.value)
                if error.value == "ShutdownException":
                    return
                if error.value == "ThrottlingException" and attempt == self.RETRIES - 1:
                    sys.stderr.write(f"gave up after {attempt} attempts\n")
                    return
            time.sleep(self.PAUSE_S)


if __name__ == "__main__":
    kcl.KCLProcess(Consumer(sys.argv[1], float(sys.argv[2]))).run()
