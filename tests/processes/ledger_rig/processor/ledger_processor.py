"""Writes down every record it is given, in one file shared by all lease processes.

One write a batch, with O_APPEND: the lines of all processes stand in the order of time. A line
carries its CRC, and begins with a line feed of its own, so that a write torn by SIGKILL spoils no
other. Options: `ledger`, the file; what goes wrong, at which record: `poison` (raises until the
file `cure` exists), `poisons` (the same, of several), `poison_every` (each such number of a key),
`crash` (the process ends), `hang` (does not return, without the file `cure`), `wedges` (records,
each with how user code stands still at it, without the file `cure`); `batch_s`, how long a batch
takes, in one shard only if `slow` names it; `hoard_mb`, the memory it takes; `says`, to print and
log its shard; `thread`, to leave one running; `emits`, to emit a row a record; `emits_to`, to more
outputs; `counts`, to count the records of each key, in the state and in the rows; `syncs`, to have
each line on the disk before going on.
"""

import ctypes
import hashlib
import json
import logging
import os
import threading
import time
import zlib
from pathlib import Path

import kclrun
from kclrun import RecordProcessor


def digest(key, number):
    return hashlib.sha256(f"{key}:{number}".encode()).hexdigest()[:16]


def is_due(n, every):
    """Whether this record of its key is poison under `poison_every`."""
    return n % every == every - 1


def sleep_for_ever():
    time.sleep(10**6)


def lock_itself_out():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hold_the_gil():
    ctypes.PyDLL(None).sleep(10**6)


WEDGES = {"sleep": sleep_for_ever, "deadlock": lock_itself_out, "gil": hold_the_gil}


class Ledger(RecordProcessor):
    def initialize(self, context):
        self.context = context
        self.options = context.options
        self.token = context.fencing_token
        self.file = os.open(self.options["ledger"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.write("began", position=str(context.position), code=kclrun.__file__)
        if self.options.get("thread"):
            threading.Thread(target=sleep_for_ever, name="left-behind", daemon=True).start()

    def process_records(self, batch, checkpointer):
        at = time.monotonic()
        self.token = batch.fencing_token
        records = []
        for record in batch:
            data = json.loads(record.data)
            if data["digest"] != digest(data["key"], data["n"]):
                raise ValueError("a record was damaged on its way")
            self.misbehave(record.partition_key, data["n"])
            records.append([record.sequence_number, record.partition_key, data["n"]])
        is_slow = self.options.get("slow") in {None, self.context.shard_id}
        batch_s = self.options.get("batch_s", 0) if is_slow else 0
        if batch_s > 1:
            self.write("at work")  # long enough for a test to strike in the middle of it
        # What takes time here is no wait for anything: it stands for work.
        time.sleep(batch_s)
        # Asked for and never touched: it is the asking that a limit refuses.
        bytes(self.options.get("hoard_mb", 0) << 20)
        for to in ["output"] * bool(self.options.get("emits")) + self.options.get("emits_to", []):
            for (sequence_number, key, n), count in zip(records, self.counts(records), strict=True):
                row = {"sequence_number": sequence_number, "key": key, "n": n}
                self.context.emit(row if count is None else row | {"count": count}, to)
        if self.options.get("says"):
            print("I am ", end="")
            logging.getLogger("orders").warning("I am %s", self.context.shard_id)
            print(self.context.shard_id)
        # Only the file: a process killed here has delivered, and not processed.
        self.write("batch", at=at, records=records)

    def counts(self, records):
        if not self.options.get("counts"):
            return [None] * len(records)
        counter = self.context.counter("n")
        return [counter.add(key) for _, key, _ in records]

    def misbehave(self, key, n):
        place = f"{key}:{n}"
        poisons = [self.options.get("poison"), *self.options.get("poisons", ())]
        every = self.options.get("poison_every")
        is_poison = place in poisons or (every and is_due(n, every))
        if is_poison and not Path(self.options["cure"]).exists():
            raise ValueError("this record is poison")
        if place == self.options.get("crash"):
            os._exit(1)
        if place == self.options.get("hang") and not Path(self.options["cure"]).exists():
            threading.Event().wait()
        how = self.options.get("wedges", {}).get(place)
        if how is not None and not Path(self.options["cure"]).exists():
            self.write("wedged", how=how)
            WEDGES[how]()

    def shard_ended(self, checkpointer):
        self.write("ended")

    def lease_lost(self):
        self.write("lost")

    def shutdown_requested(self, checkpointer):
        self.write("asked to stop")

    def write(self, what, **more):
        line = json.dumps(
            {
                "what": what,
                "shard": self.context.shard_id,
                "token": self.token,
                "pid": os.getpid(),
                "processor": type(self).__name__,
                "manager": os.environ.get("KCLRUN_RIG_MANAGER", ""),
                "at": time.monotonic(),
                **more,
            }
        ).encode()
        os.write(self.file, b"\n%08x %s\n" % (zlib.crc32(line), line))
        if self.options.get("syncs"):
            os.fdatasync(self.file)


class SecondLedger(Ledger):
    """Another processor, for a second stream."""
