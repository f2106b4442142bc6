"""Parents before children, and no key twice or never: over listings that may be stale [A7]."""

from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard, ShardGraph
from kclrun.spark.lineage import (
    KEY_SPACE,
    ancestors_of,
    children_ready,
    descendants_of,
    holes,
    leaves,
    oldest_over,
    roots,
    superseded,
    uncovered,
    unfollowed,
)
from kclrun.spark.positions import SHARD_END, after

QUARTER = (HASH_KEY_MAX + 1) // 4
MIDDLE = after("5")


def shard(name, first, last, parents=()):
    keys = HashRange(first * QUARTER, (last + 1) * QUARTER - 1)
    return Shard(name, keys, "0", None, *parents)


# a splits into b and c; c merges with d into e.
A, D = shard("a", 0, 1), shard("d", 2, 3)
B, C = shard("b", 0, 0, ("a",)), shard("c", 1, 1, ("a",))
E = shard("e", 1, 3, ("c", "d"))
ALL = ShardGraph((A, B, C, D, E))


def graph(*shards):
    return ShardGraph(shards)


def test_holes_are_what_no_range_covers():
    assert holes([]) == (KEY_SPACE,)
    assert holes([A.hash_range, D.hash_range]) == ()
    assert holes([B.hash_range, D.hash_range]) == (C.hash_range,)


def test_children_enter_once_their_parent_ended_in_the_start():
    assert children_ready({"a": MIDDLE, "d": MIDDLE}, ALL) == ()
    assert children_ready({"a": SHARD_END, "d": MIDDLE}, ALL) == ("b", "c")


def test_a_child_of_a_merge_waits_for_both_parents():
    assert children_ready({"b": MIDDLE, "c": SHARD_END, "d": MIDDLE}, ALL) == ()
    assert children_ready({"b": MIDDLE, "c": SHARD_END, "d": SHARD_END}, ALL) == ("e",)


def test_a_grandchild_waits_while_the_generation_between_is_not_listed():
    assert children_ready({"a": SHARD_END, "d": SHARD_END}, graph(A, D, E)) == ()


def test_a_child_of_a_merge_waits_for_a_parent_that_is_not_listed_yet():
    start = {"a": SHARD_END, "b": SHARD_END, "d": MIDDLE}
    f = shard("f", 0, 1, ("b", "c"))
    assert children_ready(start, graph(A, B, D, f)) == ()
    assert children_ready(start, graph(A, B, C, D, f)) == ("c",)
    # c expired, and a with it: nothing of its keys is left but f.
    assert children_ready(start, graph(B, D, f), gone=["a"]) == ("f",)


def test_a_shard_that_was_read_and_dropped_does_not_enter_again():
    assert children_ready({"b": MIDDLE, "c": MIDDLE, "d": MIDDLE}, ALL) == ()


def test_nothing_enters_beside_an_unfinished_shard_of_unknown_keys():
    assert children_ready({"a": SHARD_END, "z": MIDDLE}, ALL) == ()


def test_a_parent_stays_until_its_listed_children_cover_its_keys():
    early = graph(A, B, D)
    assert superseded({"a": SHARD_END, "b": MIDDLE, "d": MIDDLE}, early) == frozenset()
    late = {"a": SHARD_END, "b": MIDDLE, "c": MIDDLE, "d": MIDDLE}
    assert superseded(late, ALL) == {"a"}


def test_an_ended_child_stays_as_long_as_its_parent_does():
    f, g = shard("f", 0, 0, ("b",)), shard("g", 0, 0, ("f",))
    known = graph(A, B, D, f, g)
    # b ended and its child is in; without b's entry it would enter again as the child of a.
    end = {"a": SHARD_END, "b": SHARD_END, "f": MIDDLE, "d": MIDDLE}
    assert superseded(end, known) == frozenset()
    assert children_ready({"a": SHARD_END, "b": SHARD_END, "f": MIDDLE}, known) == ()


def test_an_ended_parent_that_left_the_listing_goes_once_the_rest_covers_everything():
    end = {"a": SHARD_END, "b": MIDDLE, "c": MIDDLE, "d": MIDDLE}
    assert superseded(end, graph(B, C, D)) == frozenset()
    assert superseded(end, graph(B, C, D), gone=["a"]) == {"a"}


def test_a_stream_begins_at_the_shards_without_listed_parents():
    assert roots(ALL) == ("a", "d")
    # a expired, and c with it: e covers what is left of their keys, after d.
    assert roots(graph(B, D, E)) == ("b", "d")


def test_roots_of_a_listing_with_a_missing_generation_are_not_believed():
    f = shard("f", 1, 1, ("z",))
    assert roots(graph(A, D, f)) is None


def test_a_stream_goes_on_at_the_shards_without_listed_children():
    assert leaves(ALL) == ("b", "e")
    # Both have just ended, and nothing is listed after them yet.
    assert leaves(graph(A, D)) == ("a", "d")


def test_leaves_are_not_believed_while_one_of_two_children_is_missing():
    assert leaves(graph(A, B, D)) is None


def test_ancestors_and_descendants_go_over_shards_that_left_the_listing():
    assert ancestors_of(ALL, "e") == {"a", "c", "d"}
    assert descendants_of(graph(B, C, E), ["a"]) == {"b", "c", "e"}


def test_keys_are_uncovered_when_all_generations_over_them_expired():
    start = {"a": SHARD_END, "d": MIDDLE}
    assert uncovered(start, ALL) == ()
    later = graph(D, shard("x", 0, 0, ("y",)), shard("x2", 0, 0, ("x",)))
    assert uncovered(start, later) == (A.hash_range,)
    assert oldest_over(uncovered(start, later), later) == ("x",)


def test_an_ended_shard_is_unfollowed_until_all_its_children_are_listed():
    assert unfollowed(["a"], graph(A, B, D)) == {"a"}
    assert unfollowed(["a"], ALL) == frozenset()
    assert unfollowed(["a"], graph(B, C, D)) == {"a"}
    assert unfollowed(["a"], graph(B, C, D), gone=["a"]) == frozenset()
