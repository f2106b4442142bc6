"""Row `crash`: how long a shard stands still when its lease process is killed."""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import psutil

from bench.figures import Figure, Target, figure
from bench.lease_rig import wait_until
from bench.program import program, repeated
from bench.servers import stock_client
from kclrun.local.server import Embedded, start_embedded

_STREAM: Final = "bench"
_SHARDS: Final = 8
# A record to each shard this often, so that a process that reads has something to process.
_PUT_EVERY_S: Final = 0.02
# A process is left alone until it has checkpointed (each second), or the next kill would be a
# crash loop, which is restarted ever later by design.
_LEFT_ALONE_S: Final = 2.5
_PATIENCE_S: Final = 60.0
_SEED: Final = 7


class _Life(msgspec.Struct, frozen=True):
    """A process's first batch, on CLOCK_MONOTONIC, which all processes of a host share."""

    shard: str
    pid: int
    instant: float


def crash(rounds: int) -> list[Figure]:
    """From SIGKILL of a lease process to the first batch of the process that follows it.

    The whole of kclrun runs as a user runs it (`python -m kclrun --config …`) over the embedded
    AWS with 8 shards, to each of which a record is put every 20 ms. Kills come at random moments,
    one shard after the other, each of a process that has made progress. In between: the kill is
    noticed and proven, the counter moved past the dead process, a process forked, the lease
    claimed, the processor made, the shard read, the batch handed over. The default failover (10 s)
    plays no part. Servers, the producer and all shards share this machine's processors.
    """
    chance = random.Random(_SEED)
    took_ms: list[float] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        embedded = stack.enter_context(start_embedded())
        stack.enter_context(_produced(embedded))
        path = folder / "marks"
        path.touch()
        stack.enter_context(program(folder, embedded, _STREAM, "Marking", {"marks": str(path)}))
        marks = _Marks(path)
        wait_until(lambda: len(marks.lives()) == _SHARDS, "8 first batches", _PATIENCE_S)
        for number in range(rounds):
            life = marks.lives()[f"shardId-{number % _SHARDS:012d}"]
            took_ms.append(1000 * _killed(life, marks, chance))
    return [
        figure(
            *("crash", "SIGKILL → next batch of the shard (target: p99)", "ms"),
            took_ms,
            target=Target(at_most=500.0),
            judged_percentile=99,
        )
    ]


def _killed(life: _Life, marks: _Marks, chance: random.Random) -> float:
    """Kill that process when its time has come; seconds until the shard moves on."""
    process = psutil.Process(life.pid)
    assert process.name() == "kclrun-lease", f"process {life.pid} is {process.name()}"
    due = life.instant + _LEFT_ALONE_S
    time.sleep(max(0.0, due - time.monotonic()) + chance.uniform(0, 0.2))
    # psutil compares the start time: no other process that was given the number is hit.
    process.kill()
    killed = time.monotonic()
    wait_until(
        lambda: marks.lives()[life.shard].pid != life.pid,
        f"a new process of {life.shard}",
        _PATIENCE_S,
    )
    return marks.lives()[life.shard].instant - killed


class _Marks:
    """The file that `processors.Marking` writes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lives(self) -> dict[str, _Life]:
        """The latest of each shard."""
        lines = self._path.read_text().splitlines()
        lives = (_Life(shard, int(pid), float(at)) for shard, pid, at in map(str.split, lines))
        return {life.shard: life for life in lives}


@contextlib.contextmanager
def _produced(embedded: Embedded) -> Iterator[None]:
    """A stream, and a record to each of its shards again and again."""
    client = stock_client("kinesis", embedded.kinesis_endpoint)
    client.create_stream(StreamName=_STREAM, ShardCount=_SHARDS)
    shards = client.list_shards(StreamName=_STREAM)["Shards"]
    records = [
        {
            "Data": b"x" * 200,
            "PartitionKey": "any",
            "ExplicitHashKey": shard["HashKeyRange"]["StartingHashKey"],
        }
        for shard in shards
    ]
    with repeated(lambda: client.put_records(StreamName=_STREAM, Records=records), _PUT_EVERY_S):
        yield
