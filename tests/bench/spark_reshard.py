"""Row `spark-reshard`: what a look of the planner costs after every shard was split."""

from typing import Final

from support.stream_ports import ModelStream

from bench.figures import Figure, Target, figure
from bench.measuring import timed
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.model.time import WallTime
from kclrun.spark.offset_planner import DriverClock, OffsetPlanner
from kclrun.spark.options import SourceSettings, StreamAddress

_ROW: Final = "spark-reshard"
_START: Final = WallTime(1_800_000_000.0)
# The second goal is linear growth, so it is ten times the first one.
_CASES: Final = ((1_000, Target(at_most=300.0)), (10_000, Target(at_most=3_000.0)))
_LOOK_EVERY_S: Final = 60.0
# The first looks after the reshard list the shards and find the ends of the parents.
_LOOKS: Final = 6


class _Clock:
    """Virtual: a look takes no time, so that no share of the calls a second is waited for."""

    def __init__(self) -> None:
        self.now = _START

    def read(self) -> float:
        return self.now

    def wall(self) -> WallTime:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now = WallTime(self.now + max(seconds, 0.0))


def resharded(rounds: int) -> list[Figure]:
    """CPU milliseconds of `OffsetPlanner.latest_offset` over a stream of 1,000 and of 10,000 open
    shards, each a child of a split. The slowest of the looks after the reshard, the model of
    Kinesis that answers them included."""
    return [
        figure(
            _ROW,
            f"the slowest look after a reshard to {shards:,} shards",
            "ms of CPU",
            [_slowest_ms(shards) for _ in range(rounds)],
            target=target,
        )
        for shards, target in _CASES
    ]


def _slowest_ms(shards: int) -> float:
    clock = _Clock()
    kinesis = Kinesis(KinesisSettings(), b"reshard".ljust(32))
    kinesis.create_stream("s", shards // 2, clock.now)
    clock.wait(_LOOK_EVERY_S)
    stream = ModelStream(kinesis, "s", clock.wall)
    planner = OffsetPlanner(
        stream,
        stream,
        SourceSettings(address=StreamAddress(stream="s"), poll_interval_s=_LOOK_EVERY_S / 2),
        clock=DriverClock(clock.read, clock.wall, clock.wait),
        calls_at_once=1,
    )
    offset = planner.latest_offset(planner.initial_offset())
    kinesis.update_shard_count(kinesis.stream("s", None, clock.now), shards, clock.now)
    spent = []
    for _ in range(_LOOKS):
        clock.wait(_LOOK_EVERY_S)

        def look() -> float:
            nonlocal offset
            offset = planner.latest_offset(offset)
            return 1.0

        spent.append(1_000 * timed(look).cpu_s)
    planner.close()
    if len(offset.shards) != shards:
        raise RuntimeError(f"the looks came to {len(offset.shards)} of {shards} children")
    return max(spent)
