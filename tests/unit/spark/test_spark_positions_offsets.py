"""The nouns in a checkpoint: texts that come back, one order, one text for one offset."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kclrun.errors import InvariantViolation, OffsetRefused
from kclrun.spark.offsets import VERSION, Offset, decode_offset, encode_offset
from kclrun.spark.positions import (
    SHARD_END,
    TRIM_HORIZON,
    after,
    at_timestamp,
    before,
    parse_position,
)
from kclrun.spark.ranges import Hint, ShardRange, pack, ranges_between

NUMBERS = st.integers(min_value=0, max_value=10**56).map(str)
POSITIONS = st.one_of(
    st.sampled_from([TRIM_HORIZON, SHARD_END]),
    st.integers(min_value=0, max_value=10**13).map(at_timestamp),
    NUMBERS.map(before),
    NUMBERS.map(after),
    st.tuples(NUMBERS, st.integers(min_value=0, max_value=10**6)).map(lambda each: after(*each)),
)
SHARDS = st.dictionaries(st.sampled_from(["s1", "s2", "s3"]), POSITIONS)


def offset(**fields):
    return Offset(**{"stream": "arn:x", "created_ms": 1, "shards": {}, **fields})


@given(POSITIONS)
def test_a_position_comes_back_from_its_text(position):
    assert parse_position(str(position)) == position


@given(POSITIONS, POSITIONS, POSITIONS)
def test_positions_have_one_order(one, two, three):
    assert (one < two) + (one == two) + (one > two) == 1
    if one <= two <= three:
        assert one <= three


@given(POSITIONS, NUMBERS)
def test_a_position_covers_the_records_up_to_it(position, number):
    assert position.covers(number) == (after(number) <= position)


def test_a_position_inside_an_aggregate_lies_between_its_ends():
    assert before("7") < after("7", 0) < after("7", 1) < after("7") < before("10")


@pytest.mark.parametrize("text", ["", "LATEST", "TS:01", "@", "@7/1", "007", "1/", "7 ", "TS:-1"])
def test_what_is_no_position_is_refused(text):
    with pytest.raises(OffsetRefused, match="is no position"):
        parse_position(text)


@given(SHARDS, SHARDS, st.integers(min_value=0, max_value=2**53))
def test_an_offset_comes_back_and_has_one_text(shards, began, at_ms):
    one = offset(shards=shards, began=began, aligned_ms=at_ms, as_of_ms=dict.fromkeys(shards, 5))
    backwards = offset(
        shards=dict(reversed(shards.items())),
        began=dict(reversed(began.items())),
        aligned_ms=at_ms,
        as_of_ms=dict.fromkeys(reversed(shards), 5),
    )
    text = json.dumps(encode_offset(one))

    assert json.dumps(encode_offset(backwards)) == text
    assert decode_offset(json.loads(text)) == one


def test_an_offset_of_a_newer_version_is_refused():
    with pytest.raises(OffsetRefused, match="newer kclrun"):
        decode_offset({**encode_offset(offset()), "v": VERSION + 1})


@pytest.mark.parametrize("value", [None, 3, {}, {"v": 1, "stream": "x"}, {"shard-0": "49"}])
def test_an_offset_of_another_connector_is_refused(value):
    with pytest.raises(OffsetRefused, match="does not hold an offset"):
        decode_offset(value)


def test_ranges_begin_where_the_end_says_or_else_at_the_start():
    start = offset(shards={"s1": after("1"), "s2": at_timestamp(5)}, as_of_ms={"s1": 9})
    end = offset(
        shards={"s1": after("3"), "s2": before("8"), "s3": SHARD_END},
        began={"s2": before("4"), "s3": TRIM_HORIZON},
    )

    assert ranges_between(start, end, {"s1": Hint("token", 1.0)}) == (
        ShardRange("s1", after("1"), after("3"), 9, Hint("token", 1.0)),
        ShardRange("s2", before("4"), before("8")),
        ShardRange("s3", TRIM_HORIZON, SHARD_END),
    )


def test_shards_without_news_have_no_range():
    start = offset(shards={"s1": after("1"), "s2": SHARD_END})

    assert ranges_between(start, start) == ()


def test_a_range_without_a_beginning_or_backwards_is_our_bug():
    with pytest.raises(InvariantViolation, match="where s1 begins"):
        ranges_between(offset(), offset(shards={"s1": after("1")}))
    with pytest.raises(InvariantViolation, match="backwards"):
        ranges_between(offset(shards={"s1": after("2")}), offset(shards={"s1": after("1")}))


@given(
    st.integers(min_value=0, max_value=40),
    st.integers(min_value=1, max_value=9),
    st.none() | st.integers(min_value=1, max_value=9),
)
def test_packing_gives_every_range_to_one_task(count, per_task, partitions_max):
    ranges = [ShardRange(f"s{n}", TRIM_HORIZON, after("1")) for n in range(count)]

    tasks = pack(ranges, per_task, partitions_max)

    assert sorted(each.shard_id for task in tasks for each in task) == sorted(
        each.shard_id for each in ranges
    )
    assert all(tasks)
    if partitions_max is None:
        assert all(len(task) <= per_task for task in tasks)
    else:
        assert len(tasks) <= partitions_max
