"""Checkpoints: when, how far, what user code is told, and what a failed write means [P2, P6]."""

import pytest

from kclrun.consuming import commands as do
from kclrun.consuming import events as on
from kclrun.consuming.states import State
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.protocol import writes as changes
from tests.unit.consuming.lease_driver import KEY, ME, NOT_APPLIED, START, Driver, p

DURABLE, LOST, STALE = (
    do.CheckpointAnswer.DURABLE,
    do.CheckpointAnswer.LOST,
    do.CheckpointAnswer.STALE,
)
KIND = do.ReportKind


def positions(driver):
    return [each.position for each in driver.sent(changes.Checkpoint)]


def test_auto_checkpoints_what_was_processed_once_its_time_has_come():
    driver = Driver("auto", every_s=2.0).begin()
    driver.batch(20)
    assert positions(driver) == []

    driver.tick(2.0)

    assert positions(driver) == [p(20)]
    assert driver.stored.checkpoint == p(20)
    assert driver.reports(KIND.CHECKPOINTED) == [
        do.Report(KIND.CHECKPOINTED, position=p(20), counter=7)
    ]


def test_the_next_deadline_is_the_checkpoint_that_is_due():
    driver = Driver("auto", every_s=2.0).begin()
    driver.batch(20)

    assert driver.life.next_deadline(driver.now) == driver.now + 2.0


def test_a_batch_under_way_is_not_checkpointed():
    driver = Driver("auto", every_s=2.0).begin()
    driver.batch(20)
    driver.happen(on.BatchDelivered(p(30), 1, 1))

    driver.tick(2.0)

    assert positions(driver) == [p(20)]


def test_half_of_the_cap_is_checkpointed_before_its_time():
    driver = Driver("auto", cap=10, every_s=1000.0).begin()

    driver.batch(20, records=4)
    assert positions(driver) == []
    driver.happen(on.BatchDelivered(p(30), 1, 1))

    assert positions(driver) == [p(20)]


def test_batch_mode_checkpoints_each_batch_and_lets_no_other_start_before():
    driver = Driver("batch").begin()
    assert driver.of(do.AllowDelivery)[-1].start_below == 1

    driver.tell(on.BatchDelivered(p(20), 3, 1))
    driver.tell(on.BatchProcessed(p(20)))
    assert driver.of(do.AllowDelivery)[-1].start_below == 1
    driver.settle()

    assert positions(driver) == [p(20)]
    assert driver.of(do.AllowDelivery)[-1].start_below == 4


def test_batch_mode_writes_nothing_for_a_page_without_records_before_its_time():
    driver = Driver("batch", every_s=2.0).begin()
    driver.batch(20, records=0)
    assert positions(driver) == []

    driver.tick(2.0)

    assert positions(driver) == [p(20)]


def test_manual_mode_writes_only_what_user_code_asks_for():
    driver = Driver("manual", every_s=1.0).begin()
    driver.batch(20)
    driver.tick(2.0)
    assert positions(driver) == []

    driver.happen(on.CheckpointRequested(1, p(20)))

    assert positions(driver) == [p(20)]
    assert driver.answers() == {1: DURABLE}


def test_a_request_without_a_position_covers_everything_delivered():
    driver = Driver("manual").begin()
    driver.happen(on.BatchDelivered(p(20), 1, 1), on.CheckpointRequested(1, None))

    assert positions(driver) == [p(20)]


def test_several_requests_are_answered_by_one_write():
    driver = Driver("manual").begin()
    driver.happen(on.BatchDelivered(p(30), 3, 1))
    driver.tell(on.CheckpointRequested(1, p(15)))
    driver.tell(on.CheckpointRequested(2, p(30)))
    driver.tell(on.CheckpointRequested(3, p(20)))

    driver.settle()

    assert positions(driver) == [p(15), p(30)]
    assert driver.answers() == {1: DURABLE, 2: DURABLE, 3: DURABLE}


@pytest.mark.parametrize(("position", "words"), [(p(5), "the last"), (p(31), "nothing above")])
def test_a_request_below_the_last_checkpoint_or_above_the_delivered_is_stale(position, words):
    driver = Driver("manual").begin()
    driver.happen(on.BatchDelivered(p(30), 3, 1), on.CheckpointRequested(1, position))

    assert positions(driver) == []
    assert driver.answers() == {1: STALE}
    assert words in driver.of(do.AnswerCheckpoint)[0].detail


