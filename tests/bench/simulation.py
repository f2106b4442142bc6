"""Row `simulation`: how much of a fleet's life the simulator plays in a minute of one core."""

from functools import partial
from typing import Final

from bench.figures import Figure, Target, figure, paired_ratios
from bench.measuring import interleaved, timed
from kclrun.simulation.arrivals import Traffic
from kclrun.simulation.clocks import Scheduler
from kclrun.simulation.fleet import Fleet
from kclrun.simulation.what_if import WhatIf, run_what_if
from kclrun.simulation.world import FleetSettings
from tests.support.oracles.watch import Oracles

# The fleet of the goals; four records a second and shard bring something with every poll.
_OWNERS: Final = 3
_SHARDS: Final = 8
_POLL_S: Final = 5.0
_RECORDS_PER_S: Final = 32.0
_ROW: Final = "simulation"
# Long enough that the cold start is a twentieth of it.
_PLAYED_S: Final = 600.0
_FLEET_TARGET: Final = Target(at_least=100.0)
_LARGE: Final = WhatIf(group_sizes=(67, 67, 66), shards=2_000, minutes=10.0)
_LARGE_TARGET: Final = Target(at_most=60.0)


def simulation(rounds: int) -> list[Figure]:
    """Fleet-hours a minute of CPU, with every oracle on; beside it, what a bare scheduler needs
    for as many events that do nothing: how far there is to go at most."""
    events = _play().scheduler.events_total
    runs = interleaved({"fleet": _hours_played, "bare": partial(_pop, events)}, rounds)
    fleet, bare = runs["fleet"], runs["bare"]
    per_min = [sample.per_cpu_s * 60 for sample in fleet]
    ratios = paired_ratios([s.cpu_s for s in fleet], [s.cpu_s for s in bare])
    what = f"{_OWNERS} owners, {_SHARDS} shards, {_POLL_S:g} s polls"
    return [
        figure(_ROW, what, "fleet-hours/min/core", per_min, target=_FLEET_TARGET),
        figure(_ROW, "CPU against as many events of a bare scheduler", "x", ratios),
    ]


def large_fleet(rounds: int) -> list[Figure]:
    """Seconds for ten virtual minutes from a cold start, as `kclrun simulate` plays them."""
    samples = [timed(lambda: float(run_what_if(_LARGE, "").events)) for _ in range(rounds)]
    what = f"{_LARGE.workers} owners, {_LARGE.shards} shards, {_LARGE.minutes:g} virtual minutes"
    took = [sample.wall_s for sample in samples]
    return [figure("large-fleet", what, "s", took, target=_LARGE_TARGET)]


def _hours_played() -> float:
    return _play().scheduler.now / 3600


def _play() -> Fleet:
    settings = FleetSettings(poll_s=_POLL_S)
    fleet = Fleet(
        1,
        shards=_SHARDS,
        traffic=Traffic(records_per_s=_RECORDS_PER_S),
        settings=settings,
        observer_kind=Oracles,
    )
    for number in range(_OWNERS):
        fleet.add_host("abc"[number], f"host-{number}")
    fleet.run_for(_PLAYED_S)
    return fleet


def _pop(events: int) -> float:
    """A chain of events, each of which only schedules the next."""
    scheduler = Scheduler(1)

    def again() -> None:
        scheduler.after(1.0, again)

    scheduler.after(1.0, again)
    scheduler.run_until(float(events))
    return float(scheduler.events_total)
