"""I1, I6, I7, I8: what user code is given. Each test plants a fault, or shows an excuse."""

import pytest

from kclrun.protocol.writes import CreateLease
from kclrun.simulation.stories import RuleBroken
from tests.unit.simulation.watched_world import Watched


@pytest.fixture
def world():
    return Watched()


def after_a_kill(world, *, read_up_to=100, checkpointed=40):
    """The first reader of a shard was killed; a second one has claimed."""
    key = world.keys[0]
    former = world.begin(key, "a:h:1")
    world.read(former, 1, read_up_to)
    if checkpointed:
        world.checkpoint(former, checkpointed)
    world.oracles.ended_uncleanly(former)
    world.now += 15
    return world.begin(key, "b:h:2")


def test_records_in_order_break_no_promise_and_are_counted(world):
    reader = world.begin(world.keys[0], "a:h:1")

    world.read(reader, 1, 50)
    world.read(reader, 51, 52)

    assert world.oracles.tally.records == 52
    assert world.oracles.tally.duplicates == 0


def test_a_record_that_is_passed_over_is_caught(world):
    reader = world.begin(world.keys[0], "a:h:1")
    world.read(reader, 1, 50)

    with pytest.raises(RuleBroken, match=r"I6: .* given record 52 where 51 follows"):
        world.read(reader, 52, 60)


def test_a_record_that_was_never_put_is_caught(world):
    reader = world.begin(world.keys[0], "a:h:1")

    with pytest.raises(RuleBroken, match="I1: record 601 came, and 600 were ever put"):
        world.read(reader, 1, 601)


def test_a_record_that_comes_twice_to_one_reader_is_caught(world):
    reader = world.begin(world.keys[0], "a:h:1")
    world.read(reader, 1, 50)

    with pytest.raises(RuleBroken, match="I6: "):
        world.read(reader, 50, 60)


def test_a_reader_that_begins_past_the_checkpoint_is_caught(world):
    reader = after_a_kill(world)

    with pytest.raises(RuleBroken, match=r"I6: .* begins at record 42, past checkpoint 40"):
        world.read(reader, 42, 100)


def test_a_reader_that_begins_below_the_position_it_claimed_is_caught(world):
    reader = after_a_kill(world)

    with pytest.raises(RuleBroken, match=r"I6: .* begins at record 40, and claimed at 40"):
        world.read(reader, 40, 100)


def test_what_a_killed_reader_had_not_checkpointed_may_come_again(world):
    reader = after_a_kill(world)

    world.read(reader, 41, 70)
    world.read(reader, 71, 120)

    assert world.oracles.tally.duplicates == 60
    assert "repeated_after_an_unclean_end" in world.seen


def test_records_that_come_again_after_an_end_in_order_are_caught(world):
    key = world.keys[0]
    former = world.begin(key, "a:h:1")
    world.read(former, 1, 100)
    world.release(former, 40)
    reader = world.begin(key, "b:h:2")

    with pytest.raises(RuleBroken, match="I8: 60 records again, and nothing unclean happened to a"):
        world.read(reader, 41, 100)


def test_an_excuse_is_over_once_a_checkpoint_covers_it(world):
    second = after_a_kill(world)
    world.read(second, 41, 100)
    world.checkpoint(second, 100)
    world.read(second, 101, 110)
    world.release(second, 105)
    third = world.begin(second.key, "c:h:3")

    with pytest.raises(RuleBroken, match="I8: 5 records again, and nothing unclean happened to b"):
        world.read(third, 106, 110)


def test_an_excuse_is_of_one_reader_and_not_of_the_shard(world):
    """The second one parts in order halfway through what the first had left: what it was given
    itself may not come again, what only the first was given may."""
    second = after_a_kill(world)
    world.read(second, 41, 60)
    world.release(second, 50)
    third = world.begin(second.key, "c:h:3")

    with pytest.raises(RuleBroken, match="I8: 10 records again, and nothing unclean happened to b"):
        world.read(third, 51, 100)


def test_what_only_the_killed_one_was_given_may_come_after_an_end_in_order_of_the_next(world):
    second = after_a_kill(world)
    world.read(second, 41, 60)
    world.release(second, 60)
    third = world.begin(second.key, "c:h:3")

    world.read(third, 61, 100)

    assert world.oracles.tally.duplicates == 20 + 40


def test_more_records_again_than_may_be_uncheckpointed_are_caught():
    world = Watched(uncheckpointed_max=50)
    reader = after_a_kill(world)
    world.read(reader, 41, 80)

    with pytest.raises(RuleBroken, match=r"I7: 51 records of a:h:1/1 again, .* at most 50"):
        world.read(reader, 81, 91)


