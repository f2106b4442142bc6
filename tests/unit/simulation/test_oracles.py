"""Each oracle notices: one planted fault for each rule and each way to break it.

That no oracle sees a fault where there is none is what every storm shows: it would fail.
"""

import pytest

from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import ManagerPolicy
from kclrun.model.sequence import SHARD_END
from kclrun.protocol.writes import (
    Ask,
    Checkpoint,
    Claim,
    CreateLease,
    DeleteEnded,
    DeleteTrimmed,
    LateCheckpoint,
    Offer,
    Release,
    Renew,
    Take,
)
from kclrun.simulation.stories import RuleBroken
from tests.support.storms.playing import require_bounded
from tests.unit.simulation.watched_world import Reader, Watched, replace

ME, OTHER = "kclrun:a:h:1", "kclrun:b:h:2"
FAULTS = []


def fault(words, **policy):
    """What stands before `yield` is sound; what follows must break a rule in these words."""

    def noted(plant):
        FAULTS.append(pytest.param(plant, words, policy, id=plant.__name__))
        return plant

    return noted


@pytest.mark.parametrize(("plant", "words", "policy"), FAULTS)
def test_an_oracle_notices(plant, words, policy):
    world = Watched(**policy)
    reader = world.begin(world.keys[0], "a:h:1", for_s=1000)
    moves = plant(world, reader)
    next(moves)

    with pytest.raises(RuleBroken, match=words):
        next(moves, None)


# I1, I6, I7, I8: what user code is given. Ten records a second came, for a minute.


@fault("I1: record 601 came, and 600 were ever put")
def a_record_that_was_never_put(world, reader):
    yield
    world.read(reader, 1, 601)


@fault("I1: records 1 to 50 left out")
def a_batch_that_begins_before_the_last_one_returned(world, reader):
    world.observer.batch_begun(reader, 1, 50)
    yield
    world.observer.batch_begun(reader, 51, 60)


@fault("I1: exhausted before its last record")
def a_shard_that_is_called_exhausted_before_its_last_record(world, reader):
    world.split(reader.key)
    world.read(reader, 1, 599)
    yield
    world.observer.shard_exhausted(reader)


@fault("I1: ended before")
def a_shard_that_ends_on_its_row_before_it_is_exhausted(world, reader):
    world.split(reader.key)
    world.read(reader, 1, 600)
    yield
    world.end(reader)


@fault(r"I6: .* given record 52 where 51 follows")
def a_record_that_is_passed_over(world, reader):
    world.read(reader, 1, 50)
    yield
    world.read(reader, 52, 60)


@fault("I6: ")
def a_record_that_comes_twice_to_one_reader(world, reader):
    world.read(reader, 1, 50)
    yield
    world.read(reader, 50, 60)


def killed(world, former, *, read_up_to=100, checkpointed=40):
    """The first reader of a shard was killed; a second one has claimed."""
    world.read(former, 1, read_up_to)
    world.checkpoint(former, checkpointed)
    world.observer.ended_uncleanly(former)
    world.now += 15
    return world.begin(former.key, "b:h:2")


@fault(r"I6: .* begins at record 42, past checkpoint 40")
def a_reader_that_begins_past_the_checkpoint(world, former):
    reader = killed(world, former)
    yield
    world.read(reader, 42, 100)


@fault(r"I6: .* begins at record 40, and claimed at 40")
def a_reader_that_begins_below_the_position_it_claimed(world, former):
    reader = killed(world, former)
    yield
    world.read(reader, 40, 100)


@fault(r"I7: 51 records of a:h:1/1 again, .* at most 50", uncheckpointed_max=50)
def more_records_again_than_may_be_uncheckpointed(world, former):
    reader = killed(world, former)
    world.read(reader, 41, 80)
    yield
    world.read(reader, 81, 91)


@fault("I8: 60 records again, and nothing unclean happened to a")
def records_again_after_an_end_in_order(world, former):
    world.read(former, 1, 100)
    world.release(former, 40)
    reader = world.begin(former.key, "b:h:2")
    yield
    world.read(reader, 41, 100)


@fault("I8: 60 records again, and nothing unclean")
def records_again_after_an_offer_to_whoever_comes(world, former):
    world.read(former, 1, 100)
    world.checkpoint(former, 40)
    world.offer(former, 40)
    reader = world.begin(former.key, "b:h:2")
    yield
    world.read(reader, 41, 100)


