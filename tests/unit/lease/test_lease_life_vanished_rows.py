"""A row that vanished under its live owner: written again once, where nothing can double."""

import pytest

from kclrun.lease import commands, events
from kclrun.lease.states import State
from kclrun.model.lease import FAILOVER_MAX_S, WRITTEN_AGAIN_AHEAD, Lease
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.protocol import reports
from kclrun.protocol import writes as changes
from kclrun.protocol.fence import fence_instant
from tests.unit.lease.lease_driver import KEY, ME, NOT_APPLIED, Driver, child, p

LOST_REPLY = NOT_APPLIED["dropped"]


def test_a_live_owner_writes_its_row_again_from_what_was_last_confirmed():
    driver = Driver("batch", parents=frozenset({"p0"}), throughput_kbps=3.0).begin()
    driver.batch(20)
    before = driver.stored
    driver.vanish()

    driver.tick(3.0)

    row, counter = driver.stored, before.counter + WRITTEN_AGAIN_AHEAD
    assert (row.owner, row.checkpoint, row.counter) == (ME, p(20), counter)
    assert (row.parents, row.throughput_kbps) == (frozenset({"p0"}), 3.0)
    assert driver.state is State.PROCESSING
    assert driver.life.own.fence == fence_instant(driver.now, 9.0)
    (warned,) = driver.reports(reports.ProcessWarned)
    assert "had vanished from the table and was written again, at 20" in warned.detail


def test_it_goes_on_as_owner():
    driver = Driver("batch").begin()
    driver.vanish()
    driver.tick(3.0)

    driver.batch(20)
    driver.tick(3.0)
    driver.happen(events.DrainRequested("x"))

    assert driver.state is State.RELEASED
    assert driver.stored.checkpoint == p(20)
    assert len(driver.sent(changes.CreateLease)) == 1


def test_a_checkpoint_that_found_no_row_follows_on_the_new_one():
    driver = Driver("manual").begin()
    driver.tell(events.BatchDelivered(p(20), 1, 1))
    driver.vanish()

    driver.happen(events.CheckpointRequested(1, None))

    assert driver.answers() == {1: commands.CheckpointAnswer.DURABLE}
    assert driver.stored.checkpoint == p(20)


@pytest.mark.parametrize("others", [False, True])
def test_a_drained_lease_whose_row_vanished_is_given_away_all_the_same(others):
    driver = Driver(others_in_sight=others).begin()
    driver.batch(20)
    driver.vanish()

    driver.happen(events.DrainRequested("x"))

    assert driver.state is State.RELEASED
    assert driver.stored.checkpoint == p(20)


def test_once_in_a_row_and_then_the_lease_is_lost(driver):
    for _ in range(2):
        driver.vanish()
        driver.tick(3.0)

    assert driver.state is State.LOST
    assert driver.stored is None
    assert "gone from the table" in driver.reports(reports.LeaseLost)[0].reason


def test_a_renewal_in_between_makes_it_another_time(driver):
    for _ in range(2):
        driver.vanish()
        driver.tick(3.0)
        driver.tick(3.0)

    assert driver.state is State.PROCESSING
    assert len(driver.sent(changes.CreateLease)) == 2


def test_past_the_fence_nothing_is_written_again(driver):
    driver.vanish()
    driver.now += 3.0
    driver.tell(events.Ticked())
    renew = driver.queue.popleft().change
    outcome = driver.table.write(renew)
    driver.now = driver.life.own.fence

    driver.happen(events.WriteResolved(renew, outcome, driver.now))

    assert driver.state is State.LOST
    assert driver.stored is None
    assert driver.queue == type(driver.queue)()


def test_it_is_written_again_at_the_position_to_which_a_late_checkpoint_had_moved_it():
    driver = Driver("batch").begin()
    driver.tell(events.BatchDelivered(p(20), 1, 1))
    driver.tell(events.BatchProcessed(p(20)))
    driver.move_row(p(15))
    while not isinstance(driver.queue[0], commands.SendWrite):
        driver.queue.popleft()
    driver._perform(driver.queue.popleft())  # shows the position, and is sent again
    driver.vanish()

    driver.settle()

    assert [change.lease.checkpoint for change in driver.sent(changes.CreateLease)] == [p(15)]
    assert driver.stored.checkpoint == p(20)


