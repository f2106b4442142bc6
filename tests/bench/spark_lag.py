"""Row `spark-lag`: from putting a record to having its row, by polling and by fan-out."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from bench import hot_shard
from bench.figures import Figure, figure, percentile
from bench.servers import REGION
from bench.spark_rig import SparkRig
from kclrun.aws.operations import Operation
from kclrun.aws.put_records import WirePutter
from kclrun.local.server import start_embedded
from kclrun.model.record import PutEntry

_ROW: Final = "spark-lag"
_STREAM: Final = "bench"
_WAYS: Final = {
    "poll 1s": {"pollInterval": "1s"},
    "poll 500ms": {"pollInterval": "500ms"},
    "fan-out": {"consumerMode": "fan-out", "consumerName": _STREAM},
}
_PER_SECOND: Final = 50
_PAYLOAD_BYTES: Final = 200
# The first batches begin before the compiler has seen the code.
_SKIPPED: Final = 4
_WINDOW_S: Final = 10.0
_CREATE: Final = Operation("kinesis", "CreateStream", is_write=True)


def lag(rounds: int) -> list[Figure]:
    """One shard, 50 records a second, each with the instant of its put, the default trigger.

    Put one by one into the embedded Kinesis by a thread of this process; a row is there when
    `foreachBatch` has collected its batch. One clock for both. Two poll intervals and enhanced
    fan-out in turn.
    """
    lags: dict[str, list[list[float]]] = {way: [] for way in _WAYS}
    with start_embedded() as embedded, SparkRig() as rig:
        client = hot_shard.wire_client(embedded.kinesis_endpoint)
        client.call(_CREATE, msgspec.json.encode({"StreamName": _STREAM, "ShardCount": 1}))
        with _writing(WirePutter(client, _STREAM)):
            for _ in range(rounds):
                for way, options in _WAYS.items():
                    lags[way].append(_lags(rig, embedded.kinesis_endpoint, options))
        client.close()
    figures: list[Figure] = []
    for way, taken in lags.items():
        figures += [
            figure(_ROW, f"{way}: put → row", "s", [each for run in taken for each in run]),
            figure(_ROW, f"{way}: … its p99", "s", [percentile(run, 99) for run in taken]),
        ]
    return figures


def _lags(rig: SparkRig, endpoint: str, options: dict[str, str]) -> list[float]:
    """Of all rows of one query, after its first batches."""
    lags: list[float] = []
    is_over = threading.Event()
    frame = rig.frame("kclrun", streamName=_STREAM, endpointUrl=endpoint, region=REGION, **options)

    def take(rows: Any, number: int) -> None:
        if is_over.is_set():
            return
        collected = rows.select("data").collect()
        now = time.time()
        if number >= _SKIPPED:
            lags.extend(now - float(row.data) for row in collected)

    with rig.running(frame.writeStream.foreachBatch(take)) as query:
        rig.batches(query, skipped=_SKIPPED, at_least=1, window_s=_WINDOW_S)
        # Stopped while it collects, Spark writes a thousand lines about it.
        is_over.set()
        rig.next_batch(query)
    return lags


@contextmanager
def _writing(putter: WirePutter) -> Iterator[None]:
    ends = threading.Event()
    refused: list[str | None] = []

    def write() -> None:
        due = time.monotonic()
        while not ends.wait(max(0.0, due - time.monotonic())):
            data = repr(time.time()).encode().ljust(_PAYLOAD_BYTES)
            (result,) = putter.put([PutEntry(data, "key")])
            if result.error_code is not None:
                refused.append(result.error_code)
            due += 1 / _PER_SECOND

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield
    finally:
        ends.set()
        writer.join()
    assert not refused, f"refused: {set(refused)}"
