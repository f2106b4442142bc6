"""Row `spark-whole`: a Spark program from its start on, by kclrun and by awslabs' connector."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import psutil

from bench.figures import Figure, NotMeasured, Target, figure, paired_ratios
from bench.program import credentials
from bench.servers import REGION, CannedServer
from bench.spark_whole_program import AWSLABS, KCLRUN

_ROW: Final = "spark-whole"
_STREAM: Final = "small-4"
_RATE: Final = "k rows/CPU-s"
# Each size is ten times the one before: what is left of the start shows in their difference.
_SIZES: Final = (3_000_000, 30_000_000)
_TARGET: Final = Target(at_least=3.0)
# A hundred batches of awslabs' connector take minutes; on a machine with other work, many.
_PATIENCE_S: Final = 3600.0
_NO_JAR: Final = (
    "awslabs' spark-sql-kinesis-connector: neither Maven Central nor PyPI has it. Build it of its"
    " source with Maven, for the Scala of this PySpark, and name its jar:"
    " `bin/bench --awslabs-jar FILE`"
)


class Mark(msgspec.Struct, frozen=True):
    """A batch is done: the rows so far, and the CPU that all processes had used by then."""

    rows: int
    cpu_s: float
    jvm_cpu_s: float


def whole(rounds: int, awslabs_jar: Path | None = None) -> list[Figure | NotMeasured]:
    """A count and a sum of lengths in `foreachBatch`, of 3 M and of 30 M rows of 200 B, 4 shards.

    CPU seconds of the whole program: the user's Python, the JVM, and every Python under it, those
    that have ended included. Each source has its own defaults, but for the start at the oldest
    record and five reads a second and shard. Signed GetRecords over HTTP, kclrun in JSON, the
    connector in CBOR, as each asks for. In turn, round by round, each a program of its own.
    """
    jars = {KCLRUN: None} | ({} if awslabs_jar is None else {AWSLABS: awslabs_jar})
    runs: dict[str, list[list[Mark]]] = {source: [] for source in jars}
    for _ in range(rounds):
        for source, jar in jars.items():
            with CannedServer("bench.spark_server") as server:
                runs[source].append(_run(server.url, source, jar))
    figures: list[Figure | NotMeasured] = []
    for source, marks in runs.items():
        figures += _figures(source, marks)
    if awslabs_jar is None:
        return [*figures, NotMeasured(_ROW, _NO_JAR)]
    return [*figures, *_ratios(runs[KCLRUN], runs[AWSLABS])]


def _run(url: str, source: str, jar: Path | None) -> list[Mark]:
    """One program, until it has counted as many rows as the largest size."""
    arguments = [source, url, _STREAM, str(_SIZES[-1]), *([] if jar is None else [str(jar)])]
    marks: list[Mark] = []
    with _program(arguments) as process:
        assert process.stdout is not None
        give_up_at = time.monotonic() + _PATIENCE_S
        for line in process.stdout:
            marks.append(_mark(process.pid, int(line)))
            if marks[-1].rows >= _SIZES[-1]:
                return marks
            if time.monotonic() > give_up_at:
                break
    raise RuntimeError(f"{source} ended after {marks[-1].rows if marks else 0} rows")


@contextlib.contextmanager
def _program(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "bench.spark_whole_program", *arguments],
        env=os.environ
        | credentials()
        | {"AWS_REGION": REGION, "AWS_EC2_METADATA_DISABLED": "true"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            # Its end tells the program to stop, and the JVM and the workers under it.
            assert process.stdin is not None
            process.stdin.close()


def _mark(pid: int, rows: int) -> Mark:
    """The CPU of the program's tree; that of ended processes is on those that waited for them."""
    top = psutil.Process(pid)
    spent_s = {"java": 0.0, "others": 0.0}
    for each in [top, *top.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            of = "java" if each.name() == "java" else "others"
            own_s, ended_s = sum(each.cpu_times()[:2]), sum(each.cpu_times()[2:4])
            spent_s[of] += own_s
            spent_s["others"] += ended_s
    return Mark(rows, sum(spent_s.values()), spent_s["java"])


def _figures(source: str, runs: list[list[Mark]]) -> list[Figure]:
    starts = [marks[0] for marks in runs]
    figures = [
        figure(
            _ROW,
            f"{source}: its start, first batch included",
            "CPU-s",
            [each.cpu_s for each in starts],
        )
    ]
    for rows in _SIZES:
        rates = [_whole_rate(marks, rows) for marks in runs]
        figures.append(figure(_ROW, f"{source}: {_millions(rows)}, start included", _RATE, rates))
    after = [_rate_after(marks) for marks in runs]
    shares = [100 * _share_after(marks) for marks in runs]
    return [
        *figures,
        figure(_ROW, f"{source}: {_BETWEEN}", _RATE, after),
        figure(_ROW, f"{source}: … the JVM's share of the CPU", "%", shares),
    ]


def _ratios(ours: list[list[Mark]], theirs: list[list[Mark]]) -> list[Figure]:
    figures = []
    for rows in _SIZES:
        pair = [[_whole_rate(marks, rows) for marks in runs] for runs in (ours, theirs)]
        what = f"kclrun ÷ {AWSLABS}: {_millions(rows)}, start included"
        figures.append(figure(_ROW, what, "x", paired_ratios(*pair), target=_TARGET))
    pair = [[_rate_after(marks) for marks in runs] for runs in (ours, theirs)]
    what = f"kclrun ÷ {AWSLABS}: {_BETWEEN}"
    return [*figures, figure(_ROW, what, "x", paired_ratios(*pair), target=_TARGET)]


def _at(marks: list[Mark], rows: int) -> Mark:
    """The first batch with which there are so many rows."""
    return next(mark for mark in marks if mark.rows >= rows)


def _whole_rate(marks: list[Mark], rows: int) -> float:
    there = _at(marks, rows)
    return there.rows / there.cpu_s / 1_000


def _rate_after(marks: list[Mark]) -> float:
    """What a row costs once the compiler has done most of its work."""
    first, last = _at(marks, _SIZES[0]), _at(marks, _SIZES[-1])
    return (last.rows - first.rows) / (last.cpu_s - first.cpu_s) / 1_000


def _share_after(marks: list[Mark]) -> float:
    first, last = _at(marks, _SIZES[0]), _at(marks, _SIZES[-1])
    return (last.jvm_cpu_s - first.jvm_cpu_s) / (last.cpu_s - first.cpu_s)


def _millions(rows: int) -> str:
    return f"{rows // 1_000_000} M rows"


_BETWEEN: Final = f"from {_millions(_SIZES[0])} to {_millions(_SIZES[-1])}"
