"""What a process does that lacks something of its host: another host may have it."""

import pytest

from kclrun.lease import commands, events
from kclrun.lease.shard_end import OUTPUT_WAIT_S
from kclrun.lease.states import State
from kclrun.protocol import reports
from kclrun.protocol import writes as changes
from tests.unit.lease.lease_driver import ME, NOT_KEPT, START, Driver, p

# An output that keeps no rows.


def held_up(*, seconds, others=True, every_s=1.0):
    """A checkpoint is due, and again and again its rows cannot be kept, for so long."""
    driver = Driver(every_s=every_s, others_in_sight=others).begin()
    driver.batch(20)
    driver.faults += ["not kept"] * 1000
    driver.tick(every_s)
    until = driver.now + seconds
    while driver.now < until and driver.state is State.PROCESSING:
        due = driver.life.next_deadline(driver.now)
        assert due > driver.now, "it would spin"
        # Only checkpoints have rows.
        driver.now = min(due, until)
        driver.happen(events.Ticked())
    return driver


def test_an_output_that_keeps_no_rows_for_half_a_minute_leaves_the_lease_to_another_host():
    driver = held_up(seconds=OUTPUT_WAIT_S + 5.0)

    assert driver.state is State.LOST
    (report,) = driver.reports(reports.ProcessBroke)
    assert report.reason == f"the output kept no rows for 30 s: {NOT_KEPT}"
    assert driver.reports(reports.LeaseLost) == []
    assert driver.of(commands.Exit) == [commands.Exit(commands.ExitCause.HOST)]
    assert len(driver.of(commands.CallLeaseLost)) == 1, "user code hears that it is over"
    # Its manager gives it away: the row is as it was.
    assert (driver.stored.owner, driver.stored.checkpoint) == (ME, p(10))


def test_before_that_it_is_waited_for():
    driver = held_up(seconds=OUTPUT_WAIT_S - 4.0)

    assert driver.state is State.PROCESSING
    assert len(driver.sent(changes.Renew)) >= 8
    driver.faults.clear()
    driver.tick(3.0)
    assert driver.stored.checkpoint == p(20)


def test_a_write_under_way_does_not_put_the_end_of_the_wait_off():
    driver = held_up(seconds=OUTPUT_WAIT_S - 1.0)
    while driver.life.own.pending is None:
        driver.now = driver.life.next_deadline(driver.now)
        driver.tell(events.Ticked())
        assert driver.state is State.PROCESSING

    driver.now = driver.life.next_deadline(driver.now)
    driver.tell(events.Ticked())

    assert driver.state is State.LOSING
    assert driver.now == pytest.approx(START + 1.0 + OUTPUT_WAIT_S)


def test_while_nobody_else_is_there_it_is_waited_for_without_end():
    driver = held_up(seconds=10 * OUTPUT_WAIT_S, others=False)
    assert driver.state is State.PROCESSING

    driver.happen(events.OthersInSight(True))

    assert driver.reports(reports.ProcessBroke)


def test_room_in_between_begins_the_wait_anew():
    driver = held_up(seconds=OUTPUT_WAIT_S - 4.0)
    driver.faults.clear()
    driver.tick(3.0)
    assert driver.stored.checkpoint == p(20)

    driver.batch(30)
    driver.faults += ["not kept"] * 1000
    driver.tick(3.0)
    driver.tick(3.0)

    assert driver.state is State.PROCESSING
