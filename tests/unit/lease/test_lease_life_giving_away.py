"""Asks and offers: answering who would like the lease, and giving it away [P16, P17, P18]."""

import pytest

from kclrun.lease import commands, events
from kclrun.lease.states import State
from kclrun.model.lease import ANYBODY, OFFERED, Handoff
from kclrun.protocol import reports
from kclrun.protocol import writes as changes
from kclrun.protocol.writes import Take
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


def test_an_ask_seen_by_a_renewal_is_answered_with_an_offer_after_the_batch():
    driver = Driver().in_a_batch()
    driver.ask()
    driver.tick(3.0)
    assert driver.state is State.STOPPING
    assert len(driver.of(commands.StopDelivery)) == 1

    driver.happen(events.BatchProcessed(p(20)), events.DeliveryStopped(), events.CallReturned())

    assert driver.state is State.RELEASED
    row = driver.stored
    assert (row.owner, row.offered_to, row.offered_by) == (OFFERED, OTHER, ME)
    assert (row.checkpoint, row.handoff) == (p(20), None)
    assert len(driver.of(commands.CallShutdownRequested)) == 1
    report = driver.reports(reports.LeaseReleased)[0]
    assert (report.position, report.how) == (p(20), f"offered to {OTHER}, who asked for it")
    assert driver.of(commands.Exit) == [commands.Exit(commands.ExitCause.DONE)]


def test_an_ask_seen_by_a_checkpoint_is_answered_too():
    driver = Driver("batch").begin()
    driver.ask()

    driver.batch(20)

    assert (driver.stored.owner, driver.stored.offered_to) == (OFFERED, OTHER)


def test_an_ask_on_behalf_of_anybody_is_answered_with_an_offer_to_nobody_in_particular(driver):
    driver.ask(ANYBODY)

    driver.tick(3.0)

    assert (driver.stored.owner, driver.stored.offered_to) == (OFFERED, None)
    assert "offered to any owner" in driver.reports(reports.LeaseReleased)[0].how


def test_an_ask_seen_by_the_claim_is_answered_before_any_user_code():
    driver = Driver(handoff=Handoff(OTHER, 7.0))

    driver.happen(events.Started())

    assert driver.state is State.RELEASED
    assert driver.of(commands.CallInitialize) == []
    assert (driver.stored.owner, driver.stored.offered_to) == (OFFERED, OTHER)
    assert driver.stored.checkpoint == p(10)


def test_an_ask_while_initializing_waits_for_that_and_is_answered():
    driver = Driver()
    driver.user_returns = False
    driver.happen(events.Started())
    driver.ask()
    driver.tick(3.0)
    assert driver.state is State.STOPPING

    driver.happen(events.CallReturned(), events.DeliveryStopped(), events.CallReturned())

    assert driver.stored.offered_to == OTHER


def test_our_own_ask_is_no_ask_and_the_next_renewal_removes_it():
    driver = Driver(handoff=Handoff(ME, 7.0)).begin()

    driver.tick(3.0)

    assert driver.state is State.PROCESSING
    assert driver.sent(changes.Renew)[0].drops_ask
    assert driver.stored.handoff is None


def test_at_the_end_of_a_shard_an_ask_is_left_and_after_30_s_of_it_removed(driver):
    driver.shards = ()
    driver.ask()
    driver.exhaust()  # the service names no children: it has to wait
    instants = []
    while driver.stored.handoff is not None:
        driver.tick(1.0)
        instants.append(driver.now - START)
        assert driver.state is State.CREATING

    seen_after_s = 3.0
    assert instants[-1] == pytest.approx(30.0 + seen_after_s, abs=3.0)
    assert [renew.drops_ask for renew in driver.sent(changes.Renew)].count(True) == 1


def test_an_ask_that_its_asker_took_back_is_not_answered(driver):
    driver.ask()
    driver.exhaust()
    driver.tick(3.0)
    assert driver.life.own.row.handoff is not None
    driver.move_row(driver.stored.checkpoint, handoff=None)
    driver.tick(3.0)

    driver.happen(events.DrainRequested("x"))

    assert driver.state is State.RELEASED
    assert len(driver.sent(changes.Release)) == 1


