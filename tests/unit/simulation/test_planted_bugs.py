"""Bugs planted into the cores and the queue: each must be caught, and told so that one can replay
it. A bug that survives is a bug in the oracles."""

import math

import msgspec
import pytest

from kclrun.errors import InvariantViolation
from kclrun.leases import table_view
from kclrun.leases.events import ParentsRead
from kclrun.leases.manager import LeaseManager
from kclrun.simulation.delivery_queue import SimulatedDeliveryQueue
from kclrun.simulation.process import LeaseProcess
from tests.unit.simulation.fleets import settled_fleet, small_fleet


class TakesWhatIsRenewed(LeaseManager):
    """Believes every lease expired, however fresh its counter."""

    def __init__(self, policy, chance):
        super().__init__(policy, chance)
        self._observation.expired = lambda leases, _: {lease.key for lease in leases}


class StartsChildrenAtOnce(LeaseManager):
    """Takes every parent's row for absent."""

    def handle(self, event, now):
        if isinstance(event, ParentsRead):
            event = ParentsRead(event.key, tuple(None for _ in event.parents))
        return super().handle(event, now)


class HeedlessQueue(SimulatedDeliveryQueue):
    """Starts batches whatever the fence says."""

    def allow_delivery(self, permit):
        super().allow_delivery(msgspec.structs.replace(permit, fence=math.inf))


class HeedlessProcess(LeaseProcess):
    queue_kind = HeedlessQueue


def test_a_manager_that_takes_renewed_leases_is_caught():
    fleet = small_fleet(1, core_kind=TakesWhatIsRenewed, replay="kclrun simulate --seed 1")

    with pytest.raises(InvariantViolation, match="I4: ") as caught:
        fleet.run_for(120)

    told = str(caught.value)
    assert "seed 1: at 00:0" in told
    assert "Take(" in told
    assert told.endswith("replay: kclrun simulate --seed 1")


@pytest.mark.parametrize("seed", [2, 3])
def test_an_owner_that_starts_batches_past_its_fence_is_caught(seed):
    fleet = settled_fleet(seed, process_kind=HeedlessProcess)
    for cycle in range(10):
        fleet.after(60 * cycle, fleet.hosts[0].freeze)
        fleet.after(60 * cycle + 25, fleet.hosts[0].thaw)

    with pytest.raises(InvariantViolation, match=r"I4: .* too late"):
        fleet.run_for(600)


def test_a_child_that_is_read_before_its_parents_ended_is_caught(monkeypatch):
    # The scan is a hint that says the same: with it alone the bug would stay without effect.
    monkeypatch.setattr(table_view, "seem_over", lambda *_: True)
    fleet = settled_fleet(3, hosts=4, shards=12, core_kind=StartsChildrenAtOnce)
    fleet.hosts[0].freeze()
    fleet.reshard(6)

    with pytest.raises(InvariantViolation, match="I3: "):
        fleet.run_for(60)


def test_a_shard_that_nobody_reads_is_noticed():
    fleet = settled_fleet(4)
    for host in fleet.hosts:
        host.freeze()
    fleet.run_for(60)

    with pytest.raises(InvariantViolation, match=r"L1: .* records unread"):
        fleet.require_all_read(25)