@fault("I8: 5 records again, and nothing unclean happened to b")
def records_again_whose_excuse_a_checkpoint_had_ended(world, former):
    second = killed(world, former)
    world.read(second, 41, 100)
    world.checkpoint(second, 100)
    world.read(second, 101, 110)
    world.release(second, 105)
    third = world.begin(second.key, "c:h:3")
    yield
    world.read(third, 106, 110)


@fault("I8: 10 records again, and nothing unclean happened to b")
def records_again_that_only_another_reader_has_an_excuse_for(world, former):
    second = killed(world, former)
    world.read(second, 41, 60)
    world.release(second, 50)
    third = world.begin(second.key, "c:h:3")
    yield
    world.read(third, 51, 100)


# I2, I2b, I5: what stands on the rows.


def moved(row, **fields):
    return replace(row, counter=row.counter + 1, **fields)


@fault("I2: back from")
def a_position_that_goes_back(world, reader):
    world.read(reader, 1, 100)
    world.checkpoint(reader, 100)
    row, back = world.row(reader.key), world.stream.records.position(reader.key, 50)
    change = Checkpoint(reader.key, ME, row.counter, back, row.checkpoint)
    yield
    world.wrote(reader.who, change, row, moved(row, checkpoint=back))


@fault(r"I2b: .* is past the 100 processed records")
def a_position_past_what_was_processed(world, reader):
    world.read(reader, 1, 100)
    yield
    world.checkpoint(reader, 101)


def wrong_write(words, change, sender=None, before=None, **after):
    """`change` is made of the row, and applied though no table would: it leaves `after` there."""

    def plant(world, reader):
        row = replace(world.row(reader.key), **(before or {}))
        yield
        world.wrote(sender or reader.who, change(row), row, replace(row, **after))

    return pytest.param(plant, words, {}, id=words)


def renewal(row, seen=0):
    return Renew(row.key, ME, row.counter + seen)


def take(row, seen_owner=ME):
    return Take(row.key, OTHER, seen_owner, row.counter, 10.0, "TRIM_HORIZON")


@pytest.mark.parametrize(
    ("plant", "words", "policy"),
    [
        wrong_write("I5: b:h:2/1 wrote in the name of", renewal, "b:h:2/1", counter=3),
        wrong_write(
            "I5: Renew for kclrun:a:h:1 applied to a row of",
            renewal,
            before={"owner": OTHER},
            counter=9,
        ),
        wrong_write("I5: Renew saw counter 1", lambda row: renewal(row, -1), counter=3),
        wrong_write("I5: Claim saw counter", lambda row: Claim(row.key, ME, row.counter - 1)),
        wrong_write("I5: Renew saw counter 2, 2 stood there and became 2", renewal),
        wrong_write("I5: Take saw counter", take, "b:h:2", owner=OTHER, counter=1),
        wrong_write(
            "I5: Take for None applied to a row of",
            lambda row: take(row, None),
            "b:h:2",
            owner=OTHER,
            counter=9,
        ),
        wrong_write(
            "I5: owner or counter changed by a write that must keep them",
            lambda row: Ask(row.key, OTHER, ME, 0.0),
            "b:h:2",
            counter=9,
        ),
        wrong_write(
            "I5: ",
            lambda row: LateCheckpoint(row.key, OTHER, row.checkpoint, row.checkpoint),
            "b:h:2/1",
            owner=OTHER,
        ),
    ],
)
def test_a_write_that_no_table_would_apply_is_noticed(plant, words, policy):
    test_an_oracle_notices(plant, words, policy)


@fault("I5: a:h:1/1 wrote a Renew after a:h:1/2 had")
def a_zombies_write_after_its_successors_claim(world, reader):
    world.observer.ended_uncleanly(reader)
    world.claim(reader.key, "a:h:1", 2)
    row = world.row(reader.key)
    yield
    world.wrote(reader.who, renewal(row), row, moved(row))


