"""The end of a shard, in the order of P12: children, their names, shard_ended, SHARD_END."""

import pytest

from kclrun.lease import commands, events
from kclrun.lease.shard_end import Deferred
from kclrun.lease.states import State
from kclrun.model.lease import Lease
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.model.shard import HashRange, Shard
from kclrun.protocol import reports
from kclrun.protocol import writes as changes
from tests.unit.lease.lease_driver import (
    KEY,
    ME,
    NOT_APPLIED,
    OTHER,
    Driver,
    child,
    p,
    shard_end,
)


def shard(shard_id, *parents):
    return Shard(shard_id, HashRange(0, 9), "1", None, *parents)


def other_parent(driver, checkpoint=None):
    driver.table.write(
        changes.CreateLease(Lease(key="s1", checkpoint=checkpoint or p(7), owner=OTHER, counter=3))
    )


def test_the_end_of_a_shard_goes_in_order(driver):
    driver.batch(20)

    driver.exhaust(child("s1"), child("s2"))

    steps = [
        type(each.change) if isinstance(each, commands.SendWrite) else type(each)
        for each in driver.log
        if isinstance(each, commands.SendWrite | commands.CallShardEnded | commands.Exit)
    ]
    assert steps == [
        changes.Claim,
        changes.CreateChildren,
        changes.NameChildren,
        commands.CallShardEnded,
        changes.End,
        commands.Exit,
    ]
    assert driver.state is State.ENDED
    assert driver.reports(reports.ShardEnded) == [reports.ShardEnded(("s1", "s2"))]
    assert driver.of(commands.Exit) == [commands.Exit(commands.ExitCause.DONE)]
    row = driver.stored
    assert (row.checkpoint, row.children, row.owner) == (SHARD_END, {"s1", "s2"}, ME)
    created = driver.table.read("s1")
    assert (created.checkpoint, created.owner, created.counter) == (TRIM_HORIZON, None, 0)
    assert (created.parents, created.hash_range) == ({"s0"}, HashRange(0, 9))


def test_children_that_the_answer_leaves_out_come_from_the_listing_and_are_waited_for(driver):
    driver.exhaust()
    driver.tick(3.0)

    assert driver.state is State.CREATING
    assert len(driver.sent(changes.Renew)) == 1
    assert "names no children" in driver.reports(reports.ProcessWarned)[0].detail
    driver.shards = (shard("s0"), shard("s1", "s0"), shard("s9", "s8"))
    driver.tick(1.0)
    assert driver.state is State.ENDED
    assert driver.stored.children == {"s1"}


@pytest.mark.parametrize(
    ("has_row", "condition"),
    [(True, (changes.ExistingParent("s1"),)), (False, ())],
    ids=["it has a row", "it is gone from the listing"],
)
def test_a_merge_is_conditional_on_the_other_parents_row_unless_that_shard_is_gone(
    driver, has_row, condition
):
    if has_row:
        other_parent(driver)
    driver.shards = (shard("s0"), shard("s2", "s0", "s1"))

    driver.exhaust(child("s2", "s0", "s1"))

    (write,) = driver.sent(changes.CreateChildren)
    assert write.parents == (changes.HeldParent(KEY, ME, 6), *condition)
    assert driver.state is State.ENDED
    assert driver.table.read("s2").parents == {"s0", "s1"}


def test_a_merge_whose_other_parent_is_listed_and_has_no_row_waits_and_looks_again(driver):
    driver.shards = (shard("s0"), shard("s1"))

    driver.exhaust(child("s2", "s0", "s1"))
    assert driver.state is State.CREATING
    assert driver.life.next_deadline(driver.now) == driver.now + 1.0
    driver.tick(0.5)
    assert len(driver.of(commands.ReadRows)) == 1
    driver.tick(3.0)

    assert driver.state is State.CREATING
    assert len(driver.of(commands.ReadRows)) == 2
    assert len(driver.sent(changes.Renew)) == 1
    assert [each.detail for each in driver.reports(reports.ProcessWarned)] == [
        "the other parent s1 has no lease yet"
    ]
    other_parent(driver)
    driver.tick(1.0)
    assert driver.state is State.ENDED


