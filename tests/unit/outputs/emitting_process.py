"""A lease process in small, to be killed at any instant: emits, retries, checkpoints.

Usage: emitting_process.py FOLDER SEED LAST. Record n has n % 3 rows, each with a serial number
that tells its place in the file. The file `acknowledged` stands in for the lease table. With
LAST 0 it runs until it is killed.
"""

import itertools
import os
import queue
import random
import sys
import threading
from pathlib import Path

from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.outputs import marks
from kclrun.outputs.emitted_rows import EmittedRows

SHARD = "shardId-000000000000"


def acknowledge(folder: Path, number: int) -> None:
    temporary = folder / "acknowledged.tmp"
    with temporary.open("w") as file:
        file.write(str(number))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / "acknowledged")


def keep_checkpointing(rows: EmittedRows, folder: Path, wanted: queue.Queue[int]) -> None:
    """The lease thread: the checkpoint it writes may be behind what was processed by then."""
    while (number := wanted.get()) >= 0:
        rows.make_durable(ExtendedSequenceNumber(str(number)))
        acknowledge(folder, number)
        wanted.task_done()


def main(folder: Path, seed: int, last: int) -> None:
    chance = random.Random(seed)
    marks.MARKS_MAX, marks.MARKS_KEPT = 12, 4  # so that many kills fall into a rewrite
    done = int((folder / "acknowledged").read_text())
    start = ExtendedSequenceNumber(str(done)) if done else TRIM_HORIZON
    rows = EmittedRows.open(folder, SHARD, start)
    wanted: queue.Queue[int] = queue.Queue()
    lease = threading.Thread(target=keep_checkpointing, args=(rows, folder, wanted))
    lease.start()
    print("running", flush=True)
    while not last or done < last:
        size = min(chance.randint(1, 40), last - done if last else 40)
        numbers = range(done + 1, done + size + 1)
        if chance.random() < 0.2:
            rows.begin_batch()
            for _ in range(chance.randint(0, 50)):
                rows.emit({"n": -1, "pad": "x" * chance.choice([1, 60_000])})
            rows.take_back_batch()
        rows.begin_batch()
        for number, copy in itertools.product(numbers, range(3)):
            if copy < number % 3:
                rows.emit({"n": number, "copy": copy, "pad": "x" * chance.choice([1, 100, 9_000])})
        done += size
        rows.end_batch(ExtendedSequenceNumber(str(done)))
        if chance.random() < 0.5:
            wanted.put(done)
    wanted.join()
    wanted.put(-1)
    lease.join()
    rows.make_durable(ExtendedSequenceNumber(str(done)))
    acknowledge(folder, done)
    rows.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
