"""The last release and the head beside each other on one application, under load: nothing is lost.

Upgraded machine by machine and taken back again while shards split and merge; killed; started again
by the other version on the same machine. A seed of the producer is in each test.
`KCLRUN_FLEET_TIMES=1` asserts how long shards are unread.
"""

import math
import signal
import time

import pytest

from tests.processes.fleet_rig.gaps import planned_gaps, reads_after, reported_gaps
from tests.processes.fleet_rig.times import judge_times
from tests.processes.ledger_rig.rounds import reported
from tests.upgrades.versions import HEAD

pytest_plugins = ("tests.processes.fleet_rig.fixtures", "tests.upgrades.fixtures")
pytestmark = pytest.mark.slow

SHARDS = 6
FAILOVER_S = 3.0
CAP = 2000
# The goals, on two cores.
P50_MAX_S, P99_MAX_S = 0.6, 1.5


def test_a_fleet_upgraded_in_place_while_shards_split_and_merge_loses_and_repeats_nothing(
    watched_aws, mixed_fleet, load, older
):
    stream = watched_aws.stream(SHARDS)
    fleet = mixed_fleet(stream, failover_s=FAILOVER_S)
    source = load(stream, rate=400, seed=91)
    names = ["a", "b", "c"]
    begin(fleet, dict.fromkeys(names, older))
    began = time.monotonic()

    leases = SHARDS
    for name, (how, more) in zip(names, [("split", 1), ("merge", -1), ("split", 1)], strict=True):
        assert fleet.stop(name) == [0]
        fleet.run(name, HEAD)
        # While both versions are there, but for the last one.
        source.reshard(how, 2)
        leases += more
        settle(fleet, leases)

    judge_moves(fleet, source, began)
    continues(fleet, older, HEAD)


def test_a_fleet_taken_back_to_the_last_release_by_new_machines_goes_on_from_the_checkpoints(
    watched_aws, mixed_fleet, load, older
):
    stream = watched_aws.stream(SHARDS)
    fleet = mixed_fleet(stream, failover_s=FAILOVER_S)
    source = load(stream, rate=400, seed=92)
    begin(fleet, dict.fromkeys(["a", "b", "c"], HEAD))
    began = time.monotonic()

    leases = SHARDS
    for leaves, comes, how, more in [
        ("a", "d", "merge", -1),
        ("b", "e", "split", 1),
        ("c", "f", "merge", -1),
    ]:
        fleet.run(comes, older)
        source.reshard(how, 2)
        leases += more
        settle(fleet, leases)
        assert fleet.stop(leaves) == [0]
        settle(fleet, leases)

    judge_moves(fleet, source, began)
    continues(fleet, HEAD, older)


def test_a_fleet_of_both_versions_over_two_zones_comes_to_rest_and_moves_nothing_more(
    watched_aws, mixed_fleet, load, older
):
    stream = watched_aws.stream(SHARDS)
    fleet = mixed_fleet(stream, failover_s=FAILOVER_S)
    source = load(stream, rate=400, seed=93)
    for name, version, zone in [("a", older, "1"), ("b", HEAD, "1"), ("c", older, "2")]:
        fleet.run(name, version, zone)

    rested_s, counts = fleet.until_at_rest(SHARDS)

    print(f"at rest after {rested_s:.1f} s: {counts}")
    assert fleet.moves_in_cycles(4) == []
    fleet.finish(source)
    assert fleet.misplaced() == []


def test_hosts_of_either_version_that_are_lost_are_read_on_by_what_is_left_of_both(
    watched_aws, mixed_fleet, load, older
):
    stream = watched_aws.stream(SHARDS + 2)
    fleet = mixed_fleet(stream, failover_s=FAILOVER_S)
    source = load(stream, rate=400, seed=94)
    begin(fleet, {"a": older, "b": older, "c": HEAD, "d": HEAD}, SHARDS + 2)
    killed, again_s = set(), []

    for name in ["a", "c"]:
        killed.update(fleet.machines[name].lease_pids())
        lost_at, keys = fleet.lose(name)
        assert keys
        again_s += read_again(fleet, keys, lost_at)
        settle(fleet, SHARDS + 2)

    print(reported(f"host lost, failover {FAILOVER_S:g} s: reading again", again_s))
    fleet.finish(source, killed=killed, cap=CAP)
    assert fleet.misplaced() == []
    judge_times(again_s, p99_max_s=FAILOVER_S + 7)


def test_what_the_head_offers_in_a_silent_owner_s_name_the_last_release_takes_and_gives_up(
    watched_aws, mixed_fleet, load, older
):
    """Two of the last release: one takes what is offered, the other wakes up and lets go of it."""
    stream = watched_aws.stream(SHARDS + 2)
    fleet = mixed_fleet(stream, failover_s=FAILOVER_S)
    source = load(stream, rate=400, seed=95)
    begin(fleet, {"head": HEAD, "older": older, "silent": older}, SHARDS + 2)
    head, manager, silent = fleet.machines["head"], fleet.machines["older"].process, "silent"
    keys = owned_by(fleet, silent)
    asleep = fleet.machines[silent]
    asleep_pids = set(asleep.lease_pids())

    with asleep.frozen():
        lost_at = time.monotonic()
        # Its lease processes go on: it only leaves it to the head to see first what has expired.
        manager.send_signal(signal.SIGSTOP)
        head.until(lambda: head.of("lease_passed_on"))
        manager.send_signal(signal.SIGCONT)
        read_again(fleet, keys, lost_at)
        passed_on = {line["shard"] for line in head.of("lease_passed_on")}
        taken = passed_on & owned_by(fleet, "older")
        woken_at = time.monotonic()

    print(f"{len(keys)} leases silent; passed on {sorted(passed_on)}, older took {sorted(taken)}")
    assert taken
    judge_awakened(fleet, source, asleep, asleep_pids, woken_at, keys)


