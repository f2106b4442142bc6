"""The query under test, as a driver process of its own: `python query.py ORDER`, a JSON text.

Each batch is counted and then written whole to a folder of its own attempt, so that a test can
compare what was read when a batch was read twice. Tasks fail on their first attempt now and then,
after half their rows. Ends by itself with `"available_now": true`; else it runs until killed.

Once the order's file `hold` is there, the next batch to begin is held before its commit, for ever:
by `"read"` in the file once its rows were counted, by `"written"` once its attempt is complete. The
file `held` says that it stands there: planned, read and not committed.
"""

import json
import sys
import time
import zlib
from pathlib import Path

from kclrun.config.processing import StateSettings
from kclrun.config.schema import Settings
from kclrun.spark.engine.session import open_session
from kclrun.spark.option_reading import Use, read_source_options
from kclrun.spark.processors.source import processor_stream

FAILING_ONE_IN = 5


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


def holding(hold, held):
    """What a batch calls at each of its moments; it never returns from the one asked for."""
    if hold is None:
        return lambda moment: None

    def at(moment):
        if hold.read_text() != moment:
            return
        held.touch()
        while True:
            time.sleep(3600)

    return at


def writing_attempts(order):
    out, run, seed = order["out"], order["run"], order["seed"]
    hold, held = Path(order["hold"]), Path(order["held"])

    def write(frame, batch_id):
        at = holding(hold if hold.exists() else None, held)
        folder = Path(out) / f"batch-{batch_id:05}"
        folder.mkdir(parents=True, exist_ok=True)
        attempt = folder / f"attempt-{run:03}"
        counted = frame.count()
        at("read")
        frame.mapInArrow(failing_now_and_then(batch_id, seed), frame.schema).write.parquet(
            str(attempt)
        )
        # Only a complete attempt has it, and only then may the batch be committed.
        (attempt / "COUNTED").write_text(str(counted))
        at("written")
        # A sink that is slow to return, for kills at random moments: some fall in here.
        time.sleep(order["linger_s"])

    return write


def counted(spark, order, options):
    """The rows of `counting.Counts`, which remembers how many records of a key it has seen."""
    settings = Settings(
        application="counts",
        stream=order["stream"],
        processor="counting:Counts",
        state=StateSettings(store=order["state"]),
    )
    source = read_source_options(options, Use.STREAM)
    return processor_stream(spark, settings, source, [Path(__file__).parent])


def main(order):
    spark = open_session(
        application="exactly-once", master=order["master"], conf=order.get("conf", {})
    )
    options = {
        "streamName": order["stream"],
        "endpointUrl": order["endpoint"],
        "region": "us-east-1",
        "startingOffsets": "earliest",
        "pollInterval": "500ms",
        "shardsPerTask": str(order.get("shards_per_task", 2)),
        **order.get("source", {}),
    }
    if "state" in order:
        records = counted(spark, order, options)
    else:
        records = spark.readStream.format("kclrun").options(**options).load()
    writer = records.writeStream.foreachBatch(writing_attempts(order)).option(
        "checkpointLocation", order["checkpoint"]
    )
    if order["available_now"]:
        writer = writer.trigger(availableNow=True)
    query = writer.start()
    print("started", flush=True)
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
