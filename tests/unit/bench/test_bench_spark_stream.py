"""The streams that exist as a formula mean what a stream of the service means."""

import itertools

import pytest
from bench.spark_stream import KINDS, Block, CborBlock, Stream

from kclrun.codec.cbor import decode_cbor
from kclrun.codec.get_records import decode_get_records

BEGAN_MS = 1_772_366_400_250
SHARD = "shardId-000000000001"


def fetched(stream, iterator, limit=10_000, now_ms=BEGAN_MS):
    return decode_get_records(Block(stream.kind).page(stream, iterator, limit, now_ms))


def opened(stream, kind, now_ms=BEGAN_MS, **more):
    return stream.iterator({"ShardId": SHARD, "ShardIteratorType": kind, **more}, now_ms)


def test_pages_follow_each_other_without_a_gap():
    stream = Stream("large-2", BEGAN_MS)

    first = fetched(stream, opened(stream, "TRIM_HORIZON"), limit=7)
    second = fetched(stream, first.next_iterator)

    records = [*first.records, *second.records]
    assert len(first.records) == 7
    assert len(second.records) == KINDS["large"].page_records
    assert [Stream.index_of(each.sequence_number) for each in records] == [*range(len(records))]
    assert {len(each.sequence_number) for each in records} == {56}
    arrived_ms = [round(1000 * each.approximate_arrival_timestamp) for each in records]
    assert arrived_ms == [stream.arrived_ms(n) for n in range(len(records))]


@pytest.mark.parametrize("limit", [0, 7])
def test_a_page_says_the_same_in_cbor(limit):
    stream = Stream("large-2", BEGAN_MS)
    iterator = stream.iterator_at(SHARD, 65_530)
    asked = (stream, iterator, limit, BEGAN_MS)

    said = decode_get_records(Block(stream.kind).page(*asked))
    in_cbor = decode_cbor(CborBlock(stream.kind).page(*asked))

    assert in_cbor["NextShardIterator"] == said.next_iterator
    assert in_cbor["MillisBehindLatest"] == said.millis_behind_latest
    fields = ("Data", "PartitionKey", "SequenceNumber", "ApproximateArrivalTimestamp")
    assert [tuple(each[name] for name in fields) for each in in_cbor["Records"]] == [
        (each.data, each.partition_key, each.sequence_number, each.approximate_arrival_timestamp)
        for each in said.records
    ]


@pytest.mark.parametrize(("kind", "first"), [("AT", 12_345), ("AFTER", 12_346)])
def test_an_iterator_opens_at_or_after_a_record(kind, first):
    stream = Stream("small-2", BEGAN_MS)
    number = fetched(stream, stream.iterator_at(SHARD, 12_345), limit=1).records[0].sequence_number

    opened_at = opened(stream, f"{kind}_SEQUENCE_NUMBER", StartingSequenceNumber=number)

    assert Stream.index_of(fetched(stream, opened_at).records[0].sequence_number) == first


def test_a_timestamp_opens_at_the_first_record_that_arrived_then_or_later():
    stream = Stream("aggregated-2", BEGAN_MS)  # one record in 50 ms
    at_s = (stream.arrived_ms(40) + 1) / 1000

    page = fetched(stream, opened(stream, "AT_TIMESTAMP", Timestamp=at_s))

    assert Stream.index_of(page.records[0].sequence_number) == 41


def test_the_tip_moves_with_time():
    stream = Stream("quiet-2", BEGAN_MS)  # 20 records a second, from the server's start on
    latest = opened(stream, "LATEST", now_ms=BEGAN_MS + 1_000)

    now = fetched(stream, latest, now_ms=BEGAN_MS + 1_000)
    later = fetched(stream, latest, now_ms=BEGAN_MS + 2_000)

    assert (len(now.records), now.millis_behind_latest) == (0, 0)
    assert (len(later.records), later.millis_behind_latest) == (20, 0)


def test_the_lag_is_the_age_of_the_next_record():
    stream = Stream("quiet-2", BEGAN_MS)

    page = fetched(stream, opened(stream, "TRIM_HORIZON"), limit=10, now_ms=BEGAN_MS + 2_000)

    assert page.millis_behind_latest == 2_000 - 500


def test_shards_tile_the_hash_keys():
    listed = Stream("small-3", BEGAN_MS).listing()["Shards"]

    ranges = [each["HashKeyRange"] for each in listed]
    edges = [(int(each["StartingHashKey"]), int(each["EndingHashKey"])) for each in ranges]
    assert edges[0][0] == 0
    assert edges[-1][1] == 2**128 - 1
    assert all(left[1] + 1 == right[0] for left, right in itertools.pairwise(edges))
