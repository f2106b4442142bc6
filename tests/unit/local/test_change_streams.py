"""DynamoDB Streams of the embedded AWS: a listing of the children of one shard."""

import json

import pytest

from kclrun.local.changes.model import ChangeSettings
from kclrun.local.changes.tables import ChangeStreams

ARN = "arn:aws:dynamodb:us-east-1:123456789012:table/t/stream/2026-01-01T00:00:00.000"
LIVES_S = 100.0


class Clock:
    now = 1_700_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def streams():
    """A stream whose shard has two children, and each of those has one."""
    clock = Clock()
    made = ChangeStreams(ChangeSettings(lives_s=LIVES_S, partitions_max=2), clock)
    made.add_stream(ARN)
    for _ in range(2):
        clock.now += LIVES_S
        described(made)
    return made


def asked(streams, **request):
    body = json.dumps({"StreamArn": ARN} | request).encode()
    status, body = streams.answer("DescribeStream", body, "us-east-1")
    return status, json.loads(body)


def described(streams, **request):
    status, body = asked(streams, **request)
    assert status == 200, body
    return body["StreamDescription"]


def children_of(shard_id):
    return {"ShardFilter": {"Type": "CHILD_SHARDS", "ShardId": shard_id}}


def test_the_filter_gives_the_children_of_each_shard_and_no_others(streams):
    shards = described(streams)["Shards"]
    assert len(shards) == 5

    for parent in shards:
        wanted = [shard for shard in shards if shard.get("ParentShardId") == parent["ShardId"]]
        assert described(streams, **children_of(parent["ShardId"]))["Shards"] == wanted


def test_the_children_come_in_pages_too(streams):
    first = described(streams)["Shards"][0]["ShardId"]
    every = described(streams, **children_of(first))["Shards"]
    page = described(streams, Limit=1, **children_of(first))
    last = page["LastEvaluatedShardId"]
    rest = described(streams, ExclusiveStartShardId=last, **children_of(first))

    assert page["Shards"] + rest["Shards"] == every
    assert len(every) == 2
    assert "LastEvaluatedShardId" not in rest


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (children_of("shardId-of-nothing"), "ResourceNotFoundException"),
        ({"ShardFilter": {"Type": "OTHER", "ShardId": "x"}}, "SerializationException"),
        ({"ShardFilter": {"Type": "CHILD_SHARDS"}}, "SerializationException"),
    ],
)
def test_a_filter_that_names_no_shard_is_refused(streams, given, code):
    status, body = asked(streams, **given)

    assert (status, body["__type"].rpartition("#")[2]) == (400, code)


@pytest.mark.parametrize("number", [None, "", "-1", "1.5", "x", "\u0663", "9" * 500])
def test_an_iterator_at_what_is_not_a_sequence_number_is_refused(streams, number):
    status, body = iterator_at(streams, number)
    assert (status, body["__type"].split("#")[-1]) == (400, "ValidationException")


def test_an_iterator_at_a_sequence_number_is_given(streams):
    status, body = iterator_at(streams, "100000000000000000001")
    assert "SequenceNumber is missing" not in str(body)
    assert status == 200 or "Trimmed" in str(body)


def iterator_at(streams, number):
    shard = described(streams)["Shards"][-1]["ShardId"]
    request = {"StreamArn": ARN, "ShardId": shard, "ShardIteratorType": "AT_SEQUENCE_NUMBER"}
    if number is not None:
        request["SequenceNumber"] = number
    status, body = streams.answer("GetShardIterator", json.dumps(request).encode(), "us-east-1")
    return status, json.loads(body)
