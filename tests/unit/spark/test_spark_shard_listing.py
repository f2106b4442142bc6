"""What is known of a stream's shards over many listings: bounded, and never too little [A7]."""

from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
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


def test_what_a_start_or_a_listing_changes_is_seen_at_once():
    lines = ShardListing(10.0)
    listed(lines, [shard(0)])
    lines.watch({"s000": MIDDLE})
    assert lines.entering(fails_on_data_loss=True) == ()

    lines.watch({"s000": SHARD_END})
    assert lines.waits_for_children()
    listed(lines, [shard(0), shard(1, 0)])
    assert lines.entering(fails_on_data_loss=True) == ("s001",)
    lines.watch({"s001": MIDDLE})
    assert not lines.waits_for_children()


def test_a_shard_of_the_query_is_gone_only_once_five_listings_in_a_row_left_it_out():
    lines = ShardListing(10.0)
    listed(lines, [shard(0)])
    lines.watch({"s000": MIDDLE})

    listed(lines, [shard(1, 0)], 4)
    assert lines.gone() == ()
    listed(lines, [shard(0)])
    listed(lines, [shard(1, 0)], 4)
    assert lines.gone() == ()
    listed(lines, [shard(1, 0)])
    assert lines.gone() == ("s000",)
