"""Managers and lease processes that die or stand still by themselves, and the locks that tell."""

import pytest

from tests.examples import seeds
from tests.unit.simulation.fleets import settled_fleet


def gap_lengths(fleet, since_s):
    return sorted(gap.length_s for gap in fleet.observer.gaps.since(since_s))


@pytest.mark.parametrize("seed", seeds(0, 3))
def test_a_manager_that_is_killed_and_started_again_on_its_host_reads_again_within_3_s(seed):
    fleet = settled_fleet(seed, hosts=1, shards=6)
    began_s = fleet.scheduler.now
    [host] = fleet.hosts

    host.kill_manager()
    fleet.run_for(1)
    fleet.start_again(host)
    fleet.run_for(30)

    lengths = gap_lengths(fleet, began_s)
    assert len(lengths) == 6
    assert max(lengths) <= 1 + 3  # the goal, from its start
    assert fleet.is_balanced()
    assert fleet.observer.tally.duplicates == 0


def test_the_lease_processes_of_a_killed_manager_give_their_leases_to_others_at_once():
    fleet = settled_fleet(1, hosts=3, shards=9)
    began_s = fleet.scheduler.now

    fleet.hosts[0].kill_manager()
    fleet.run_for(30)

    assert "orphan_gave_its_lease_away" in fleet.observer.situations.names
    assert not list(fleet.hosts[0].living())
    assert max(gap_lengths(fleet, began_s)) < fleet.world.settings.failover_s / 2
    assert fleet.observer.tally.duplicates == 0


def test_lease_processes_work_on_while_only_their_manager_stands_still():
    fleet = settled_fleet(2)
    began_s, moves = fleet.scheduler.now, fleet.observer.tally.moves

    fleet.hosts[0].os.stop()
    fleet.run_for(60)
    fleet.hosts[0].os.go_on()
    fleet.run_for(60)

    assert gap_lengths(fleet, began_s) == []
    assert fleet.observer.tally.moves == moves
    assert fleet.is_balanced()


def test_a_lease_process_that_stands_still_is_ended_by_its_manager_and_another_reads():
    fleet = settled_fleet(3, hosts=1, shards=4)
    began_s = fleet.scheduler.now
    process = next(fleet.hosts[0].living())

    process.os.stop()
    fleet.run_for(60)

    assert process.is_over
    [length_s] = gap_lengths(fleet, began_s)
    # Two failovers of silence, a look, 2 s of patience, ABRT that it does not hear, KILL: L5.
    assert 20 <= length_s <= 20 + 0.5 + 2 + 2 + 1


def test_a_process_that_wakes_after_a_later_manager_has_its_lock_begins_nothing():
    fleet = settled_fleet(4, hosts=1, shards=1)
    [host] = fleet.hosts
    fleet.hosts[0].kill_process(next(host.living()).key)
    while not any(process.life.own.row is None for process in host.living()):
        fleet.run_for(0.001)
    newcomer = next(host.living())
    newcomer.os.stop()
    host.kill_manager()
    fleet.start_again(host)
    fleet.run_for(5)

    newcomer.os.go_on()
    fleet.run_for(5)

    assert newcomer.is_over
    assert newcomer.life.own.row is None, "it claimed nothing"
    assert fleet.is_balanced()


def test_a_machine_whose_requests_are_cut_off_loses_its_leases_and_reads_nothing_past_its_fences():
    fleet = settled_fleet(5)
    began_s = fleet.scheduler.now

    fleet.hosts[0].machine.uplink.is_cut = True
    fleet.run_for(60)
    assert fleet.shards_by_owner()[fleet.hosts[0].owner] == 0
    fleet.hosts[0].machine.connect()
    fleet.run_for(60)

    assert max(gap_lengths(fleet, began_s)) <= 17
    assert fleet.is_balanced()


def test_without_forks_a_manager_keeps_its_leases_and_reads_once_forks_work_again():
    fleet = settled_fleet(6, hosts=1, shards=4)
    [host] = fleet.hosts
    host.machine.refuses_forks = True
    for process in list(host.living()):
        process.kill()
    fleet.run_for(40)
    assert len(fleet.observer.gaps.unread()) == 4

    host.machine.allow_forks()
    fleet.run_for(31)  # the longest pause before the next try, and the start

    assert not fleet.observer.gaps.unread()
    assert "fork_failed" in fleet.observer.situations.names
