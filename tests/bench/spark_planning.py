"""Row `spark-planning`: what a trigger waits before its tasks run, by the number of shards."""

import time
from typing import Final

from bench.figures import Figure, Sample, Target, figure, percentile
from bench.measuring import timed
from bench.servers import CREDENTIALS, CannedServer, endpoint_at
from bench.spark_rig import Batch, SparkRig
from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.wire import WireClient
from kclrun.spark.offset_planner import OffsetPlanner
from kclrun.spark.options import SourceSettings, StreamAddress

_ROW: Final = "spark-planning"
# Records a second and shard: 20 x 200 B travel with the plan, 500 x 1 KB are read by the tasks.
_CASES: Final = (("quiet", 1), ("quiet", 8), ("quiet", 100), ("busy", 100))
_LABELS: Final = {"quiet": "20/s of 200 B", "busy": "500/s of 1 KB"}
# A look at the shards is due whenever a trigger fires: half the time between two of them.
_TRIGGER: Final = "1 second"
_POLL_S: Final = 0.5
_SKIPPED: Final = 2
# Looks by themselves: one is due every time, and within the quota even where the tasks that there
# are none of would read as well.
_LOOKS: Final = 6
_LOOK_EVERY_S: Final = 0.6
_PLANNING: Final = ("latestOffset", "getBatch", "queryPlanning")


def planning(rounds: int) -> list[Figure]:
    """At the tip of streams that are written to, one trigger a second (rounds: triggers).

    News are at hand whenever a trigger fires, and the source's next look at all shards is due, so
    that nothing of it is waiting for the poll interval. What a trigger waits is `latestOffset`
    (the calls for all shards), `getBatch` and `queryPlanning` (the ranges, and Spark's own
    planning) of Spark's progress. Beside it the first of them alone, and one look at all shards
    without Spark: `OffsetPlanner.latest_offset` in this process, by the wall clock and in CPU.
    """
    figures: list[Figure] = []
    with CannedServer("bench.spark_server") as server, SparkRig() as rig:
        for kind, shards in _CASES:
            batches = _triggers(rig, server, f"{kind}-{shards}", rounds)
            looks = _looks(server, f"{kind}-{shards}")
            figures += _figures(f"{shards} x {_LABELS[kind]}", shards, batches, looks)
    return figures


def _triggers(rig: SparkRig, server: CannedServer, stream: str, count: int) -> list[Batch]:
    frame = rig.frame(
        "kclrun",
        streamName=stream,
        endpointUrl=server.url,
        startingOffsets="latest",
        pollInterval=f"{round(1_000 * _POLL_S)}ms",
    )
    writer = frame.writeStream.format("noop").trigger(processingTime=_TRIGGER)
    with rig.running(writer) as query:
        batches = rig.batches(query, skipped=_SKIPPED, at_least=count, window_s=0.0)
    return batches[1:]


def _looks(server: CannedServer, stream: str) -> list[Sample]:
    client = WireClient(endpoint_at(server.url), lambda: CREDENTIALS, service="kinesis")
    settings = SourceSettings(
        address=StreamAddress(stream=stream, endpoint_url=server.url),
        poll_interval_s=_POLL_S,
        reads_per_second_max=5.0,
    )
    planner = OffsetPlanner(
        PollingReader(client, stream), WireStreamAdmin(client, stream), settings
    )
    offset = planner.initial_offset()

    def look() -> float:
        nonlocal offset
        offset = planner.latest_offset(offset)
        return 1.0

    looks = []
    for _ in range(_SKIPPED + _LOOKS):
        time.sleep(_LOOK_EVERY_S)
        looks.append(timed(look))
    planner.close()
    client.close()
    return looks[_SKIPPED:]


def _figures(label: str, shards: int, batches: list[Batch], looks: list[Sample]) -> list[Figure]:
    waits = [float(sum(batch.took_ms[part] for part in _PLANNING)) for batch in batches]
    ours = [float(batch.took_ms["latestOffset"]) for batch in batches]
    target = Target(at_most=60.0) if shards == 100 else None
    return [
        figure(_ROW, f"{label}: a trigger waits", "ms", waits, target=target),
        figure(_ROW, f"{label}: … its p99", "ms", [percentile(waits, 99)]),
        figure(_ROW, f"{label}: … of that latestOffset", "ms", ours),
        figure(_ROW, f"{label}: a look by itself", "ms", [1_000 * s.wall_s for s in looks]),
        figure(_ROW, f"{label}: … its CPU", "ms", [1_000 * s.cpu_s for s in looks]),
    ]
