"""What is known of a stream's shards over many listings: bounded, and never too little [A7]."""

import pytest

from kclrun.errors import DataLoss
from kclrun.model.shard import HASH_KEY_MAX, ChildShard, HashRange, Shard
from kclrun.spark.planning.shard_listing import LISTINGS_TO_BELIEVE, ShardListing
from kclrun.spark.positions import SHARD_END, after

KEYS = HashRange(0, HASH_KEY_MAX)
MIDDLE = after("5")


def shard(number, *parents):
    """One of a line of shards, each of which took all keys over from the one before."""
    return Shard(f"s{number:03}", KEYS, "0", None, *(f"s{each:03}" for each in parents))


def listed(lines, shards, times=1):
    for at in range(times):
        lines.listed(shards, float(at))


def test_what_listings_leave_out_is_forgotten_once_the_query_is_past_it():
    lines = ShardListing(10.0)
    for day in range(100):
        now = [shard(day), shard(day + 1, day)]
        lines.watch({now[1].shard_id: MIDDLE})
        listed(lines, now, LISTINGS_TO_BELIEVE)

    assert len(lines.graph) <= 3


def test_a_generation_that_the_query_has_yet_to_come_past_is_kept():
    lines = ShardListing(10.0)
    listed(lines, [shard(0), shard(1, 0), shard(2, 1)])
    lines.watch({"s000": SHARD_END})
    listed(lines, [shard(2, 1)], 10 * LISTINGS_TO_BELIEVE)

    # s001 expired unread; without it nothing would tell that s002 descends from what was read.
    assert "s001" in lines.graph
    assert lines.entering(fails_on_data_loss=True) == ("s001",)


def test_one_listing_that_leaves_a_shard_out_forgets_nothing():
    lines = ShardListing(10.0)
    listed(lines, [shard(0), shard(1, 0)])
    lines.watch({"s001": MIDDLE})
    listed(lines, [shard(1, 0)], LISTINGS_TO_BELIEVE - 1)
    assert "s000" in lines.graph

    listed(lines, [shard(1, 0)])
    assert "s000" not in lines.graph


def test_a_listing_is_due_each_interval_and_each_second_while_a_shard_is_missing():
    lines = ShardListing(10.0)
    assert lines.next_listing_at() == 0.0, "the first at once"
    lines.listed([shard(0)], 5.0)
    assert lines.next_listing_at() == 15.0
    lines.watch({"s000": MIDDLE})
    assert lines.next_listing_at() == 15.0

    lines.watch({"s000": MIDDLE, "s009": MIDDLE})  # of the query, and in no listing
    assert lines.next_listing_at() == 6.0
    lines.watch({"s000": SHARD_END})  # its children are in no listing
    assert lines.next_listing_at() == 6.0
    lines.listed([shard(0), shard(1, 0)], 7.0)
    assert lines.next_listing_at() == 17.0
    lines.not_listed(20.0)
    assert lines.next_listing_at() == 21.0, "a listing that failed is repeated"
    lines.list_now()
    assert lines.next_listing_at() == 0.0
    quick = ShardListing(0.5)
    quick.not_listed(20.0)
    assert quick.next_listing_at() == 20.5


def test_a_listing_answers_for_the_time_before_its_request():
    lines = ShardListing(10.0)
    assert not lines.listed_since(0.0)
    lines.listed([shard(0)], 5.0)

    assert (lines.listed_since(4.9), lines.listed_since(5.0)) == (True, False)
    assert (lines.lists("s000"), lines.lists("s001")) == (True, False)


def test_the_children_that_a_last_page_names_are_known_before_a_listing_has_them():
    lower, upper = HashRange(0, HASH_KEY_MAX // 2), HashRange(HASH_KEY_MAX // 2 + 1, HASH_KEY_MAX)
    lines = ShardListing(10.0)
    lines.listed([shard(0)], 1.0)
    lines.watch({"s000": SHARD_END})
    lines.add_children([ChildShard("s001", ("s000",), lower)])
    assert lines.waits_for_children()
    assert lines.next_listing_at() == 2.0
    lines.add_children([ChildShard("s001", ("s000",), lower), ChildShard("s002", ("s000",), upper)])

    assert lines.next_listing_at() == 11.0
    assert lines.entering(fails_on_data_loss=True) == ("s001", "s002")
    assert lines.graph["s002"] == Shard("s002", upper, "0", None, "s000", None)
    assert not lines.lists("s001")
    merged = ShardListing(10.0)
    merged.add_children([ChildShard("s003", ("s001", "s002"), KEYS)])
    assert merged.graph["s003"].parents == ("s001", "s002")


def test_a_closed_shard_stays_closed_in_a_listing_that_is_older():
    lines = ShardListing(10.0)
    closed = Shard("s000", KEYS, "0", "9")
    assert not lines.is_closed("s000")
    lines.listed([shard(0)], 1.0)
    assert not lines.is_closed("s000")
    lines.listed([closed], 2.0)
    lines.listed([shard(0)], 3.0)

    assert lines.is_closed("s000")
    assert lines.graph["s000"] == closed


def test_where_all_children_expired_the_rest_is_entered_only_if_a_loss_is_allowed():
    half = HashRange(0, HASH_KEY_MAX // 2)
    rest = Shard("s007", half, "0", None, "s005")
    other = Shard("s001", HashRange(HASH_KEY_MAX // 2 + 1, HASH_KEY_MAX), "0", None)
    lines = ShardListing(10.0)  # of a query that was started again
    lines.watch({"s000": SHARD_END, "s001": MIDDLE})
    listed(lines, [rest, other], LISTINGS_TO_BELIEVE - 1)
    assert lines.entering(fails_on_data_loss=True) == ()
    listed(lines, [rest, other])

    assert lines.entering(fails_on_data_loss=False) == ("s007",)
    with pytest.raises(DataLoss, match=f"children of s000 expired.*keys 0 to {half.end} are in no"):
        lines.entering(fails_on_data_loss=True)
    unread = ShardListing(10.0)
    unread.watch({"s000": MIDDLE, "s001": MIDDLE})
    listed(unread, [rest, other], LISTINGS_TO_BELIEVE)
    assert unread.gone() == ("s000",)
    assert unread.entering(fails_on_data_loss=True) == (), "its own records are judged first"
