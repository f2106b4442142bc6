"""Endings in good order and in bad: drain, release, failure, loss, stalls."""

import pytest

from kclrun.consuming import commands as do
from kclrun.consuming import events as on
from kclrun.consuming.states import State
from kclrun.protocol import writes as changes
from tests.unit.consuming.lease_driver import ME, NOT_APPLIED, OTHER, Driver, child, p

KIND = do.ReportKind
DRAIN = on.DrainRequested("the host drains")
FAILED = on.ProcessorFailed("process_records", "ValueError: x", 3, p(30), "Traceback")


def test_a_drain_finishes_the_batch_says_goodbye_and_releases_in_one_write():
    driver = Driver().begin()
    driver.user_returns = False
    driver.happen(on.BatchDelivered(p(20), 1, 1), DRAIN)
    assert driver.state is State.STOPPING
    assert len(driver.of(do.StopDelivery)) == 1

    driver.happen(on.BatchProcessed(p(20)), on.DeliveryStopped())
    assert len(driver.of(do.CallShutdownRequested)) == 1
    driver.happen(on.CallReturned())

    assert driver.state is State.RELEASED
    assert (driver.stored.owner, driver.stored.checkpoint) == (None, p(20))
    assert driver.sent(changes.Checkpoint) == []
    alone = "released: no other owner is in sight"
    assert driver.reports(KIND.RELEASED) == [do.Report(KIND.RELEASED, position=p(20), text=alone)]
    assert driver.of(do.Exit) == [do.Exit(do.ExitCause.DONE)]


def test_a_manual_lease_is_released_at_what_user_code_checkpointed():
    driver = Driver("manual").begin()
    driver.batch(20)
    driver.happen(on.CheckpointRequested(1, p(15)))

    driver.happen(DRAIN)

    assert driver.stored.checkpoint == p(15)


def test_a_request_of_the_last_moment_goes_with_the_release():
    driver = Driver("manual").begin()
    driver.batch(20)
    driver.user_returns = False
    driver.happen(DRAIN, on.DeliveryStopped())
    driver.tell(on.CheckpointRequested(1, None))

    driver.happen(on.CallReturned())

    assert driver.stored.checkpoint == p(20)
    assert driver.answers() == {1: do.CheckpointAnswer.DURABLE}


def test_the_processor_can_ask_for_its_release():
    driver = Driver().begin()

    driver.happen(on.ReleaseRequested())

    assert driver.state is State.RELEASED


def test_a_drain_while_claiming_releases_without_any_user_code():
    driver = Driver()
    driver.tell(on.Started())
    driver.tell(DRAIN)

    driver.settle()

    assert driver.state is State.RELEASED
    assert driver.of(do.CallInitialize) == []
    assert driver.stored.owner is None


def test_a_drain_while_initializing_waits_for_it():
    driver = Driver()
    driver.user_returns = False
    driver.happen(on.Started(), DRAIN)
    assert driver.state is State.STOPPING

    driver.happen(on.CallReturned(), on.DeliveryStopped(), on.CallReturned())

    assert driver.state is State.RELEASED
    assert len(driver.of(do.CallShutdownRequested)) == 1


@pytest.mark.parametrize("meanwhile", [(), (on.ProcessorFailed("initialize", "E", 1),)])
def test_a_processor_that_never_began_is_not_asked_to_shut_down(meanwhile):
    driver = Driver()
    driver.user_returns = False
    driver.happen(on.Started(), DRAIN, *meanwhile, on.DeliveryStopped())

    assert driver.state is State.RELEASED
    assert driver.of(do.CallShutdownRequested) == []


def test_a_drain_while_children_wait_for_the_other_parent_releases():
    driver = Driver().begin()
    driver.shards = (lease_driver_shard("s1"),)
    driver.exhaust(child("s2", "s0", "s1"))
    assert driver.state is State.CREATING

    driver.happen(DRAIN)

    assert driver.state is State.RELEASED


@pytest.mark.parametrize("state", [State.NAMING, State.CLOSING, State.ENDING])
def test_a_drain_when_the_children_exist_ends_the_shard(state):
    driver = Driver().begin()
    driver.tell(on.ShardExhausted((child("s1"), child("s2"))))
    while driver.state is not state:
        driver._perform(driver.queue.popleft())

    driver.happen(DRAIN)

    assert driver.state is State.ENDED
    assert driver.stored.is_ended