@pytest.mark.parametrize("sleeper", ["older", "head"])
def test_a_host_that_sleeps_beyond_failover_beside_the_other_version_wakes_up_and_touches_nothing(
    watched_aws, mixed_fleet, load, older, sleeper
):
    stream = watched_aws.stream(6)
    fleet = mixed_fleet(stream, failover_s=FAILOVER_S)
    source = load(stream, rate=400, seed=96)
    begin(fleet, {"older": older, "head": HEAD}, 6)
    asleep = fleet.machines[sleeper]
    asleep_pids = set(asleep.lease_pids())
    keys = owned_by(fleet, sleeper)

    with asleep.frozen():
        read_again(fleet, keys, time.monotonic())
        woken_at = time.monotonic()

    judge_awakened(fleet, source, asleep, asleep_pids, woken_at, keys)


@pytest.mark.parametrize("goes_back", [False, True], ids=["upgraded", "taken back"])
def test_a_manager_killed_and_started_again_as_the_other_version_has_its_leases_back_at_once(
    watched_aws, mixed_fleet, load, older, goes_back
):
    """By the lock files of both, which is told, and not by expiry."""
    former, next_one = (HEAD, older) if goes_back else (older, HEAD)
    stream = watched_aws.stream(4)
    fleet = mixed_fleet(stream, failover_s=30.0, checkpoint={"every": "500ms"})
    source = load(stream, rate=400, seed=97)
    begin(fleet, {"a": former}, 4)
    fleet.until(lambda: all(has_begun(row) for row in fleet.rows().values()))
    killed = set(fleet.machines["a"].lease_pids())
    keys = set(fleet.rows())

    fleet.machines["a"].lose_power()
    died_at = time.monotonic()
    fleet.run("a", next_one)

    again_s = read_again(fleet, keys, died_at)
    print(reported("manager killed: reading again by the other version", again_s))
    fleet.finish(source, killed=killed, cap=CAP)
    continues(fleet, former, next_one)
    assert fleet.machines["a"].of("former_owners_gone")
    judge_times(again_s, p99_max_s=30)


def begin(fleet, versions, leases=SHARDS):
    """Start a manager of its version on each machine; until all share the work and have some."""
    for name, version in versions.items():
        fleet.run(name, version)
    settle(fleet, leases)
    fleet.machines[next(iter(versions))].until_delivered(1000)


def settle(fleet, leases):
    settled_s, counts = fleet.until_settled(leases)
    versions = {name: version.name[:9] for _, name, version in fleet.runs}
    shares = {f"{name} ({versions[name]})": count for name, count in counts.items()}
    print(f"settled after {settled_s:.1f} s:", shares)


def read_again(fleet, keys, lost_at):
    """Seconds from the loss to the next reader's first GetRecords, of each shard."""

    def seconds():
        return reads_after(fleet.notes.read().all, keys, lost_at).values()

    fleet.until(lambda: max(seconds()) < math.inf)
    return list(seconds())


def owned_by(fleet, name):
    owner = fleet.owner_ids()[name]
    return {key for key, row in fleet.rows().items() if row.get("leaseOwner") == owner}


def judge_awakened(fleet, source, asleep, asleep_pids, woken_at, keys):
    """Who slept too long lets go of all it had, and its processes have begun no batch since."""

    def lost():
        # A process that had just been started has claimed nothing.
        unclaimed = [line for line in asleep.of("process_exited") if "unclaimed" in line["reason"]]
        return len(asleep.of("process_lost_lease")) + len(unclaimed)

    asleep.until(lambda: lost() >= len(keys))
    settle(fleet, len(fleet.rows()))
    late = [b for b in fleet.ledger.read().batches if b.pid in asleep_pids and b.at > woken_at]
    assert late == [], "a batch was begun after the fence [I4]"
    fleet.finish(source, killed=asleep_pids, cap=CAP)
    assert fleet.misplaced() == []


def has_begun(row):
    return row["checkpoint"] != "TRIM_HORIZON"


def judge_moves(fleet, source, began):
    """No fault and no duplicate; where they are measured, the times of any planned move."""
    ended = time.monotonic()

    def gaps():
        return planned_gaps(fleet.notes.read().all, began, ended)

    # Who has taken a row reads it only after a fork and a claim. Nobody at all is a failure here.
    fleet.until(lambda: all(math.isfinite(gap.seconds) for gap in gaps()))
    fleet.finish(source)
    print(reported_gaps("planned moves", gaps()))
    assert len(gaps()) >= SHARDS
    seconds = [gap.seconds for gap in gaps()]
    judge_times(seconds, p50_max_s=P50_MAX_S, p99_max_s=P99_MAX_S)


def continues(fleet, former, next_one):
    """Both versions have read, each where it was meant to; the next one went on from a record."""
    assert fleet.misplaced() == []
    assert fleet.read_by(former)
    begun = fleet.read_by(next_one)
    assert [shard for shard, position in begun if position != "TRIM_HORIZON"]
