"""Whatever a request says, the answer is one of the service's."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kclrun.local.operations import OPERATIONS, answer
from kclrun.local.puts import PutEntry
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.ports import IteratorType

NOW = 1_700_000_000.0
ARN = "arn:aws:kinesis:us-east-1:123456789012:stream/s"
CANARY = "canary-in-the-data"


def service():
    kinesis = Kinesis(KinesisSettings(), b"s" * 32)
    stream = kinesis.create_stream("s", 2, NOW)
    kinesis.put(stream, PutEntry(b"x", "k"), NOW)
    return kinesis


TOKEN = service().iterator(
    service().stream("s", None, NOW), "shardId-000000000000", IteratorType.LATEST, NOW
)
FIELDS = st.sampled_from(
    [
        *("StreamName", "StreamARN", "ShardCount", "ShardId", "ShardIteratorType", "Timestamp"),
        *("StartingSequenceNumber", "ShardIterator", "Limit", "Records", "Data", "PartitionKey"),
        *("ExplicitHashKey", "ShardToSplit", "ShardToMerge", "NewStartingHashKey", "Type"),
        *("AdjacentShardToMerge", "TargetShardCount", "ScalingType", "NextToken", "MaxResults"),
        *("ShardFilter", "RetentionPeriodHours", "Tags", "TagKeys", "ResourceARN"),
        *("MaxRecordSizeInKiB", "ExclusiveStartShardId", "ExclusiveStartStreamName"),
    ]
)
PLAUSIBLE = st.sampled_from(
    [
        *("s", ARN, "shardId-000000000000", "shardId-000000000001", "TRIM_HORIZON", TOKEN),
        *("AT_TIMESTAMP", "AT_SEQUENCE_NUMBER", "UNIFORM_SCALING", "AFTER_SHARD_ID"),
        *(str(2**126), "5", "eA=="),
    ]
)
LEAVES = PLAUSIBLE | st.integers() | st.floats() | st.text(max_size=8) | st.none() | st.booleans()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=8,
)
BODIES = st.dictionaries(FIELDS, VALUES, max_size=6).map(lambda body: {"StreamName": "s"} | body)


@settings(max_examples=400, deadline=None)
@given(operation=st.sampled_from(sorted(OPERATIONS)), body=BODIES)
def test_any_body_is_answered_with_success_or_a_named_refusal(operation, body):
    given_answer = answer(service(), operation, json.dumps(body).encode(), NOW)

    assert given_answer.status in (200, 400)
    if given_answer.status == 400:
        assert json.loads(given_answer.body)["__type"].endswith("Exception")


@settings(max_examples=200, deadline=None)
@given(operation=st.sampled_from(sorted(OPERATIONS)), body=st.binary(max_size=60))
def test_any_bytes_are_answered_too(operation, body):
    assert answer(service(), operation, body, NOW).status in (200, 400)


@pytest.mark.parametrize(
    "entry",
    [
        {"Data": CANARY, "PartitionKey": "k"},
        {"Data": "eA==", "PartitionKey": CANARY * 20},
        {"Data": "eA==", "PartitionKey": "k", "ExplicitHashKey": CANARY},
        {"Data": "eA==", "PartitionKey": [CANARY]},
    ],
)
def test_a_refusal_names_neither_data_nor_keys(entry):
    body = json.dumps({"StreamName": "s", "Records": [entry]}).encode()

    refusal = answer(service(), "PutRecords", body, NOW)

    assert refusal.status == 400
    assert CANARY.encode() not in refusal.body


def test_a_lone_surrogate_is_refused():
    body = b'{"StreamName":"s","Data":"eA==","PartitionKey":"\\ud800"}'

    assert answer(service(), "PutRecord", body, NOW).status == 400


def test_a_request_above_ten_mebibytes_is_refused_whole():
    kinesis = service()
    records = [{"Data": "eHh4" * 250_000, "PartitionKey": "k"}] * 14
    body = json.dumps({"StreamName": "s", "Records": records}).encode()

    refusal = answer(kinesis, "PutRecords", body, NOW)

    assert json.loads(refusal.body)["__type"] == "InvalidArgumentException"
    assert kinesis.storage.used_bytes < 1000
