"""Row `peers`: one stream read by kclrun, and by what a user would take instead."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import psutil

from bench.figures import Figure, NotMeasured, Sample, figure, paired_ratios
from bench.peer_reader import EACH
from bench.program import credentials, program
from bench.servers import REGION
from tests.interop.rig.artefacts import NotToBeHad, async_kinesis
from tests.interop.rig.peers import KclpyDaemon
from tests.interop.rig.world import Stream, World

_ROW: Final = "peers"
ASYNC_KINESIS: Final = "3.0.1"
KCLPY: Final = "3.1.3"
_SHARDS: Final = 2
_RECORDS: Final = 200 * EACH
_PAYLOAD: Final = b"x" * 200
_PUT_AT_ONCE: Final = 500
# A peer takes seconds; on a machine with other work, minutes.
_PATIENCE_S: Final = 600.0
_SCRIPT: Final = Path(__file__).with_name("peer_reader.py")

Started = contextlib.AbstractContextManager[Any]


class Run(Sample, frozen=True, kw_only=True):
    """A whole run of a program; `start_cpu_s` had gone when its first records were counted."""

    start_cpu_s: float
    first_records: int

    @property
    def per_cpu_s_after(self) -> float:
        """Records a CPU second, those of the start and its costs left out."""
        return (self.work - self.first_records) / (self.cpu_s - self.start_cpu_s)


def peers(rounds: int) -> list[Figure | NotMeasured]:
    """200,000 records of 200 B in two shards, from the program's start to the last record.

    CPU seconds of the program and all its processes (of amazon_kclpy: the daemon's JVM and a Python
    each shard); the embedded AWS that serves them is not in it. Each program has its own defaults
    but for the start at TRIM_HORIZON, and user code that only counts: kclrun in a fleet of one with
    a process each shard, amazon_kclpy the same, async-kinesis in one process without a lease
    table, boto3 in one loop without anything. In turn, round by round.
    """
    runs: dict[str, list[Run]] = {}
    missing: dict[str, NotMeasured] = {}
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        world = World(Path(folder))
        try:
            stream = _filled(world)
            for number in range(rounds):
                for place, (name, start) in enumerate(_PEERS.items()):
                    try:
                        rig = _rig(Path(folder), world, stream, f"peer-{place}-{number}")
                        runs.setdefault(name, []).append(_run(rig, start))
                    except NotToBeHad as reason:
                        missing[name] = NotMeasured(_ROW, f"{name}: {reason}", is_left_out=True)
        finally:
            world.close()
    figures = [each for name in runs for each in _figures(name, runs[name], runs[_OURS])]
    return [*figures, *missing.values()]


def _filled(world: Any) -> Any:
    stream = Stream(world, _SHARDS)
    for first in range(0, _RECORDS, _PUT_AT_ONCE):
        records = [
            {"Data": _PAYLOAD, "PartitionKey": f"key-{number}"}
            for number in range(first, first + _PUT_AT_ONCE)
        ]
        answer = world.kinesis.put_records(StreamName=stream.name, Records=records)
        assert answer["FailedRecordCount"] == 0, "the embedded stream has no limits here"
    return stream


def _rig(folder: Path, world: Any, stream: Any, name: str) -> Any:
    """What a peer is given: a folder, an application and a ledger of its own."""
    own = folder / name
    own.mkdir()
    ledger = own / "ledger"
    ledger.touch()
    return SimpleNamespace(
        folder=own,
        world=world,
        stream=SimpleNamespace(name=stream.name, table=f"bench-{name}"),
        ledger=SimpleNamespace(path=ledger),
    )


def _run(rig: Any, start: Callable[[Any], Started]) -> Run:
    began = time.monotonic()
    with start(rig) as process:
        first = _counted(rig, process, 1)
        start_cpu_s = _tree_cpu_s(process.pid)
        _counted(rig, process, _RECORDS)
        cpu_s, wall_s = _tree_cpu_s(process.pid), time.monotonic() - began
    return Run(_RECORDS, cpu_s, wall_s, start_cpu_s=start_cpu_s, first_records=first)


def _counted(rig: Any, process: Any, at_least: int) -> int:
    """How many records have been counted, once they are so many."""
    give_up_at = time.monotonic() + _PATIENCE_S
    while (count := sum(map(int, rig.ledger.path.read_text().split()))) < at_least:
        assert count <= _RECORDS, "a record was read twice"
        if process.poll() is not None or time.monotonic() > give_up_at:
            log = "".join(path.read_text() for path in rig.folder.glob("*log"))
            raise TimeoutError(f"{count} of {_RECORDS} records in {rig.folder.name}: {log[-2000:]}")
        time.sleep(0.02)
    return count


def _tree_cpu_s(pid: int) -> float:
    top = psutil.Process(pid)
    tree = [top, *top.children(recursive=True)]
    return float(sum(sum(each.cpu_times()[:2]) for each in tree))


@contextlib.contextmanager
def _kclrun(rig: Any) -> Iterator[Any]:
    options = {"marks": str(rig.ledger.path)}
    place = SimpleNamespace(endpoint=None, **vars(rig.world.embedded))
    settings = {"application": rig.stream.table}
    with program(rig.folder, place, rig.stream.name, "Counts", options, **settings) as process:
        yield process


@contextlib.contextmanager
def _kclpy(rig: Any) -> Iterator[Any]:
    daemon = KclpyDaemon(rig, KCLPY, script=_SCRIPT, arguments="kclpy")
    try:
        yield daemon.process
    finally:
        daemon.close()


def _script(library: str, python: Callable[[], object]) -> Callable[[Any], Started]:
    @contextlib.contextmanager
    def start(rig: Any) -> Iterator[Any]:
        url = rig.world.embedded.kinesis_endpoint
        with (rig.folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [str(python()), str(_SCRIPT), library, url, rig.stream.name],
                env=os.environ
                | credentials()
                | {"KCLRUN_RIG_LEDGER": str(rig.ledger.path), "AWS_DEFAULT_REGION": REGION},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    return start


_OURS: Final = "kclrun"
_PEERS: Final[dict[str, Callable[[Any], Started]]] = {
    _OURS: _kclrun,
    "boto3, a loop": _script("boto3", lambda: sys.executable),
    f"async-kinesis {ASYNC_KINESIS}": _script(
        "async-kinesis", lambda: async_kinesis(ASYNC_KINESIS)
    ),
    f"amazon_kclpy {KCLPY}": _kclpy,
}


def _figures(name: str, runs: list[Run], ours: list[Run]) -> list[Figure]:
    def rates(each: list[Run]) -> tuple[list[float], list[float]]:
        after = [run.per_cpu_s_after / 1000 for run in each]
        return after, [run.per_cpu_s / 1000 for run in each]

    after, whole = rates(runs)
    starts = [run.start_cpu_s for run in runs]
    figures = [
        figure(_ROW, f"{name}: after its start", "k records/CPU-s", after),
        figure(_ROW, f"{name}: start included", "k records/CPU-s", whole),
        figure(_ROW, f"{name}: its start, to the first record", "CPU-s", starts),
    ]
    if name != _OURS:
        # A peer that could not run in some round has fewer runs.
        ours_after, ours_whole = rates(ours[: len(runs)])
        ratio = f"kclrun ÷ {name}"
        figures += [
            figure(_ROW, f"{ratio}: after its start", "x", paired_ratios(ours_after, after)),
            figure(_ROW, f"{ratio}: start included", "x", paired_ratios(ours_whole, whole)),
        ]
    return figures
