"""A shard that a listing leaves out is trimmed, or too new for one that lags: not the same."""

import pytest

from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.model.lease import CHILDREN_EXPIRED
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.protocol import writes as ch
from kclrun.protocol.writes import OutcomeUnknown, Throttled
from tests.unit.leases.manager_life import JAVA, ME, OTHER, ManagerLife, row

WHOLE = HashRange(0, HASH_KEY_MAX)
LOW, HIGH = HashRange(0, 2**127 - 1), HashRange(2**127, HASH_KEY_MAX)


def deleted_as_trimmed(life, shards, *, minutes=2):
    """What is deleted by such a listing, made again and again."""
    deleted = set()
    for _ in range(12 * minutes):
        life.scan(after=5.0)
        life.say(e.ShardsListed(shards, 1.0))
        deleted |= {change.key for change in life.writes(ch.DeleteTrimmed)}
    return deleted


@pytest.mark.parametrize("parent_end", [None, "9"], ids=["open still", "closed, without children"])
def test_a_child_that_a_lagging_listing_does_not_show_yet_keeps_its_row(parent_end):
    parents = frozenset({"a"})
    life = ManagerLife(
        row("a", OTHER, 9, checkpoint=SHARD_END),
        row("b", JAVA, 7, parents=parents, hash_range=LOW),
        row("c", JAVA, 7, parents=parents, hash_range=HIGH),
    )

    assert deleted_as_trimmed(life, (Shard("a", WHOLE, "1", parent_end),)) == set()


def test_a_grandchild_whose_parents_are_not_listed_yet_either_keeps_its_row():
    ids = [f"shardId-{number:012}" for number in range(6)]
    life = ManagerLife(row(ids[5], JAVA, 7, parents=frozenset({ids[2]}), hash_range=LOW))

    assert deleted_as_trimmed(life, (Shard(ids[0], WHOLE, "1", None),)) == set()


def test_a_row_that_looks_newer_than_all_listings_for_minutes_is_of_another_stream():
    life = ManagerLife(row("shardId-000000000005", JAVA, 7))
    shards = (Shard("shardId-000000000000", WHOLE, "1", None),)
    life.rows["shardId-000000000000"] = row("shardId-000000000000")

    assert deleted_as_trimmed(life, shards, minutes=4) == set()
    assert deleted_as_trimmed(life, shards, minutes=2) == {"shardId-000000000005"}


def test_a_shard_whose_parents_are_gone_from_the_listing_too_was_trimmed():
    life = ManagerLife(row("b", JAVA, 7, parents=frozenset({"a"})))
    shards = (Shard("c", WHOLE, "20", None, "b"),)

    life.say(e.ShardsListed(shards, 1.0))
    life.rows["c"] = row("c", parents=frozenset({"b"}))

    assert deleted_as_trimmed(life, shards) == {"b"}


def ids(*numbers):
    return [f"shardId-{number:012}" for number in numbers]


# A transaction of DynamoDB has at most so many parts.
PARTS_MAX = 100
PIECE = 2**128 // 256


def pieces():
    return [HashRange(at * PIECE, (at + 1) * PIECE - 1) for at in range(256)]


def created(life, *shards):
    """The keys of the rows that are created as heirs, by transactions that DynamoDB accepts."""
    life.say(e.ShardsListed(shards, 1.0))
    repairs = life.writes(ch.CreateChildren)
    assert all(len(each.children) + len(each.parents) <= PARTS_MAX for each in repairs)
    return sorted(child.key for each in repairs for child in each.children)


def test_one_trimmed_row_with_hundreds_of_heirs_has_them_created():
    (old,) = ids(0)
    life = ManagerLife(row(old, None, 7), start=LATEST)
    heirs, parents = ids(*range(1000, 1256)), ids(*range(500, 756))

    shards = [
        Shard(heir, piece, "9", None, parent)
        for heir, piece, parent in zip(heirs, pieces(), parents, strict=True)
    ]

    assert created(life, *shards) == heirs


def test_the_one_heir_of_hundreds_of_trimmed_rows_is_created():
    rows = [
        row(key, OTHER, 7, hash_range=piece)
        for key, piece in zip(ids(*range(256)), pieces(), strict=True)
    ]
    heir, parent = ids(1000, 999)
    life = ManagerLife(*rows, start=LATEST)

    assert created(life, Shard(heir, WHOLE, "9", None, parent)) == [heir]


