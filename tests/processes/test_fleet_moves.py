"""Planned moves over real managers under load: nothing lost, nothing twice, hardly a pause.

The sizes are what two cores carry beside the embedded AWS. `KCLRUN_FLEET_LONG=1` takes the default
failover of ten seconds and twice the rounds; `KCLRUN_FLEET_TIMES=1` asserts how long they take.
"""

import math
import os
import time

import pytest

from tests.processes.fleet_rig.gaps import planned_gaps, reported_gaps
from tests.processes.fleet_rig.times import judge_times

pytest_plugins = ("tests.processes.fleet_rig.fixtures",)
pytestmark = pytest.mark.slow

IS_LONG = os.environ.get("KCLRUN_FLEET_LONG") == "1"
FAILOVER_S = 10.0 if IS_LONG else 6.0
ROUNDS = 2 if IS_LONG else 1
# The goals, on two cores.
P50_MAX_S, P99_MAX_S = 0.6, 1.5


def moves(fleet, began, until):
    return planned_gaps(fleet.notes.read().all, began, until)


def judge_moves(fleet, source, began):
    """No fault, no duplicate; and, where they are measured, the times of the design."""
    until = time.monotonic()
    # Who has taken a row reads it only after a fork and a claim. Nobody at all is a failure here.
    fleet.until(lambda: all(math.isfinite(gap.seconds) for gap in moves(fleet, began, until)))
    gaps = moves(fleet, began, until)
    fleet.finish(source)
    print(reported_gaps("planned moves", gaps))
    seconds = [gap.seconds for gap in gaps]
    judge_times(seconds, p50_max_s=P50_MAX_S, p99_max_s=P99_MAX_S)
    return gaps


def test_a_rolling_restart_of_five_managers_over_twenty_shards_loses_and_repeats_nothing(
    watched_aws, fleet, load
):
    shards = 20
    stream = watched_aws.stream(shards)
    names = ["a", "b", "c", "d", "e"]
    fleet = fleet(stream, failover_s=FAILOVER_S, fetch={"idle": "500ms"})
    source = load(stream, rate=500, seed=71)
    fleet.add_all(names)
    settled_s, counts = fleet.until_settled(shards)
    print(f"settled after {settled_s:.1f} s: {counts}")
    began = time.monotonic()

    for name in names * ROUNDS:
        assert fleet.stop(name) == [0]
        fleet.machines[name].start()
        settled_s, counts = fleet.until_settled(shards)
        print(f"{name} is back; settled after {settled_s:.1f} s: {counts}")

    gaps = judge_moves(fleet, source, began)
    # Each restart gives four leases away, and takes about as many back.
    assert len(gaps) >= shards * ROUNDS
    assert {gap.kind for gap in gaps} == {"offer"}


def test_two_managers_that_drain_at_once_leave_their_leases_to_the_other_two(
    watched_aws, fleet, load
):
    shards = 20
    stream = watched_aws.stream(shards)
    fleet = fleet(stream, failover_s=FAILOVER_S, fetch={"idle": "500ms"})
    source = load(stream, rate=400, seed=72)
    fleet.add_all(["a", "b", "c", "d"])
    fleet.until_at_rest(shards)
    began = time.monotonic()

    assert fleet.stop("a", "b") == [0, 0]

    settled_s, counts = fleet.until_settled(shards)
    print(f"settled after {settled_s:.1f} s: {counts}")
    gaps = judge_moves(fleet, source, began)
    assert len(gaps) >= 10


def test_a_fleet_grows_from_one_to_five_and_shrinks_to_one_while_its_stream_is_resharded(
    watched_aws, fleet, load
):
    shards = 16
    stream = watched_aws.stream(shards)
    fleet = fleet(stream, failover_s=FAILOVER_S, fetch={"idle": "500ms"})
    reshards = [(2_000, "split", 0), (4_000, "merge", 5), (6_000, "split", 9), (8_000, "merge", 2)]
    source = load(stream, rate=400, seed=73, reshards=reshards)
    fleet.add("a")
    fleet.until_settled(shards)
    began = time.monotonic()

    fleet.add_all(["b", "c", "d", "e"])
    fleet.until(lambda: source.total_put > reshards[-1][0])
    # Two splits and two merges, and all of their parents read to the end.
    fleet.until(lambda: len(fleet.rows()) == shards)
    settled_s, counts = fleet.until_settled(shards)
    print(f"five: settled after {settled_s:.1f} s: {counts}")

    assert fleet.stop("b", "c", "d", "e") == [0, 0, 0, 0]

    fleet.until_settled(shards)
    judge_moves(fleet, source, began)
