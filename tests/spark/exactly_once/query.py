"""The query under test, as a driver process of its own: `python query.py ORDER`, a JSON text.

Each batch is counted and then written whole to a folder of its own attempt, so that a test can
compare what was read when a batch was read twice. Tasks fail on their first attempt now and then,
after half their rows. Ends by itself with `"available_now": true`; else it runs until killed.
"""

import json
import sys
import time
import zlib
from pathlib import Path

from kclrun.spark.engine.session import open_session

FAILING_ONE_IN = 5
LINGER_S = 0.4


def failing_now_and_then(batch_id, seed):
    """A pass-through over Arrow batches whose first attempt fails in some partitions."""

    def run(batches):
        from pyspark import TaskContext

        context = TaskContext.get()
        chance = zlib.crc32(f"{seed}/{batch_id}/{context.partitionId()}".encode())
        fails = context.attemptNumber() == 0 and chance % FAILING_ONE_IN == 0
        for batch in batches:
            if fails and batch.num_rows:
                yield batch.slice(0, batch.num_rows // 2)
                raise RuntimeError("the test fails this task once")
            yield batch

    return run


def writing_attempts(out, run, seed):
    def write(frame, batch_id):
        folder = Path(out) / f"batch-{batch_id:05}"
        folder.mkdir(parents=True, exist_ok=True)
        attempt = folder / f"attempt-{run:03}"
        counted = frame.count()
        frame.mapInArrow(failing_now_and_then(batch_id, seed), frame.schema).write.parquet(
            str(attempt)
        )
        # Only a complete attempt has it, and only then may the batch be committed.
        (attempt / "COUNTED").write_text(str(counted))
        # A sink that is slow to return: drivers are killed here too, and the batch comes again.
        time.sleep(LINGER_S)

    return write


def main(order):
    spark = open_session(
        application="exactly-once", master=order["master"], conf=order.get("conf", {})
    )
    records = (
        spark.readStream.format("kclrun")
        .option("streamName", order["stream"])
        .option("endpointUrl", order["endpoint"])
        .option("region", "us-east-1")
        .option("startingOffsets", "earliest")
        .option("pollInterval", "500ms")
        .option("shardsPerTask", order.get("shards_per_task", 2))
        .load()
    )
    writer = records.writeStream.foreachBatch(
        writing_attempts(order["out"], order["run"], order["seed"])
    ).option("checkpointLocation", order["checkpoint"])
    if order["available_now"]:
        writer = writer.trigger(availableNow=True)
    query = writer.start()
    print("started", flush=True)
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