def test_what_a_lost_lease_left_may_come_again(world):
    key = world.keys[0]
    former = world.begin(key, "a:h:1")
    world.read(former, 1, 100)
    world.now += 20
    reader = world.begin(key, "b:h:2")

    world.read(reader, 1, 100)

    assert world.oracles.tally.duplicates == 100


def test_a_batch_that_raised_was_not_given(world):
    key = world.keys[0]
    reader = world.begin(key, "a:h:1")
    world.read(reader, 1, 50)
    world.oracles.batch_begun(reader, 51, 60)
    world.oracles.batch_raised(reader, 51)
    world.oracles.batch_begun(reader, 51, 60)
    world.oracles.batch_raised(reader, 51)
    world.release(reader, 50)

    world.read(world.begin(key, "b:h:2"), 51, 60)

    assert world.oracles.tally.duplicates == 0


def test_user_code_that_did_not_checkpoint_may_be_given_the_same_again():
    world = Watched(is_manual=True)
    key = world.keys[0]
    former = world.begin(key, "a:h:1")
    world.read(former, 1, 100)
    world.release(former, 40)

    world.read(world.begin(key, "b:h:2"), 41, 100)

    assert world.oracles.tally.duplicates == 60


def test_a_process_that_offers_its_lease_to_whoever_comes_excuses_nothing(world):
    former = world.begin(world.keys[0], "a:h:1")
    world.read(former, 1, 100)
    world.checkpoint(former, 40)
    world.offer(former, 40)

    with pytest.raises(RuleBroken, match=r"I8: 60 records again, and nothing unclean"):
        world.read(world.begin(former.key, "b:h:2"), 41, 100)


def test_a_row_that_somebody_deleted_excuses_everything(world):
    key = world.keys[0]
    former = world.begin(key, "a:h:1")
    world.read(former, 1, 100)
    world.checkpoint(former, 90)
    world.delete_by_somebody(key)
    world.write("b:h:2", CreateLease(world.lease(key)))

    world.read(world.begin(key, "b:h:2"), 1, 100)

    assert world.oracles.tally.records == 200
    assert "row_deleted_by_somebody" in world.seen


def test_who_read_when_a_deleted_row_was_made_anew_may_give_its_new_owners_records_again(world):
    key = world.keys[0]
    former = world.begin(key, "a:h:1")
    world.read(former, 1, 100)
    world.delete_by_somebody(key)
    world.write("b:h:2", CreateLease(world.lease(key)))
    again = world.begin(key, "b:h:2")
    world.read(again, 1, 100)
    world.checkpoint(again, 100)  # covers all that was given twice
    world.release(again, 100)
    last = world.begin(key, "c:h:3")
    world.read(last, 101, 120)

    world.read(former, 101, 130)

    assert world.oracles.tally.duplicates == 120


def test_a_shard_that_is_called_exhausted_before_its_last_record_is_caught(world):
    reader = world.begin(world.keys[0], "a:h:1", for_s=100)
    world.split(reader.key)
    world.read(reader, 1, 599)

    with pytest.raises(RuleBroken, match="I1: exhausted before its last record"):
        world.oracles.shard_exhausted(reader)


def test_a_shard_that_ends_on_its_row_before_its_last_record_is_caught(world):
    reader = world.begin(world.keys[0], "a:h:1", for_s=100)
    world.split(reader.key)
    world.read(reader, 1, 600)

    with pytest.raises(RuleBroken, match="I1: ended before"):
        world.end(reader)


def test_a_batch_that_begins_before_the_last_one_returned_is_caught(world):
    reader = world.begin(world.keys[0], "a:h:1")
    world.oracles.batch_begun(reader, 1, 50)

    with pytest.raises(RuleBroken, match="I1: records 1 to 50 left out"):
        world.oracles.batch_begun(reader, 51, 60)


def test_two_who_read_side_by_side_after_a_deletion_go_on_each_where_it_was(world):
    """A checkpoint of one covers all that both were given: the other is no new reader by that."""
    key = world.keys[0]
    former = world.begin(key, "a:h:1", for_s=1000)
    world.read(former, 1, 12)
    world.checkpoint(former, 12)
    world.delete_by_somebody(key)
    world.write("b:h:2", CreateLease(world.lease(key)))
    second = world.begin(key, "b:h:2", for_s=1000)
    world.read(second, 1, 13)
    world.read(former, 13, 13)
    world.checkpoint(second, 13)

    world.read(second, 14, 20)

    assert world.oracles.tally.records == 12 + 13 + 1 + 7