@pytest.mark.parametrize("state", [State.STOPPING, State.RELEASING, State.LOSING])
def test_a_second_drain_changes_nothing(state):
    driver = Driver().begin()
    driver.user_returns = False
    if state is State.LOSING:
        driver.steal()
        driver.tick(3.0)
    else:
        driver.tell(DRAIN)
    if state is State.RELEASING:
        driver.happen(on.DeliveryStopped())
        driver.tell(on.CallReturned())
    assert driver.state is state
    stops = len(driver.of(do.StopDelivery))

    driver.tell(DRAIN)

    assert driver.state is state
    assert len(driver.of(do.StopDelivery)) == stops


def test_a_drain_while_failing_keeps_the_failure():
    driver = Driver().begin()
    driver.batch(20)
    driver.tell(FAILED)
    assert driver.state is State.FAILING

    driver.happen(DRAIN)

    assert driver.state is State.FAILED


@pytest.mark.parametrize("next_owner", [False, True])
def test_a_release_whose_reply_was_lost_is_known_by_the_row(next_owner):
    driver = Driver().begin()
    driver.batch(20)
    driver.user_returns = False
    driver.happen(DRAIN, on.DeliveryStopped())
    driver.tell(on.CallReturned())
    release = driver.queue.popleft().change
    driver.table.write(release)
    if next_owner:
        driver.steal()
    driver.tell(on.WriteResolved(release, NOT_APPLIED["dropped"], driver.now))

    driver.settle()

    assert driver.state is State.RELEASED
    assert len(driver.sent(changes.Release)) == 1
    assert driver.reports(KIND.RELEASED)[0].position == p(20)


def test_a_release_that_never_applied_before_another_took_the_row_is_a_loss():
    driver = Driver().begin()
    driver.batch(20)
    driver.user_returns = False
    driver.happen(DRAIN, on.DeliveryStopped())
    driver.tell(on.CallReturned())
    release = driver.queue.popleft().change
    driver.steal()
    driver.user_returns = True

    driver.tell(on.WriteResolved(release, NOT_APPLIED["dropped"], driver.now))
    driver.settle()

    assert driver.state is State.LOST
    assert driver.stored.owner == OTHER


def test_a_release_that_landed_late_is_not_sent_twice():
    driver = Driver().begin()
    driver.batch(20)
    driver.faults += ["in flight"]
    driver.tell(DRAIN)
    while not driver.in_flight:
        driver._perform(driver.queue.popleft())
    driver.tell(on.OwnRowRead(driver.stored))  # read before it lands: still unknown
    driver.queue.popleft()
    driver.land()

    driver.settle()

    assert driver.state is State.RELEASED
    assert [each.seen_counter for each in driver.sent(changes.Release)] == [6, 6]


def test_a_late_checkpoint_before_the_release_is_kept():
    driver = Driver().begin()
    driver.batch(20)
    driver.move_row(p(25))

    driver.happen(DRAIN)

    assert driver.stored.checkpoint == p(25)
    assert driver.stored.owner is None


def test_without_a_manager_the_lease_drains_renews_no_more_and_ends_at_the_fence():
    driver = Driver().begin()
    driver.user_returns = False
    driver.happen(on.BatchDelivered(p(20), 1, 1), on.ManagerGone())
    assert driver.state is State.STOPPING

    driver.tick(5.0)
    assert driver.sent(changes.Renew) == []
    driver.now = driver.life.own.fence
    driver.tick()
    driver.tick()

    assert driver.state is State.LOST
    assert driver.stored.owner == ME


def test_without_a_manager_a_batch_that_returns_in_time_is_released():
    driver = Driver().begin()
    driver.batch(20)

    driver.happen(on.ManagerGone())

    assert driver.state is State.RELEASED
    assert driver.stored.checkpoint == p(20)


# Failures


