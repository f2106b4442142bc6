"""kclrun and the Java KCL 2.x at one table: the real cores, and the Java twin."""

import pytest

from kclrun.errors import InvariantViolation
from kclrun.leases.held_leases import HeldLeases
from kclrun.leases.manager import LeaseManager
from tests.examples import seeds
from tests.support.java.consumer import ShardConsumer
from tests.support.java.overlap import MixedOracles
from tests.unit.simulation.java_fleets import mixed_fleet, owners

pytestmark = pytest.mark.seconds

PATIENCE_S = 35  # failover + 7 s, a poll, the backlog, and a Java worker's rhythm of 10 and 20 s


def work_of(fleet, members):
    counts = fleet.shards_by_owner()
    return sum(counts.get(member.owner, 0) for member in members)


@pytest.mark.parametrize("seed", seeds(0, 3))
def test_kclrun_joins_java_workers_and_takes_its_share_one_lease_a_cycle(seed):
    fleet = mixed_fleet(seed, java=2, shards=8)
    fleet.run_for(150)
    fleet.add_host("a", "h0")
    fleet.add_host("b", "h1")

    fleet.run_for(90)

    assert sorted(fleet.shards_by_owner().values()) == [2, 2, 2, 2]
    assert fleet.observer.overlaps.forced_takes >= 4
    forced = fleet.observer.overlaps.forced_takes
    fleet.run_for(300)  # and then nothing moves
    assert fleet.observer.overlaps.forced_takes == forced
    assert fleet.is_balanced()
    fleet.require_all_read(PATIENCE_S)


def test_java_joins_kclrun_and_steals_its_share():
    # A sound network: whoever is stolen from finds out with its next renewal, which may be at once.
    beside_s = [beside_java_s(seed) for seed in range(3)]

    assert 0 < max(beside_s) <= 10 / 3 + 0.1


def beside_java_s(seed):
    fleet = mixed_fleet(seed, java=0, hosts=2, shards=8, poll_s=1.0)
    fleet.run_for(60)
    fleet.add_java_worker("a", "j0")
    fleet.add_java_worker("b", "j1")

    fleet.run_for(240)

    assert sorted(fleet.shards_by_owner().values()) == [2, 2, 2, 2], f"seed {seed}"
    assert fleet.observer.overlaps.java_steals >= 4, f"seed {seed}"
    fleet.require_all_read(PATIENCE_S)
    return fleet.observer.overlaps.kclrun_beside_java_s


def test_a_java_worker_waits_at_a_shard_that_gets_no_records():
    fleet = mixed_fleet(1, java=1, shards=2, each_per_s=0.0)

    fleet.run_for(240)

    assert owners(fleet) == {fleet.java_workers[0].owner: 2}
    assert fleet.observer.gaps.unread() == {}


@pytest.mark.parametrize("count", [12, 4])
def test_a_rolling_migration_with_a_reshard_in_its_middle_loses_nothing(count):
    fleet = mixed_fleet(1, java=3, shards=8)
    fleet.run_for(240)

    for number, worker in enumerate(list(fleet.java_workers)):
        fleet.add_host("ab"[number % 2], f"h{number}")
        fleet.run_for(20)
        worker.drain()
        if number == 1:
            fleet.reshard(count)
        fleet.run_for(60)

    fleet.run_for(120)
    assert work_of(fleet, fleet.hosts) == count
    assert fleet.is_balanced()
    fleet.require_all_read(PATIENCE_S)


def test_what_a_dead_java_worker_had_is_read_again_within_failover_and_seven_seconds():
    fleet = mixed_fleet(2, java=2, hosts=2, shards=8)
    fleet.run_for(240)
    began_s = fleet.scheduler.now
    had = fleet.shards_by_owner()[fleet.java_workers[0].owner]

    fleet.java_workers[0].kill()
    fleet.run_for(60)

    lengths = [gap.length_s for gap in fleet.observer.gaps.since(began_s - 1)]
    assert len(lengths) >= had > 0
    assert max(lengths) <= 17
    fleet.require_all_read(PATIENCE_S)


def test_what_a_dead_kclrun_host_had_is_read_again_beside_java_workers():
    fleet = mixed_fleet(3, java=2, hosts=2, shards=8)
    fleet.run_for(240)
    dead = fleet.hosts[0]

    dead.kill()
    fleet.run_for(60)

    assert dead.owner not in owners(fleet)
    fleet.require_all_read(PATIENCE_S)


_NEXT_STEP = HeldLeases._next_step


class HastyHolder(HeldLeases):
    """Begins at once on what it took by force."""

    def _next_step(self, held_lease, now):
        held_lease.has_waited = True
        return _NEXT_STEP(self, held_lease, now)


def test_a_manager_that_does_not_wait_after_a_take_by_force_is_caught(monkeypatch):
    monkeypatch.setattr(HeldLeases, "_next_step", HastyHolder._next_step)
    fleet = mixed_fleet(4, java=1, shards=4)
    fleet.run_for(120)
    fleet.add_host("a", "h0")

    with pytest.raises(InvariantViolation, match=r"P18: .* after the row was taken by force"):
        fleet.run_for(120)


class TakesWhatJavaRenews(LeaseManager):
    """Believes every lease expired, however fresh its counter."""

    def __init__(self, policy, chance):
        super().__init__(policy, chance)
        self._observation.expired = lambda leases, _: {lease.key for lease in leases}


def test_a_manager_that_takes_what_a_java_worker_renews_is_caught():
    fleet = mixed_fleet(5, java=1, shards=4)
    fleet.core_kind = TakesWhatJavaRenews
    fleet.run_for(120)
    fleet.add_host("a", "h0")

    with pytest.raises(InvariantViolation, match=r"I4: taken from a Java worker"):
        fleet.run_for(60)


def test_a_java_worker_that_never_notices_its_loss_is_caught(monkeypatch):
    monkeypatch.setattr(ShardConsumer, "lease_lost", lambda _: None)
    fleet = mixed_fleet(6, java=1, shards=4)
    fleet.run_for(240)
    fleet.add_host("a", "h0")

    with pytest.raises(InvariantViolation, match=r"I4J: .* beside"):
        fleet.run_for(240)


def test_the_oracles_of_a_mixed_fleet_know_java_members():
    assert isinstance(mixed_fleet(7, java=0, hosts=1).observer, MixedOracles)
