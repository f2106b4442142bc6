"""Rows as records of a stream: which partition keys they get."""

import collections
from types import SimpleNamespace

import pytest

from kclrun.model.output import OutputDestination, RowsOf
from kclrun.outputs.kinesis_output import KinesisOutput


def keys_of(count, **place):
    of = RowsOf(
        application="orders",
        stream="clicks",
        stream_created_at=1_700_000_000.0,
        shard_id="shardId-000000000007",
        generation=0,
        token=10,
    )
    admin = SimpleNamespace(summary=lambda: SimpleNamespace(record_bytes_max=2**20))
    output = KinesisOutput(
        OutputDestination(name="output", kinesis="rows", **place), of, None, admin
    )
    return collections.Counter(
        output.encode({"n": number, "k": "a"})[0][0].partition_key for number in range(count)
    )


@pytest.mark.parametrize("aggregates", [True, False])
def test_without_a_key_ten_rows_in_a_row_share_one(aggregates):
    found = keys_of(21, aggregates=aggregates)

    assert sorted(found.values()) == [1, 10, 10]
    assert all(key.startswith("shardId-000000000007-") for key in found)


def test_a_column_that_is_the_key_gives_it_to_its_rows():
    assert keys_of(25, key=("k",)) == {"a": 25}
