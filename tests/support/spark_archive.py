"""`python -m tests.support.spark_archive`: an archive of Spark's classes, once per environment.

A JVM that finds them there neither reads nor checks them again: a session starts for half the CPU
time. `tests/conftest.py` names the archive to each JVM of a test. A JVM that it does not fit, of
another Java or another PySpark, goes on without it.
"""

import os
import sys
import tempfile
from pathlib import Path

from tests.patience import HUNG_S

ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"
# A JVM of a test lives for seconds: the first compiler only, and one thread for garbage, start and
# run it in four fifths of the time. An archive fits JVMs that have the options of its own.
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def java_options() -> str:
    """For the variable JDK_JAVA_OPTIONS, which Spark and the Java KCL read."""
    if not ARCHIVE.is_file():
        return _QUICK
    # Without a word where it does not fit: Spark's launcher reads what a JVM prints.
    return f'{_QUICK} "-XX:SharedArchiveFile={ARCHIVE}" -Xlog:disable -Xlog:all=error:stderr'


def make(made: Path, folder: Path) -> None:
    """Do what most sessions of the tests do, in a JVM that writes its classes down at its end."""
    from pyspark import SparkContext

    from kclrun.local.server import start_embedded
    from kclrun.spark.engine.session import open_session
    from tests.spark.source_rig import Collected, Stream, credentials_in

    os.environ |= credentials_in(folder)
    os.environ["JDK_JAVA_OPTIONS"] = _QUICK
    conf = {"spark.driver.extraJavaOptions": f"-XX:ArchiveClassesAtExit={made}"}
    session = open_session(application="archive", master="local[2]", conf=conf)
    with start_embedded() as running:
        stream = Stream(running.kinesis_endpoint, shards=1)
        stream.put(10)
        collected = Collected(session, stream, folder)
        collected.run_until(10)
        writer = collected.frame().writeStream.option("checkpointLocation", f"{folder}/c")
        writer.trigger(availableNow=True).start(
            f"{folder}/rows", format="parquet"
        ).awaitTermination()
    rows = session.read.parquet(f"{folder}/rows").groupBy("shardId").count()
    assert rows.mapInArrow(lambda batches: batches, "shardId string, count long").count() == 1
    gateway = SparkContext._gateway
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    assert gateway.proc.wait(HUNG_S) == 0


def main() -> None:
    if ARCHIVE.is_file():
        return
    with (
        tempfile.TemporaryDirectory(dir=sys.prefix) as there,
        tempfile.TemporaryDirectory() as here,
    ):
        # A path without spaces, for the options of a JVM.
        place = Path(here) / "place"
        place.symlink_to(there)
        make(place / "made", Path(here))
        (place / "made").rename(ARCHIVE)


if __name__ == "__main__":
    main()
