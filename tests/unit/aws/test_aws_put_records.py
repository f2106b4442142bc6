from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from kclrun.aws.put_records import (
    BATCH_BYTES_MAX,
    BATCH_RECORDS_MAX,
    BLOCK_MAX,
    ShardPacker,
    batches,
)
from kclrun.codec.kpl import effective_hash_key, open_aggregates
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


def shard_of(key: str) -> int:
    return int(effective_hash_key(key, None) >= HALF)


@given(st.lists(st.integers(0, 20), max_size=700), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_packing_loses_nothing_keeps_order_and_its_share(keys: list[int], share: float) -> None:
    rows = [PutEntry(str(number).encode(), f"key{key}") for number, key in enumerate(keys)]
    packer = ShardPacker(SHARDS, share)

    packed = [entry for row in rows for entry in packer.add(row)] + list(packer.flush())

    users = [user for entry in packed for user in opened(entry)]
    for shard in (0, 1):
        sent = [int(data) for key, data in users if shard_of(key) == shard]
        assert sent == [n for n, key in enumerate(keys) if shard_of(f"key{key}") == shard]
    for entry in packed:
        # What is packed together belongs to the shard that the aggregate is routed to.
        assert {shard_of(key) for key, _ in opened(entry)} == {shard_of(entry.partition_key)}
        assert len(opened(entry)) == entry.user_records
    aggregated = sum(
        entry.user_records for entry in packed if entry.data.startswith(b"\xf3\x89\x9a\xc2")
    )
    assert abs(aggregated - share * len(rows)) < 1


def test_a_block_is_sent_when_it_is_full() -> None:
    packer = ShardPacker(SHARDS, 1.0)
    ready = [packer.add(PutEntry(b"x", "same key")) for _ in range(BLOCK_MAX)]

    assert [len(entries) for entries in ready] == [0] * (BLOCK_MAX - 1) + [1]
    assert packer.flush() == []


def test_a_record_too_large_for_an_aggregate_goes_as_it_is() -> None:
    packer = ShardPacker(SHARDS, 1.0)
    large = PutEntry(b"x" * (2**20 - 8), "k")
    rows = [PutEntry(b"before", "k"), large, PutEntry(b"after", "k")]
    for row in rows:
        assert packer.add(row) == ()

    sent = packer.flush()

    assert sent[1] is large
    assert [data for entry in sent for _, data in opened(entry)] == [row.data for row in rows]


@given(st.lists(st.one_of(st.none(), st.integers(0, 2**20)), max_size=50), st.booleans())
def test_requests_keep_the_limits_and_the_order(sizes: list[int | None], one_a_key: bool) -> None:
    rows = [
        None if size is None else PutEntry(bytes(size), f"k{number % 7}")
        for number, size in enumerate(sizes)
    ]

    cut = list(batches(rows, one_a_key=one_a_key))

    assert [entry for batch in cut for entry in batch] == [row for row in rows if row is not None]
    for batch in cut:
        assert 0 < len(batch) <= BATCH_RECORDS_MAX
        assert sum(entry.size_bytes for entry in batch) <= BATCH_BYTES_MAX
        keys = [entry.partition_key for entry in batch]
        assert not one_a_key or len(set(keys)) == len(keys)


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
