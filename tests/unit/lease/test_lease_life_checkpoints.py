"""Checkpoints: when, how far, what user code is told, and what a failed write means [P2, P6]."""

import pytest

from kclrun.lease import commands, events
from kclrun.lease.states import State
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.protocol import reports
from kclrun.protocol import writes as changes
from tests.support.tables import over_rows
from tests.unit.lease.lease_driver import KEY, ME, NOT_APPLIED, Driver, p

DURABLE, STALE = commands.CheckpointAnswer.DURABLE, commands.CheckpointAnswer.STALE
SENTINELS = ("LATEST", "AT_TIMESTAMP", "SHARD_END")


def positions(driver):
    return [each.position for each in driver.sent(changes.Checkpoint)]


@pytest.mark.parametrize("under_way", [False, True])
def test_auto_checkpoints_what_was_processed_once_its_time_has_come(under_way):
    driver = Driver("auto", every_s=2.0).begin()
    driver.batch(20)
    if under_way:
        driver.happen(events.BatchDelivered(p(30), 1, 1))
    assert positions(driver) == []
    assert driver.life.next_deadline(driver.now) == driver.now + 2.0

    driver.tick(2.0)

    assert positions(driver) == [p(20)]
    assert driver.stored.checkpoint == p(20)
    assert driver.reports(reports.Checkpointed) == [reports.Checkpointed(p(20), 7)]


def test_half_of_the_cap_is_checkpointed_before_its_time():
    driver = Driver("auto", cap=10, every_s=1000.0).begin()

    driver.batch(20, records=4)
    assert positions(driver) == []
    driver.happen(events.BatchDelivered(p(30), 1, 1))

    assert positions(driver) == [p(20)]


def test_batch_mode_checkpoints_each_batch_and_lets_no_other_start_before():
    driver = Driver("batch").begin()
    assert driver.of(commands.AllowDelivery)[-1].start_below == 1

    driver.tell(events.BatchDelivered(p(20), 3, 1))
    driver.tell(events.BatchProcessed(p(20)))
    assert driver.of(commands.AllowDelivery)[-1].start_below == 1
    driver.settle()

    assert positions(driver) == [p(20)]
    assert driver.of(commands.AllowDelivery)[-1].start_below == 4


def test_batch_mode_writes_nothing_for_a_page_without_records_before_its_time():
    driver = Driver("batch", every_s=2.0).begin()
    driver.batch(20, records=0)
    assert positions(driver) == []

    driver.tick(2.0)

    assert positions(driver) == [p(20)]


@over_rows(
    ("begins_at", "position", "words"),
    [
        (p(10), p(5), "the last"),
        (p(10), p(31), "nothing above"),
        *((TRIM_HORIZON, ExtendedSequenceNumber(each), "") for each in SENTINELS),
    ],
)
def test_a_request_below_the_last_checkpoint_or_above_the_delivered_is_stale(
    begins_at, position, words
):
    driver = Driver("manual", position=begins_at).begin()
    driver.happen(events.BatchDelivered(p(30), 3, 1), events.CheckpointRequested(1, position))

    assert positions(driver) == []
    assert driver.stored.checkpoint == begins_at
    assert driver.answers() == {1: STALE}
    assert words in driver.of(commands.AnswerCheckpoint)[0].detail


def test_a_request_equal_to_the_last_checkpoint_is_no_write():
    driver = Driver("manual").begin()

    driver.happen(events.CheckpointRequested(1, p(10)), events.CheckpointRequested(2, None))

    assert positions(driver) == []
    assert driver.answers() == {1: DURABLE, 2: DURABLE}


# The cap


@pytest.mark.parametrize("mode", ["auto", "batch", "manual"])
def test_the_permit_never_allows_more_uncheckpointed_records_than_the_cap(mode):
    driver = Driver(mode, cap=10).begin()

    assert driver.of(commands.AllowDelivery)[-1].delivered_max == 10
    driver.happen(events.BatchDelivered(p(20), 4, 1), events.CheckpointRequested(1, p(20)))

    assert driver.of(commands.AllowDelivery)[-1].delivered_max == 14


