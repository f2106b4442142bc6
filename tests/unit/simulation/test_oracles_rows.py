"""I2, I2b, I3, I5, I11: what stands on the rows. Each test plants a fault."""

import pytest

from kclrun.model.sequence import SHARD_END
from kclrun.protocol.writes import (
    Ask,
    Checkpoint,
    Claim,
    CreateLease,
    DeleteEnded,
    DeleteTrimmed,
    LateCheckpoint,
    Renew,
    Take,
)
from kclrun.simulation.stories import RuleBroken
from tests.unit.simulation.watched_world import Reader, Watched, replace

ME = "kclrun:a:h:1"


@pytest.fixture
def world():
    return Watched()


@pytest.fixture
def reader(world):
    reader = world.begin(world.keys[0], "a:h:1", for_s=1000)
    world.read(reader, 1, 100)
    world.checkpoint(reader, 100)
    return reader


def moved(row, **fields):
    return replace(row, counter=row.counter + 1, **fields)


# I2, I2b.


def test_a_position_that_goes_back_is_caught(world, reader):
    row, back = world.row(reader.key), world.stream.position(reader.key, 50)
    change = Checkpoint(reader.key, ME, row.counter, back, row.checkpoint)

    with pytest.raises(RuleBroken, match="I2: back from"):
        world.wrote(reader.who, change, row, moved(row, checkpoint=back))


def test_a_position_past_what_was_processed_is_caught(world, reader):
    with pytest.raises(RuleBroken, match=r"I2b: .* is past the 100 processed records"):
        world.checkpoint(reader, 101)


def test_a_position_that_user_code_vouches_for_is_no_fault(world, reader):
    world.oracles.batch_begun(reader, 101, 110)
    world.oracles.vouched_for(reader, 110)

    world.checkpoint(reader, 110)


# I5.


def test_a_write_in_anothers_name_is_caught(world, reader):
    row = world.row(reader.key)

    with pytest.raises(RuleBroken, match="I5: b:h:2/1 wrote in the name of kclrun:a:h:1"):
        world.wrote("b:h:2/1", Renew(reader.key, ME, row.counter), row, moved(row))


def test_a_write_of_who_is_no_owner_any_more_is_caught(world, reader):
    row = replace(world.row(reader.key), owner="kclrun:b:h:2")

    with pytest.raises(RuleBroken, match="I5: Renew for kclrun:a:h:1 applied to a row of"):
        world.wrote(reader.who, Renew(reader.key, ME, row.counter), row, moved(row))


def test_a_write_that_saw_another_counter_is_caught(world, reader):
    row = world.row(reader.key)

    with pytest.raises(RuleBroken, match="I5: Renew saw counter"):
        world.wrote(reader.who, Renew(reader.key, ME, row.counter - 1), row, moved(row))


def test_a_counter_that_stands_still_under_an_owners_write_is_caught(world, reader):
    row = world.row(reader.key)

    with pytest.raises(RuleBroken, match="I5: "):
        world.wrote(reader.who, Renew(reader.key, ME, row.counter), row, row)


def test_a_counter_that_a_take_sets_back_is_caught(world, reader):
    row = world.row(reader.key)
    world.now += 2000
    take = Take(reader.key, "kclrun:b:h:2", ME, row.counter, 10.0, "TRIM_HORIZON")

    with pytest.raises(RuleBroken, match="I5: Take saw counter"):
        world.wrote("b:h:2", take, row, replace(row, owner="kclrun:b:h:2", counter=1))


def test_a_take_of_another_owners_row_than_the_one_seen_is_caught(world, reader):
    row = world.row(reader.key)
    take = Take(reader.key, "kclrun:b:h:2", None, row.counter, 10.0, "TRIM_HORIZON")

    with pytest.raises(RuleBroken, match="I5: Take for None applied to a row of"):
        world.wrote("b:h:2", take, row, moved(row, owner="kclrun:b:h:2"))


