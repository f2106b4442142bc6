"""The late checkpoint: once, for what was fully processed when the lease was lost [P19]."""

import pytest

from kclrun.consuming import commands as do
from kclrun.consuming import events as on
from kclrun.consuming.states import State
from kclrun.model.sequence import SHARD_END
from kclrun.protocol import writes as changes
from kclrun.protocol.writes import OutcomeUnknown
from tests.unit.consuming.lease_driver import KEY, ME, OTHER, Driver, child, p

KIND = do.ReportKind


def losing(driver):
    """Another kclrun owner has the row, and a renewal has shown it; user code still runs."""
    driver.user_returns = False
    driver.steal()
    driver.tick(3.0)
    assert driver.state is State.LOSING
    return driver


def lose(driver):
    losing(driver)
    driver.happen(on.DeliveryStopped(), on.CallReturned())


def test_what_was_processed_is_checkpointed_once_after_the_loss():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)

    lose(driver)

    assert driver.sent(changes.LateCheckpoint) == [changes.LateCheckpoint(KEY, ME, p(10), p(20))]
    assert (driver.stored.checkpoint, driver.stored.owner) == (p(20), OTHER)
    assert driver.stored.counter == 7  # only the take has moved it
    assert driver.state is State.LOST
    assert driver.reports(KIND.LOST)[0].text.endswith("checkpointed late, at 20")


def test_it_waits_for_the_batch_under_way_and_covers_it():
    driver = losing(started := Driver(every_s=1000.0).begin())
    started.happen(on.BatchDelivered(p(20), 1, 1))
    assert driver.sent(changes.LateCheckpoint) == []

    driver.happen(on.BatchProcessed(p(20)), on.DeliveryStopped())

    assert driver.stored.checkpoint == p(20)


def test_lease_lost_is_called_before_the_late_checkpoint_is_sent():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    losing(driver)

    commands = driver.tell(on.DeliveryStopped())

    assert [type(each) for each in commands] == [do.CallLeaseLost, do.SendLateCheckpoint]


def test_a_batch_that_was_not_finished_is_not_covered():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    driver.happen(on.BatchDelivered(p(30), 1, 1))
    losing(driver)

    driver.happen(
        on.ProcessorFailed("process_records", "LeaseLost", 1, p(30)), on.DeliveryStopped()
    )

    assert driver.stored.checkpoint == p(20)


@pytest.mark.parametrize(
    ("options", "happened"),
    [({}, "nothing new"), ({"has_keyed_state": True}, "a batch"), ({}, "a checkpoint")],
)
def test_there_is_none_where_there_is_nothing_to_say_or_it_may_not_be_said(options, happened):
    driver = Driver("batch" if happened == "a checkpoint" else "auto", every_s=1e3, **options)
    driver.begin()
    if happened != "nothing new":
        driver.batch(20)

    lose(driver)

    assert driver.sent(changes.LateCheckpoint) == []
    assert driver.state is State.LOST


def test_there_is_none_for_a_row_that_was_deleted():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    driver.vanish()
    driver.tick(3.0)  # written again
    driver.vanish()
    driver.tick(3.0)

    assert driver.state is State.LOST
    assert driver.sent(changes.LateCheckpoint) == []


def test_there_is_none_past_a_batch_that_failed():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    driver.steal()
    driver.user_returns = False
    driver.happen(on.ProcessorFailed("process_records", "E", 3, p(30)))
    assert driver.state is State.LOSING

    driver.happen(on.BatchDelivered(p(40), 1, 1), on.BatchProcessed(p(40)), on.DeliveryStopped())

    assert driver.sent(changes.LateCheckpoint) == []


def test_it_never_ends_a_shard():
    # Trace N6: all records are processed and the children exist when the lease is lost.
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    driver.tell(on.ShardExhausted((child("s1"),)))
    while driver.state is not State.ENDING:
        driver._perform(driver.queue.popleft())
    driver.steal()

    driver.settle()

    assert [late.position for late in driver.sent(changes.LateCheckpoint)] == [p(20)]
    assert driver.stored.checkpoint != SHARD_END


def test_without_a_manager_and_past_the_fence_nothing_is_waited_for():
    driver = Driver(every_s=1000.0).begin()
    driver.user_returns = False
    driver.batch(20)
    driver.happen(on.ManagerGone())
    driver.now = driver.life.own.fence

    driver.tick()
    driver.tick()

    assert driver.state is State.LOST
    assert driver.sent(changes.LateCheckpoint) == []


# Its outcome