@pytest.mark.parametrize("has_child", [True, False])
def test_a_merge_whose_other_parents_row_was_deleted_ends_if_the_child_has_its_row(has_child):
    """Ended rows look like litter; without this the child would wait until the shard is trimmed."""
    driver = Driver(failover_s=9.0).begin()
    driver.shards = (shard("s0"), shard("s1"), shard("s2", "s0", "s1"))
    if has_child:
        driver.table.write(changes.CreateLease(Lease(key="s2", checkpoint=TRIM_HORIZON)))

    driver.exhaust(child("s2", "s0", "s1"))
    for _ in range(8 if has_child else 30):
        driver.tick(1.0)
    assert driver.state is State.CREATING, "a live owner may write its row again for a failover"
    driver.tick(1.0)

    assert driver.state is (State.ENDED if has_child else State.CREATING)
    assert driver.stored.children == ({"s2"} if has_child else set())
    assert driver.sent(changes.CreateChildren) == []


@pytest.mark.parametrize("fault", ["dropped", "reply lost", "refused", "throttled", "unavailable"])
def test_children_that_were_not_created_for_sure_are_done_again_from_fresh_reads(driver, fault):
    other_parent(driver)
    driver.tell(events.ShardExhausted((child("s2", "s0", "s1"),)))
    driver.faults.append(fault)
    driver.settle()
    assert driver.state is State.CREATING

    driver.tick(1.0)

    assert driver.state is State.ENDED
    assert len(driver.of(commands.ReadRows)) == 2
    assert driver.of(commands.ReadOwnRow) == []


def test_children_whose_other_parent_vanished_in_between_are_done_again(driver):
    other_parent(driver)
    driver.tell(events.ShardExhausted((child("s2", "s0", "s1"),)))
    driver._perform(driver.queue.popleft())  # ReadRows: it is there
    driver.table._forget("s1")

    driver.settle()
    assert driver.state is State.CREATING
    assert driver.table.read("s2") is None
    driver.tick(1.0)

    assert driver.state is State.ENDED


def test_a_service_that_refuses_the_children_costs_no_lease(driver):
    driver.tell(events.ShardExhausted((child("s1"),)))
    for _ in range(30):
        for command in list(driver.queue):
            driver.queue.remove(command)
            is_creation = isinstance(command, commands.SendWrite) and isinstance(
                command.change, changes.CreateChildren
            )
            if is_creation:
                refused = NOT_APPLIED["refused"]
                driver.tell(events.WriteResolved(command.change, refused, driver.now))
            else:
                driver._perform(command)
        driver.now += 1.0
        driver.tell(events.Ticked())

    assert driver.state is State.CREATING
    assert "the children cannot be created" in driver.reports(reports.ProcessWarned)[0].detail
    assert len(driver.reports(reports.ProcessWarned)) == 1


def test_a_look_up_that_fails_is_asked_again(driver):
    other_parent(driver)
    driver.tell(events.ShardExhausted((child("s2", "s0", "s1"),)))
    assert isinstance(driver.queue.popleft(), commands.ReadRows)

    driver.happen(events.LookUpFailed("no route"))
    assert driver.state is State.CREATING
    driver.tick(1.0)

    assert driver.state is State.ENDED
    assert driver.reports(reports.ProcessWarned)[0].detail == "no route"


def test_a_look_up_that_is_under_way_is_not_asked_twice(driver):
    driver.tell(events.ShardExhausted((child("s2", "s0", "s1"),)))
    driver.queue.clear()

    driver.tick(3.0)

    assert len(driver.of(commands.ReadRows)) == 1
    assert len(driver.sent(changes.Renew)) == 1
    assert driver.life.next_deadline(driver.now) > driver.now


@pytest.mark.parametrize("kind", [changes.NameChildren, changes.End])
@pytest.mark.parametrize("fault", ["reply lost", "dropped", "throttled"])
def test_the_writes_of_the_end_survive_faults(driver, kind, fault):
    driver.tell(events.ShardExhausted((child("s1"),)))
    while not any(isinstance(getattr(each, "change", None), kind) for each in driver.queue):
        driver._perform(driver.queue.popleft())
    driver.faults.append(fault)

    driver.settle()

    assert driver.state is State.ENDED
    assert driver.stored.is_ended
    assert driver.stored.children == {"s1"}
    assert len(driver.of(commands.CallShardEnded)) == 1


def test_an_end_after_which_the_row_was_taken_is_known_by_its_position(driver):
    driver.user_returns = False
    driver.exhaust(child("s1"))
    driver.tell(events.CallReturned())
    end = driver.queue.popleft().change
    driver.table.write(end)
    driver.steal()

    driver.happen(events.WriteResolved(end, NOT_APPLIED["dropped"], driver.now))

    assert driver.state is State.ENDED


def test_the_end_is_written_over_a_late_checkpoint(driver):
    driver.user_returns = False
    driver.exhaust(child("s1"))
    driver.move_row(p(15))

    driver.happen(events.CallReturned())

    assert driver.state is State.ENDED
    assert driver.stored.is_ended