def test_an_ask_that_moves_the_counter_is_caught(world, reader):
    row = world.row(reader.key)

    with pytest.raises(RuleBroken, match="I5: owner or counter moved by nobody's write"):
        world.wrote("b:h:2", Ask(row.key, "kclrun:b:h:2", ME, 0.0), row, moved(row))


def test_a_late_checkpoint_that_changes_the_owner_is_caught(world, reader):
    row = world.row(reader.key)
    late = LateCheckpoint(row.key, "kclrun:b:h:2", row.checkpoint, row.checkpoint)

    with pytest.raises(RuleBroken, match="I5: "):
        world.wrote("b:h:2/1", late, row, replace(row, owner="kclrun:b:h:2"))


def test_a_zombies_write_after_its_successors_claim_is_caught(world, reader):
    world.oracles.ended_uncleanly(reader)
    world.claim(reader.key, "a:h:1", 2)
    row = world.row(reader.key)

    with pytest.raises(RuleBroken, match="I5: a:h:1/1 wrote a Renew after a:h:1/2 had"):
        world.wrote(reader.who, Renew(row.key, ME, row.counter), row, moved(row))


def test_a_zombies_write_after_its_managers_is_caught(world, reader):
    world.oracles.ended_uncleanly(reader)
    world.write("a:h:1", Renew(reader.key, ME, world.row(reader.key).counter))
    row = world.row(reader.key)

    with pytest.raises(RuleBroken, match="I5: a:h:1/1 wrote a Renew after a:h:1 had"):
        world.wrote(reader.who, Renew(row.key, ME, row.counter), row, moved(row))


def test_the_last_write_of_a_process_that_was_killed_may_still_apply(world, reader):
    world.oracles.ended_uncleanly(reader)

    world.as_owner(reader, Renew)


# I3.


def split_and_read_out(world, reader):
    children = world.split(reader.key)
    total = world.stream.total(reader.key)
    world.read(reader, 101, total)
    world.checkpoint(reader, total)
    world.oracles.shard_exhausted(reader)
    return children


def test_a_child_that_is_read_before_its_parent_ended_is_caught(world, reader):
    children = split_and_read_out(world, reader)
    world.write(reader.who, CreateLease(world.lease(children[0])))
    world.now += 60
    child = world.begin(children[0], "b:h:2")

    with pytest.raises(RuleBroken, match=r"I3: read before its parent .* ended"):
        world.oracles.batch_begun(child, 1, 10)


def test_a_child_that_is_read_while_its_parent_never_had_a_row_is_caught(world, reader):
    children = split_and_read_out(world, reader)
    world.write(reader.who, CreateLease(world.lease(children[0])))
    world.rows.uproot(reader.key)
    world.now += 60
    child = world.begin(children[0], "b:h:2")

    with pytest.raises(RuleBroken, match=r"I3: read before its parent .* ended"):
        world.oracles.batch_begun(child, 1, 10)


def test_a_child_may_be_read_where_somebody_deleted_its_parents_row(world, reader):
    children = ended_parent(world, reader)
    world.delete_by_somebody(reader.key)
    world.now += 60
    child = world.begin(children[0], "b:h:2")

    world.read(child, 1, 10)


@pytest.mark.parametrize(("later_s", "is_caught"), [(20.0, False), (30.0, True)])
def test_a_parent_whose_deleted_row_came_again_is_over_for_who_had_looked_before(
    world, reader, later_s, is_caught
):
    children = ended_parent(world, reader)
    world.delete_by_somebody(reader.key)
    world.write("b:h:2", CreateLease(world.lease(reader.key)))
    world.now += later_s
    child = world.begin(children[0], "b:h:2")

    if is_caught:
        with pytest.raises(RuleBroken, match=r"I3: read before its parent .* ended"):
            world.oracles.batch_begun(child, 1, 10)
    else:
        world.read(child, 1, 10)


