#!/usr/bin/env python
"""Written for amazon_kclpy, interface 1: plain arguments, records as mappings.

consumer_v1.py NOTES
"""

import base64
import sys

from amazon_kclpy import kcl
from noting import Note


class Consumer(kcl.RecordProcessorBase):
    def __init__(self, path):
        self._note = Note(path)

    def initialize(self, shard_id):
        self._shard = shard_id
        self._note("initialize", shard_id)

    def process_records(self, records, checkpointer):
        self._note(
            "process_records",
            self._shard,
            records=[
                [
                    each.get("sequenceNumber"),
                    str(each.get("subSequenceNumber")),
                    base64.b64decode(each.get("data")).decode(),
                ]
                for each in records
            ],
        )
        checkpointer.checkpoint()

    def shutdown(self, checkpointer, reason):
        self._note("shutdown", self._shard, reason=reason)
        if reason == "TERMINATE":
            checkpointer.checkpoint()

    def shutdown_requested(self, checkpointer):
        self._note("shutdown_requested", self._shard)


if __name__ == "__main__":
    kcl.KCLProcess(Consumer(sys.argv[1])).run()