def test_a_request_equal_to_the_last_checkpoint_is_no_write():
    driver = Driver("manual").begin()

    driver.happen(on.CheckpointRequested(1, p(10)), on.CheckpointRequested(2, None))

    assert positions(driver) == []
    assert driver.answers() == {1: DURABLE, 2: DURABLE}


def test_after_the_loss_every_request_is_refused():
    driver = Driver("manual").begin()
    driver.happen(on.BatchDelivered(p(20), 1, 1))
    driver.tell(on.CheckpointRequested(1, None))
    driver.steal()
    driver.user_returns = False
    driver.settle()

    driver.happen(on.CheckpointRequested(2, None), on.DeliveryStopped(), on.CallReturned())
    driver.happen(on.CheckpointRequested(3, None))

    assert driver.state is State.LOST
    assert driver.answers() == {1: LOST, 2: LOST, 3: LOST}


def test_the_manager_is_told_of_a_checkpoint_before_user_code_is_answered():
    driver = Driver("manual").begin()
    driver.happen(on.BatchDelivered(p(20), 1, 1), on.CheckpointRequested(1, None))

    kinds = [type(each) for each in driver.log if isinstance(each, do.Report | do.AnswerCheckpoint)]

    assert kinds[-2:] == [do.Report, do.AnswerCheckpoint]


# The cap


@pytest.mark.parametrize("mode", ["auto", "batch", "manual"])
def test_the_permit_never_allows_more_uncheckpointed_records_than_the_cap(mode):
    driver = Driver(mode, cap=10).begin()

    assert driver.of(do.AllowDelivery)[-1].delivered_max == 10
    driver.happen(on.BatchDelivered(p(20), 4, 1), on.CheckpointRequested(1, p(20)))

    assert driver.of(do.AllowDelivery)[-1].delivered_max == 14


def test_auto_lifts_a_reached_cap_by_a_checkpoint():
    driver = Driver("auto", cap=10, every_s=1000.0).begin()

    driver.batch(20, records=10)

    assert driver.of(do.AllowDelivery)[-1].delivered_max == 20
    assert driver.state is State.PROCESSING


def test_manual_at_the_cap_without_a_request_fails_with_the_reason():
    driver = Driver("manual", cap=10).begin()

    driver.batch(20, records=10)

    assert driver.state is State.FAILED
    failure = driver.reports(KIND.FAILED)[0]
    assert "10 records were processed and none checkpointed" in failure.text
    assert failure.position == p(20)
    assert positions(driver) == []


def test_manual_at_the_cap_with_a_batch_under_way_or_a_request_waiting_does_not_fail():
    driver = Driver("manual", cap=10).begin()
    driver.happen(on.BatchDelivered(p(20), 10, 1))
    assert driver.state is State.PROCESSING

    driver.tell(on.CheckpointRequested(1, None))
    driver.tell(on.BatchProcessed(p(20)))
    driver.settle()

    assert driver.state is State.PROCESSING
    assert driver.stored.checkpoint == p(20)


def test_a_checkpoint_inside_a_batch_counts_none_of_it_as_covered():
    driver = Driver("manual", cap=10).begin()

    driver.happen(on.BatchDelivered(p(20), 4, 1), on.CheckpointRequested(1, p(15)))

    assert driver.of(do.AllowDelivery)[-1].delivered_max == 10
    assert driver.stored.checkpoint == p(15)


# Late checkpoints of a former owner


def test_a_position_that_moved_alone_is_adopted_and_never_lowered():
    driver = Driver("batch").begin()
    driver.move_row(p(25))  # trace N1

    driver.batch(20)

    assert driver.stored.checkpoint == p(25)
    sent = driver.sent(changes.Checkpoint)
    assert [(each.position, each.last) for each in sent] == [(p(20), p(10)), (p(25), p(25))]
    assert driver.stored.counter == 7


def test_a_position_below_mine_is_adopted_and_mine_written_over_it():
    driver = Driver("batch").begin()
    driver.move_row(p(15))

    driver.batch(20)

    sent = driver.sent(changes.Checkpoint)
    assert [(each.position, each.last) for each in sent] == [(p(20), p(10)), (p(20), p(15))]
    assert driver.stored.checkpoint == p(20)


def test_a_late_checkpoint_seen_by_a_renewal_is_not_lowered_by_the_next_checkpoint():
    driver = Driver("auto", every_s=10.0).begin()
    driver.move_row(p(25))
    driver.tick(3.0)
    assert len(driver.sent(changes.Renew)) == 1

    driver.batch(20)
    driver.tick(7.0)

    assert driver.stored.checkpoint == p(25)
    assert driver.life.ledger.checkpointed == p(25)


