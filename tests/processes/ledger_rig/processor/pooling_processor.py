"""A processor as many people write it: its work is done in a pool of processes, forked by it."""

import concurrent.futures
import multiprocessing
import subprocess

from kclrun import RecordProcessor


def length_of(data):
    return len(data)


class Pooling(RecordProcessor):
    def initialize(self, context):
        self.context = context
        fork = multiprocessing.get_context("fork")
        self.pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=fork)
        self.pool.submit(length_of, b"").result()
        # A program of its own, in a process group of its own: still in the lease's session.
        self.program = subprocess.Popen(["sleep", "600"], process_group=0)

    def process_records(self, batch, checkpointer):
        for record in batch:
            length = self.pool.submit(length_of, record.data).result()
            self.context.emit({"number": record.sequence_number, "length": length})

    def shard_ended(self, checkpointer):
        pass
