"""Row `fleet`: planned moves, the loss of a host, and what a fleet at rest asks of DynamoDB."""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from bench.figures import Figure, Target, figure

# The rig of the fleet's tests goes by its full name.
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.processes.fleet_rig.aws import WatchedAws
from tests.processes.fleet_rig.fleet import Fleet
from tests.processes.fleet_rig.gaps import planned_gaps, reads_after
from tests.processes.ledger_rig.application import Application
from tests.processes.ledger_rig.producing import Producer

_ROW: Final = "fleet"
_MANAGERS: Final = ("a", "b", "c", "d", "e")
_SHARDS: Final = 50
_FAILOVER_S: Final = 10.0
_RECORDS_PER_S: Final = 500
_AT_REST_S: Final = 30.0
_HOUR_S: Final = 3600.0
# A lost host's leases: those of one manager of five.
_PATIENCE_S: Final = 90.0
_SEED: Final = 7


def fleet(rounds: int) -> list[Figure]:
    """A rolling restart of five managers over 50 shards, under 500 records a second.

    Each manager is kclrun as a user runs it, with a lock folder of its own as on a host of its own,
    and the default failover (10 s). A round stops each manager by SIGTERM and starts it again once
    it is gone; the next one follows when every manager has ten leases. Times are the servers': from
    the answer to the write that gives a lease away to the arrival of the next owner's first
    GetRecords. Then hosts are lost (SIGKILL of a manager and of all it started), one a round. At
    last the fleet is left alone and its requests are counted. Fifty lease processes, five managers,
    two servers and the producer share this machine's processors. DynamoDB is the test rig's own,
    quick enough not to be what is measured.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        aws = WatchedAws(folder / "notes")
        stack.callback(aws.close)
        stream = aws.stream(_SHARDS)
        machines = Fleet(
            stack.enter_context(applications(folder, aws)), aws, stream, failover_s=_FAILOVER_S
        )
        machines.add_all(_MANAGERS)
        machines.until_settled(_SHARDS)
        source = Producer(aws.kinesis, stream, 10**9, seed=_SEED, rate=_RECORDS_PER_S).start()
        stack.callback(source.stop)
        moves_ms = _rolling_restarts(machines, rounds)
        requests = _requests(machines)
        again_s, killed = _lost_hosts(machines, rounds)
        # Records that come twice are those of the lost hosts: a planned move's would be a fault.
        machines.finish(source, killed=killed, cap=10**6)
    return [*_moves(moves_ms), _losses(again_s), *requests]


@contextlib.contextmanager
def applications(folder: Path, aws: WatchedAws) -> Iterator[Callable[..., Any]]:
    """Makes applications, and ends them with all that they started."""
    made: list[Any] = []

    def application(stream: str, **settings: Any) -> Any:
        made.append(Application(folder, aws, stream, **settings))
        return made[-1]

    try:
        yield application
    finally:
        for one in made:
            one.close()


def _rolling_restarts(machines: Fleet, rounds: int) -> list[float]:
    began = time.monotonic()
    for name in _MANAGERS * rounds:
        machines.stop(name)
        machines.machines[name].start()
        machines.until_settled(_SHARDS)
    gaps = planned_gaps(machines.notes.read().all, began, time.monotonic())
    return [gap.seconds * 1000 for gap in gaps]


def _moves(moves_ms: list[float]) -> list[Figure]:
    what = "planned move: give-away → first GetRecords (target: {})"
    p50 = figure(_ROW, what.format("p50"), "ms", moves_ms, target=Target(at_most=400.0))
    p99 = figure(
        *(_ROW, what.format("p99"), "ms", moves_ms),
        target=Target(at_most=800.0),
        judged_percentile=99,
    )
    return [p50, p99]


def _requests(machines: Fleet) -> list[Figure]:
    """Per lease-hour and owner-hour; a Java KCL 2.x worker renews as often, and scans 180 times."""
    machines.until_at_rest(_SHARDS)
    began = time.monotonic()
    time.sleep(_AT_REST_S)  # an observation, no wait
    counts = machines.notes.requests_between(began, began + _AT_REST_S)
    hours = _AT_REST_S / _HOUR_S
    renewals = sum(count for kind, count in counts.items() if kind.startswith("renew"))
    checkpoints = sum(count for kind, count in counts.items() if kind.startswith("checkpoint"))
    return [
        figure(_ROW, f"{what} at rest", unit, [count / each / hours])
        for what, unit, count, each in (
            ("renewals", "a lease-hour", renewals, _SHARDS),
            ("checkpoints (every 5 s here)", "a lease-hour", checkpoints, _SHARDS),
            ("scans", "an owner-hour", counts["Scan"], len(_MANAGERS)),
            ("looks for offers", "an owner-hour", counts["Query"], len(_MANAGERS)),
        )
    ]


def _lost_hosts(machines: Fleet, rounds: int) -> tuple[list[float], set[int]]:
    again_s: list[float] = []
    killed: set[int] = set()
    for number in range(rounds):
        name = _MANAGERS[number % len(_MANAGERS)]
        killed.update(machines.machines[name].lease_pids())
        lost_at, keys = machines.lose(name)

        def is_read_again(keys: set[str] = keys, lost_at: float = lost_at) -> bool:
            reads = reads_after(machines.notes.read().all, keys, lost_at)
            return max(reads.values()) < float("inf")

        machines.until(is_read_again, _PATIENCE_S)
        again_s += reads_after(machines.notes.all, keys, lost_at).values()
        machines.machines[name].start()
        machines.until_settled(_SHARDS, _PATIENCE_S)
    return again_s, killed


def _losses(again_s: list[float]) -> Figure:
    return figure(
        *(_ROW, "host lost → first GetRecords, failover 10 s (target: p99)", "s", again_s),
        target=Target(at_most=_FAILOVER_S + 5),
        judged_percentile=99,
    )
