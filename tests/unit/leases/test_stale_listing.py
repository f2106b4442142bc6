"""ListShards may lag behind the table: a listing that is older than it creates nothing."""

from kclrun.leases import events as e
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.protocol import writes as ch
from tests.unit.leases.manager_life import OTHER, ManagerLife, row

WHOLE = HashRange(0, HASH_KEY_MAX)
LOW, HIGH = HashRange(0, 2**127 - 1), HashRange(2**127, HASH_KEY_MAX)


def children_of_a():
    """Shard a was read to its end and cleaned up; its children are being read."""
    return (
        row("b", OTHER, 7, parents=frozenset({"a"}), hash_range=LOW),
        row("c", OTHER, 7, parents=frozenset({"a"}), hash_range=HIGH),
    )


def listing_before_the_split():
    return e.ShardsListed((Shard("a", WHOLE, "1", None),), 1.0)


def test_a_parent_that_was_cleaned_up_is_not_created_again_by_a_listing_that_shows_it_open():
    life = ManagerLife(*children_of_a())

    life.say(listing_before_the_split())

    assert life.writes(ch.CreateLease) == []
    assert life.notes() == ["shard_sync_refused"]


def test_the_next_listing_that_knows_the_children_creates_what_is_missing():
    life = ManagerLife(*children_of_a())
    life.say(listing_before_the_split())
    life.scan()

    shards = (
        Shard("a", WHOLE, "1", "9"),
        Shard("b", LOW, "10", None, "a"),
        Shard("c", HIGH, "10", "19", "a"),
        Shard("d", HIGH, "20", None, "x"),
    )
    life.say(e.ShardsListed(shards, 2.0))

    assert [change.lease.key for change in life.writes(ch.CreateLease)] == ["d"]
