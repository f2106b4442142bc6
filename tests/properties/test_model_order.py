"""The one total order over positions, and the shard graph, by their laws."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kclrun.model.sequence import (
    AT_TIMESTAMP,
    LATEST,
    SEQUENCE_DIGITS_MAX,
    SHARD_END,
    TRIM_HORIZON,
    ExtendedSequenceNumber,
)
from kclrun.model.shard import HashRange, Shard, ShardGraph

NUMBERS = st.one_of(
    st.integers(0, 12),
    st.integers(0, 10**SEQUENCE_DIGITS_MAX - 1),
    st.integers(10 ** (SEQUENCE_DIGITS_MAX - 1), 10**SEQUENCE_DIGITS_MAX - 1),
)
SUBS = st.one_of(st.integers(0, 3), st.integers(0, 10**6))
TICKS = st.sampled_from([0, 0, 1, 7])
NUMBERED = st.builds(
    lambda number, *rest: ExtendedSequenceNumber(str(number), *rest), NUMBERS, SUBS, TICKS
)
SENTINEL_NAMES = ("AT_TIMESTAMP", "TRIM_HORIZON", "LATEST", "SHARD_END")
POSITIONS = st.one_of(
    NUMBERED, st.builds(ExtendedSequenceNumber, st.sampled_from(SENTINEL_NAMES), SUBS, TICKS)
)


@given(POSITIONS, POSITIONS)
def test_of_two_positions_exactly_one_of_less_equal_greater_holds(one, other):
    assert [one < other, one == other, one > other].count(True) == 1
    assert (one <= other) == (one < other or one == other)
    assert (one >= other) == (other <= one)


@given(POSITIONS, POSITIONS, POSITIONS)
def test_the_order_is_transitive(one, two, three):
    low, middle, high = sorted([one, two, three])

    assert low <= middle <= high
    assert low <= high


@given(NUMBERED, NUMBERED)
def test_numbers_are_ordered_as_numbers_then_by_sub_sequence_then_by_tick(one, other):
    def as_numbers(position):
        return (int(position.sequence_number), position.sub_sequence_number, position.tick)

    assert (one < other) == (as_numbers(one) < as_numbers(other))
    assert (one == other) == (as_numbers(one) == as_numbers(other))


@given(NUMBERED)
def test_sentinels_stand_below_every_number_and_shard_end_above(position):
    assert AT_TIMESTAMP < TRIM_HORIZON < LATEST < position < SHARD_END


@given(st.lists(POSITIONS))
def test_sorting_by_key_is_sorting_by_order(positions):
    by_key = sorted(positions, key=lambda position: position.sort_key)

    assert by_key == sorted(positions)
    assert all(one <= other for one, other in itertools.pairwise(by_key))


@given(POSITIONS, POSITIONS)
def test_equal_positions_have_equal_hashes(one, other):
    if one == other:
        assert hash(one) == hash(other)


@st.composite
def families(draw):
    """Shards numbered in the order of their birth, each with up to two earlier parents."""
    shards = []
    for index in range(draw(st.integers(1, 12))):
        earlier = [shard.shard_id for shard in shards]
        parents = (
            draw(st.lists(st.sampled_from(earlier), max_size=2, unique=True)) if earlier else []
        )
        first, second = [*parents, None, None][:2]
        is_open = draw(st.booleans())
        shards.append(
            Shard(
                f"shardId-{index:012d}",
                HashRange(0, 2**128 - 1),
                "1",
                None if is_open else "2",
                first,
                second,
            )
        )
    return shards


@given(families(), st.data())
def test_in_the_graph_parents_and_children_are_the_same_edges(shards, data):
    listed = data.draw(st.lists(st.sampled_from(shards), unique_by=lambda shard: shard.shard_id))
    graph = ShardGraph(listed)

    down = {
        (parent, child.shard_id) for child in graph for parent in graph.parents_of(child.shard_id)
    }
    up = {
        (parent.shard_id, child) for parent in graph for child in graph.children_of(parent.shard_id)
    }

    assert down == up
    assert all(parent in graph for parent, _ in down), "trimmed parents are left out"
    assert set(graph.open_shards()) == {shard for shard in listed if shard.is_open}