def test_a_late_checkpoint_seen_while_an_earlier_send_is_unresolved_is_adopted():
    driver = Driver("batch").begin()
    driver.faults.append("in flight")
    driver.move_row(p(25))

    driver.batch(20)
    driver.land()

    assert driver.stored.checkpoint == p(25)
    assert driver.state is State.PROCESSING


@pytest.mark.parametrize("mode", ["auto", "batch", "manual"])
def test_a_row_far_ahead_of_what_is_delivered_stops_nothing(mode):
    driver = Driver(mode, cap=10).begin()
    driver.move_row(p(90))
    driver.happen(on.BatchDelivered(p(11), 2, 1), on.CheckpointRequested(1, None))
    driver.happen(on.BatchProcessed(p(11)))
    assert driver.stored.checkpoint == p(90)

    for last in range(12, 40, 2):
        permit = driver.of(do.AllowDelivery)[-1]
        assert driver.life.ledger.delivered_total < permit.start_below
        driver.happen(on.BatchDelivered(p(last), 8, 1), on.CheckpointRequested(last, None))
        driver.happen(on.BatchProcessed(p(last)))

    assert driver.state is State.PROCESSING
    assert set(driver.answers().values()) == {DURABLE}
    assert driver.stored.checkpoint == p(90)


# Unknown outcomes


def test_a_checkpoint_in_flight_that_lands_is_adopted():
    driver = Driver("batch").begin()
    driver.faults.append("reply lost")

    driver.batch(20)

    assert positions(driver) == [p(20)]
    assert driver.life.ledger.checkpointed == p(20)
    assert driver.life.own.counter == driver.stored.counter == 7


def test_when_only_an_earlier_write_applied_what_is_missing_is_issued_again():
    driver = Driver("auto", every_s=4.0).begin()
    driver.batch(20)
    driver.now += 4.0
    driver.tell(on.Ticked())
    checkpoint = driver.queue.popleft().change
    assert isinstance(checkpoint, changes.Checkpoint)
    driver.tell(on.WriteResolved(checkpoint, NOT_APPLIED["dropped"], driver.now))
    driver.queue.popleft()
    # The image shows a write of mine at this counter, but not this position.
    driver.table.write(changes.Renew(KEY, ME, 6))

    driver.happen(on.OwnRowRead(driver.stored))

    assert [each.seen_counter for each in driver.sent(changes.Checkpoint)] == [6, 7]
    assert driver.stored.checkpoint == p(20)


def test_a_checkpoint_that_cannot_be_sent_lets_the_renewals_go_first():
    driver = Driver("auto", every_s=1.0).begin()
    driver.batch(20)
    driver.now += 1.0
    for _ in range(400):
        driver.tell(on.Ticked())
        while driver.queue:
            command = driver.queue.popleft()
            if isinstance(command, do.SendWrite) and isinstance(command.change, changes.Checkpoint):
                outcome = NOT_APPLIED["unavailable"]  # as with a full disk
                driver.tell(on.WriteResolved(command.change, outcome, driver.now))
            else:
                driver._perform(command)
        driver.now = max(driver.life.next_deadline(driver.now), driver.now + 0.001)

    assert driver.state is State.PROCESSING
    assert driver.now > 2 * 9.0
    assert len(driver.sent(changes.Checkpoint)) < 3 * (driver.now - START)
    driver.tick(3.0)
    assert driver.stored.checkpoint == p(20)


def test_a_checkpoint_that_may_still_land_is_not_put_off():
    driver = Driver("batch").begin()
    driver.faults += ["in flight", "unavailable"]

    driver.batch(20)

    assert len(driver.sent(changes.Checkpoint)) == 3
    assert driver.sent(changes.Renew) == []
    assert driver.stored.checkpoint == p(20)


@pytest.mark.parametrize("name", ["LATEST", "AT_TIMESTAMP", "SHARD_END"])
def test_a_sentinel_is_no_position_to_checkpoint(name):
    driver = Driver("manual", position=TRIM_HORIZON).begin()
    driver.happen(on.BatchDelivered(p(20), 1, 1))

    driver.happen(on.CheckpointRequested(1, ExtendedSequenceNumber(name)))

    assert driver.answers() == {1: STALE}
    assert driver.stored.checkpoint == TRIM_HORIZON
