"""The nouns in a checkpoint: texts that come back, one order, one text for one offset."""

import base64
import json
import random
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kclrun.errors import InvariantViolation, OffsetRefused
from kclrun.local.sequence_numbers import Numbering
from kclrun.spark.offsets import (
    PLAIN_SHARDS_MAX,
    VERSION,
    Offset,
    ShardRange,
    StreamIs,
    decode_offset,
    encode_offset,
    pack,
    ranges_between,
)
from kclrun.spark.positions import (
    SHARD_END,
    TRIM_HORIZON,
    after,
    at_timestamp,
    before,
    parse_position,
)
from tests.support.tables import over_rows

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
    return Offset(**{"streams": {"": StreamIs("arn:x", 1)}, "shards": {}, **fields})


@given(POSITIONS)
def test_a_position_comes_back_from_its_text(position):
    assert parse_position(str(position)) == position


@over_rows("text", ["", "LATEST", "TS:01", "@", "@7/1", "007", "1/", "7 ", "TS:-1"])
def test_what_is_no_position_is_refused(text):
    with pytest.raises(OffsetRefused, match="is not a position"):
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


@over_rows("value", [None, 3, {}, {"v": 1, "stream": "x"}, {"shard-0": "49"}])
def test_an_offset_of_another_connector_is_refused(value):
    with pytest.raises(OffsetRefused, match="does not hold an offset"):
        decode_offset(value)


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


def test_parents_and_children_of_one_batch_are_one_tasks_work_in_their_order():
    # a ends and splits into b and c; c merges with d into e; x is of another line.
    end = offset(
        shards={**dict.fromkeys("acd", SHARD_END), **dict.fromkeys("bex", after("9"))},
        began=dict.fromkeys("abcdex", TRIM_HORIZON),
        parents={"b": ("a",), "c": ("a",), "e": ("c", "d")},
    )

    tasks = pack(ranges_between(offset(), end), 1, None)

    assert decode_offset(json.loads(json.dumps(encode_offset(end)))) == end
    assert [{each.shard_id: each.generation for each in task} for task in tasks] == [
        {"a": 0, "b": 1, "c": 1, "d": 0, "e": 2},
        {"x": 0},
    ]


MANY = st.dictionaries(
    st.integers(min_value=0, max_value=10**12 - 1).map("shardId-{:012d}".format), POSITIONS
)


@given(MANY, MANY, st.integers(min_value=0, max_value=2**53))
def test_an_offset_of_many_shards_comes_back_and_has_one_text(shards, began, at_ms):
    filled = {f"shardId-{n:012d}": after(str(n)) for n in range(PLAIN_SHARDS_MAX + 1)} | shards
    one = offset(shards=filled, began=began, as_of_ms=dict.fromkeys(filled, at_ms))
    text = json.dumps(encode_offset(one))

    assert decode_offset(json.loads(text)) == one
    assert json.dumps(encode_offset(decode_offset(json.loads(text)))) == text


def test_few_shards_are_written_as_they_always_were():
    # A checkpoint of version 1, as kclrun has written them so far; an older kclrun reads it, too.
    text = (
        '{"asOf": {"s1": 5}, "created": 1, "from": {"s2": "@8"}, "shards": {"s1": "7", "s2":'
        ' "9"}, "stream": "arn:x", "t": 4, "v": 1}'
    )
    said = offset(
        shards={"s1": after("7"), "s2": after("9")},
        began={"s2": before("8")},
        as_of_ms={"s1": 5},
        aligned_ms=4,
    )

    assert json.dumps(encode_offset(said)) == text
    assert decode_offset(json.loads(text)) == said


def test_a_checkpoint_of_many_shards_in_the_first_version_is_still_read():
    shards = {f"shardId-{n:012d}": after(str(10**55 + n)) for n in range(PLAIN_SHARDS_MAX * 4)}
    texts = {each: str(position) for each, position in shards.items()}
    plain = {"v": 1, "stream": "arn:x", "created": 1, "shards": texts, "from": {}, "asOf": {}}

    assert decode_offset(plain) == offset(shards=shards)


def test_the_offset_of_a_thousand_busy_shards_takes_six_bytes_a_shard():
    chance = random.Random(1)
    shards = {
        f"shardId-{n:012d}": after(
            str(Numbering(1_700_000_000, n).number(10**9 + chance.randrange(10**8), 1_700_500_000))
        )
        for n in range(1_000)
    }

    text = json.dumps(encode_offset(offset(shards=shards, as_of_ms=dict.fromkeys(shards, 5))))

    assert len(text) < 6_500


def test_the_offset_of_a_reshard_from_500_shards_to_1000_takes_few_bytes_more_and_comes_back():
    ids = [f"shardId-{n:012d}" for n in range(1_500)]
    numbering = Numbering(1_700_000_000, 7)
    shards = {each: after(str(numbering.number(10**9, 1_700_500_000))) for each in ids}
    split = {ids[500 + n]: (ids[n // 2],) for n in range(1_000)}
    merged = {ids[500]: (ids[0], ids[1])}
    plain = len(json.dumps(encode_offset(offset(shards=shards))))

    resharded = offset(shards=shards, parents=split | merged)
    text = json.dumps(encode_offset(resharded))

    assert decode_offset(json.loads(text)) == resharded
    # Two offsets and the report are one progress event, which is to stay below 20 kB.
    assert len(text) < plain + 1_000
    assert encode_offset(offset(shards=shards))["v"] == encode_offset(resharded)["v"]


def test_packed_parents_that_were_cut_short_are_refused():
    ids = [f"shardId-{n:012d}" for n in range(60)]
    shards = dict.fromkeys(ids, TRIM_HORIZON)
    encoded = encode_offset(offset(shards=shards, parents={ids[59]: (ids[0],)}))

    with pytest.raises(OffsetRefused, match="does not hold an offset"):
        decode_offset({**encoded, "parents": encoded["parents"][:-5]})


@pytest.mark.parametrize(
    ("kinds", "numbers", "times"),
    [((2, 2), b"\1", []), ((1, 1), b"", [1]), ((0, 0), b"\1", []), ((0, 0), b"", [1])],
)
def test_positions_that_do_not_match_their_kinds_are_refused(kinds, numbers, times):
    subs = [0] * len(numbers)
    columns = [[0, 1], bytes(kinds), 1, numbers, subs, times]
    packed = base64.b85encode(zlib.compress(msgspec.msgpack.encode(columns))).decode()

    with pytest.raises(OffsetRefused, match="do not match their kinds"):
        decode_offset({**encode_offset(offset()), "v": VERSION, "shards": packed})


@pytest.mark.parametrize("shards", ["", "no", "c-oj$0RR910096190%q%"])
def test_positions_that_were_cut_short_are_refused(shards):
    with pytest.raises(OffsetRefused, match="does not hold an offset"):
        decode_offset({**encode_offset(offset()), "v": VERSION, "shards": shards})
