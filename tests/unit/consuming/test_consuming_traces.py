"""Traces of the model-checked protocol that broke a promise before its repair, played again.

Each name tells the hole. H4, H6, H8, N3 and N6 are played in the tests of offers, checkpoints,
vanished rows and late checkpoints.
"""

import pytest

from kclrun.consuming import commands, events
from kclrun.consuming.states import State
from kclrun.protocol import writes as changes
from tests.unit.consuming.lease_driver import KEY, OTHER, Driver, child, p


@pytest.mark.parametrize("fate", ["reply lost", "in flight"])
def test_h5_a_checkpoint_that_lands_late_is_not_taken_for_the_end_of_the_shard(fate):
    driver = Driver("batch").begin()
    driver.faults.append(fate)
    driver.tell(events.BatchDelivered(p(20), 1, 1))
    driver.tell(events.BatchProcessed(p(20)))
    while driver.faults:
        driver._perform(driver.queue.popleft())
    driver.tell(events.ShardExhausted((child("s1"),)))
    if driver.in_flight:
        driver._perform(driver.queue.popleft())  # the read back: unmoved
        driver.land()

    driver.settle()

    assert driver.state is State.ENDED
    assert driver.stored.is_ended
    assert len(driver.sent(changes.End)) == 1


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


def test_h13_a_giver_that_saw_no_reply_takes_nothing_back_from_who_has_claimed():
    driver = Driver(others_in_sight=True).begin()
    driver.batch(20)
    driver.faults += ["reply lost"]
    driver.tell(events.DrainRequested("x"))
    while driver.faults:
        driver._perform(driver.queue.popleft())
    offer = driver.sent(changes.Offer)[0]
    driver.steal()
    counter = driver.stored.counter
    driver.table.write(changes.Claim(KEY, OTHER, counter))

    driver.settle()
    driver.table.write(offer)  # its first send was only slow

    assert driver.state is State.RELEASED
    assert (driver.stored.owner, driver.stored.counter) == (OTHER, counter + 1)
    assert len(driver.of(commands.AllowDelivery)) == 1
