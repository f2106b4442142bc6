"""A Spark program as users write one: `spark_whole_program.py SOURCE URL STREAM ROWS [JAR]`.

It counts rows and sums their lengths in `foreachBatch`, from the oldest record on, until there are
so many rows. A line of its output is the number of rows so far, a line a batch.
"""

import sys
import tempfile
import threading
from typing import Any, Final

from kclrun.spark.engine.java import close_session
from kclrun.spark.engine.session import open_session

KCLRUN: Final = "kclrun"
AWSLABS: Final = "aws-kinesis"
_REGION: Final = "us-east-1"
# What the demo machine has, and what the goals for Spark were measured with.
_MASTER: Final = "local[2]"
_HEAP: Final = "2g"
# Five reads a second and shard are the service's limit, and the connector's default.
_READS_A_SECOND: Final = 5


def main(source: str, url: str, stream: str, rows: int, jar: str = "") -> None:
    """Run until so many rows were counted."""
    conf = {"spark.driver.memory": _HEAP, "spark.jars": jar}
    spark = open_session(application="bench", master=_MASTER, conf=conf)
    spark.sparkContext.setLogLevel("OFF")
    counted, is_enough = 0, threading.Event()

    def count(frame: Any, _: int) -> None:
        nonlocal counted
        ((batch_rows, batch_bytes),) = frame.selectExpr("count(*)", "sum(length(data))").collect()
        assert batch_rows == 0 or batch_bytes % batch_rows == 0, "all have one length"
        counted += batch_rows
        print(counted, flush=True)
        if counted >= rows:
            is_enough.set()

    try:
        with tempfile.TemporaryDirectory(prefix="bench-spark-") as folder:
            frame = spark.readStream.format(source).options(**_options(source, url, stream)).load()
            query = frame.writeStream.foreachBatch(count)
            running = query.option("checkpointLocation", folder).start()
            while not is_enough.wait(0.1):
                if not running.isActive:
                    raise RuntimeError(str(running.exception()))
            sys.stdin.read()  # the bench takes the CPU of all processes first
            running.stop()
    finally:
        close_session(spark)


def _options(source: str, url: str, stream: str) -> dict[str, str]:
    """The defaults of each, but for the beginning and the reads a second."""
    if source == KCLRUN:
        return {
            "streamName": stream,
            "endpointUrl": url,
            "startingOffsets": "earliest",
            "maxReadsPerSecondPerShard": str(_READS_A_SECOND),
        }
    return {
        "kinesis.streamName": stream,
        "kinesis.endpointUrl": url,
        "kinesis.region": _REGION,
        "kinesis.startingPosition": "TRIM_HORIZON",
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
