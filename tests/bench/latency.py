"""Row `latency`: from putting a record to user code, by enhanced fan-out and by polling."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.figures import Figure, Target, figure
from bench.lease_rig import wait_until
from bench.program import program, repeated
from bench.servers import stock_client
from kclrun.local.server import Embedded, start_embedded

_ROW: Final = "latency"
_MODES: Final = ("fan-out", "polling")
_SHARDS: Final = 2
# 200 records a second (issue "Throughput"), in requests of four.
_A_REQUEST: Final = 4
_PUT_EVERY_S: Final = 0.02
_MEASURED_S: Final = 10.0
_PATIENCE_S: Final = 60.0
# CPU for each MB: one shard with 32 MB of records of 1 kB, read from its beginning.
_BACKLOG_RECORDS: Final = 32_000
_RECORD_BYTES: Final = 1_000


def latency(rounds: int) -> list[Figure]:
    """The whole of kclrun runs as a user runs it, over the embedded AWS with two shards, in both
    modes in turn, with the default `fetch.idle` of 1 s. 200 records a second carry the instant of
    their put; the processor compares it with the present, by the clock that all processes of a host
    share. Then 32 MB are read from the beginning of one shard, and the lease process says what CPU
    time it took. Servers, producer and lease processes share this machine's processors.
    """
    lags: dict[str, list[float]] = {mode: [] for mode in _MODES}
    cpu: dict[str, list[float]] = {mode: [] for mode in _MODES}
    for number in range(rounds):
        for mode in _MODES:
            with start_embedded() as embedded, tempfile.TemporaryDirectory() as folder:
                lags[mode] += _lags(Path(folder), embedded, mode)
                cpu[mode].append(_cpu_ms_a_mb(Path(folder), embedded, mode, number))
    targets = {"fan-out": (Target(at_most=30.0), Target(at_most=100.0)), "polling": (None, None)}
    figures = []
    for mode in _MODES:
        p50, p99 = targets[mode]
        figures += [
            figure(_ROW, f"{mode}: put → process_records", "ms", lags[mode], target=p50),
            figure(
                *(_ROW, f"{mode}: … its p99", "ms", lags[mode]), target=p99, judged_percentile=99
            ),
            figure(_ROW, f"{mode}: CPU of the lease process", "ms/MB", cpu[mode]),
        ]
    ratios = [mine / its for mine, its in zip(cpu["fan-out"], cpu["polling"], strict=True)]
    figures.append(
        figure(_ROW, "CPU for each MB: fan-out ÷ polling", "x", ratios, target=Target(at_most=1.0))
    )
    return figures


def _lags(folder: Path, embedded: Embedded, mode: str) -> list[float]:
    client = stock_client("kinesis", embedded.kinesis_endpoint)
    client.create_stream(StreamName="lags", ShardCount=_SHARDS)
    marks = folder / "lags"
    marks.touch()
    options = {"marks": str(marks)}
    with (
        program(folder, embedded, "lags", "Lags", options, fetch={"mode": mode}),
        repeated(partial(_put_some, client, itertools.count()), _PUT_EVERY_S),
    ):
        wait_until(lambda: marks.stat().st_size > 0, "the first batch", _PATIENCE_S)
        time.sleep(2.0)  # an observation, no wait: the first second has imports in it
        before = len(marks.read_text().splitlines())
        time.sleep(_MEASURED_S)
        return [float(line) for line in marks.read_text().splitlines()[before:]]


def _put_some(client: Any, numbers: Iterator[int]) -> None:
    """Records to keys of their own, each with the instant of its put."""
    records = [
        {"Data": repr(time.monotonic()).encode(), "PartitionKey": str(next(numbers))}
        for _ in range(_A_REQUEST)
    ]
    client.put_records(StreamName="lags", Records=records)


def _cpu_ms_a_mb(folder: Path, embedded: Embedded, mode: str, number: int) -> float:
    stream = f"backlog-{mode}-{number}"
    client = stock_client("kinesis", embedded.kinesis_endpoint)
    client.create_stream(StreamName=stream, ShardCount=1)
    records = [{"Data": bytes(_RECORD_BYTES), "PartitionKey": "any"}] * 500
    for _ in range(_BACKLOG_RECORDS // len(records)):
        client.put_records(StreamName=stream, Records=records)
    marks = folder / "cpu"
    options = {"marks": str(marks), "records": _BACKLOG_RECORDS}
    settings = {"fetch": {"mode": mode}, "application": f"bench-{mode}-{number}"}
    with program(folder, embedded, stream, "Cpu", options, **settings):
        wait_until(marks.exists, "the last record", _PATIENCE_S)
        wait_until(lambda: marks.read_text().endswith("\n"), "its line", _PATIENCE_S)
    return float(marks.read_text()) * 1000 / (_BACKLOG_RECORDS * _RECORD_BYTES / 1e6)
