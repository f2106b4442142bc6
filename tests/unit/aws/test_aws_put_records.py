from itertools import groupby

from kclrun.aws.put_records import (
    BATCH_RECORDS_MAX,
    BLOCK_MAX,
    ShardPacker,
    batches,
)
from kclrun.codec.kpl import open_aggregates
from kclrun.model.record import PutEntry, Record
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard

HALF = 2**127
SHARDS = (
    Shard("shardId-000000000000", HashRange(0, HALF - 1), "1"),
    Shard("shardId-000000000001", HashRange(HALF, HASH_KEY_MAX), "1"),
    Shard("shardId-000000000002", HashRange(0, HASH_KEY_MAX), "1", ending_sequence_number="2"),
)


def opened(entry: PutEntry) -> list[tuple[str, bytes]]:
    record = Record(entry.data, entry.partition_key, "1")
    return [(user.partition_key, user.data) for user in open_aggregates([record])]


def test_a_block_is_sent_when_it_is_full() -> None:
    packer = ShardPacker(SHARDS, 1.0)
    ready = [packer.add(PutEntry(b"x", "same key")) for _ in range(BLOCK_MAX)]

    assert [len(entries) for entries in ready] == [0] * (BLOCK_MAX - 1) + [1]
    assert packer.flush() == []


def test_only_records_of_one_open_shard_share_an_aggregate_the_lowest_hash_key_included() -> None:
    packer = ShardPacker(SHARDS, 1.0)
    hash_keys = (0, HALF - 1, HALF, HASH_KEY_MAX)
    for hash_key in hash_keys:
        assert packer.add(PutEntry(b"%d" % hash_key, "k", str(hash_key))) == ()

    found = [[int(data) for _, data in opened(entry)] for entry in packer.flush()]

    assert found == [[*hash_keys[:2]], [*hash_keys[2:]]]


def test_a_hash_key_below_every_listed_range_goes_to_the_first() -> None:
    packer = ShardPacker(SHARDS[1:2], 1.0)
    packer.add(PutEntry(b"x", "k", "0"))

    assert [opened(entry) for entry in packer.flush()] == [[("k", b"x")]]


def test_a_record_too_large_for_an_aggregate_goes_as_it_is() -> None:
    packer = ShardPacker(SHARDS, 1.0)
    large = PutEntry(b"x" * (2**20 - 8), "k")
    rows = [PutEntry(b"before", "k"), large, PutEntry(b"after", "k")]
    for row in rows:
        assert packer.add(row) == ()

    sent = packer.flush()

    assert sent[1] is large
    assert [data for entry in sent for _, data in opened(entry)] == [row.data for row in rows]


def test_in_order_a_request_ends_before_a_key_that_it_has_and_not_before_others() -> None:
    a, b, again = PutEntry(b"1", "a"), PutEntry(b"2", "b"), PutEntry(b"3", "a")

    assert list(batches([a, b, again], one_a_key=True)) == [(a, b), (again,)]


def test_nothing_more_in_sight_means_send() -> None:
    a, b, c = (PutEntry(name, "k") for name in (b"a", b"b", b"c"))

    assert list(batches([a, b, None, None, c])) == [(a, b), (c,)]


def test_a_full_request_is_sent_without_waiting_for_the_next_row() -> None:
    rows = [PutEntry(b"x", "k")] * (2 * BATCH_RECORDS_MAX + 1)

    assert [len(list(group)) for _, group in groupby(map(len, batches(rows)))] == [2, 1]


def test_large_records_make_small_requests() -> None:
    rows = [PutEntry(bytes(2**20 - 1), "k")] * 12

    assert [len(batch) for batch in batches(rows)] == [5, 5, 2]