def test_a_failing_lease_saves_what_was_processed_before_it_exits():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    driver.happen(on.BatchDelivered(p(30), 1, 1), FAILED)

    assert driver.state is State.FAILED
    assert driver.stored.checkpoint == p(20)
    assert driver.stored.owner == ME
    report = driver.reports(KIND.FAILED)[0]
    assert (report.where, report.text, report.attempts) == ("process_records", "ValueError: x", 3)
    assert (report.position, report.traceback_text) == (p(30), "Traceback")
    assert driver.of(do.Exit) == [do.Exit(do.ExitCause.FAILED)]
    kinds = [type(each) for each in driver.log]
    assert kinds.index(do.Exit) == len(kinds) - 1


def test_a_batch_behind_the_one_that_failed_moves_no_position():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    driver.tell(on.BatchDelivered(p(30), 1, 1))
    driver.tell(FAILED)
    driver.tell(on.BatchDelivered(p(40), 1, 1))
    driver.tell(on.BatchProcessed(p(40)))

    driver.settle()

    assert driver.state is State.FAILED
    assert driver.stored.checkpoint == p(20)


def test_failing_with_a_throttled_table_saves_all_the_same():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    driver.faults += ["throttled", "unavailable", "reply lost"]

    driver.happen(FAILED)

    assert driver.state is State.FAILED
    assert driver.stored.checkpoint == p(20)


def test_a_manual_lease_that_fails_saves_nothing_by_itself():
    driver = Driver("manual").begin()
    driver.batch(20)

    driver.happen(FAILED)

    assert driver.stored.checkpoint == p(10)


def test_a_processor_that_cannot_begin_fails_the_lease():
    driver = Driver()
    driver.user_returns = False

    driver.happen(on.Started(), on.ProcessorFailed("initialize", "E", 1))

    assert driver.state is State.FAILED
    assert driver.of(do.AllowDelivery) == []


def test_a_failing_lease_can_be_lost():
    driver = Driver().begin()
    driver.batch(20)
    driver.steal()

    driver.happen(FAILED)

    assert driver.state is State.LOST


def test_trouble_in_shutdown_requested_is_a_warning_and_the_lease_is_released():
    driver = Driver().begin()
    driver.user_returns = False
    driver.happen(DRAIN, on.DeliveryStopped())

    driver.happen(on.ProcessorFailed("shutdown_requested", "E: x", 1))

    assert driver.state is State.RELEASED
    assert "shutdown_requested raised E: x" in driver.reports(KIND.WARNED)[0].text


# Losses


def test_a_lost_lease_waits_for_user_code_and_calls_lease_lost_once():
    driver = Driver().begin()
    driver.user_returns = False
    driver.happen(on.BatchDelivered(p(20), 1, 1))
    driver.steal()
    driver.tick(3.0)
    assert driver.state is State.LOSING

    driver.happen(on.BatchProcessed(p(20)), on.DeliveryStopped())
    assert len(driver.of(do.CallLeaseLost)) == 1
    driver.happen(on.CallReturned())

    assert driver.state is State.LOST
    assert driver.of(do.Exit) == [do.Exit(do.ExitCause.LOST)]


def test_a_lost_lease_lets_go_after_30_s_of_user_code():
    driver = Driver().begin()
    driver.user_returns = False
    driver.happen(on.BatchDelivered(p(20), 1, 1))
    driver.steal()
    driver.tick(3.0)
    assert driver.life.next_deadline(driver.now) == driver.now + 30.0

    driver.tick(29.9)
    assert driver.state is State.LOSING
    driver.tick(0.1)

    assert driver.state is State.LOST


def test_a_processor_that_raises_in_lease_lost_is_lost_all_the_same():
    driver = Driver().begin()
    driver.user_returns = False
    driver.steal()
    driver.tick(3.0)

    driver.happen(on.DeliveryStopped(), on.ProcessorFailed("lease_lost", "E", 1))

    assert driver.state is State.LOST


def test_a_lease_lost_while_initializing_calls_lease_lost_only_if_it_began():
    for event, calls in ((on.CallReturned(), 1), (on.ProcessorFailed("initialize", "E", 1), 0)):
        driver = Driver()
        driver.user_returns = False
        driver.happen(on.Started())
        driver.steal()
        driver.tick(3.0)
        assert driver.state is State.LOSING

        driver.happen(event, on.DeliveryStopped())

        assert len(driver.of(do.CallLeaseLost)) == calls


