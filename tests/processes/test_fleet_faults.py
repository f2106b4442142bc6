"""A fleet that loses a host, and one whose parts stand still and wake up: nothing is lost.

`KCLRUN_FLEET_TIMES=1` asserts how long a lost host's leases are unread.
"""

import os
import signal
import time

import pytest

from tests.processes.fleet_rig.gaps import reads_after
from tests.processes.fleet_rig.times import judge_times
from tests.processes.ledger_rig.rounds import reported

pytest_plugins = ("tests.processes.fleet_rig.fixtures",)
pytestmark = pytest.mark.slow

IS_LONG = os.environ.get("KCLRUN_FLEET_LONG") == "1"
FAILOVER_S = 10.0 if IS_LONG else 3.0
CAP = 2000


def test_the_leases_of_a_lost_host_are_read_again_and_nothing_is_lost(watched_aws, fleet, load):
    shards = 20
    stream = watched_aws.stream(shards)
    fleet = fleet(stream, failover_s=FAILOVER_S, fetch={"idle": "500ms"})
    source = load(stream, rate=400, seed=81)
    fleet.add_all(["a", "b", "c", "d"])
    fleet.until_settled(shards)
    fleet.machines["a"].until_delivered(1000)
    killed, again_s = set(), []

    for name in ["a", "b"]:
        victims = fleet.machines[name].lease_pids()
        killed.update(victims)
        lost_at, keys = fleet.lose(name)
        assert keys
        fleet.until(
            lambda lost_at=lost_at, keys=keys: (
                max(reads_after(fleet.notes.read().all, keys, lost_at).values()) < float("inf")
            )
        )
        again_s += reads_after(fleet.notes.all, keys, lost_at).values()
        fleet.until_settled(shards)

    print(reported(f"host lost, failover {FAILOVER_S:g} s: reading again", again_s))
    fleet.finish(source, killed=killed, cap=CAP)
    judge_times(again_s, p99_max_s=FAILOVER_S + 7)


def test_a_lease_process_that_stands_still_and_wakes_up_finds_its_lease_with_another(
    watched_aws, fleet, load
):
    # An odd number: only who has fewer than the other takes an expired lease at once.
    shards = 9
    stream = watched_aws.stream(shards)
    fleet = fleet(stream, failover_s=FAILOVER_S)
    source = load(stream, rate=400, seed=82)
    fleet.add_all(["a", "b"])
    fleet.until_at_rest(shards)
    counts = fleet.counts()
    richer = max(counts, key=counts.get)
    giver = fleet.machines[richer]
    giver.until_delivered(1000)
    owner = fleet.owner_ids()[richer]
    zombie = giver.lease_pids()[0]
    (key,) = {m["shard"] for m in giver.ledger.read().marks if m["pid"] == zombie}

    stopped_at = time.monotonic()
    os.kill(zombie, signal.SIGSTOP)
    time.sleep(3 * FAILOVER_S)  # a stoppage of that length is the fault, no wait
    os.kill(zombie, signal.SIGCONT)
    woken_at = time.monotonic()

    giver.until(lambda: giver.of("process_lost_lease"))
    (reported_once,) = giver.of("process_lost_lease")
    assert reported_once["shard"] == key
    print(reported_once["reason"])
    taken = [n for n in fleet.notes.since(stopped_at) if n.is_take and n.key == key]
    assert taken[0].owner != owner
    assert taken[0].at < woken_at
    print(f"taken {taken[0].at - stopped_at:.1f} s after the stop")
    fleet.until_settled(shards)
    fleet.finish(source, killed={zombie}, cap=CAP)
    late = [b for b in fleet.ledger.batches if b.pid == zombie and b.at > woken_at]
    assert late == [], "a batch was begun after the fence [I4]"
    # A late checkpoint [P19] names no owner: it touches neither owner nor counter. Of all else
    # nothing may apply between the other's take and the giver's own next one.
    notes = [n for n in fleet.notes.all if n.key == key and n.is_applied and n.at > taken[0].at]
    mine_again = [n.at for n in notes if n.is_take and n.owner == owner]
    until = min(mine_again, default=float("inf"))
    assert [n for n in notes if n.owner == owner and n.at < until] == []


def test_a_manager_that_stands_still_loses_nothing_and_takes_nothing_when_it_wakes_up(
    watched_aws, fleet, load
):
    shards = 8
    stream = watched_aws.stream(shards)
    fleet = fleet(stream, failover_s=FAILOVER_S)
    source = load(stream, rate=400, seed=83)
    fleet.add_all(["a", "b"])
    fleet.until_settled(shards)
    sleeper = fleet.machines["a"]
    sleeper.until_delivered(1000)
    stopped_at = time.monotonic()

    sleeper.process.send_signal(signal.SIGSTOP)
    time.sleep(3 * FAILOVER_S)  # the fault itself
    sleeper.process.send_signal(signal.SIGCONT)

    # Its lease processes renewed and read on all the while, so there is nothing to move or to end.
    assert fleet.moves_in_cycles(4) == []
    assert [n for n in fleet.notes.since(stopped_at) if n.is_take] == []
    assert not sleeper.of("process_stalled")
    assert fleet.is_settled(shards)
    fleet.finish(source)
