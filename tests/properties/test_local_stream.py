"""What no sequence of puts, splits, merges and scalings may break."""

import itertools
from collections import defaultdict

import hypothesis.strategies as st
from hypothesis import given

from kclrun.local.hash_ranges import Merge, Split, even_ranges, steps_to
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.stream import (
    PutEntry,
)
from kclrun.model.record import IteratorType
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from tests.examples import examples

START = 1_700_000_000.0
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "split", "merge", "scale"]),
        st.integers(0, 2**32),
        st.integers(0, HASH_KEY_MAX),
        st.floats(0, 3),
    ),
    max_size=30,
)


def assert_tiles(ranges):
    ordered = sorted(ranges)
    assert ordered[0].start == 0
    assert ordered[-1].end == HASH_KEY_MAX
    for low, high in itertools.pairwise(ordered):
        assert low.end + 1 == high.start


def carry_out(kinesis, stream, step, count, now):
    """One random step; the record written, if it was a put."""
    kind, choice, hash_key, _ = step
    shards = stream.open_shards()
    chosen = shards[choice % len(shards)]
    if kind == "put":
        data = b"%d" % count
        kinesis.put(stream, PutEntry(data, f"k{choice % 5}", str(hash_key)), now)
        return data
    if kind == "split" and chosen.hash_range.end - chosen.hash_range.start > 4:
        width = chosen.hash_range.end - chosen.hash_range.start - 2
        at = chosen.hash_range.start + 2 + hash_key % (width - 1)
        kinesis.split_shard(stream, chosen.shard_id, at, now)
    if kind == "merge" and len(shards) > 1:
        low = choice % (len(shards) - 1)
        stream.merge(shards[low + 1].shard_id, shards[low].shard_id, now)
    if kind == "scale":
        least = (len(shards) + 1) // 2
        kinesis.update_shard_count(stream, least + choice % (2 * len(shards) - least + 1), now)
    return None


def read_out(kinesis, stream, shard, limit, now):
    """All records of a shard and its children's ids; None while it is open."""
    records = []
    iterator = kinesis.iterator(stream, shard.shard_id, IteratorType.TRIM_HORIZON, now)
    while True:
        page = kinesis.fetch(iterator, limit, now)
        records += page.records
        if page.next_iterator is None:
            return records, [child.shard_id for child in page.children]
        if page.millis_behind_latest == 0 and not page.records:
            return records, None
        iterator = page.next_iterator


@examples(60)
@given(shards=st.integers(1, 5), steps=STEPS, limit=st.integers(1, 7))
def test_no_record_is_lost_or_doubled_and_order_holds_along_the_lineage(shards, steps, limit):
    kinesis = Kinesis(KinesisSettings(), b"s" * 32)
    stream = kinesis.create_stream("s", shards, START)
    now, written = START, []
    for count, step in enumerate(steps):
        now += step[3]
        data = carry_out(kinesis, stream, step, count, now)
        written += [data] if data is not None else []
        assert_tiles([shard.hash_range for shard in stream.open_shards()])

    found, last_of = [], defaultdict(int)
    for shard in stream.shards(now):  # Oldest first, so parents before children.
        records, children = read_out(kinesis, stream, shard, limit, now)
        floor = max((last_of[parent] for parent in shard.parents), default=0)
        numbers = [floor, *(int(record.sequence_number) for record in records)]
        assert numbers == sorted(set(numbers))
        assert (children is None) == (shard.closed_at is None)
        if children is not None:
            assert children == [
                s.shard_id for s in stream.shards(now) if shard.shard_id in s.parents
            ]
        last_of[shard.shard_id] = numbers[-1]
        found += [record.data for record in records]
    assert sorted(found) == sorted(written)


@examples(60)
@given(shards=st.integers(1, 5), steps=STEPS)
def test_each_key_is_read_in_the_order_it_was_written(shards, steps):
    """With the shard chosen by the key itself, and parents read before children."""
    kinesis = Kinesis(KinesisSettings(), b"s" * 32)
    stream = kinesis.create_stream("s", shards, START)
    written = defaultdict(list)
    for count, step in enumerate(steps):
        if step[0] == "put":
            key, data = f"k{step[1] % 5}", b"%d" % count
            kinesis.put(stream, PutEntry(data, key), START)
            written[key].append(data)
        else:
            carry_out(kinesis, stream, step, count, START)

    read = defaultdict(list)
    for shard in stream.shards(START):
        records, _ = read_out(kinesis, stream, shard, 1000, START)
        for record in records:
            read[record.partition_key].append(record.data)
    assert read == written


@examples(100)
@given(
    arrivals=st.lists(st.floats(0, 200_000), min_size=1, max_size=60),
    horizon=st.floats(0, 300_000),
    limit=st.integers(1, 9),
)
def test_after_any_trimming_exactly_the_records_within_the_retention_are_read(
    arrivals, horizon, limit
):
    kinesis = Kinesis(KinesisSettings(), b"s" * 32)
    stream = kinesis.create_stream("s", 1, START)
    instants = sorted(START + round(arrival, 3) for arrival in arrivals)
    for index, at in enumerate(instants):
        kinesis.put(stream, PutEntry(b"%d" % index, "k"), at)
    now = max(instants[-1], START + horizon)

    records, _ = read_out(kinesis, stream, stream.shards(now)[0], limit, now)

    oldest = now - stream.retention_s
    expected = [b"%d" % i for i, at in enumerate(instants) if round(at, 3) >= oldest]
    assert [record.data for record in records] == expected


@given(st.integers(1, 40))
def test_even_ranges_tile(count):
    ranges = even_ranges(count)

    assert len(ranges) == count
    assert_tiles(ranges)


@given(st.sets(st.integers(1, HASH_KEY_MAX), max_size=12), st.integers(1, 12))
def test_steps_lead_from_any_tiling_to_the_wanted_one(cuts, count):
    edges = [0, *sorted(cuts), HASH_KEY_MAX + 1]
    current = [HashRange(low, high - 1) for low, high in itertools.pairwise(edges)]
    ranges = set(current)

    for step in steps_to(current, even_ranges(count)):
        match step:
            case Split(whole, at):
                ranges.remove(whole)
                ranges |= {HashRange(whole.start, at - 1), HashRange(at, whole.end)}
            case Merge(low, high):
                ranges -= {low, high}
                ranges.add(HashRange(low.start, high.end))
        assert_tiles(ranges)

    assert ranges == set(even_ranges(count))