def test_drained_and_then_lost_before_user_code_is_idle_says_goodbye_once():
    driver = Driver().begin()
    driver.user_returns = False
    driver.happen(DRAIN)
    driver.steal()
    driver.tick(3.0)
    assert len(driver.of(do.StopDelivery)) == 2

    driver.happen(on.DeliveryStopped(), on.DeliveryStopped())
    assert driver.state is State.LOSING
    assert len(driver.of(do.CallLeaseLost)) == 1
    driver.happen(on.CallReturned())

    assert driver.state is State.LOST


def test_lost_while_shutdown_requested_runs_waits_for_its_return():
    driver = Driver().begin()
    driver.user_returns = False
    driver.happen(DRAIN, on.DeliveryStopped())
    driver.steal()
    driver.tick(3.0)

    driver.happen(on.CallReturned())
    assert driver.state is State.LOSING
    driver.happen(on.DeliveryStopped(), on.CallReturned())

    assert driver.state is State.LOST
    assert len(driver.of(do.CallLeaseLost)) == 1


def test_a_thread_that_stood_still_is_told():
    driver = Driver().begin()

    driver.happen(on.ThreadStalled(2.5, in_user_code=True))
    driver.happen(on.ThreadStalled(3.5, in_user_code=False))

    assert driver.reports(KIND.GIL_HELD)[0].seconds == 2.5
    assert driver.reports(KIND.WARNED)[0].seconds == 3.5


def lease_driver_shard(shard_id, **fields):
    from kclrun.model.shard import HashRange, Shard

    return Shard(shard_id, HashRange(0, 9), "1", **fields)


def test_a_lease_that_lets_go_with_something_unsaved_writes_nothing():
    driver = Driver(every_s=1000.0).begin()
    driver.user_returns = False
    driver.batch(20)
    driver.steal()
    driver.tick(3.0)
    assert driver.state is State.LOSING
    sends = len(driver.of(do.SendWrite))

    driver.tick(1000.0)

    assert driver.state is State.LOST
    assert len(driver.of(do.SendWrite)) == sends
    assert isinstance(driver.log[-1], do.Exit)


# What an end leaves undone: the manager makes an exit code of it.


def given_up(driver):
    """A drain whose last write nothing lets through, until the fence has passed."""
    driver.user_returns = True
    driver.faults.extend(["unavailable"] * 100)
    driver.happen(on.DrainRequested("SIGTERM"))
    assert driver.state in {State.RELEASING, State.LOSING, State.LOST}
    driver.tick(10.0)
    driver.tick(40.0)
    assert driver.state is State.LOST
    return driver


def test_a_drain_that_cannot_checkpoint_what_was_processed_leaves_it_undone():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)

    assert given_up(driver).life.has_undone


def test_a_drain_that_cannot_write_its_release_leaves_nothing_undone_that_was_checkpointed():
    driver = Driver("batch").begin()
    driver.batch(20)
    assert driver.stored.checkpoint == p(20)

    assert not given_up(driver).life.has_undone


def test_a_release_and_a_late_checkpoint_leave_nothing_undone():
    released = Driver(every_s=1000.0).begin()
    released.batch(20)
    released.happen(on.DrainRequested("SIGTERM"))
    assert released.state is State.RELEASED
    assert not released.life.has_undone

    late = Driver(every_s=1000.0).begin()
    late.batch(20)
    late.steal()
    late.tick(3.0)
    assert (late.state, late.stored.checkpoint) == (State.LOST, p(20))
    assert not late.life.has_undone


def test_a_batch_that_has_not_returned_is_undone_and_what_manual_code_did_not_ask_for_is_not():
    driver = Driver("manual").begin()
    driver.batch(20)
    assert not driver.life.has_undone
    driver.happen(on.BatchDelivered(p(30), 1, 1))
    assert driver.life.has_undone
    driver.happen(on.BatchProcessed(p(30)))
    driver.faults.extend(["unavailable"] * 100)
    driver.tell(on.CheckpointRequested(1, p(30)))
    assert driver.life.has_undone


def test_a_lease_that_passed_its_fence_says_why_its_row_was_not_written():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)

    (lost,) = given_up(driver).reports(KIND.LOST)

    assert lost.text.startswith("its row could not be written in time (no route): its fence passed")