@pytest.mark.parametrize("faults", [[], ["dropped"]])
def test_a_row_that_somebody_else_created_meanwhile_is_not_ours(driver, faults):
    driver.vanish()
    driver.now += 3.0
    driver.tell(events.Ticked())
    driver._perform(driver.queue.popleft())
    driver.faults += faults  # of our creation
    driver.table.write(changes.CreateLease(Lease(key=KEY, checkpoint=TRIM_HORIZON)))

    driver.settle()

    assert driver.state is State.LOST
    reason = driver.reports(reports.LeaseLost)[0].reason
    assert "the one that stands there belongs to no owner, at TRIM_HORIZON" in reason
    assert driver.stored.owner is None


# Unknown outcomes


def test_a_renewal_that_may_have_applied_before_is_passed_by_the_new_counter(driver):
    driver.faults += ["reply lost"]
    driver.now += 3.0
    driver.tell(events.Ticked())
    driver._perform(driver.queue.popleft())
    assert driver.stored.counter == 7  # somebody may have seen it, and counts down from there
    driver.vanish()

    driver.settle()

    assert driver.stored.counter == driver.life.own.counter > 7
    assert driver.state is State.PROCESSING


def test_no_counter_of_a_java_worker_that_stole_the_row_before_it_vanished_fits_the_new_one(driver):
    # It renews and checkpoints by the counter alone, and would go on beside us by the new row.
    stolen = driver.stored.counter + 1
    driver.vanish()

    driver.tick(3.0)

    assert driver.stored.owner == ME
    assert driver.stored.counter > stolen + FAILOVER_MAX_S * 5


def test_a_write_still_on_its_way_does_not_match_the_new_row():
    driver = Driver("batch").begin()
    driver.faults += ["in flight"]
    driver.tell(events.BatchDelivered(p(20), 1, 1))
    driver.tell(events.BatchProcessed(p(20)))
    driver._perform(driver.queue.popleft())
    while not driver.in_flight:
        driver._perform(driver.queue.popleft())
    driver.vanish()
    driver.settle()
    counter = driver.stored.counter

    driver.land()

    assert driver.stored.counter == counter
    assert driver.life.own.counter == counter


@pytest.mark.parametrize("others", [False, True])
def test_a_lease_that_may_be_given_away_already_is_not_written_again(others):
    driver = Driver(others_in_sight=others).begin()
    driver.user_returns = False
    driver.happen(events.DrainRequested("x"), events.DeliveryStopped())
    driver.tell(events.CallReturned())
    change = driver.queue.popleft().change
    driver.table.write(change)
    driver.vanish()

    driver.tell(events.WriteResolved(change, LOST_REPLY, driver.now))
    driver.settle()

    assert driver.stored is None
    assert driver.state is State.LOSING


def test_a_shard_that_may_have_ended_and_been_cleaned_up_is_not_written_again(driver):
    driver.faults += [None, None, None]
    driver.tell(events.ShardExhausted((child("s1"),)))
    while not isinstance(getattr(driver.queue[0], "change", None), changes.End):
        driver._perform(driver.queue.popleft())
    end = driver.queue.popleft().change
    driver.table.write(end)
    driver.table.write(changes.DeleteEnded(KEY))

    driver.tell(events.WriteResolved(end, LOST_REPLY, driver.now))
    driver.settle()

    assert driver.stored is None
    assert driver.state is State.LOST


@pytest.mark.parametrize(
    ("fault", "creations", "state"),
    [
        ("throttled", 2, State.PROCESSING),
        ("unavailable", 2, State.PROCESSING),
        ("refused", 2, State.PROCESSING),
        # Known by the row.
        ("reply lost", 1, State.PROCESSING),
        # Trace C3: landed after the row was deleted for good, it would have the shard read again.
        ("in flight", 1, State.LOST),
    ],
)
def test_a_creation_is_sent_again_only_if_it_surely_did_not_apply(driver, fault, creations, state):
    driver.vanish()
    driver.faults += [None, fault]

    driver.tick(3.0)

    assert driver.state is state
    assert len(driver.sent(changes.CreateLease)) == creations
    if state is State.PROCESSING:
        assert driver.stored.owner == ME
        assert driver.stored.counter == driver.life.own.counter == 6 + WRITTEN_AGAIN_AHEAD


def test_a_row_like_ours_that_we_have_not_written_is_another_process_of_ours(driver):
    # Trace N3: a counter that fits proves nothing without a write of ours that may have applied.
    driver.vanish()
    driver.now += 3.0
    driver.tell(events.Ticked())
    driver._perform(driver.queue.popleft())
    driver.table.write(driver.queue[0].change)

    driver.settle()

    assert driver.state is State.LOST