def test_a_shard_that_is_read_after_its_end_is_caught(world, reader):
    split_and_read_out(world, reader)
    world.end(reader)
    second = Reader(reader.key, "b:h:2", 1)
    world.oracles.delivery_allowed(second, world.now + 10)

    with pytest.raises(RuleBroken, match="I3: b:h:2/1 reads it after its shard end"):
        world.oracles.batch_begun(second, 1, 10)


# I11.


def ended_parent(world, reader):
    children = split_and_read_out(world, reader)
    world.end(reader)
    world.create_children("a:h:1", reader.key)
    return children


def begin_all(world, children):
    world.now += 60
    for number, key in enumerate(children):
        child = world.begin(key, "b:h:2", number)
        world.read(child, 1, 10)
        world.checkpoint(child, 10)


def test_a_row_whose_children_have_not_begun_must_not_go(world, reader):
    ended_parent(world, reader)

    with pytest.raises(RuleBroken, match=r"I11: was deleted before \[.*\] had begun"):
        world.write("a:h:1", DeleteEnded(reader.key))


def test_a_row_that_has_not_ended_must_not_go(world, reader):
    row = world.row(reader.key)

    with pytest.raises(RuleBroken, match="I11: was deleted at"):
        world.wrote("a:h:1", DeleteEnded(row.key), row, None)


def test_a_family_leaves_oldest_first(world, reader):
    children = ended_parent(world, reader)
    begin_all(world, children)
    row = replace(world.row(children[0]), checkpoint=SHARD_END)
    world.split(children[0])

    with pytest.raises(RuleBroken, match="I11: "):
        world.wrote("a:h:1", DeleteEnded(row.key), row, None)


def test_an_ended_row_that_nobody_can_miss_may_go_and_must_not_come_again(world, reader):
    children = ended_parent(world, reader)
    begin_all(world, children)
    world.write("a:h:1", DeleteEnded(reader.key))
    assert "row_cleaned_up" in world.seen

    with pytest.raises(RuleBroken, match="I11: was created again after it was cleaned up"):
        world.write("b:h:2", CreateLease(world.lease(reader.key)))


def test_a_row_deleted_as_trimmed_whose_shard_is_there_is_caught(world, reader):
    row = world.row(reader.key)

    with pytest.raises(RuleBroken, match="I11: was deleted as trimmed and is not"):
        world.write("a:h:1", DeleteTrimmed(row.key, row.owner, row.counter))


def test_a_row_of_no_shard_is_caught(world):
    stray = replace(world.lease(world.keys[0]), key="shardId-000000000077")

    with pytest.raises(RuleBroken, match="I11: is the row of no shard"):
        world.write("a:h:1", CreateLease(stray))


def test_a_child_that_is_created_before_its_parent_was_read_out_is_caught(world, reader):
    world.split(reader.key)
    row = world.row(reader.key)
    world.rows._rows[reader.key] = replace(row, checkpoint=SHARD_END)

    with pytest.raises(RuleBroken, match="I11: was created before a parent was read to its end"):
        world.create_children("a:h:1", reader.key)


def test_a_child_that_is_created_past_its_first_record_is_caught(world, reader):
    children = split_and_read_out(world, reader)
    late = world.lease(children[0], checkpoint=world.stream.position(children[0], 5))

    with pytest.raises(RuleBroken, match="I11: was created at"):
        world.write("a:h:1", CreateLease(late))


def test_an_owner_may_write_its_row_again_only_where_somebody_deleted_it(world, reader):
    row = world.row(reader.key)
    again = CreateLease(moved(row))
    with pytest.raises(RuleBroken, match="I11: "):
        world.wrote(reader.who, again, None, again.lease)

    world.oracles.row_deleted_by_somebody(row)
    world.wrote(reader.who, again, None, again.lease)

    assert "row_written_again_by_its_process" in world.seen


def test_a_claim_is_a_write_like_any_other(world, reader):
    row = world.row(reader.key)

    with pytest.raises(RuleBroken, match="I5: "):
        world.wrote("a:h:1/2", Claim(row.key, ME, row.counter - 1), row, moved(row))
