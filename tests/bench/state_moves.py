"""Row `state-moves`: planned moves of leases that have a large state."""

import contextlib
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.figures import Figure, Target, figure
from bench.servers import stock_client

# The rig of the fleet's tests goes by its full name.
sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.fleet import applications
from kclrun.local.server import start_embedded
from tests.processes.fleet_rig.aws import WatchedAws
from tests.processes.fleet_rig.fleet import Fleet
from tests.processes.fleet_rig.gaps import planned_gaps
from tests.processes.ledger_rig.producing import Producer

_ROW: Final = "state-moves"
_BUCKET: Final = "state-moves"
_SHARDS: Final = 2
_KEYS: Final = 200
_NAMES: Final = 10_000
# Each of the first ten records of a key makes a tenth of its 10,000 values, so that each of two
# shards has 100 MB. All at once, the first batch of a hundred keys were a million changes: longer
# on a busy machine than `stall` allows, and close to the most that one call may change.
_RECORDS: Final = 10
# Of such records a batch has 50,000 changes, which take a second.
_BATCH_MAX: Final = 50
_PROCESSOR: Final = f"""
from kclrun import RecordProcessor

class Large(RecordProcessor):
    def initialize(self, context):
        self.state = context.state

    def process_records(self, batch, checkpointer):
        for record in batch:
            values = self.state[record]
            count = values.get("count", 0)
            if count < {_RECORDS}:
                for number in range(count, {_NAMES}, {_RECORDS}):
                    values[f"{{number:06}}"] = f"{{number:06}}" * 15
            values["count"] = count + 1
"""
_PATIENCE_S: Final = 120.0


def state_moves(rounds: int) -> list[Figure]:
    """Two managers share two shards, each with a million values of 90 bytes (110 MB), whose
    versions are in the embedded S3. A round stops the second manager, removes its disk, and starts
    it again: it asks for a lease. With `state.local` the state is copied while the first owner
    works, and the first manager has a copy when the lease comes back. Without, every move reads it
    whole. From the answer to the write that gives a lease away to the arrival of the next owner's
    first GetRecords, with 100 records a second.
    """
    found = []
    for what, more in (
        ("with state.local", {"local": "local", "memory": "256MiB"}),
        ("state in memory", {}),
    ):
        asked, drained = _gaps_ms(rounds, more)
        for how, gaps in (("asked for", asked), ("drained", drained)):
            target = Target(at_most=2000.0) if more else None
            found += [
                figure(*(_ROW, f"lease {how}, {what} (p50)", "ms", gaps)),
                figure(
                    *(_ROW, f"lease {how}, {what} (p99)", "ms", gaps),
                    target=target,
                    judged_percentile=99,
                ),
            ]
    return found


def _gaps_ms(rounds: int, more: dict[str, str]) -> tuple[list[float], list[float]]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "code").mkdir()
        (folder / "code" / "large.py").write_text(_PROCESSOR)
        machines, source = stack.enter_context(_two_machines(folder, more))
        drained, asked = [], []
        for _ in range(rounds):
            began = time.monotonic()
            machines.stop("b")
            machines.until(lambda: machines.counts()["a"] == _SHARDS, _PATIENCE_S)
            _wait_for_reads(machines, began)
            drained += planned_gaps(machines.notes.all, began)
            shutil.rmtree(machines.machines["b"].folder / "local", ignore_errors=True)
            began = time.monotonic()
            machines.machines["b"].start()
            machines.until_settled(_SHARDS, _PATIENCE_S)
            _wait_for_reads(machines, began)
            asked += planned_gaps(machines.notes.all, began)
        source.stop()
    return [gap.seconds * 1000 for gap in asked], [gap.seconds * 1000 for gap in drained]


def _wait_for_reads(machines: Fleet, began: float) -> None:
    """Every lease that was given away since then is read again."""

    def are_read() -> bool:
        return all(
            gap.seconds < float("inf") for gap in planned_gaps(machines.notes.read().all, began)
        )

    machines.until(are_read, _PATIENCE_S)


@contextlib.contextmanager
def _two_machines(folder: Path, more: dict[str, str]) -> Iterator[tuple[Fleet, Any]]:
    with contextlib.ExitStack() as stack:
        services = stack.enter_context(start_embedded())
        stock_client("s3", services.endpoint).create_bucket(Bucket=_BUCKET)
        aws = WatchedAws(folder / "notes")
        stack.callback(aws.close)
        stream = aws.stream(_SHARDS)
        application = stack.enter_context(applications(folder, aws))
        endpoints = {"endpoints": {"s3": services.endpoint}}
        machines = Fleet(
            lambda of, **settings: application(of, aws=endpoints, **settings),
            aws,
            stream,
            failover_s=10.0,
            processor="large:Large",
            path=str(folder / "code"),
            fetch={"batch_max": _BATCH_MAX},
            state={"store": f"s3://{_BUCKET}/state", **more},
        )
        stack.enter_context(_telling_logs(machines))
        machines.add("a")
        machines.until(lambda: machines.counts()["a"] == _SHARDS, _PATIENCE_S)
        source = Producer(aws.kinesis, stream, 10**9, seed=7, rate=100, keys=_KEYS).start()
        stack.callback(source.stop)
        _wait_for_state(machines, source)
        machines.add("b")
        machines.until_settled(_SHARDS, _PATIENCE_S)
        yield machines, source


def _wait_for_state(machines: Fleet, source: Any) -> None:
    """Every key has all of its values, in a version that its row names."""

    def are_put() -> bool:
        counts = Counter(key for put in (*source.put.values(),) for _, key, _ in put[:])
        return len(counts) == _KEYS and min(counts.values()) >= _RECORDS

    machines.until(are_put, _PATIENCE_S)
    last = {shard: int(put[-1][0]) for shard, put in source.put.items()}

    def are_written() -> bool:
        rows = machines.rows()
        return all("-" in row.get("stateVersion", "") for row in rows.values()) and all(
            int(rows[shard]["checkpoint"]) >= at for shard, at in last.items()
        )

    machines.until(are_written, _PATIENCE_S)


@contextlib.contextmanager
def _telling_logs(machines: Fleet) -> Iterator[None]:
    """What fails here is seen in the managers' logs, whose folder is gone afterwards."""
    try:
        yield
    except BaseException:
        for name, machine in machines.machines.items():
            print(f"{name}: {machine.last_words()}", file=sys.stderr)
        raise