def test_the_row_of_a_trimmed_shard_is_left_to_the_process_of_another_kclrun_owner():
    life = ManagerLife(row("b", OTHER, 7, parents=frozenset({"a"})))
    shards = (Shard("c", WHOLE, "20", None, "b"),)
    life.rows["c"] = row("c", parents=frozenset({"b"}))

    assert deleted_as_trimmed(life, shards) == set()

    life.rows["b"] = row("b", OTHER, 7, parents=frozenset({"a"}), checkpoint=SHARD_END)
    assert deleted_as_trimmed(life, shards) == {"b"}


def expirations(life):
    return [note for note in life.asked(c.Note) if note.event == "records_expired"]


def test_an_unended_row_that_is_deleted_as_trimmed_says_before_which_records_are_lost():
    life = ManagerLife(row("b", JAVA, 7, checkpoint=ExtendedSequenceNumber("41")))
    life.rows["c"] = row("c", JAVA, parents=frozenset({"b"}))
    while not life.writes(ch.DeleteTrimmed):
        life.scan(after=5.0)
        life.say(e.ShardsListed((Shard("c", WHOLE, "20", None, "b"),), 1.0))

    (lost,) = expirations(life)
    assert (lost.level, lost.key, lost.fields["position"]) == ("error", "b", "41")
    kinds = [type(command) for command in life.said]
    assert kinds.index(c.Note) < kinds.index(c.WriteRow)


@pytest.mark.parametrize("outcome", [OutcomeUnknown("cut"), Throttled("slow down")])
def test_the_loss_is_reported_once_a_manager_whatever_becomes_of_the_deletion(outcome):
    life = ManagerLife(row("b", JAVA, 7))
    life.rows["c"] = row("c", JAVA, parents=frozenset({"b"}))
    reported, deletions = 0, 0
    for _ in range(60):
        life.scan(after=5.0)
        life.say(e.ShardsListed((Shard("c", WHOLE, "20", None, "b"),), 1.0))
        reported += len(expirations(life))
        for change in life.writes(ch.DeleteTrimmed):
            deletions += 1
            life.resolve(change, outcome)

    assert reported == 1
    assert deletions > 1


@pytest.mark.parametrize(
    ("listed", "is_reported"), [(WHOLE, False), (LOW, True)], ids=["all there", "one child is gone"]
)
def test_a_row_that_is_deleted_as_trimmed_tells_the_loss_of_children_that_had_none(
    listed, is_reported
):
    life = ManagerLife(row("b", JAVA, 7, hash_range=WHOLE))
    life.rows["c"] = row("c", JAVA, parents=frozenset({"b"}))
    while not life.writes(ch.DeleteTrimmed):
        life.scan(after=5.0)
        life.say(e.ShardsListed((Shard("c", listed, "20", None, "b"),), 1.0))

    (lost,) = expirations(life)
    assert lost.fields["detail"].endswith(CHILDREN_EXPIRED) == is_reported


@pytest.mark.parametrize("end", [ExtendedSequenceNumber("7"), SHARD_END])
def test_a_shard_whose_parent_was_trimmed_with_its_parent_is_read_from_its_beginning(end):
    """With `start: LATEST` the first sync would leave out what it holds."""
    oldest, parent, heir = ids(1, 3, 5)
    life = ManagerLife(row(oldest, ME, 7, checkpoint=end, hash_range=LOW), start=LATEST)
    listed = Shard(heir, WHOLE, "20", None, parent)

    life.scan(after=5.0)
    life.say(e.ShardsListed((listed,), 1.0))

    created = life.writes(ch.CreateChildren)
    assert [lease.key for lease in created[0].children] == [heir]
    assert created[0].children[0].checkpoint == TRIM_HORIZON
    assert [condition.key for condition in created[0].parents] == [oldest]
    assert life.writes(ch.CreateLease) == []


def test_an_heir_whose_line_was_read_already_is_not_created_again():
    oldest, parent, heir, child, grandchild = ids(1, 3, 5, 7, 9)
    life = ManagerLife(
        row(oldest, OTHER, 7, checkpoint=ExtendedSequenceNumber("7")),
        row(grandchild, OTHER, 7, checkpoint=ExtendedSequenceNumber("99")),
    )
    shards = (
        Shard(heir, WHOLE, "20", "29", parent),
        Shard(child, WHOLE, "30", "39", heir),
        Shard(grandchild, WHOLE, "40", None, child),
    )

    life.scan(after=5.0)
    life.say(e.ShardsListed(shards, 1.0))

    assert life.writes(ch.CreateChildren) == []


def test_a_shard_of_the_streams_beginning_is_not_the_heir_of_a_row():
    life = ManagerLife(row(ids(3)[0], OTHER, 7))

    life.scan(after=5.0)
    life.say(e.ShardsListed((Shard(ids(5)[0], WHOLE, "20", None),), 1.0))

    assert life.writes(ch.CreateChildren) == []