def test_shard_ended_may_checkpoint_and_others_who_wait_are_answered_by_the_end():
    driver = Driver("manual").begin()
    driver.user_returns = False
    driver.batch(20)
    driver.exhaust(child("s1"))
    driver.happen(events.CheckpointRequested(1, None))
    assert driver.stored.checkpoint == p(20)
    driver.tell(events.CallReturned())
    driver.tell(events.CheckpointRequested(2, p(20)))

    driver.settle()

    assert driver.state is State.ENDED
    assert driver.answers() == {
        1: commands.CheckpointAnswer.DURABLE,
        2: commands.CheckpointAnswer.DURABLE,
    }


@pytest.mark.parametrize("in_shard_ended", [(), (p(15),), (p(20),), (None,)])
def test_a_shard_ended_that_returns_ends_the_shard_under_manual_whatever_it_checkpointed(
    in_shard_ended,
):
    driver = Driver("manual").begin()
    driver.batch(20)
    driver.happen(events.CheckpointRequested(1, p(12)))
    driver.user_returns = False

    driver.exhaust(child("s1"))
    driver.happen(*(events.CheckpointRequested(2, position) for position in in_shard_ended))
    driver.user_returns = True
    driver.happen(events.CallReturned())

    assert driver.state is State.ENDED
    assert driver.stored.is_ended
    assert driver.reports(reports.ProcessorFailed) == []


@pytest.mark.parametrize("state", [State.CREATING, State.CLOSING])
def test_a_lease_that_ends_its_shard_and_only_renews_can_be_lost(driver, state):
    driver.batch(20)
    driver.user_returns = state is not State.CLOSING
    driver.shards = (shard("s1"),)
    driver.exhaust(child("s2", "s0", "s1") if state is State.CREATING else child("s2"))
    assert driver.state is state
    driver.steal()
    driver.user_returns = True

    driver.tick(3.0)

    assert driver.state is State.LOST
    assert driver.stored.owner == OTHER


def test_a_shard_end_says_what_it_waits_for():
    end = shard_end(child("s2", "s0", "s1"))
    own = Driver().row

    assert end.look_up() == commands.ReadRows(("s1",))
    assert end.look_up() is None
    assert end.creation(own) is None
    end.read([("s1", None)])
    assert end.creation(own) == Deferred("the other parent s1 has no lease yet")
    assert end.look_up() == commands.ListShards()
    end.list([], own)
    assert end.look_up() is None
    assert end.creation(own).parents == (changes.HeldParent(KEY, ME, 5),)
    end.begin_again(5.0)
    assert end.not_before == 5.0
    assert end.look_up() == commands.ReadRows(("s1",))


def test_of_a_listing_of_thousands_only_the_relatives_of_the_shard_are_kept():
    end = shard_end()
    own = Driver().row
    assert end.look_up() == commands.ListShards()

    others = [shard(f"o{number}") for number in range(5_000)]
    end.list([*others, shard("s0"), shard("s1"), shard("s2", "s0", "s1")], own)

    assert end.children == (child("s2", "s0", "s1"),)
    assert end._listed == {"s0", "s1", "s2"}
    assert end.look_up() == commands.ReadRows(("s1",))


@pytest.mark.parametrize(
    ("listed", "parents", "is_created"),
    [
        pytest.param(["s0"], (), False, id="older than the child: it says nothing of s1"),
        pytest.param(["s0", "s2"], (), True, id="the child and not s1: s1 is gone"),
        pytest.param(["z"], (), True, id="the shard itself was trimmed meanwhile"),
        pytest.param(["z"], ("z",), False, id="too old for the shard itself: it shows its parent"),
    ],
)
def test_a_listing_says_that_the_other_parent_is_gone_unless_it_may_lag(
    listed, parents, is_created
):
    end = shard_end(child("s2", "s0", "s1"))
    end.look_up()
    end.read([("s1", None)])
    end.look_up()
    own = Driver(parents=frozenset(parents)).row
    end.list([shard(each) for each in listed], own)

    creation = end.creation(own)

    assert isinstance(creation, changes.CreateChildren if is_created else Deferred)
    if listed == ["s0"]:
        assert "neither the children yet, nor s1" in creation.reason


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


def test_the_end_of_a_time_range_ends_the_lease_without_children_and_without_a_listing():
    driver = Driver(is_bounded=True).begin()
    driver.batch(20)

    driver.exhaust()

    assert driver.state is State.ENDED
    assert (driver.stored.checkpoint, driver.stored.children) == (SHARD_END, frozenset())
    assert driver.of(commands.ListShards) == []