@pytest.mark.parametrize("fault", ["throttled", "unavailable"])
def test_it_is_sent_again_where_it_surely_did_not_apply(fault):
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    losing(driver)
    driver.faults += [fault, fault]

    driver.happen(on.DeliveryStopped(), on.CallReturned())

    assert len(driver.sent(changes.LateCheckpoint)) == 3
    assert driver.stored.checkpoint == p(20)
    assert driver.state is State.LOST


def test_a_table_that_stays_away_is_waited_for_3_s_at_most():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    losing(driver)
    lost_at = driver.now
    driver.faults += ["throttled"] * 100

    driver.happen(on.DeliveryStopped(), on.CallReturned())

    assert driver.state is State.LOST
    assert driver.now - lost_at <= 3.0
    assert len(driver.faults) > 90


@pytest.mark.parametrize("fault", ["refused", "dropped", "reply lost"])
def test_after_any_other_outcome_the_process_lets_go(fault):
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    losing(driver)
    driver.faults.append(fault)

    driver.happen(on.DeliveryStopped(), on.CallReturned())

    assert len(driver.sent(changes.LateCheckpoint)) == 1
    assert driver.of(do.ReadOwnRow) == []
    assert driver.state is State.LOST


def test_an_outcome_that_does_not_come_is_not_waited_for_longer_than_3_s():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    losing(driver)
    driver.tell(on.DeliveryStopped())
    late = driver.queue.pop().change
    driver.happen(on.CallReturned())
    assert driver.state is State.LOSING
    assert driver.life.next_deadline(driver.now) == driver.now + 3.0

    driver.tick(3.0)

    assert driver.state is State.LOST
    assert driver.tell(on.WriteResolved(late, OutcomeUnknown("x"), driver.now)) == []


def test_a_lease_lost_that_runs_longer_is_waited_for_when_the_late_checkpoint_is_done():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    losing(driver)
    driver.happen(on.DeliveryStopped())
    assert driver.stored.checkpoint == p(20)

    driver.tick(5.0)
    assert driver.state is State.LOSING
    driver.happen(on.CallReturned())

    assert driver.state is State.LOST


def test_an_owner_that_went_further_is_not_moved_back():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    losing(driver)
    driver.move_row(p(50))

    driver.happen(on.DeliveryStopped(), on.CallReturned())

    assert driver.stored.checkpoint == p(50)
    assert driver.state is State.LOST
    assert "late" not in driver.reports(KIND.LOST)[0].text


def test_a_lease_that_an_operator_reset_stays_reset():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    losing(driver)
    driver.move_row(p(3))

    driver.happen(on.DeliveryStopped(), on.CallReturned())

    assert driver.stored.checkpoint == p(3)


def test_a_java_owner_is_left_alone():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    losing(driver)
    driver.move_row(p(10), owner="java-worker")

    driver.happen(on.DeliveryStopped(), on.CallReturned())

    assert driver.stored.checkpoint == p(10)


# With manual checkpoints only what user code asked for


def test_a_manual_request_that_was_waiting_at_the_loss_is_written_late_if_its_batch_returned():
    driver = Driver("manual").begin()
    driver.tell(on.BatchDelivered(p(20), 1, 1))
    driver.steal()
    driver.user_returns = False
    driver.happen(on.CheckpointRequested(1, p(15)))
    assert driver.state is State.LOSING
    assert driver.answers() == {1: do.CheckpointAnswer.LOST}

    driver.happen(on.BatchProcessed(p(20)), on.DeliveryStopped())

    assert driver.stored.checkpoint == p(15)


def test_a_manual_request_whose_batch_raised_on_being_refused_is_not():
    driver = Driver("manual").begin()
    driver.tell(on.BatchDelivered(p(20), 1, 1))
    driver.steal()
    driver.user_returns = False
    driver.happen(on.CheckpointRequested(1, p(20)))

    driver.happen(
        on.ProcessorFailed("process_records", "LeaseLost", 1, p(20)), on.DeliveryStopped()
    )

    assert driver.sent(changes.LateCheckpoint) == []


def test_a_manual_request_after_the_loss_fails_and_is_not_written():
    driver = Driver("manual").begin()
    driver.tell(on.BatchDelivered(p(20), 1, 1))
    losing(driver)
    driver.happen(on.CheckpointRequested(1, p(15)))
    assert driver.answers() == {1: do.CheckpointAnswer.LOST}

    driver.happen(on.BatchProcessed(p(20)), on.DeliveryStopped())

    assert driver.sent(changes.LateCheckpoint) == []


def test_what_a_manual_lease_processed_and_nobody_asked_for_is_not_written():
    driver = Driver("manual").begin()
    driver.batch(20)

    lose(driver)

    assert driver.sent(changes.LateCheckpoint) == []