def test_an_ask_that_is_replaced_is_a_new_one(driver):
    driver.ask()
    driver.exhaust()
    while driver.now < START + 25.0:
        driver.tick(1.0)
    driver.ask(asked_at=26.0)

    while driver.now < START + 45.0:
        driver.tick(1.0)

    assert driver.stored.handoff == Handoff(OTHER, 26.0)


def test_the_age_of_an_ask_is_what_was_seen_of_it_and_not_what_it_says():
    for asked_at in (0.0, 9e9):
        driver = Driver().begin()
        driver.ask(asked_at=asked_at)

        driver.tick(3.0)

        assert driver.stored.offered_to == OTHER


def test_an_ask_that_grew_old_during_a_long_batch_is_not_answered_to_its_asker():
    driver = Driver().in_a_batch()
    driver.ask()
    for _ in range(40):
        driver.tick(1.0)
    assert driver.state is State.STOPPING
    assert driver.stored.handoff is None

    driver.happen(
        events.OthersInSight(True), events.BatchProcessed(p(20)), events.DeliveryStopped()
    )
    driver.happen(events.CallReturned())

    assert (driver.stored.owner, driver.stored.offered_to) == (OFFERED, None)


def test_a_halted_lease_answers_no_ask():
    driver = Driver(every_s=1000.0).begin()
    driver.batch(20)
    driver.ask()

    driver.happen(reports.ProcessorFailed("process_records", "E", 1, p(30)))

    assert driver.state is State.FAILED
    assert driver.stored.owner == ME


# H8: a take keeps no ask, so nobody obeys one that was meant for the owner before.


def test_what_the_former_owner_was_asked_for_is_not_obeyed_after_a_take():
    driver = Driver(owner=OTHER)
    driver.table.write(changes.Ask(KEY, "kclrun::host:c", OTHER, 7.0))
    driver.table.write(Take(KEY, ME, OTHER, 5, 10.0, "LATEST"))
    driver.life.own.counter = driver.stored.counter

    driver.happen(events.Started())

    assert driver.state is State.PROCESSING


# Offers


@pytest.mark.parametrize("event", [DRAIN, events.ReleaseRequested(), events.ManagerGone()])
def test_with_others_in_sight_the_lease_is_offered_and_alone_it_is_released(event):
    for others, owner in ((True, OFFERED), (False, None)):
        driver = Driver(others_in_sight=others).begin()
        driver.batch(20)

        driver.happen(event)

        assert driver.state is State.RELEASED
        assert (driver.stored.owner, driver.stored.checkpoint) == (owner, p(20))
        assert driver.stored.offered_by == (ME if others else None)


def test_what_is_in_sight_changes_with_the_managers_word():
    for first, then, owner in ((False, True, OFFERED), (True, False, None)):
        driver = Driver(others_in_sight=first).begin()

        driver.happen(events.OthersInSight(then), DRAIN)

        assert driver.stored.owner == owner


def test_a_drain_with_an_ask_on_the_row_offers_to_the_asker(driver):
    driver.user_returns = False
    driver.happen(DRAIN)
    driver.ask()
    driver.tick(3.0)

    driver.happen(events.DeliveryStopped(), events.CallReturned())

    assert driver.stored.offered_to == OTHER


@others_or_alone
def test_a_drain_while_claiming_gives_the_lease_away_without_any_user_code(others, owner):
    driver = Driver(others_in_sight=others)
    driver.tell(events.Started())
    driver.tell(DRAIN)

    driver.settle()

    assert driver.state is State.RELEASED
    assert driver.stored.owner == owner
    assert driver.of(commands.CallInitialize) == []


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


def test_an_ask_that_comes_between_two_sends_of_an_offer_changes_nothing():
    driver = Driver(others_in_sight=True).begin()
    driver.batch(20)
    offer = giving_away(driver)
    driver.ask()

    driver.happen(events.WriteResolved(offer, NOT_APPLIED["throttled"], driver.now))

    assert (driver.stored.owner, driver.stored.handoff) == (OFFERED, None)


# Forced takes


def test_who_has_waited_removes_the_mark_with_the_claim_and_begins():
    driver = Driver(taken_from="java-worker", has_waited=True)

    driver.begin()

    assert driver.sent(changes.Claim) == [changes.Claim(KEY, ME, 5, has_waited=True)]
    assert driver.stored.taken_from is None