@fault("I5: a:h:1/1 wrote a Renew after a:h:1 had")
def a_zombies_write_after_its_managers(world, reader):
    world.observer.ended_uncleanly(reader)
    world.as_owner(reader, Renew)  # the last one of a killed process may still apply
    world.write("a:h:1", renewal(world.row(reader.key)))
    row = world.row(reader.key)
    yield
    world.wrote(reader.who, renewal(row), row, moved(row))


# I4: one reader at a time. The other shard has a reader with a fence of ten seconds.


def fenced(world):
    return world.begin(world.keys[1], "a:h:1", for_s=10)


@fault(r"I4: a:h:1/1 began a batch 0\.500 s too late")
def a_batch_past_the_fence(world, _):
    reader = fenced(world)
    world.now += 10.5
    yield
    world.observer.batch_begun(reader, 1, 10)


@fault("I4: ")
def a_batch_of_a_reader_whose_delivery_was_stopped(world, reader):
    world.observer.delivery_stopped(reader)
    yield
    world.observer.batch_begun(reader, 1, 10)


@fault(r"I4: b:h:2/1 reads while a:h:1/1 may for 6\.000 s more")
def a_second_permit_beside_a_standing_one(world, _):
    first = fenced(world)
    world.now += 4
    yield
    world.observer.delivery_allowed(Reader(first.key, "b:h:2", 1), world.now + 10)


@fault("I4: kclrun:b:h:2 took what a:h:1/1 may read")
def a_take_of_what_its_owner_may_still_read(world, _):
    reader = fenced(world)
    world.now += 4
    yield
    world.take(reader.key, "b:h:2")


@fault("I4: kclrun:offered took what a:h:1/1 may read")
def a_row_that_is_passed_on_while_its_owner_may_still_read(world, reader):
    row = world.row(reader.key)
    yield
    world.write("b:h:2", Offer(row.key, row.owner, row.counter, row.checkpoint, row.checkpoint))


@fault(r"I4: .* too late")
def the_victim_of_a_java_member_past_its_fence(world, _):
    victim = fenced(world)
    row = world.row(victim.key)
    world.wrote("java-1", object(), row, moved(row, owner="java-1"))
    world.read(victim, 1, 10)
    world.now += 10.5
    yield
    world.observer.batch_begun(victim, 11, 20)


@fault(r"I4: .* java-1 may still process it")
def a_begin_on_a_row_taken_by_force_before_it_was_waited_for(world, reader):
    row = world.row(reader.key)
    world.rows._rows[reader.key] = replace(row, taken_from="java-1")
    yield
    world.observer.batch_begun(reader, 1, 10)


@fault("I4: ")
def an_overlap_after_the_victim_of_a_deletion_gave_the_row_away(world, victim):
    row = world.row(victim.key)
    world.observer.row_deleted_from_outside(row)
    at = row.checkpoint
    world.write(victim.who, Release(row.key, row.owner, row.counter, at, at))
    yield
    world.take(victim.key, "b:h:2")


@fault(r"I4: .* what c:h:3/1 may read")
def an_overlap_with_a_later_owner_of_a_deleted_row(world, former):
    world.observer.row_deleted_from_outside(world.row(former.key))
    again = world.begin(former.key, "b:h:2", for_s=10)
    world.release(again, 0)
    last = world.begin(former.key, "c:h:3", for_s=10)
    world.observer.delivery_allowed(former, world.now + 1)  # to its fence
    yield
    world.take(last.key, "d:h:4")


# I3, I11: families.


def read_out(world, reader):
    children = world.split(reader.key)
    world.checkpoint(reader, world.read_out(reader))
    return children


def ended(world, reader):
    children = read_out(world, reader)
    world.end(reader)
    world.create_children("a:h:1", reader.key)
    return children


def begin_all(world, children):
    world.now += 60
    for number, key in enumerate(children):
        child = world.begin(key, "b:h:2", number)
        world.read(child, 1, 10)
        world.checkpoint(child, 10)


@pytest.mark.parametrize("has_parent", [True, False])
def test_a_child_that_is_read_before_its_parent_ended_is_noticed(has_parent):
    def plant(world, reader):
        children = read_out(world, reader)
        world.write(reader.who, CreateLease(world.lease(children[0])))
        if not has_parent:
            world.rows.uproot(reader.key)
        world.now += 60
        child = world.begin(children[0], "b:h:2")
        yield
        world.observer.batch_begun(child, 1, 10)

    test_an_oracle_notices(plant, r"I3: read before its parent .* ended", {})


