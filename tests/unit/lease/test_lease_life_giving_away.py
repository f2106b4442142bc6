"""Asks and offers: answering who would like the lease, and giving it away [P16, P17, P18]."""

import pytest

from kclrun.lease import commands, events
from kclrun.lease.states import State
from kclrun.model.lease import OFFERED, Handoff
from kclrun.protocol import reports
from kclrun.protocol import writes as changes
from tests.unit.lease.lease_driver import KEY, ME, NOT_APPLIED, OTHER, START, Driver, p

DRAIN = events.DrainRequested("the host drains")
LOST_REPLY = NOT_APPLIED["dropped"]
others_or_alone = pytest.mark.parametrize(("others", "owner"), [(True, OFFERED), (False, None)])


def giving_away(driver):
    """Withdrawn, and the offer or release is the next write in the queue."""
    driver.user_returns = False
    driver.happen(DRAIN, events.DeliveryStopped())
    driver.tell(events.CallReturned())
    change = driver.queue.popleft().change
    assert isinstance(change, changes.Offer | changes.Release)
    return change


# Asks


def test_our_own_ask_is_no_ask_and_the_next_renewal_removes_it():
    driver = Driver(handoff=Handoff(ME, 7.0)).begin()

    driver.tick(3.0)

    assert driver.state is State.PROCESSING
    assert driver.sent(changes.Renew)[0].drops_ask
    assert driver.stored.handoff is None


def test_an_ask_that_is_replaced_is_a_new_one(driver):
    driver.ask()
    driver.exhaust()
    while driver.now < START + 25.0:
        driver.tick(1.0)
    driver.ask(asked_at=26.0)

    while driver.now < START + 45.0:
        driver.tick(1.0)

    assert driver.stored.handoff == Handoff(OTHER, 26.0)


def test_a_halted_lease_answers_no_ask():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    driver.ask()

    driver.happen(reports.ProcessorFailed("process_records", "E", 1, p(30)))

    assert driver.state is State.FAILED
    assert driver.stored.owner == ME


# Offers


@others_or_alone
def test_a_manual_lease_is_given_away_at_what_user_code_checkpointed(others, owner):
    driver = Driver("manual", others_in_sight=others).begin()
    driver.batch(20)
    driver.happen(events.CheckpointRequested(1, p(15)), DRAIN)

    assert (driver.stored.owner, driver.stored.checkpoint) == (owner, p(15))


@others_or_alone
@pytest.mark.parametrize("meanwhile", ["given", "taken", "claimed and moved on"])
def test_an_offer_or_release_whose_reply_was_lost_is_known_by_the_row(others, owner, meanwhile):
    driver = Driver(others_in_sight=others).begin()
    driver.batch(20)
    change = giving_away(driver)
    driver.table.write(change)
    assert driver.stored.owner == owner
    if meanwhile != "given":
        driver.steal()
    if meanwhile == "claimed and moved on":
        counter = driver.stored.counter
        driver.table.write(changes.Claim(KEY, OTHER, counter))
        driver.table.write(changes.Checkpoint(KEY, OTHER, counter + 1, p(30), p(20)))
    stored = driver.stored

    driver.tell(events.WriteResolved(change, LOST_REPLY, driver.now))
    driver.settle()
    driver.table.write(change)  # trace H13: its first send was only slow

    assert driver.state is State.RELEASED
    assert driver.stored == stored
    assert len(driver.sent(type(change))) == 1
    assert driver.reports(reports.LeaseReleased)[0].position == p(20)
    assert driver.of(commands.CallLeaseLost) == []
    assert len(driver.of(commands.AllowDelivery)) == 1


@others_or_alone
def test_an_offer_or_release_in_flight_starts_no_batch_and_is_sent_again_with_its_counter(
    others, owner
):
    # Trace H4: the read back shows the old counter, and then the offer lands.
    driver = Driver(others_in_sight=others).begin()
    driver.batch(20)
    driver.faults += ["in flight"]
    driver.tell(DRAIN)
    while not driver.in_flight:
        driver._perform(driver.queue.popleft())
    permits = len(driver.of(commands.AllowDelivery))
    driver.tell(events.OwnRowRead(driver.stored))
    driver.queue.popleft()  # the second send waits its turn
    assert driver.state is State.RELEASING
    driver.land()

    driver.settle()

    assert len(driver.of(commands.AllowDelivery)) == permits
    assert (driver.state, driver.stored.owner) == (State.RELEASED, owner)
    sent = driver.sent(changes.Offer | changes.Release)
    assert [each.seen_counter for each in sent] == [6, 6]


def test_an_offer_that_did_not_apply_before_the_fence_is_a_loss_and_no_batch_starts():
    driver = Driver(others_in_sight=True).begin()
    driver.batch(20)
    offer = giving_away(driver)
    driver.now = driver.life.own.fence

    driver.happen(events.WriteResolved(offer, NOT_APPLIED["throttled"], driver.now))

    assert driver.state is State.LOSING
    assert len(driver.of(commands.AllowDelivery)) == 1


@others_or_alone
def test_a_late_checkpoint_before_the_offer_or_release_is_kept(others, owner):
    # Trace N1: the final checkpoint is never below what stands there.
    driver = Driver(others_in_sight=others).begin()
    driver.batch(20)
    driver.move_row(p(25))

    driver.happen(DRAIN)

    assert (driver.stored.owner, driver.stored.checkpoint) == (owner, p(25))
