"""Keys of streams and leases: the KCL's form, qualified and bare, and back."""

import pytest

from kclrun.errors import SettingsError
from kclrun.model.shard import ChildShard, HashRange, Shard
from kclrun.model.stream import (
    ONLY_STREAM,
    arn_difference,
    display_name,
    qualified,
    qualified_child,
    qualified_shards,
    shard_id_of,
    stream_key,
    stream_name_of,
    stream_of,
)
from tests.support.tables import over_rows

ORDERS = "123456789012:orders:1700000000"
SHARD = "shardId-000000000003"
RANGE = HashRange(0, 9)


def test_a_key_is_made_of_account_name_and_the_whole_second_of_the_creation():
    arn = "arn:aws:kinesis:eu-west-1:123456789012:stream/orders"

    assert stream_key(arn, 1_700_000_000.999) == ORDERS
    assert stream_key(arn.replace("aws", "aws-cn", 1), 1_700_000_000) == ORDERS


@pytest.mark.parametrize(
    "arn", ["", "orders", "arn:aws:s3:::bucket", "arn:aws:kinesis:x:1:stream/"]
)
def test_what_is_no_arn_of_a_stream_makes_no_key(arn):
    with pytest.raises(SettingsError, match="not the ARN of a stream"):
        stream_key(arn, 1.0)


def test_a_qualified_lease_key_has_a_stream_a_shard_and_a_name_for_people():
    key = qualified(ORDERS, SHARD)

    assert key == f"{ORDERS}:{SHARD}"
    assert (stream_of(key), shard_id_of(key)) == (ORDERS, SHARD)
    assert display_name(key) == f"orders:{SHARD}"
    assert stream_name_of(stream_of(key)) == "orders"


@over_rows(
    "key", [SHARD, "", "a:b:c:d", "1:b:2", "1:b:2:", "1:b:2:c:d", "x1:b:2:c", "?", f" {ORDERS}:s"]
)
def test_whatever_else_a_key_is_it_is_of_the_only_stream_and_its_own_shard(key):
    assert stream_of(key) == ONLY_STREAM
    assert shard_id_of(key) == display_name(key) == key


def test_a_listing_is_qualified_with_the_parents_of_each_shard():
    merged = Shard("c", RANGE, "3", None, "a", "b")
    first = Shard("a", RANGE, "1", "2")

    listed = qualified_shards(ORDERS, [first, merged])

    assert [shard.shard_id for shard in listed] == [f"{ORDERS}:a", f"{ORDERS}:c"]
    assert [shard.parents for shard in listed] == [(), (f"{ORDERS}:a", f"{ORDERS}:b")]
    assert qualified_shards(ONLY_STREAM, [first, merged]) == (first, merged)


def test_a_child_is_qualified_with_its_parents():
    child = ChildShard("c", ("a", "b"), RANGE)

    assert qualified_child(ORDERS, child) == ChildShard(
        f"{ORDERS}:c", (f"{ORDERS}:a", f"{ORDERS}:b"), RANGE
    )
    assert qualified_child(ONLY_STREAM, child) == child


HERE = "arn:aws:kinesis:eu-west-1:123456789012:stream/orders"


@over_rows(
    ("part", "other", "words"),
    [
        ("eu-west-1", "us-east-1", "orders of region us-east-1; the one of region eu-west-1"),
        ("123456789012", "999999999999", "orders of account 999999999999; the one of account 1234"),
        ("arn:aws:", "arn:aws-cn:", "orders of partition aws-cn; the one of partition aws is"),
        ("orders", "Orders", "Orders is written otherwise than orders, which is read"),
        ("orders", "audits", None),
        ("stream/orders", "orders", None),
        (HERE, "orders", None),
        ("eu-west-1", "eu-west-1", None),
    ],
)
def test_an_arn_that_is_nearly_the_same_is_named_with_its_difference(part, other, words):
    """Besides the keys of rows: of them see tests/unit/leases/test_stream_rows.py."""
    found = arn_difference(HERE, HERE.replace(part, other))

    assert found.startswith(words) if words else found == ""


LABEL = "2026-03-01T10:00:00.000"
OF_TABLE = f"arn:aws:dynamodb:eu-west-1:123456789012:table/orders/stream/{LABEL}"


@pytest.mark.parametrize(
    ("part", "other", "words"),
    [
        ("eu-west-1", "us-east-1", "orders of region us-east-1; the one of region eu-west-1 is"),
        ("123456789012", "999999999999", "orders of account 999999999999; the one of account 1234"),
        ("arn:aws:", "arn:aws-cn:", "orders of partition aws-cn; the one of partition aws is"),
        ("table/orders", "table/Orders", "Orders is written otherwise than orders, which is read"),
        ("table/orders", "table/audits", None),
        ("2026-03", "2025-12", "an earlier stream of the table orders, of 2025-12-01T10:00:00.000"),
        ("2026-03", "2026-04", "a later stream of the table orders, of 2026-04-01T10:00:00.000"),
        (OF_TABLE, HERE, "the stream of Kinesis orders; the stream of the table orders is read"),
        (OF_TABLE, "orders", None),
        ("orders", "orders", None),
    ],
)
def test_the_stream_of_a_table_that_is_nearly_the_same_is_named_with_its_difference(
    part, other, words
):
    found = arn_difference(OF_TABLE, OF_TABLE.replace(part, other))

    assert found.startswith(words) if words else found == ""