@fault(r"I3: read before its parent .* ended")
def a_child_long_after_its_parents_deleted_row_came_again(world, reader):
    children = ended(world, reader)
    world.delete_by_somebody(reader.key)
    world.write("b:h:2", CreateLease(world.lease(reader.key)))
    world.now += 20
    begun_before = world.begin(children[1], "b:h:2", 2)
    world.observer.batch_begun(begun_before, 1, 10)  # it had looked before
    world.now += 10
    child = world.begin(children[0], "b:h:2")
    yield
    world.observer.batch_begun(child, 1, 10)


@fault("I3: b:h:2/1 reads it after its shard end")
def a_shard_that_is_read_after_its_end(world, reader):
    read_out(world, reader)
    world.end(reader)
    second = Reader(reader.key, "b:h:2", 1)
    world.observer.delivery_allowed(second, world.now + 10)
    yield
    world.observer.batch_begun(second, 1, 10)


@fault(r"I11: was deleted before \[.*\] had begun")
def a_row_that_goes_before_its_children_have_begun(world, reader):
    ended(world, reader)
    yield
    world.write("a:h:1", DeleteEnded(reader.key))


@fault("I11: was deleted at")
def a_row_that_goes_before_it_has_ended(world, reader):
    yield
    world.wrote("a:h:1", DeleteEnded(reader.key), world.row(reader.key), None)


@fault("I11: ")
def a_row_that_goes_before_its_parent(world, reader):
    children = ended(world, reader)
    begin_all(world, children)
    row = replace(world.row(children[0]), checkpoint=SHARD_END)
    world.split(children[0])
    yield
    world.wrote("a:h:1", DeleteEnded(row.key), row, None)


@fault("I11: was created again after it was cleaned up")
def a_row_that_comes_again(world, reader):
    begin_all(world, ended(world, reader))
    world.write("a:h:1", DeleteEnded(reader.key))
    yield
    world.write("b:h:2", CreateLease(world.lease(reader.key)))


@fault("I11: was deleted as trimmed and is not")
def a_row_deleted_as_trimmed_whose_shard_is_there(world, reader):
    row = world.row(reader.key)
    yield
    world.write("a:h:1", DeleteTrimmed(row.key, row.owner, row.counter))


@fault("I11: is the row of no shard")
def a_row_of_no_shard(world, reader):
    stray = replace(world.lease(reader.key), key="shardId-000000000077")
    yield
    world.write("a:h:1", CreateLease(stray))


@fault("I11: was created before a parent was read to its end")
def a_child_that_is_created_before_its_parent_was_read_out(world, reader):
    world.split(reader.key)
    world.rows._rows[reader.key] = replace(world.row(reader.key), checkpoint=SHARD_END)
    yield
    world.create_children("a:h:1", reader.key)


@fault("I11: was created at")
def a_child_that_is_created_past_its_first_record(world, reader):
    children = read_out(world, reader)
    late = world.lease(children[0], checkpoint=world.stream.records.position(children[0], 5))
    yield
    world.write("a:h:1", CreateLease(late))


@fault("I11: ")
def a_row_that_its_owner_writes_again_though_nobody_deleted_it(world, reader):
    again = CreateLease(moved(world.row(reader.key)))
    yield
    world.wrote(reader.who, again, None, again.lease)


# L1, P13.


@fault("L1: 600 records unread for 0 s")
def a_shard_that_nobody_reads(world, _):
    yield
    world.observer.require_all_read(0)


@fault("P13: .* reports that it expired, and it has not")
def a_shard_that_is_given_up_as_trimmed_and_is_there(world, reader):
    yield
    world.observer.shard_expired(reader)


# I12: what a core holds.


def test_a_core_that_remembers_too_much_is_noticed_however_deep_it_hides_it():
    manager = LeaseManager(ManagerPolicy(me=ME), lambda: 0.5)
    require_bounded("a:h:1", "", manager, 0)
    manager._balancer._asker._asks.update(dict.fromkeys(map(str, range(500))))

    with pytest.raises(RuleBroken, match=r"500 entries in LeaseManager\._balancer\._asker\._asks"):
        require_bounded("a:h:1", "", manager, 100)
