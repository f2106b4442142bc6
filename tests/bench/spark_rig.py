"""One Spark for a row of the bench: a session as users get it, and what its batches cost.

Costs are those of the JVM and of all Python under it (the source's driver process, workers), by
the kernel's count; neither servers nor the bench itself are in them. Every batch is one entry of
`Watched`, taken as Spark tells that the batch is done.
"""

import os
import queue
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self

import msgspec
import psutil
from pyspark.sql.streaming.listener import StreamingQueryListener

from bench.figures import Sample
from bench.servers import CREDENTIALS, REGION
from bench.spark_prebuilt import PrebuiltSource
from kclrun.spark.engine.java import close_session
from kclrun.spark.engine.session import open_session

# What the demo machine has, and what the goals for Spark were measured with.
_MASTER: Final = "local[2]"
_HEAP: Final = "2g"
# The first batch pays for workers and imports, on a loaded machine for tens of seconds.
_PATIENCE_S: Final = 120.0
_RUNNER: Final = "the source's driver process"
_OTHERS: Final = "other Python"
_ENVIRONMENT: Final = {
    "AWS_ACCESS_KEY_ID": CREDENTIALS.access_key,
    "AWS_SECRET_ACCESS_KEY": CREDENTIALS.secret_key,
    "AWS_SESSION_TOKEN": CREDENTIALS.token or "",
    "AWS_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Batch(msgspec.Struct, frozen=True):
    """A micro-batch that is done: its offsets as Spark has them (JSON) and its rows; what Spark
    spent where; and the CPU that the JVM and the Python under it had used by then."""

    start: str
    end: str
    rows: int
    took_ms: dict[str, int]
    done_at: float
    jvm_cpu_s: float
    python_cpu_s: float

    @property
    def cpu_s(self) -> float:
        return self.jvm_cpu_s + self.python_cpu_s


def sample_of(batches: Sequence[Batch]) -> Sample:
    """Rows and costs of all batches but the first, from whose end the time is taken."""
    first, last = batches[0], batches[-1]
    rows = sum(batch.rows for batch in batches[1:])
    return Sample(rows, last.cpu_s - first.cpu_s, last.done_at - first.done_at)


class Watched(StreamingQueryListener):
    """The batches of the running query, in their order."""

    def __init__(self) -> None:
        self.batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()

    def onQueryStarted(self, event: object) -> None:
        pass

    def onQueryProgress(self, event: Any) -> None:
        said = event.progress
        (jvm_cpu_s, *others_s), now = _cpu_s(), time.monotonic()
        self.batches.put(
            Batch(
                start=said.sources[0].startOffset or "",
                end=said.sources[0].endOffset,
                rows=said.numInputRows,
                took_ms=dict(said.durationMs),
                done_at=now,
                jvm_cpu_s=jvm_cpu_s,
                python_cpu_s=sum(others_s),
            )
        )

    def onQueryIdle(self, event: object) -> None:
        pass

    def onQueryTerminated(self, event: object) -> None:
        pass


class SparkRig:
    """A context manager; leaving it ends the session and its JVM."""

    def __enter__(self) -> Self:
        before = dict(os.environ)
        # Read by every process of Spark, which inherit it from the JVM.
        os.environ |= _ENVIRONMENT
        try:
            self.spark = open_session(
                application="bench", master=_MASTER, conf={"spark.driver.memory": _HEAP}
            )
        finally:
            os.environ.clear()
            os.environ.update(before)
        # Stopping a query within a batch logs pages of errors; those that matter are raised.
        self.spark.sparkContext.setLogLevel("OFF")
        self.spark.dataSource.register(PrebuiltSource)
        self._watched = Watched()
        self.spark.streams.addListener(self._watched)
        return self

    def __exit__(self, *_: object) -> None:
        close_session(self.spark)

    def frame(self, source: str, **options: object) -> Any:
        texts = {name: str(value) for name, value in options.items()}
        return self.spark.readStream.format(source).options(**texts).load()

    @contextmanager
    def running(self, writer: Any) -> Iterator[Any]:
        """A query with a checkpoint of its own; stopped at the end."""
        with tempfile.TemporaryDirectory(prefix="bench-spark-") as folder:
            query = writer.option("checkpointLocation", folder).start()
            try:
                yield query
            finally:
                query.stop()
                self._forget()

    def next_batch(self, query: Any) -> Batch:
        """The next batch that is done. Raises what the query failed with, or TimeoutError."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            try:
                return self._watched.batches.get(timeout=0.5)
            except queue.Empty:
                if query.exception() is not None:
                    raise query.exception() from None
        raise TimeoutError(f"no batch within {_PATIENCE_S:.0f} s")

    def batches(self, query: Any, *, skipped: int, at_least: int, window_s: float) -> list[Batch]:
        """Skip some, then take batches for so long and so many, and the one before them."""
        for _ in range(skipped):
            self.next_batch(query)
        taken = [self.next_batch(query)]
        while len(taken) <= at_least or taken[-1].done_at < taken[0].done_at + window_s:
            taken.append(self.next_batch(query))
        return taken

    def _forget(self) -> None:
        while not self._watched.batches.empty():
            self._watched.batches.get()


def _processes() -> list[psutil.Process]:
    """The JVM and all that runs under it."""
    jvms = [each for each in psutil.Process().children() if each.name() == "java"]
    return jvms + [child for jvm in jvms for child in jvm.children(recursive=True)]


def _cpu_s() -> list[float]:
    """User and system time of each, the JVM first."""
    spent_s = []
    for process in _processes():
        try:
            spent_s.append(sum(process.cpu_times()[:2]))
        except psutil.NoSuchProcess:
            continue
    return spent_s


def memory_mb() -> dict[str, list[float]]:
    """PSS of each process by what it is for: pages that several share are counted once."""
    found: dict[str, list[float]] = {"JVM": [], _RUNNER: [], "a worker": [], _OTHERS: []}
    for process in _processes():
        try:
            command, pss = process.cmdline(), process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        found[_purpose(command)].append(pss / 1e6)
    return found


def _purpose(command: list[str]) -> str:
    if command[0].endswith("java"):
        return "JVM"
    if command[-1].endswith("python_streaming_source_runner"):
        return _RUNNER
    # Forked from a daemon of the same name, which is small.
    return "a worker" if command[-1] == "pyspark.worker" else _OTHERS
