"""Hosts that cannot run their leases, in simulated fleets: others read what such hosts held.

What is demanded: no lease is unread for longer than it takes to see that its host fails, while
another host has room; nothing is halted for one host's troubles; a lease that kills whatever runs
it does not wander.
"""

from typing import ClassVar

import pytest

from kclrun.lease.commands import AllowDelivery
from kclrun.leases.capacity import RECOVERY_MAX_S
from kclrun.protocol.reports import ProcessorFailed
from kclrun.simulation.arrivals import Traffic
from kclrun.simulation.fleet import Fleet
from kclrun.simulation.process import LeaseProcess
from kclrun.simulation.world import FleetSettings
from tests.examples import seeds
from tests.support.oracles.watch import Oracles

pytestmark = pytest.mark.seconds

SICK_AT_S = 60.0
# Three starts, at once, after nothing and after a second; an offer, a look each half second, a
# take and a claim.
FAILED_STARTS_S = 6.0
# Three start commands of a failover each, the pause after the second, and what follows as above.
EXPIRED_STARTS_S = 3 * 10.0 + FAILED_STARTS_S
# Five lives of 0.3 s, pauses of 0, 1, 2 and 4 s, and what follows as above.
DEATHS_S = 14.0


class Mortal(LeaseProcess):
    """Dies soon after its start, on a sick machine or with a poisonous lease, or has no memory for
    its records there (`starves`); on a slow machine it begins when its start command has expired.
    """

    starves: ClassVar[bool] = False
    sick: ClassVar[set[object]] = set()
    slow: ClassVar[set[object]] = set()
    poison: ClassVar[set[str]] = set()
    deaths: ClassVar[list[tuple[object, str]]] = []

    def begin(self, **reported):
        super().begin(**reported)
        if self._is_doomed and not self.starves:
            self.os.after(0.3, self._die)

    @property
    def _is_doomed(self):
        return self.machine in self.sick or self.key in self.poison

    def _lock(self):
        self.os.after(11.0 if self.machine in self.slow else 0.0, super()._lock)

    def _die(self):
        self.deaths.append((self.machine, self.key))
        self.kill()

    def _perform(self, command):
        if self._is_doomed and self.starves and isinstance(command, AllowDelivery):
            self.deaths.append((self.machine, self.key))
            self.post(ProcessorFailed("process_records", "MemoryError", 1, is_host_fault=True))
        else:
            super()._perform(command)


@pytest.fixture(autouse=True)
def nothing_is_sick_yet():
    Mortal.sick, Mortal.slow, Mortal.poison, Mortal.deaths = set(), set(), set(), []
    Mortal.starves = False


def fleet_of(hosts, seed=1):
    settings = FleetSettings(poll_s=1.0)
    fleet = Fleet(
        seed,
        shards=6,
        traffic=Traffic(records_per_s=12.0),
        settings=settings,
        observer_kind=Oracles,
    )
    fleet.process_kind = Mortal
    for number in range(hosts):
        fleet.after(0.1 * number, lambda number=number: fleet.add_host("a", f"h{number}"))
    fleet.run_for(SICK_AT_S)
    return fleet


def longest_gap_s(fleet):
    now = fleet.scheduler.now
    open_s = [now - since for since in fleet.observer.gaps.unread().values()]
    return max([gap.length_s for gap in fleet.observer.gaps.since(SICK_AT_S)] + open_s)


def kill_all_processes(host):
    for key in list(host.processes):
        host.kill_process(key)


def halted(fleet):
    return [row.key for row in fleet.table.leases() if row.halt is not None]


@pytest.mark.parametrize("seed", seeds(0, 2))
def test_the_leases_of_a_host_that_can_start_nothing_are_soon_read_elsewhere(seed):
    fleet = fleet_of(3, seed)
    sick = fleet.hosts[0]
    sick.machine.refuses_forks = True

    kill_all_processes(sick)
    fleet.run_for(240.0)

    assert longest_gap_s(fleet) < FAILED_STARTS_S
    assert halted(fleet) == []
    sick.machine.allow_forks()
    fleet.run_for(RECOVERY_MAX_S)
    assert fleet.is_balanced()


@pytest.mark.parametrize("starves", [False, True])
@pytest.mark.parametrize("seed", seeds(0, 2))
def test_the_leases_that_die_on_one_host_live_on_another_and_are_not_halted(seed, starves):
    fleet = fleet_of(3, seed)
    sick = fleet.hosts[0]
    Mortal.starves = starves
    Mortal.sick = {sick.machine}

    kill_all_processes(sick)
    fleet.run_for(240.0)

    assert longest_gap_s(fleet) < DEATHS_S
    assert halted(fleet) == []
    assert len(fleet.hosts[1].core.held()) + len(fleet.hosts[2].core.held()) >= 5


@pytest.mark.parametrize("seed", seeds(0, 2))
def test_the_leases_of_a_host_too_slow_to_claim_them_are_read_elsewhere(seed):
    fleet = fleet_of(3, seed)
    slow = fleet.hosts[0]
    Mortal.slow = {slow.machine}

    kill_all_processes(slow)
    fleet.run_for(300.0)

    assert longest_gap_s(fleet) < EXPIRED_STARTS_S
    # Those that were killed and those asked for instead; then one at a time, after longer and
    # longer pauses: at 30, 90 and 210 s.
    assert len(list(fleet.observer.gaps.since(SICK_AT_S))) <= 2 + 2 + 3
    assert halted(fleet) == []
    Mortal.slow = set()
    fleet.run_for(RECOVERY_MAX_S)
    assert fleet.is_balanced()


@pytest.mark.each_value
@pytest.mark.parametrize("starves", [False, True])
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_a_lease_that_kills_whatever_runs_it_stands_still_after_a_dozen_deaths(hosts, starves):
    """Also one with a record that needs more memory than any host has."""
    fleet = fleet_of(hosts)
    Mortal.starves = starves
    poison = min(row.key for row in fleet.table.leases())
    Mortal.poison = {poison}
    (owner,) = [host for host in fleet.hosts if poison in host.processes]

    owner.kill_process(poison)
    fleet.run_for(300.0)

    assert halted(fleet) == [poison]
    assert 6 <= len(Mortal.deaths) <= 12
    assert len({machine for machine, _ in Mortal.deaths}) == min(hosts, 2)
    assert set(fleet.observer.gaps.unread()) == {poison}


def test_where_all_hosts_fail_for_a_while_everything_is_read_soon_after():
    fleet = fleet_of(3)
    for host in fleet.hosts:
        host.machine.refuses_forks = True
        kill_all_processes(host)
    fleet.run_for(300.0)
    assert fleet.observer.gaps.unread()

    for host in fleet.hosts:
        host.machine.allow_forks()
    # Three failovers until what nobody takes is overdue, and the scans that see it.
    fleet.run_for(50.0)

    assert fleet.observer.gaps.unread() == {}
    assert halted(fleet) == []
