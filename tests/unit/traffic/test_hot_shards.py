"""Which shards are hot, how often that is said, and the advice."""

import msgspec
import pytest

from kclrun.model.quotas import SHARD_READ_BYTES_MAX, SHARD_WRITE_BYTES_MAX, SHARD_WRITE_RECORDS_MAX
from kclrun.traffic.hot_keys import HotKey, ShardHeat
from kclrun.traffic.hot_shards import (
    Cooled,
    Heated,
    HotShard,
    HotShards,
    advice,
)

QUIET = ShardHeat(90.0, 1e3, 10.0, 1e3, 0.0, 0, 0.04, "keys", (), "77", 0.5)
SHARD = "shardId-000000000003"
HASH = "144401253837402563416234723478923446671"


def heat(**fields):
    return msgspec.structs.replace(QUIET, **fields)


def full(share=0.9, **fields):
    return heat(in_bytes_per_s=share * SHARD_WRITE_BYTES_MAX, **fields)


def looked(shards, heats):
    return shards.look(heats if isinstance(heats, dict) else {SHARD: heats})


@pytest.fixture
def shards():
    return HotShards("orders")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"in_bytes_per_s": 0.8 * SHARD_WRITE_BYTES_MAX},
            "0.84 MB/s and 10 records/s in: 80% of the limit",
        ),
        (
            {"in_records_per_s": 0.8 * SHARD_WRITE_RECORDS_MAX},
            "1.0 kB/s and 800 records/s in: 80% of the",
        ),
        ({"throttled": 0.34, "behind_ms": 10_000}, "34% of the reads are throttled"),
        (
            {"read_bytes_per_s": 0.8 * SHARD_READ_BYTES_MAX},
            "1.68 MB/s out: 80% of the limit of a shard",
        ),
    ],
)
def test_a_shard_near_a_limit_is_hot(shards, fields, words):
    (change,) = looked(shards, heat(**fields))

    assert isinstance(change, Heated)
    assert words in change.hot.reason
    assert shards.hot == {SHARD: change.hot}


def test_the_beginning_and_the_end_are_said_once_each(shards):
    said = [
        len(looked(shards, full(share))) for share in (0.5, 0.85, 0.95, 0.75, 0.61, 0.85, 0.7, 0.62)
    ]

    assert said == [0, 1, 0, 0, 0, 0, 0, 0]
    (end,) = looked(shards, full(0.59))
    assert end == Cooled(SHARD, "0.62 MB/s and 10 records/s in")
    assert looked(shards, full(0.75)) == [], "it has to come near the limit again"
    assert len(looked(shards, full(0.85))) == 1


def test_a_traffic_that_is_not_known_now_ends_nothing_and_a_lease_that_left_is_forgotten(shards):
    looked(shards, full())

    assert looked(shards, None) == []
    assert SHARD in shards.hot
    assert shards.look({"shardId-000000000004": QUIET}) == []
    assert shards.hot == {}
    assert len(looked(shards, full())) == 1, "for its next owner it begins anew"


def others(load, count=3):
    return {f"shardId-00000000010{n}": heat(in_records_per_s=load * 1000) for n in range(count)}


@pytest.mark.parametrize(
    ("load", "rest", "is_hot"),
    [
        (0.4, others(0.1), True),
        (0.39, others(0.1), False),
        (0.25, others(0.0), True),
        (0.24, others(0.0), False),
        (0.4, others(0.1, count=2), False),
        # The median: one other that is as heavy, and one that rests, change nothing.
        (0.5, others(0.1) | {"shardId-000000000200": heat(in_records_per_s=490.0)}, True),
    ],
)
def test_a_shard_far_above_the_others_is_hot_if_there_are_some_and_it_has_a_load(
    shards, load, rest, is_hot
):
    changes = shards.look({SHARD: heat(in_records_per_s=load * 1000)} | rest)

    assert (SHARD in [change.key for change in changes]) == is_hot
    if is_hot:
        assert "the other shards of this manager" in shards.hot[SHARD].reason


def test_a_shard_above_the_others_stays_so_down_to_three_times(shards):
    shards.look({SHARD: heat(in_records_per_s=500.0)} | others(0.1))

    assert shards.look({SHARD: heat(in_records_per_s=310.0)} | others(0.1)) == []
    assert shards.look({SHARD: heat(in_records_per_s=290.0)} | others(0.1)) == [
        Cooled(SHARD, "1.0 kB/s and 290 records/s in")
    ]


def test_the_load_is_that_of_the_nearer_limit():
    assert heat(in_bytes_per_s=SHARD_WRITE_BYTES_MAX / 2, in_records_per_s=100.0).load == 0.5
    assert heat(in_bytes_per_s=1.0, in_records_per_s=700.0).load == 0.7


def reported(heat, key=SHARD):
    return advice(heat, key, "orders")


def test_where_a_split_helps_the_advice_has_the_whole_command():
    assert reported(full(split_at=HASH, split_share=0.52)) == (
        f"split at hash key {HASH}: 52% of the bytes on one side, 48% on the other:"
        " aws kinesis split-shard --stream-name orders --shard-to-split shardId-000000000003"
        f" --new-starting-hash-key {HASH}"
    )


def test_a_key_with_most_of_the_bytes_cannot_be_split_and_is_named_by_its_hash_key():
    words = reported(full(keys=(HotKey(HASH, 0.71),), split_at="7", split_share=0.8))

    assert words == (
        f"the partition key with hash key {HASH} carries 71% (± 4): splitting cannot help, because"
        " a key is in one shard. Spread it over several partition keys"
    )


def test_hidden_hash_keys_are_said_instead_of_a_position():
    hot = full(routing="hidden", keys=(HotKey(HASH, 0.9),), split_at="")

    assert "producers set explicit hash keys" in reported(hot)
    assert "split-shard" not in reported(hot)


def test_without_enough_samples_there_is_no_position():
    assert "too few records were sampled" in reported(full(split_at=""))


def test_throttled_reads_of_a_shard_with_little_in_it_are_no_reason_to_split():
    for fields in (
        {"throttled": 0.5, "behind_ms": 60_000},
        {"read_bytes_per_s": SHARD_READ_BYTES_MAX},
    ):
        shards = HotShards("orders")
        looked(shards, heat(**fields))
        assert "enhanced fan-out" in shards.hot[SHARD].advice
        assert "split" not in shards.hot[SHARD].advice

        looked(shards, full(**fields))
        assert "split at" in shards.hot[SHARD].advice, "a full one is"


def test_a_few_throttled_reads_do_not_change_the_advice_for_a_shard_above_the_others(shards):
    shards.look({SHARD: heat(in_records_per_s=400.0, throttled=0.2)} | others(0.05))

    assert "split at" in shards.hot[SHARD].advice


def test_a_hot_shard_is_two_sentences(shards):
    looked(shards, full())

    assert isinstance(shards.hot[SHARD], HotShard)
