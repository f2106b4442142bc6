"""Endings in good order and in bad: drain, release, failure, loss, stalls."""

import pytest

from kclrun.lease import commands, events
from kclrun.lease.states import State
from kclrun.protocol import reports
from kclrun.protocol import writes as changes
from tests.unit.lease.lease_driver import ME, NOT_APPLIED, OTHER, Driver, p

DRAIN = events.DrainRequested("the host drains")
FAILED = reports.ProcessorFailed("process_records", "ValueError: x", 3, p(30), "Traceback")


def test_a_drain_finishes_the_batch_says_goodbye_and_releases_in_one_write():
    driver = Driver().in_a_batch(DRAIN)
    assert driver.state is State.STOPPING
    assert len(driver.of(commands.StopDelivery)) == 1

    driver.happen(events.BatchProcessed(p(20)), events.DeliveryStopped())
    assert len(driver.of(commands.CallShutdownRequested)) == 1
    driver.happen(events.CallReturned())

    assert driver.state is State.RELEASED
    assert (driver.stored.owner, driver.stored.checkpoint) == (None, p(20))
    assert driver.sent(changes.Checkpoint) == []
    alone = "released: no other owner is in sight"
    assert driver.reports(reports.LeaseReleased) == [reports.LeaseReleased(p(20), alone)]
    assert driver.of(commands.Exit) == [commands.Exit(commands.ExitCause.DONE)]


@pytest.mark.parametrize(
    ("meanwhile", "goodbyes"),
    [
        ([events.CallReturned()], 1),
        ([reports.ProcessorFailed("initialize", "E", 1)], 0),
        ([], 0),
    ],
)
def test_a_drain_while_initializing_asks_to_shut_down_only_what_began(meanwhile, goodbyes):
    driver = Driver()
    driver.user_returns = False
    driver.happen(events.Started(), DRAIN)
    assert driver.state is State.STOPPING

    driver.happen(*meanwhile, events.DeliveryStopped())
    if goodbyes:
        driver.happen(events.CallReturned())

    assert driver.state is State.RELEASED
    assert len(driver.of(commands.CallShutdownRequested)) == goodbyes


def test_a_release_that_never_applied_before_another_took_the_row_is_a_loss(driver):
    driver.batch(20)
    driver.user_returns = False
    driver.happen(DRAIN, events.DeliveryStopped())
    driver.tell(events.CallReturned())
    release = driver.queue.popleft().change
    driver.steal()
    driver.user_returns = True

    driver.tell(events.WriteResolved(release, NOT_APPLIED["dropped"], driver.now))
    driver.settle()

    assert driver.state is State.LOST
    assert driver.stored.owner == OTHER


def test_without_a_manager_the_lease_drains_renews_no_more_and_ends_at_the_fence():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    driver.user_returns = False
    driver.happen(events.BatchDelivered(p(30), 1, 1), events.ManagerGone())
    assert driver.state is State.STOPPING

    driver.tick(5.0)
    assert driver.sent(changes.Renew) == []
    assert driver.life.next_deadline(driver.now) > driver.now
    driver.now = driver.life.own.fence
    driver.tick()
    driver.tick()

    assert driver.state is State.LOST
    assert driver.stored.owner == ME
    assert driver.sent(changes.LateCheckpoint) == []


# Failures


def test_failing_with_a_throttled_table_saves_all_the_same():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    driver.faults += ["throttled", "unavailable", "reply lost"]

    driver.happen(FAILED)

    assert driver.state is State.FAILED
    assert driver.stored.checkpoint == p(20)


def test_trouble_in_shutdown_requested_is_a_warning_and_the_lease_is_released(driver):
    driver.user_returns = False
    driver.happen(DRAIN, events.DeliveryStopped())

    driver.happen(reports.ProcessorFailed("shutdown_requested", "E: x", 1))

    assert driver.state is State.RELEASED
    assert "shutdown_requested raised E: x" in driver.reports(reports.ProcessWarned)[0].detail


# Losses


@pytest.mark.parametrize(
    "ending", [events.CallReturned(), reports.ProcessorFailed("lease_lost", "E", 1)]
)
def test_a_lost_lease_waits_for_user_code_and_calls_lease_lost_once(ending):
    driver = Driver().in_a_batch()
    driver.steal()
    driver.tick(3.0)
    assert driver.state is State.LOSING

    driver.happen(events.BatchProcessed(p(20)), events.DeliveryStopped())
    assert len(driver.of(commands.CallLeaseLost)) == 1
    driver.happen(ending)

    assert driver.state is State.LOST
    assert driver.of(commands.Exit) == [commands.Exit(commands.ExitCause.LOST)]


