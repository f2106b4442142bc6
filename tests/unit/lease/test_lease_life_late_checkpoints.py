"""The late checkpoint: once, for what was fully processed when the lease was lost [P19]."""

import pytest

from kclrun.lease import commands, events
from kclrun.lease.states import State
from kclrun.model.sequence import SHARD_END
from kclrun.protocol import reports
from kclrun.protocol import writes as changes
from tests.unit.lease.lease_driver import KEY, ME, OTHER, Driver, child, p


def losing(driver):
    """Another kclrun owner has the row, and a renewal has shown it; user code still runs."""
    driver.user_returns = False
    driver.steal()
    driver.tick(3.0)
    assert driver.state is State.LOSING
    return driver


def lose(driver):
    losing(driver)
    driver.happen(events.DeliveryStopped(), events.CallReturned())


@pytest.fixture
def driver():
    """Its first batch, up to 20, is processed and not checkpointed."""
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    return driver


def test_what_was_processed_is_checkpointed_once_after_the_loss(driver):
    lose(driver)

    assert driver.sent(changes.LateCheckpoint) == [changes.LateCheckpoint(KEY, ME, p(10), p(20))]
    assert (driver.stored.checkpoint, driver.stored.owner) == (p(20), OTHER)
    assert driver.stored.counter == 7  # only the take has moved it
    assert driver.state is State.LOST
    assert driver.reports(reports.LeaseLost)[0].reason.endswith("checkpointed late, at 20")


@pytest.mark.parametrize(
    ("noted", "late_note", "is_written"),
    [
        pytest.param(p(10), None, True, id="letters that the last checkpoint covers"),
        pytest.param(p(20), None, False, id="letters above it"),
        pytest.param(None, p(20), False, id="letters that no write of ours has shown"),
    ],
)
def test_there_is_none_over_letters_which_the_next_owner_says_do_not_count(
    noted, late_note, is_written
):
    driver = Driver(every_s=1000.0)
    if noted:
        driver.table.write(changes.NoteLetters(KEY, ME, noted, None))
    driver.begin()
    driver.batch(20)
    if late_note:
        driver.table.write(changes.NoteLetters(KEY, ME, late_note, None))

    lose(driver)

    assert (driver.stored.checkpoint == p(20)) == is_written


def test_there_is_none_past_a_batch_that_failed(driver):
    driver.steal()
    driver.user_returns = False
    driver.happen(reports.ProcessorFailed("process_records", "E", 3, p(30)))
    assert driver.state is State.LOSING

    driver.happen(
        events.BatchDelivered(p(40), 1, 1), events.BatchProcessed(p(40)), events.DeliveryStopped()
    )

    assert driver.sent(changes.LateCheckpoint) == []


def test_it_never_ends_a_shard(driver):
    # Trace N6: all records are processed and the children exist when the lease is lost.
    driver.tell(events.ShardExhausted((child("s1"),)))
    while driver.state is not State.ENDING:
        driver._perform(driver.queue.popleft())
    driver.steal()

    driver.settle()

    assert [late.position for late in driver.sent(changes.LateCheckpoint)] == [p(20)]
    assert driver.stored.checkpoint != SHARD_END


# Its outcome


@pytest.mark.parametrize(
    ("faults", "sends", "stored"),
    [
        (["throttled", "throttled"], 3, p(20)),
        (["unavailable", "unavailable"], 3, p(20)),
        (["refused"], 1, p(10)),
        (["dropped"], 1, p(10)),
        (["reply lost"], 1, p(20)),
    ],
)
def test_it_is_sent_again_only_where_it_surely_did_not_apply(driver, faults, sends, stored):
    losing(driver)
    driver.faults += faults

    driver.happen(events.DeliveryStopped(), events.CallReturned())

    assert len(driver.sent(changes.LateCheckpoint)) == sends
    assert driver.life.has_undone == (stored != p(20) or faults == ["reply lost"])
    assert driver.of(commands.ReadOwnRow) == []
    assert driver.stored.checkpoint == stored
    assert driver.state is State.LOST


def test_a_lease_lost_that_runs_longer_is_waited_for_when_the_late_checkpoint_is_done(driver):
    losing(driver)
    driver.happen(events.DeliveryStopped())
    assert driver.stored.checkpoint == p(20)

    driver.tick(5.0)
    assert driver.state is State.LOSING
    driver.happen(events.CallReturned())

    assert driver.state is State.LOST


@pytest.mark.parametrize(
    ("position", "fields"),
    [
        pytest.param(p(50), {}, id="the next owner went further"),
        pytest.param(p(3), {}, id="an operator reset it"),
        pytest.param(p(10), {"owner": "java-worker"}, id="a Java owner"),
    ],
)
def test_a_row_that_moved_meanwhile_is_left_alone(driver, position, fields):
    losing(driver)
    driver.move_row(position, **fields)

    driver.happen(events.DeliveryStopped(), events.CallReturned())

    assert driver.stored.checkpoint == position
    assert driver.state is State.LOST
    assert "late" not in driver.reports(reports.LeaseLost)[0].reason


# With manual checkpoints only what user code asked for


RETURNED = events.BatchProcessed(p(20))
RAISED = reports.ProcessorFailed("process_records", "LeaseLost", 1, p(20))


@pytest.mark.parametrize(
    ("was_waiting", "ending", "stored"),
    [(True, RETURNED, p(15)), (True, RAISED, p(10)), (False, RETURNED, p(10))],
)
def test_a_manual_request_that_was_waiting_at_the_loss_is_written_late_if_its_batch_returned(
    was_waiting, ending, stored
):
    driver = Driver("manual").begin()
    driver.tell(events.BatchDelivered(p(20), 1, 1))
    if was_waiting:
        driver.steal()
        driver.user_returns = False
    else:
        losing(driver)
    driver.happen(events.CheckpointRequested(1, p(15)))
    assert driver.state is State.LOSING
    assert driver.answers() == {1: commands.CheckpointAnswer.LOST}

    driver.happen(ending, events.DeliveryStopped())

    assert driver.stored.checkpoint == stored
    assert len(driver.sent(changes.LateCheckpoint)) == (stored == p(15))
