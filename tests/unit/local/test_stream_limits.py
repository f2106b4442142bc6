"""The rates of a shard, in virtual time."""

import pytest

from kclrun.errors import Throttled
from kclrun.local.limits import AWS_LIMITS
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.stream import PutEntry
from kclrun.model.record import IteratorType

START = 1_700_000_000.0
FIRST = "shardId-000000000000"
MIB = 1024 * 1024


@pytest.fixture
def kinesis():
    return Kinesis(KinesisSettings(limits=AWS_LIMITS), b"s" * 32)


@pytest.fixture
def stream(kinesis):
    return kinesis.create_stream("s", 1, START)


def batch(count, data=b""):
    return [PutEntry(data, "k")] * count


def failures(results):
    return [result.error_code for result in results if result.error_code is not None]


def test_a_shard_takes_a_thousand_records_a_second(kinesis, stream):
    accepted = kinesis.put_many(stream, batch(500), START) + kinesis.put_many(
        stream, batch(500), START
    )
    refused = kinesis.put_many(stream, batch(10), START)
    later = kinesis.put_many(stream, batch(500), START + 0.5)

    assert failures(accepted) == []
    assert failures(refused) == ["ProvisionedThroughputExceededException"] * 10
    assert failures(later) == []
    at_once = kinesis.put_many(stream, batch(1), START + 0.5)
    assert failures(at_once) == ["ProvisionedThroughputExceededException"], "one second's, once"


def test_a_shard_takes_one_mebibyte_a_second(kinesis, stream):
    half = b"x" * (MIB // 2 - 1)

    results = kinesis.put_many(stream, batch(3, half), START)

    assert failures(results) == ["ProvisionedThroughputExceededException"]
    assert failures(kinesis.put_many(stream, batch(1, half), START + 0.6)) == []


def test_a_throttled_record_is_named_with_shard_stream_and_account(kinesis, stream):
    kinesis.put_many(stream, batch(500), START)
    kinesis.put_many(stream, batch(500), START)

    with pytest.raises(Throttled) as refusal:
        kinesis.put(stream, PutEntry(b"", "k"), START)

    assert str(refusal.value) == (
        "Rate exceeded for shard shardId-000000000000 in stream s under account 123456789012."
    )


def test_a_shard_is_read_five_times_a_second(kinesis, stream):
    iterator = kinesis.iterator(stream, FIRST, IteratorType.TRIM_HORIZON, START)

    for _ in range(5):
        kinesis.fetch(iterator, 1, START)
    with pytest.raises(Throttled):
        kinesis.fetch(iterator, 1, START)
    kinesis.fetch(iterator, 1, START + 0.2)


def test_an_answer_of_ten_mebibytes_throttles_the_next_five_seconds(kinesis, stream):
    for second in range(10):
        kinesis.put(stream, PutEntry(b"x" * (MIB - 1), "k"), START + 2 * second)
    now = START + 100
    iterator = kinesis.iterator(stream, FIRST, IteratorType.TRIM_HORIZON, now)

    page = kinesis.fetch(iterator, 10_000, now)

    assert len(page.records) == 10
    with pytest.raises(Throttled):
        kinesis.fetch(iterator, 1, now + 4.9)
    kinesis.fetch(iterator, 1, now + 5)


def test_an_answer_of_just_two_mebibytes_is_of_this_second_and_throttles_the_next(kinesis, stream):
    for second in range(2):
        kinesis.put(stream, PutEntry(b"x" * (MIB - 1), "k"), START + second)
    now = START + 100
    iterator = kinesis.iterator(stream, FIRST, IteratorType.TRIM_HORIZON, now)

    for _ in range(2):
        assert len(kinesis.fetch(iterator, 2, now).records) == 2
    with pytest.raises(Throttled):
        kinesis.fetch(iterator, 1, now + 0.9)
    kinesis.fetch(iterator, 1, now + 1)


def test_small_answers_share_two_mebibytes_a_second(kinesis, stream):
    kinesis.put(stream, PutEntry(b"x" * (MIB - 1), "k"), START)
    iterator = kinesis.iterator(stream, FIRST, IteratorType.TRIM_HORIZON, START)

    for _ in range(3):  # The third begins with the budget at zero and leaves a debt.
        kinesis.fetch(iterator, 1, START)
    with pytest.raises(Throttled):
        kinesis.fetch(iterator, 1, START + 0.4)
    kinesis.fetch(iterator, 1, START + 0.6)


def test_limits_are_each_shards_own(kinesis):
    stream = kinesis.create_stream("two", 2, START)

    results = [
        kinesis.put_many(stream, [PutEntry(b"", "k", hash_key)] * 500, START)
        for hash_key in ("0", "0", str(2**127), str(2**127))
    ]

    assert [failures(result) for result in results] == [[], [], [], []]


def test_without_limits_nothing_is_throttled():
    kinesis = Kinesis(KinesisSettings(), b"s" * 32)
    stream = kinesis.create_stream("s", 1, START)

    assert all(failures(kinesis.put_many(stream, batch(500), START)) == [] for _ in range(4))
