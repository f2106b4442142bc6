"""Row `spark-source`: rows through Spark, really fetched and decoded, to a no-op sink."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from bench.figures import Figure, Sample, Target, figure, paired_ratios
from bench.measuring import timed
from bench.record_path import our_reader
from bench.servers import CannedServer
from bench.spark_prebuilt import BATCH_ROWS
from bench.spark_rig import Batch, SparkRig, memory_mb, sample_of
from bench.spark_stream import KINDS, Kind, Stream
from kclrun.codec.kpl import open_aggregates
from kclrun.spark.positions import PositionKind, parse_position

_ROW: Final = "spark-source"
_RATE: Final = "k rows/s/core"
_TARGET: Final = Target(at_least=500.0)
# Two tasks at a time on two cores, eight shards each, all of them opened at once.
_SHARDS: Final = 16
_TASKS: Final = 2
# A batch takes about a second, a sixth of it what a batch costs without rows: three and a half
# pages a shard of 200 B and of aggregates, four and a half of 1 KB.
_RECORDS_A_SHARD: Final = {"small": 35_000, "large": 9_000, "aggregated": 140}
# Three times as many rows in a batch: what a batch costs without rows is a sixteenth then.
_RECORDS_A_LARGE_BATCH: Final = 105_000
_CEILING_ROWS: Final = 280_000
# Behind the first ones are workers, imports and most of the compiler's work.
_SKIPPED: Final = 2
_BATCHES_MIN: Final = 4
_WINDOW_S: Final = 4.0
_BARE_PAGES: Final = {"small": 40, "large": 40, "aggregated": 20}
_LABELS: Final = {"small": "200 B", "large": "1 KB", "aggregated": "aggregates of 240 x 200 B"}
_NO_SOURCE: Final = "200 B, prebuilt batches"
_LARGE_BATCHES: Final = "200 B, 1.7 M rows a batch"


class Run(msgspec.Struct, frozen=True):
    """One query's steady state."""

    sample: Sample
    jvm_share: float
    memory_mb: dict[str, list[float]]


def source(rounds: int) -> list[Figure]:
    """Catching up, 16 shards hours behind, `local[2]`: signed GetRecords over HTTP to Spark's rows.

    Rows a second of CPU: the JVM's, the source's driver process' and the workers', planner and
    all that a batch costs included; the server is another process and not in it. Five reads a
    second and shard, which is the service's limit, so that nothing waits for the quota of one
    shard. Steady state: the first batches of each query do not count. Beside it, in turn in the
    same run: the bare loop (`PollingReader.fetch`, and `open_aggregates`, on one thread without
    Spark), and Spark's ceiling without a source, prebuilt Arrow batches of the same rows. What
    Spark says of its rows is compared with the numbers in the offsets.
    """
    runs: dict[str, list[Run]] = {}
    bare: dict[str, list[Sample]] = {}
    with CannedServer("bench.spark_server") as server, SparkRig() as rig:
        _run(rig, server, "small")  # the compiler's warm-up
        for number in range(rounds):
            for kind in _LABELS:
                runs.setdefault(kind, []).append(_run(rig, server, kind))
                bare.setdefault(kind, []).append(timed(_bare_loop(server, kind, number)))
            large = _run(rig, server, "small", _RECORDS_A_LARGE_BATCH)
            runs.setdefault(_LARGE_BATCHES, []).append(large)
            runs.setdefault(_NO_SOURCE, []).append(_ceiling(rig))
    figures = [each for kind in _LABELS for each in _of_kind(kind, runs[kind], bare[kind])]
    ceiling = _per_core(runs[_NO_SOURCE])
    large_batches = _thousands(_per_core(runs[_LARGE_BATCHES]))
    figures += [
        figure(
            _ROW, f"{_LARGE_BATCHES}: source to no-op sink", _RATE, large_batches, target=_TARGET
        ),
        figure(_ROW, f"{_NO_SOURCE}: Spark alone", "k rows/s/core", _thousands(ceiling)),
        figure(
            *(_ROW, "200 B: rows/CPU-s ÷ Spark alone", "x"),
            paired_ratios(_per_core(runs["small"]), ceiling),
        ),
    ]
    return figures + _memory(runs["small"])


