"""I4: one reader at a time. Each test plants a fault, or shows what is no fault."""

import pytest

from kclrun.protocol.writes import Offer, Release
from kclrun.simulation.stories import RuleBroken
from tests.unit.simulation.watched_world import Reader, Watched, replace


@pytest.fixture
def world():
    return Watched()


def test_a_batch_past_the_fence_is_caught(world):
    reader = world.begin(world.keys[0], "a:h:1", for_s=10)
    world.now += 10.5

    with pytest.raises(RuleBroken, match=r"I4: a:h:1/1 began a batch 0\.500 s too late"):
        world.oracles.batch_begun(reader, 1, 10)


def test_a_batch_of_a_reader_whose_delivery_was_stopped_is_caught(world):
    reader = world.begin(world.keys[0], "a:h:1")
    world.oracles.delivery_stopped(reader)

    with pytest.raises(RuleBroken, match="I4: "):
        world.oracles.batch_begun(reader, 1, 10)


def test_a_second_permit_beside_a_standing_one_is_caught(world):
    first = world.begin(world.keys[0], "a:h:1", for_s=10)
    world.now += 4

    with pytest.raises(RuleBroken, match=r"I4: b:h:2/1 reads while a:h:1/1 may for 6\.000 s more"):
        world.oracles.delivery_allowed(Reader(first.key, "b:h:2", 1), world.now + 10)


def test_a_take_of_what_its_owner_may_still_read_is_caught(world):
    world.begin(world.keys[0], "a:h:1", for_s=10)
    world.now += 4

    with pytest.raises(RuleBroken, match="I4: kclrun:b:h:2 took what a:h:1/1 may read"):
        world.take(world.keys[0], "b:h:2")


def test_a_row_that_is_passed_on_while_its_owner_may_still_read_is_caught(world):
    reader = world.begin(world.keys[0], "a:h:1", for_s=10)
    row = world.row(reader.key)
    world.now += 4

    at = row.checkpoint
    with pytest.raises(RuleBroken, match="I4: kclrun:offered took what a:h:1/1 may read"):
        world.write("b:h:2", Offer(row.key, row.owner, row.counter, at, at))


def test_a_take_after_the_fence_is_no_fault(world):
    former = world.begin(world.keys[0], "a:h:1", for_s=10)
    world.now += 10

    reader = world.begin(former.key, "b:h:2")
    world.read(reader, 1, 10)


def test_a_lease_that_was_given_away_may_be_read_at_once(world):
    former = world.begin(world.keys[0], "a:h:1", for_s=10)
    world.read(former, 1, 10)
    world.release(former, 10)

    world.read(world.begin(former.key, "b:h:2"), 11, 20)


def test_a_java_member_may_steal_and_its_victim_has_its_fence(world):
    victim = world.begin(world.keys[0], "a:h:1", for_s=10)
    row = world.row(victim.key)
    stolen = replace(row, owner="java-1", counter=row.counter + 1)
    world.wrote("java-1", object(), row, stolen)

    world.read(victim, 1, 10)
    world.now += 10.5
    with pytest.raises(RuleBroken, match=r"I4: .* too late"):
        world.oracles.batch_begun(victim, 11, 20)


def test_who_begins_on_a_row_taken_by_force_before_it_was_waited_for_is_caught(world):
    reader = world.begin(world.keys[0], "a:h:1")
    row = world.row(reader.key)
    world.rows._rows[reader.key] = replace(row, taken_from="java-1")

    with pytest.raises(RuleBroken, match=r"I4: .* java-1 may still process it"):
        world.oracles.batch_begun(reader, 1, 10)


def test_a_release_excuses_no_overlap_from_then_on(world):
    """The victim of a steal gives the row away later: the next overlap is a fault again."""
    victim = world.begin(world.keys[0], "a:h:1", for_s=10)
    world.oracles.row_deleted_by_somebody(world.row(victim.key))
    row = world.row(victim.key)
    at = row.checkpoint
    world.write(victim.who, Release(row.key, row.owner, row.counter, at, at))

    with pytest.raises(RuleBroken, match="I4: "):
        world.take(victim.key, "b:h:2")


def test_what_a_new_owner_of_a_deleted_row_gives_away_is_taken_beside_who_read_before(world):
    key = world.keys[0]
    former = world.begin(key, "a:h:1", for_s=10)
    world.oracles.row_deleted_by_somebody(world.row(key))
    again = world.begin(key, "b:h:2", for_s=10)
    world.release(again, 0)

    last = world.begin(key, "c:h:3", for_s=10)

    world.oracles.delivery_allowed(former, world.now + 1)  # to its fence
    with pytest.raises(RuleBroken, match=r"I4: .* what c:h:3/1 may read"):
        world.take(last.key, "d:h:4")
