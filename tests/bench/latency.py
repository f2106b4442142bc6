"""Rows `latency` and `consumers`: records to user code, by enhanced fan-out and by polling."""

import contextlib
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
# Five applications of one shard, which takes 90 % of the 1 MB/s that the service lets through.
_CONSUMERS: Final = 5
_FULL_REQUEST: Final = 45
_FULL_EVERY_S: Final = 0.05


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
        repeated(partial(_put, client, "lags", itertools.count(), _A_REQUEST, 0), _PUT_EVERY_S),
    ):
        wait_until(lambda: marks.stat().st_size > 0, "the first batch", _PATIENCE_S)
        time.sleep(2.0)  # an observation, no wait: the first second has imports in it
        before = len(marks.read_text().splitlines())
        time.sleep(_MEASURED_S)
        return [float(line) for line in marks.read_text().splitlines()[before:]]


def _put(client: Any, stream: str, numbers: Iterator[int], count: int, size_bytes: int) -> None:
    """Records to keys of their own, each with the instant of its put."""
    records = [
        {
            "Data": repr(time.monotonic()).encode().ljust(size_bytes),
            "PartitionKey": str(next(numbers)),
        }
        for _ in range(count)
    ]
    client.put_records(StreamName=stream, Records=records)


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


def consumers(rounds: int) -> list[Figure]:
    """Five applications read one shard, which takes 0.9 MB/s, under the service's limits: a shard
    gives 2 MB/s to all pollers together, and 2 MB/s to each consumer of enhanced fan-out. From
    putting a record to user code, over all five: pollers fall behind for as long as it goes on.
    """
    figures = []
    for mode, target in (("fan-out", Target(at_most=1_000.0)), ("polling", None)):
        lags = [lag for _ in range(rounds) for lag in _lags_of_five(mode)]
        label = f"{mode}, {_CONSUMERS} applications: put → process_records"
        figures += [
            figure("consumers", label, "ms", lags),
            figure(
                *("consumers", f"{mode}: … its p99", "ms", lags),
                target=target,
                judged_percentile=99,
            ),
        ]
    return figures


def _lags_of_five(mode: str) -> list[float]:
    with (
        start_embedded(limits=True) as embedded,
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as running,
    ):
        client = stock_client("kinesis", embedded.kinesis_endpoint)
        client.create_stream(StreamName="shared", ShardCount=1)
        all_marks = []
        for number in range(_CONSUMERS):
            place = Path(folder, str(number))
            place.mkdir()
            (marks := place / "lags").touch()
            all_marks.append(marks)
            settings = {"fetch": {"mode": mode}, "application": f"bench-{number}"}
            options = {"marks": str(marks)}
            running.enter_context(program(place, embedded, "shared", "Lags", options, **settings))
        _put(client, "shared", itertools.count(), 1, 0)
        for marks in all_marks:
            wait_until(lambda marks=marks: marks.stat().st_size > 0, "a batch", _PATIENCE_S)
        put = partial(_put, client, "shared", itertools.count(), _FULL_REQUEST, _RECORD_BYTES)
        with repeated(put, _FULL_EVERY_S):
            time.sleep(_MEASURED_S)
        # The first line is of the record that came before all had started.
        return [float(line) for each in all_marks for line in each.read_text().splitlines()[1:]]
