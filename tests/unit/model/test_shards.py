"""Shards: what is open, who is whose child, which of two is older, and what a listing lacks."""

import pytest

from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard, ShardGraph, is_older, is_too_new_for
from tests.support.tables import over_rows

LOW, HIGH, ALL = HashRange(0, 49), HashRange(50, 99), HashRange(0, 99)


def number(at):
    return f"shardId-{at:012d}"


def shard(at, hash_range=ALL, *parents, ends=None):
    first, second = [*(number(each) for each in parents), None, None][:2]
    return Shard(number(at), hash_range, "1", ends, first, second)


# 0 is split into 1 and 2, which are merged into 3; the parent of 9 is trimmed.
CLOSED = [shard(0, ALL, ends="5"), shard(1, LOW, 0, ends="7"), shard(2, HIGH, 0, ends="7")]
OPEN = [shard(3, ALL, 1, 2), shard(9, LOW, 8)]
GRAPH = ShardGraph([*OPEN, *reversed(CLOSED)])


def test_hash_keys_are_the_128_bits_of_an_md5():
    assert int("f" * 32, 16) == HASH_KEY_MAX


def test_a_shard_is_open_until_it_has_an_ending_sequence_number():
    assert [each.is_open for each in (*CLOSED, *OPEN)] == [False, False, False, True, True]
    assert GRAPH.open_shards() == tuple(OPEN)


def test_a_listing_is_gone_through_in_the_order_of_ids_and_asked_by_them():
    assert list(GRAPH) == [*CLOSED, *OPEN]
    assert set(GRAPH.unordered()) == {*CLOSED, *OPEN}
    assert len(GRAPH) == 5
    assert number(9) in GRAPH
    assert number(8) not in GRAPH
    assert GRAPH[number(3)] is GRAPH.get(number(3)) is OPEN[0]
    assert GRAPH.get(number(8)) is None


def test_parents_and_children_are_those_that_the_listing_has():
    assert GRAPH.parents_of(number(3)) == (number(1), number(2))
    assert GRAPH.parents_of(number(0)) == ()
    assert GRAPH.children_of(number(0)) == (number(1), number(2))
    assert GRAPH.children_of(number(3)) == ()


def test_a_trimmed_parent_is_named_by_its_child_and_is_no_part_of_the_graph():
    assert OPEN[1].parents == (number(8),)
    assert GRAPH.parents_of(number(9)) == ()
    assert GRAPH.children_of(number(8)) == ()
    assert GRAPH.children_naming(number(8)) == (number(9),)
    assert GRAPH.children_naming(number(7)) == ()


@over_rows(
    ("one", "other", "older"),
    [
        (number(1), number(2), True),
        (number(2), number(1), False),
        (number(2), number(2), False),
        (number(9), number(10), True),
        (f"1:orders:7:{number(1)}", f"1:orders:7:{number(2)}", True),
        (f"1:zebras:7:{number(1)}", f"1:orders:7:{number(2)}", True),
        ("a", number(2), False),
        (number(1), "z", False),
        ("a", "b", False),
    ],
)
def test_the_older_of_two_shards_has_the_lower_number_if_both_have_one(one, other, older):
    assert is_older(one, other) == older


@pytest.mark.parametrize(
    ("listed", "hash_range", "parents", "is_newer"),
    [
        pytest.param([shard(1, LOW)], HIGH, [number(1)], True, id="a parent is listed"),
        pytest.param([shard(7, LOW)], None, [number(7)], True, id="whatever its range is"),
        pytest.param([shard(1, LOW)], HashRange(49, 60), [], True, id="an older one of its keys"),
        pytest.param([shard(1, LOW)], HIGH, [], False, id="an older one of other keys"),
        pytest.param([shard(7, LOW)], LOW, [], False, id="a newer one of its keys"),
        pytest.param([shard(1, LOW)], None, [], False, id="its keys are not known"),
        pytest.param([shard(7, LOW), shard(1, LOW)], LOW, [], True, id="one of several"),
        pytest.param([], LOW, [number(1)], False, id="nothing is listed"),
    ],
)
def test_a_shard_that_a_listing_lacks_is_too_new_for_it_where_an_older_one_is_listed(
    listed, hash_range, parents, is_newer
):
    assert is_too_new_for(listed, number(5), hash_range, parents) == is_newer
