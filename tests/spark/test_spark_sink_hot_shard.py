"""Many rows through the sink into a stream with one hot shard, at the service's own rates."""

import itertools
import random
from collections import Counter

import pytest

from kclrun.codec.kpl import effective_hash_key
from kclrun.local.server import start_embedded
from kclrun.spark.sink.writing import write
from tests.spark.sink_rig import Kinesis, numbers_by_key, rows_of

pytestmark = pytest.mark.alone

SHARDS = 8
ROWS = 30_000
# A third of all rows: ten times what the shard takes in a second.
HOT_SHARE = 1 / 3
KEYS_A_SHARD = 150


@pytest.fixture(scope="module")
def throttling():
    with start_embedded(limits=True) as embedded:
        yield Kinesis(embedded.kinesis_endpoint)


def keys_by_shard() -> list[list[str]]:
    """Keys for each shard of a stream that splits the hash keys evenly."""
    keys: list[list[str]] = [[] for _ in range(SHARDS)]
    for number in itertools.count():
        name = f"key-{number}"
        mine = keys[effective_hash_key(name, None) * SHARDS >> 128]
        if len(mine) < KEYS_A_SHARD:
            mine.append(name)
        if all(len(each) == KEYS_A_SHARD for each in keys):
            return keys
    raise AssertionError


@pytest.mark.slow
def test_a_hot_shard_costs_no_record_and_no_order(spark, throttling):
    chance = random.Random(20261)
    hot, *healthy = keys_by_shard()
    rows = [
        (
            chance.choice(hot if chance.random() < HOT_SHARE else chance.choice(healthy)),
            str(number).encode(),
            number,
        )
        for number in range(ROWS)
    ]
    stream = throttling.stream(SHARDS)

    write(
        rows_of(spark, rows),
        stream,
        key="partitionKey",
        data="data",
        order_by=["number"],
        options=throttling.options(),
    )

    stored = throttling.stored(stream)
    sizes = sorted(map(len, stored.values()), reverse=True)
    assert sizes[0] > 3 * sizes[1], "one shard is hot"
    expected: dict[str, list[int]] = {}
    for key, _, number in rows:
        expected.setdefault(key, []).append(number)
    by_key = numbers_by_key(stored)
    # At least once: a request that was answered too late is sent again, with what follows.
    first_ones = {key: list(dict.fromkeys(numbers)) for key, numbers in by_key.items()}
    assert first_ones == expected
    doubled = sum(count - 1 for numbers in by_key.values() for count in Counter(numbers).values())
    print(f"{doubled} records twice")