def _run(rig: SparkRig, server: CannedServer, kind: str, records: int | None = None) -> Run:
    records = records or _RECORDS_A_SHARD[kind]
    frame = rig.frame(
        "kclrun",
        streamName=f"{kind}-{_SHARDS}",
        endpointUrl=server.url,
        startingOffsets="earliest",
        maxRecordsPerTrigger=_SHARDS * records,
        maxReadsPerSecondPerShard=5,
        shardsPerTask=_SHARDS // _TASKS,
        # Away from the tip the next batch is looked for at once; this is for the tip.
        pollInterval="200ms",
    )
    return _steady(rig, frame, lambda batch: _check(batch, KINDS[kind]))


def _ceiling(rig: SparkRig) -> Run:
    frame = rig.frame(
        "bench-prebuilt", rowsPerPartition=_CEILING_ROWS, partitions=_TASKS, payloadBytes=200
    )
    assert _CEILING_ROWS % BATCH_ROWS == 0
    return _steady(rig, frame, lambda _: None)


def _steady(rig: SparkRig, frame: Any, check: Callable[[Batch], None]) -> Run:
    with rig.running(frame.writeStream.format("noop")) as query:
        batches = rig.batches(query, skipped=_SKIPPED, at_least=_BATCHES_MIN, window_s=_WINDOW_S)
        memory = memory_mb()
    for batch in batches:
        check(batch)
    sample = sample_of(batches)
    jvm_s = batches[-1].jvm_cpu_s - batches[0].jvm_cpu_s
    return Run(sample, jvm_s / sample.cpu_s, memory)


def _check(batch: Batch, kind: Kind) -> None:
    """As many rows as lie between the offsets, or it is no source."""
    expected = kind.user_records * (_records_before(batch.end) - _records_before(batch.start))
    assert batch.rows == expected, f"{batch.rows} rows of {expected}"


def _records_before(offset: str) -> int:
    """Kinesis records before an offset, in all shards."""
    positions = [parse_position(each) for each in json.loads(offset)["shards"].values()]
    return sum(
        Stream.index_of(each.number) + (0 if each.is_before else 1)
        for each in positions
        if each.kind is PositionKind.RECORD
    )


def _bare_loop(server: CannedServer, kind: str, number: int) -> Callable[[], float]:
    reader, pages = our_reader(server.url), _BARE_PAGES[kind]
    stream = Stream(f"{kind}-{_SHARDS}", began_ms=0)
    opens = KINDS[kind].user_records > 1

    def read() -> float:
        total = 0
        begin = number * pages * KINDS[kind].page_records
        iterator: str | None = stream.iterator_at(stream.shards[0], begin)
        for _ in range(pages):
            assert iterator is not None
            page = reader.fetch(iterator, 10_000)
            total += len(open_aggregates(page.records) if opens else page.records)
            iterator = page.next_iterator
        return float(total)

    read()
    return read


def _of_kind(kind: str, runs: Sequence[Run], bare: Sequence[Sample]) -> list[Figure]:
    label, ours = _LABELS[kind], _per_core(runs)
    loop = [sample.per_cpu_s for sample in bare]
    target = _TARGET if kind == "small" else None
    wall = [run.sample.per_wall_s for run in runs]
    shares = [100 * run.jvm_share for run in runs]
    return [
        figure(
            _ROW, f"{label}: source to no-op sink", "k rows/s/core", _thousands(ours), target=target
        ),
        figure(_ROW, f"{label}: … by the wall clock", "k rows/s", _thousands(wall)),
        figure(_ROW, f"{label}: … the JVM's share of the CPU", "%", shares),
        figure(_ROW, f"{label}: the bare loop", "k rows/s/core", _thousands(loop)),
        figure(_ROW, f"{label}: rows/CPU-s ÷ the bare loop's", "x", paired_ratios(ours, loop)),
    ]


def _memory(runs: Sequence[Run]) -> list[Figure]:
    """Of each process as the window ends; those left over from earlier queries are among them."""
    figures = [
        figure(_ROW, f"200 B, loaded: {what} (PSS)", "MB", values)
        for what in runs[0].memory_mb
        if (values := [each for run in runs for each in run.memory_mb[what]])
    ]
    totals = [sum(sum(each) for each in run.memory_mb.values()) for run in runs]
    return [*figures, figure(_ROW, "200 B, loaded: all of them (PSS)", "MB", totals)]


def _per_core(runs: Sequence[Run]) -> list[float]:
    return [run.sample.per_cpu_s for run in runs]


def _thousands(values: Sequence[float]) -> list[float]:
    return [value / 1_000 for value in values]
