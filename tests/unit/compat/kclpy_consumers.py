"""Processors as people write them for `amazon_kclpy`, one of each interface, in the shape of its
sample application: count, checkpoint now and then with retries, checkpoint at the ends.

The base classes are made by the tests, since `amazon_kclpy` may be there or not.
"""

import base64


def consumers(kcl, v2, v3):
    """The three classes over the given modules of `amazon_kclpy`."""

    class Noting:
        def __init__(self):
            self.noted = []

        def note(self, *what):
            self.noted.append(what)

        def checkpoint(self, checkpointer, *arguments):
            for _ in range(3):
                try:
                    checkpointer.checkpoint(*arguments)
                    return self.note("checkpointed", *arguments)
                except kcl.CheckpointError as error:
                    self.note("refused", error.value, str(error))
                    if error.value == "ShutdownException":
                        return None
            return None

    class First(Noting, kcl.RecordProcessorBase):
        def initialize(self, shard_id):
            self.note("initialize", shard_id)

        def process_records(self, records, checkpointer):
            for record in records:
                self.note(base64.b64decode(record.get("data")), record["partitionKey"])
            self.checkpoint(checkpointer, records[-1].get("sequenceNumber"))

        def shutdown(self, checkpointer, reason):
            self.note("shutdown", reason)
            self.checkpoint(checkpointer, None)

        def shutdownRequested(self, checkpointer):
            self.note("shutdownRequested")
            self.checkpoint(checkpointer)

    class Second(Noting, v2.RecordProcessorBase):
        def initialize(self, initialize_input):
            given = initialize_input
            self.note("initialize", given.shard_id, given.sequence_number)

        def process_records(self, process_records_input):
            for record in process_records_input.records:
                self.note(record.binary_data, record.partition_key)
            last = process_records_input.records[-1]
            self.checkpoint(process_records_input.checkpointer, last)

        def shutdown(self, shutdown_input):
            self.note("shutdown", shutdown_input.reason)
            self.checkpoint(shutdown_input.checkpointer)

    class Third(Noting, v3.RecordProcessorBase):
        def initialize(self, initialize_input):
            given = initialize_input
            self.note(
                "initialize", given.shard_id, given.sequence_number, given.sub_sequence_number
            )

        def process_records(self, process_records_input):
            for record in process_records_input.records:
                self.note(record.binary_data, record.partition_key)
            last = process_records_input.records[-1]
            self.checkpoint(
                process_records_input.checkpointer, last.sequence_number, last.sub_sequence_number
            )

        def lease_lost(self, lease_lost_input):
            self.note("lease_lost")

        def shard_ended(self, shard_ended_input):
            self.note("shard_ended")
            self.checkpoint(shard_ended_input.checkpointer)

        def shutdown_requested(self, shutdown_requested_input):
            self.note("shutdown_requested")
            self.checkpoint(shutdown_requested_input.checkpointer)

    return First, Second, Third
