"""An operator's pause, as the lease process sees it on its row: reading ends, the lease stays.

The traces of docs/explanation/pauses.md.
"""

import pytest

from kclrun.lease import commands, events
from kclrun.lease.states import State
from kclrun.model.lease import Pause, Scope
from kclrun.protocol import reports
from kclrun.protocol import writes as changes
from tests.unit.lease.lease_driver import KEY, ME, Driver, by_mode, child, p

PAUSE, OVER = Pause(2_000.0), Pause(1_000.0, 1_500.0)


def pause(driver, mark, seen=None):
    assert isinstance(driver.table.write(changes.ChangePause(KEY, mark, seen)), changes.Applied)


@by_mode
def test_the_batch_in_hand_is_finished_and_checkpointed_and_the_lease_kept(mode, asked_for, stored):
    driver = Driver(mode, others_in_sight=True).in_a_batch()
    pause(driver, PAUSE)
    driver.tick(3.0)
    assert driver.state is State.STOPPING
    assert len(driver.of(commands.StopDelivery)) == 1

    driver.happen(events.BatchProcessed(p(20)), events.DeliveryStopped())
    if asked_for:
        driver.tell(events.CheckpointRequested(1, None))
    driver.happen(events.CallReturned())

    assert (driver.stored.owner, driver.stored.checkpoint) == (ME, stored)
    assert driver.reports(reports.LeaseKept) == [reports.LeaseKept(is_paused=True)]
    assert not [*driver.sent(changes.Offer), *driver.sent(changes.Release)]


@pytest.mark.parametrize(
    ("past", "found", "ends"),
    [(None, PAUSE, True), (OVER, OVER, False), (OVER, PAUSE, True), (OVER, None, False)],
    ids=["new", "known to be over", "another after it", "taken away"],
)
def test_only_a_pause_that_was_not_over_at_the_start_ends_the_process(past, found, ends):
    driver = Driver(pause=past, past_pause=past).begin()

    pause(driver, found, seen=past)
    driver.tick(3.0)

    assert (driver.state is not State.PROCESSING) == ends


def test_a_pause_that_comes_with_the_claim_lets_no_batch_begin():
    driver = Driver(pause=PAUSE)

    driver.happen(events.Started())

    assert driver.reports(reports.LeaseKept) == [reports.LeaseKept(is_paused=True)]
    assert driver.of(commands.AllowDelivery) == []


def test_a_drain_overrules_a_pause_which_goes_with_the_lease():
    driver = Driver(others_in_sight=True).in_a_batch()
    pause(driver, PAUSE)
    driver.tick(3.0)
    driver.happen(events.DrainRequested("the host drains"))

    driver.happen(events.BatchProcessed(p(20)), events.DeliveryStopped(), events.CallReturned())

    row = driver.stored
    assert (row.checkpoint, row.offered_by, row.pause) == (p(20), ME, PAUSE)


def test_a_shard_at_its_end_is_ended_and_its_children_have_its_pause(driver):
    driver.happen(events.ShardExhausted((child("s1"), child("s2"))))
    assert {driver.table.read(key).pause for key in ("s1", "s2")} == {None}

    driver = Driver(pause=OVER, past_pause=OVER).begin()
    driver.happen(events.ShardExhausted((child("s1"), child("s2"))))
    assert {driver.table.read(key).pause for key in ("s1", "s2")} == {OVER}


@pytest.mark.parametrize(
    ("before", "after"), [(None, Pause(2_000.0, scope=Scope.ALL)), (OVER, None)]
)
def test_children_are_never_created_with_a_pause_that_the_parent_has_no_more(before, after):
    """The operator's write comes between the last renewal and the creation: it is refused, and sent
    again from the row of the next renewal."""
    driver = Driver(pause=before, past_pause=before, failover_s=9.0).begin()
    pause(driver, after, seen=before)

    driver.happen(events.ShardExhausted((child("s1"), child("s2"))))
    assert driver.table.read("s1") is None
    for _ in range(20):
        driver.tick(1.0)
        if driver.state is State.ENDED:
            break

    assert driver.state is State.ENDED
    assert {driver.table.read(key).pause for key in ("s1", "s2")} == {after}
