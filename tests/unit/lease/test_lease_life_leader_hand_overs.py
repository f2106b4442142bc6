"""A KCL 3 leader names the next owner beside us, its `checkpointOwner` [R8, B5]."""

import pytest

from kclrun.lease import commands, events
from kclrun.lease.states import State
from kclrun.protocol import writes as changes
from kclrun.protocol.fence import fence_instant
from tests.unit.lease.lease_driver import KEY, ME, NOT_APPLIED, Driver, child, p

JAVA = "java-worker"
LOST_REPLY = NOT_APPLIED["dropped"]


def led_away(driver):
    """The leader has written; a renewal has shown it; user code still runs."""
    driver.user_returns = False
    driver.lead_away()
    driver.tick(3.0)
    return driver


def test_nothing_else_is_written_and_nothing_spins_before_the_batch_has_ended():
    driver = led_away(Driver().begin())
    driver.happen(events.BatchDelivered(p(20), 1, 1))
    sends = len(driver.of(commands.SendWrite))

    driver.tick(4.0)

    assert len(driver.of(commands.SendWrite)) == sends
    assert driver.life.next_deadline(driver.now) > driver.now


def test_a_batch_that_outlasts_the_fence_is_a_loss():
    driver = led_away(Driver().begin())
    driver.now = driver.life.own.fence

    driver.tick()

    assert driver.state is State.LOSING
    assert "fence" in driver.life._lost.reason


def test_a_checkpoint_that_user_code_waits_for_is_refused_or_the_batch_would_never_end(driver):
    driver.happen(events.BatchDelivered(p(20), 1, 1))
    driver.lead_away()
    driver.user_returns = False

    driver.happen(events.CheckpointRequested(1, p(20)))
    driver.happen(events.CheckpointRequested(2, p(20)))

    assert driver.answers() == dict.fromkeys((1, 2), commands.CheckpointAnswer.LOST)
    assert JAVA in driver.of(commands.AnswerCheckpoint)[0].detail


def test_what_a_manual_lease_asked_for_goes_with_the_hand_over_if_its_batch_returned():
    driver = Driver("manual").begin()
    driver.happen(events.BatchDelivered(p(20), 1, 1))
    driver.lead_away()
    driver.user_returns = False
    driver.happen(events.CheckpointRequested(1, p(15)))

    driver.happen(events.BatchProcessed(p(20)), events.DeliveryStopped(), events.CallReturned())

    assert (driver.stored.owner, driver.stored.checkpoint) == (JAVA, p(15))


@pytest.mark.parametrize("next_owner", [False, True])
def test_a_hand_over_whose_reply_was_lost_is_known_by_the_row(next_owner):
    driver = led_away(Driver().begin())
    driver.batch(20)
    driver.happen(events.DeliveryStopped())
    driver.tell(events.CallReturned())
    change = driver.queue.popleft().change
    driver.table.write(change)
    if next_owner:
        driver.table.write(changes.Renew(KEY, JAVA, 7))

    driver.happen(events.WriteResolved(change, LOST_REPLY, driver.now))

    assert driver.state is State.RELEASED
    assert len(driver.sent(changes.HandOver)) == 1


@pytest.mark.parametrize(
    ("fault", "position"),
    [
        ("throttled", p(20)),
        ("dropped", p(20)),
        ("in flight", p(20)),
        # It is not known by a position that stood there before.
        ("dropped", p(10)),
    ],
)
def test_a_hand_over_that_did_not_apply_is_sent_again_with_its_counter(fault, position):
    driver = led_away(Driver().begin())
    if position != p(10):
        driver.batch(20)
    driver.faults.append(fault)

    driver.happen(events.DeliveryStopped(), events.CallReturned())

    assert [(each.seen_counter, each.position) for each in driver.sent(changes.HandOver)] == [
        (6, position)
    ] * 2
    assert (driver.stored.owner, driver.stored.checkpoint_owner) == (JAVA, None)
    assert driver.state is State.RELEASED


def test_a_leader_that_forced_the_hand_over_makes_it_a_loss():
    driver = led_away(Driver().begin())
    driver.batch(20)
    driver.move_row(p(10), checkpoint_owner=None, counter=7)

    driver.happen(events.DeliveryStopped(), events.CallReturned())

    assert driver.state is State.LOSING
    assert driver.stored.checkpoint == p(10)


def test_a_leader_that_names_another_owner_meanwhile_is_followed():
    driver = led_away(Driver().begin())
    driver.batch(20)
    driver.lead_away("java-other")

    driver.happen(events.DeliveryStopped(), events.CallReturned())

    assert (driver.stored.owner, driver.stored.checkpoint) == ("java-other", p(20))


@pytest.mark.parametrize("faults", [["reply lost"], ["dropped", "reply lost"]])
def test_a_renewal_that_landed_before_the_leaders_write_is_adopted_with_its_first_send(
    driver, faults
):
    driver.user_returns = False
    driver.faults += faults
    driver.now += 3.0
    first_send = driver.now
    driver.tell(events.Ticked())
    while driver.stored.counter == 6:
        driver._perform(driver.queue.popleft())
    assert (driver.now > first_send) is (len(faults) > 1)
    driver.lead_away()
    driver.settle()
    assert driver.life.own.counter == 7
    assert driver.life.own.fence == fence_instant(first_send, driver.policy.failover_s)

    driver.happen(events.DeliveryStopped(), events.CallReturned())

    assert driver.stored.owner == JAVA


@pytest.mark.parametrize("state", [State.NAMING, State.CLOSING, State.ENDING])
def test_while_a_shard_ends_it_is_a_loss_and_the_next_owner_ends_it(driver, state):
    driver.tell(events.ShardExhausted((child("s1"), child("s2"))))
    while driver.state is not state:
        driver._perform(driver.queue.popleft())
    if state is State.CLOSING:
        driver.queue.clear()
        driver.now += 3.0
    driver.user_returns = False
    driver.lead_away()

    driver.happen(events.Ticked())

    assert driver.state is State.LOSING
    assert not driver.stored.is_ended


def test_what_was_asked_for_before_the_leader_came_is_still_known_when_the_fence_passes():
    driver = Driver("manual").begin()
    driver.happen(events.BatchDelivered(p(20), 1, 1))
    driver.lead_away()
    driver.user_returns = False
    driver.happen(events.CheckpointRequested(1, p(15)), events.BatchProcessed(p(20)))
    driver.now = driver.life.own.fence

    driver.happen(events.Ticked(), events.DeliveryStopped())

    assert driver.sent(changes.LateCheckpoint) == [changes.LateCheckpoint(KEY, ME, p(10), p(15))]
    assert driver.stored.checkpoint == p(10)  # the Java worker's by now
