"""Rows that are created belong to the generation of the reset before them [K4]."""

import pytest

from kclrun.lease import events
from kclrun.lease.states import State
from kclrun.leases.shard_sync import Listing, children_to_create, sync_table
from kclrun.leases.table_view import Observation, TableView
from kclrun.model.lease import Halt, Lease, highest_generation
from kclrun.model.output import Cursor, file_name
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.operating.reset import position_at
from kclrun.protocol import writes as changes
from tests.unit.lease.lease_driver import KEY, Driver, child, p, shard_end

MIDDLE = HASH_KEY_MAX // 2
LOW, HIGH = HashRange(0, MIDDLE), HashRange(MIDDLE + 1, HASH_KEY_MAX)


def view_of(*rows):
    observation = Observation(10.0)
    observation.update(rows, 0.0)
    return TableView(rows, (), observation, me="me", gone=frozenset(), now=0.0)


@pytest.mark.parametrize(("mine", "other", "inherited"), [(2, None, 2), (2, 5, 5), (5, 2, 5)])
def test_children_inherit_the_highest_generation_of_their_parents(mine, other, inherited):
    driver = Driver(generation=mine).begin()
    driver.shards = (Shard("s0", HashRange(0, 9), "1", None),)
    if other is not None:
        row = Lease(key="s1", checkpoint=p(7), generation=other)
        driver.table.write(changes.CreateLease(row))

    driver.exhaust(child("s2", "s0", *(["s1"] if other is not None else [])))

    assert driver.table.read("s2").generation == inherited


def test_a_child_that_a_manager_creates_inherits_it_too():
    rows = (
        Lease(key="s0", checkpoint=SHARD_END, hash_range=LOW, generation=1),
        Lease(key="s1", checkpoint=SHARD_END, hash_range=HIGH, generation=4),
    )
    shards = [
        Shard("s0", LOW, "1", "5"),
        Shard("s1", HIGH, "1", "5"),
        Shard("s2", HashRange(0, HASH_KEY_MAX), "6", None, "s0", "s1"),
    ]

    (creation,) = children_to_create(view_of(*rows), Listing(shards, 0.0, 0.0))

    assert [each.generation for each in creation.children] == [4]


def test_a_hole_that_is_filled_has_the_generation_of_the_table():
    listing = Listing([Shard("s0", LOW, "1", None), Shard("s1", HIGH, "1", None)], 0.0, 0.0)

    plan = sync_table(listing, lambda key: key == "s0", TRIM_HORIZON, 3)

    assert [(each.key, each.generation) for each in plan.leases] == [("s1", 3)]
    assert highest_generation(plan.leases) == 3
    assert highest_generation(()) == 0


def test_a_late_checkpoint_is_of_the_generation_in_which_the_lease_was_held():
    driver = Driver(every_s=1000.0, generation=2).begin()
    driver.batch(20)
    driver.steal()
    row = driver.stored
    driver.tick(3.0)

    (late,) = driver.sent(changes.LateCheckpoint)

    assert (late.key, late.generation) == (KEY, 2)
    assert row.generation == 2
    assert driver.stored.checkpoint == p(20)


def test_a_shard_end_without_other_parents_needs_no_rows_of_them():
    end = shard_end(child("s2", "s0"))

    creation = end.creation(Driver(generation=7).begin().stored)

    assert [each.generation for each in creation.children] == [7]


@pytest.mark.parametrize(
    ("generation", "name"), [(0, "shardId-000000000003"), (2, "shardId-000000000003.2")]
)
def test_a_growing_file_of_a_later_generation_has_a_name_of_its_own(generation, name):
    assert file_name("shardId-000000000003", generation) == name


def test_a_cursor_at_a_time_is_read_as_it_was_written():
    at = Cursor(ExtendedSequenceNumber("AT_TIMESTAMP", 1_764_000_000_123))

    assert Cursor.parse(str(at)) == at


WAKING = {
    "reads on": lambda driver: driver.batch(30),
    "renews": lambda _: None,
    "ends its shard": lambda driver: driver.exhaust(child("s1"), child("s2")),
    "is drained": lambda driver: driver.happen(events.DrainRequested("deploy")),
}


@pytest.mark.parametrize("wakes_after_s", [0.0, 3.0, 60.0])
@pytest.mark.parametrize("to", [TRIM_HORIZON, LATEST, position_at(1_764_000_000.0)], ids=str)
@pytest.mark.parametrize("began", [p(10), TRIM_HORIZON], ids=str)
@pytest.mark.parametrize("does", WAKING)
def test_a_process_that_wakes_up_after_a_reset_undoes_nothing(does, began, to, wakes_after_s):
    """R1: it adopted the row's position and wrote its own, or its late checkpoint, above it."""
    driver = Driver(every_s=1.0, position=began).begin()
    driver.batch(20)
    seen = driver.stored
    halt = Halt("reset", 1.0, 1.0)
    reset = changes.ResetLease(
        KEY, seen.owner, seen.counter, seen.checkpoint, to, seen.generation + 1, halt
    )
    assert isinstance(driver.table.write(reset), changes.Applied)
    after = driver.stored

    driver.now += wakes_after_s
    WAKING[does](driver)
    driver.tick(3.0)
    driver.tick(30.0)
    driver.happen(events.DeliveryStopped(), events.CallReturned())
    driver.tick(30.0)

    assert driver.stored == after
    assert driver.table.read("s1") is None
    assert driver.state is State.LOST
