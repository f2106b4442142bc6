"""Row `spark-whole`: a Spark program from its start on, by kclrun and by awslabs' connector."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
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
# The second is ten times the first: what is left of the start shows in their difference.
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


class Sizes(msgspec.Struct, frozen=True):
    """So many rows are counted: the rates are told at `few` and at `many`, and between them."""

    few: int
    many: int

    @property
    def between(self) -> str:
        return f"from {_millions(self.few)} to {_millions(self.many)}"


def whole(
    rounds: int,
    awslabs_jar: Path | None = None,
    rows_counted: Sequence[int] | None = None,
) -> list[Figure | NotMeasured]:
    """A count and a sum of lengths in `foreachBatch`, of rows of 200 B, 4 shards; 3 M and 30 M rows
    unless `rows_counted` says otherwise.

    CPU seconds of the whole program: the user's Python, the JVM, and every Python under it, those
    that have ended included. Each source has its own defaults, but for the start at the oldest
    record and five reads a second and shard. Signed GetRecords over HTTP, kclrun in JSON, the
    connector in CBOR, as each asks for. In turn, round by round, each a program of its own.
    """
    sizes = Sizes(*(rows_counted or _SIZES))
    jars = {KCLRUN: None} | ({} if awslabs_jar is None else {AWSLABS: awslabs_jar})
    runs: dict[str, list[list[Mark]]] = {source: [] for source in jars}
    for _ in range(rounds):
        for source, jar in jars.items():
            with CannedServer("bench.spark_server") as server:
                runs[source].append(_run(server.url, source, jar, sizes.many))
    figures: list[Figure | NotMeasured] = []
    for source, marks in runs.items():
        figures += _figures(source, marks, sizes)
    if awslabs_jar is None:
        return [*figures, NotMeasured(_ROW, _NO_JAR, is_left_out=True)]
    return [*figures, *_ratios(runs[KCLRUN], runs[AWSLABS], sizes)]


def _run(url: str, source: str, jar: Path | None, rows: int) -> list[Mark]:
    """One program, until it has counted so many rows."""
    arguments = [source, url, _STREAM, str(rows), *([] if jar is None else [str(jar)])]
    marks: list[Mark] = []
    with _program(arguments) as process:
        assert process.stdout is not None
        give_up_at = time.monotonic() + _PATIENCE_S
        for line in process.stdout:
            marks.append(_mark(process.pid, int(line)))
            if marks[-1].rows >= rows:
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


def _figures(source: str, runs: list[list[Mark]], sizes: Sizes) -> list[Figure]:
    starts = [marks[0] for marks in runs]
    figures = [
        figure(
            _ROW,
            f"{source}: its start, first batch included",
            "CPU-s",
            [each.cpu_s for each in starts],
        )
    ]
    for rows in (sizes.few, sizes.many):
        rates = [_whole_rate(marks, rows) for marks in runs]
        figures.append(figure(_ROW, f"{source}: {_millions(rows)}, start included", _RATE, rates))
    after = [_rate_after(marks, sizes) for marks in runs]
    shares = [100 * _share_after(marks, sizes) for marks in runs]
    return [
        *figures,
        figure(_ROW, f"{source}: {sizes.between}", _RATE, after),
        figure(_ROW, f"{source}: … the JVM's share of the CPU", "%", shares),
    ]


def _ratios(ours: list[list[Mark]], theirs: list[list[Mark]], sizes: Sizes) -> list[Figure]:
    figures = []
    for rows in (sizes.few, sizes.many):
        pair = [[_whole_rate(marks, rows) for marks in runs] for runs in (ours, theirs)]
        what = f"kclrun ÷ {AWSLABS}: {_millions(rows)}, start included"
        figures.append(figure(_ROW, what, "x", paired_ratios(*pair), target=_TARGET))
    pair = [[_rate_after(marks, sizes) for marks in runs] for runs in (ours, theirs)]
    what = f"kclrun ÷ {AWSLABS}: {sizes.between}"
    return [*figures, figure(_ROW, what, "x", paired_ratios(*pair), target=_TARGET)]


def _at(marks: list[Mark], rows: int) -> Mark:
    """The first batch with which there are so many rows."""
    return next(mark for mark in marks if mark.rows >= rows)


def _whole_rate(marks: list[Mark], rows: int) -> float:
    there = _at(marks, rows)
    return there.rows / there.cpu_s / 1_000


def _rate_after(marks: list[Mark], sizes: Sizes) -> float:
    """What a row costs once the compiler has done most of its work."""
    first, last = _at(marks, sizes.few), _at(marks, sizes.many)
    return (last.rows - first.rows) / (last.cpu_s - first.cpu_s) / 1_000


def _share_after(marks: list[Mark], sizes: Sizes) -> float:
    first, last = _at(marks, sizes.few), _at(marks, sizes.many)
    return (last.jvm_cpu_s - first.jvm_cpu_s) / (last.cpu_s - first.cpu_s)


def _millions(rows: int) -> str:
    return f"{rows / 1_000_000:g} M rows"