def test_auto_lifts_a_reached_cap_by_a_checkpoint():
    driver = Driver("auto", cap=10, every_s=1000.0).begin()

    driver.batch(20, records=10)

    assert driver.of(commands.AllowDelivery)[-1].delivered_max == 20
    assert driver.state is State.PROCESSING


def test_manual_at_the_cap_without_a_request_fails_with_the_reason():
    driver = Driver("manual", cap=10).begin()

    driver.batch(20, records=10)

    assert driver.state is State.FAILED
    failure = driver.reports(reports.ProcessorFailed)[0]
    assert "10 records were processed and none checkpointed" in failure.error
    assert failure.attempts == 1
    assert failure.position == p(20)
    assert positions(driver) == []


def test_a_checkpoint_inside_a_batch_counts_none_of_it_as_covered():
    driver = Driver("manual", cap=10).begin()

    driver.happen(events.BatchDelivered(p(20), 4, 1), events.CheckpointRequested(1, p(15)))

    assert driver.of(commands.AllowDelivery)[-1].delivered_max == 10
    assert driver.stored.checkpoint == p(15)


# Late checkpoints of a former owner


@pytest.mark.parametrize(
    ("late", "again"), [(p(25), (p(25), p(25))), (p(15), (p(20), p(15)))], ids=["above", "below"]
)
def test_a_late_checkpoint_is_adopted_and_the_position_never_lowered(late, again):
    driver = Driver("batch").begin()
    driver.tell(events.BatchDelivered(p(20), 1, 1))
    driver.table.write(changes.LateCheckpoint(KEY, "kclrun::host:gone", p(10), late))
    assert driver.stored.checkpoint == late

    driver.happen(events.BatchProcessed(p(20)))  # traces H6 and N1

    sent = driver.sent(changes.Checkpoint)
    assert [(each.position, each.last) for each in sent] == [(p(20), p(10)), again]
    assert driver.stored.checkpoint == driver.life.ledger.checkpointed == again[0]
    assert driver.stored.counter == 7


def test_a_late_checkpoint_seen_by_a_renewal_is_not_lowered_by_the_next_checkpoint():
    driver = Driver("auto", every_s=10.0).begin()
    driver.move_row(p(25))
    driver.tick(3.0)
    assert len(driver.sent(changes.Renew)) == 1

    driver.batch(20)
    driver.tick(7.0)

    assert driver.stored.checkpoint == p(25)
    assert driver.life.ledger.checkpointed == p(25)


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
    driver.tell(events.Ticked())
    checkpoint = driver.queue.popleft().change
    assert isinstance(checkpoint, changes.Checkpoint)
    driver.tell(events.WriteResolved(checkpoint, NOT_APPLIED["dropped"], driver.now))
    driver.queue.popleft()
    # The image shows a write of mine at this counter, but not this position.
    driver.table.write(changes.Renew(KEY, ME, 6))

    driver.happen(events.OwnRowRead(driver.stored))

    assert [each.seen_counter for each in driver.sent(changes.Checkpoint)] == [6, 7]
    assert driver.stored.checkpoint == p(20)


def test_a_checkpoint_that_may_still_land_is_not_put_off():
    driver = Driver("batch").begin()
    driver.faults += ["in flight", "unavailable"]

    driver.batch(20)

    assert len(driver.sent(changes.Checkpoint)) == 3
    assert driver.sent(changes.Renew) == []
    assert driver.stored.checkpoint == p(20)


@pytest.mark.parametrize("fate", ["reply lost", "dropped"])
def test_n1_what_is_issued_again_after_an_unknown_outcome_is_never_below_the_row(fate):
    driver = Driver("batch").begin()
    driver.faults.append(fate)
    driver.tell(events.BatchDelivered(p(20), 1, 1))
    driver.tell(events.BatchProcessed(p(20)))
    driver._perform(driver.queue.popleft())
    while driver.faults:
        driver._perform(driver.queue.popleft())
    driver.table.write(changes.LateCheckpoint(KEY, "kclrun::host:gone", p(10), p(25)))

    driver.settle()

    assert driver.stored.checkpoint == p(25)
    assert driver.state is State.PROCESSING