def test_a_lost_lease_lets_go_after_30_s_of_user_code():
    driver = Driver().in_a_batch()
    driver.steal()
    driver.tick(3.0)
    assert driver.life.next_deadline(driver.now) == driver.now + 30.0

    driver.tick(29.9)
    assert driver.state is State.LOSING
    driver.tick(0.1)

    assert driver.state is State.LOST


def test_a_lease_lost_while_initializing_calls_lease_lost_only_if_it_began():
    for event, calls in (
        (events.CallReturned(), 1),
        (reports.ProcessorFailed("initialize", "E", 1), 0),
    ):
        driver = Driver()
        driver.user_returns = False
        driver.happen(events.Started())
        driver.steal()
        driver.tick(3.0)
        assert driver.state is State.LOSING

        driver.happen(event, events.DeliveryStopped())

        assert len(driver.of(commands.CallLeaseLost)) == calls


def test_drained_and_then_lost_before_user_code_is_idle_says_goodbye_once(driver):
    driver.user_returns = False
    driver.happen(DRAIN)
    driver.steal()
    driver.tick(3.0)
    assert len(driver.of(commands.StopDelivery)) == 2

    driver.happen(events.DeliveryStopped(), events.DeliveryStopped())
    assert driver.state is State.LOSING
    assert len(driver.of(commands.CallLeaseLost)) == 1
    driver.happen(events.CallReturned())

    assert driver.state is State.LOST


def test_lost_while_shutdown_requested_runs_waits_for_its_return(driver):
    driver.user_returns = False
    driver.happen(DRAIN, events.DeliveryStopped())
    driver.steal()
    driver.tick(3.0)

    driver.happen(events.CallReturned())
    assert driver.state is State.LOSING
    driver.happen(events.DeliveryStopped(), events.CallReturned())

    assert driver.state is State.LOST
    assert len(driver.of(commands.CallLeaseLost)) == 1


def test_a_thread_that_stood_still_is_reported(driver):
    driver.happen(events.ThreadStalled(2.5, in_user_code=True))
    driver.happen(events.ThreadStalled(3.5, in_user_code=False))

    assert driver.reports(reports.GilHeld)[0].seconds == 2.5
    assert "for 3.5 s" in driver.reports(reports.ProcessWarned)[0].detail


# What an end leaves undone: the manager makes an exit code of it.


def given_up(driver):
    """A drain whose last write nothing lets through, until the fence has passed."""
    driver.user_returns = True
    driver.faults.extend(["unavailable"] * 100)
    driver.happen(events.DrainRequested("SIGTERM"))
    assert driver.state in {State.RELEASING, State.LOSING, State.LOST}
    driver.tick(10.0)
    driver.tick(40.0)
    assert driver.state is State.LOST
    return driver


def test_a_drain_that_cannot_checkpoint_what_was_processed_leaves_it_undone():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)

    assert given_up(driver).life.has_undone


def test_a_lease_that_passed_its_fence_says_why_its_row_was_not_written():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)

    (lost,) = given_up(driver).reports(reports.LeaseLost)

    assert lost.reason.startswith(
        "its row could not be written in time (no route): its fence passed"
    )


# A restart only: the lease stays ours.

RESTART = events.RestartRequested()


def test_a_restart_waits_for_its_checkpoint_and_renews_meanwhile():
    driver = Driver(failover_s=9.0).begin()
    driver.batch(20)
    driver.happen(RESTART)
    driver.faults.extend(["throttled"] * 3)
    driver.happen(events.DeliveryStopped())
    for _ in range(40):
        driver.tick(0.5)
        if driver.state is State.RELEASED:
            break

    assert driver.state is State.RELEASED
    assert (driver.stored.owner, driver.stored.checkpoint) == (ME, p(20))


@pytest.mark.parametrize("at", ["before the batch ends", "at its last call"])
def test_a_drain_overrules_a_restart(at):
    driver = Driver().in_a_batch(RESTART)
    if at == "before the batch ends":
        driver.happen(DRAIN)
    driver.happen(events.BatchProcessed(p(20)), events.DeliveryStopped())
    if at == "at its last call":
        driver.happen(DRAIN)
    driver.happen(events.CallReturned())

    assert (driver.stored.owner, driver.stored.checkpoint) == (None, p(20))
    assert not driver.reports(reports.LeaseKept)
