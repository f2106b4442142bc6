"""A shard that a listing leaves out is trimmed, or too new for one that lags: not the same."""

import pytest

from kclrun.leases import events as e
from kclrun.model import changes as ch
from kclrun.model.sequence import SHARD_END
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from tests.unit.leases.manager_life import OTHER, ManagerLife, row

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
        row("b", OTHER, 7, parents=parents, hash_range=LOW),
        row("c", OTHER, 7, parents=parents, hash_range=HIGH),
    )

    assert deleted_as_trimmed(life, (Shard("a", WHOLE, "1", parent_end),)) == set()


def test_a_grandchild_whose_parents_are_not_listed_yet_either_keeps_its_row():
    ids = [f"shardId-{number:012}" for number in range(6)]
    life = ManagerLife(row(ids[5], OTHER, 7, parents=frozenset({ids[2]}), hash_range=LOW))

    assert deleted_as_trimmed(life, (Shard(ids[0], WHOLE, "1", None),)) == set()


def test_a_row_that_looks_newer_than_all_listings_for_minutes_is_of_another_stream():
    life = ManagerLife(row("shardId-000000000005", OTHER, 7))
    shards = (Shard("shardId-000000000000", WHOLE, "1", None),)
    life.rows["shardId-000000000000"] = row("shardId-000000000000")

    assert deleted_as_trimmed(life, shards, minutes=4) == set()
    assert deleted_as_trimmed(life, shards, minutes=2) == {"shardId-000000000005"}


def test_a_shard_whose_parents_are_gone_from_the_listing_too_was_trimmed():
    life = ManagerLife(row("b", OTHER, 7, parents=frozenset({"a"})))
    shards = (Shard("c", WHOLE, "20", None, "b"),)

    life.say(e.ShardsListed(shards, 1.0))
    life.rows["c"] = row("c", parents=frozenset({"b"}))

    assert deleted_as_trimmed(life, shards) == {"b"}
