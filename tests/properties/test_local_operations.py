"""Whatever a request to the embedded Kinesis says, the answer is one of the service's."""

import json

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kclrun.codec.cbor import decode_cbor
from kclrun.local.consumers import Subscription
from kclrun.local.operations import OPERATIONS, Encoding, answer
from kclrun.model.record import IteratorType
from tests.examples import examples
from tests.unit.local.test_operations import NOW, service, with_consumer

ARN = "arn:aws:kinesis:us-east-1:123456789012:stream/s"


CONSUMER = f"{ARN}/consumer/c:{int(NOW)}"


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
        *("ConsumerARN", "ConsumerName", "StartingPosition", "SequenceNumber", "KeyId"),
        *("EncryptionType", "ShardLevelMetrics", "StreamModeDetails", "StreamMode"),
    ]
)


PLAUSIBLE = st.sampled_from(
    [
        *("s", ARN, "shardId-000000000000", "shardId-000000000001", "TRIM_HORIZON", TOKEN),
        *("AT_TIMESTAMP", "AT_SEQUENCE_NUMBER", "UNIFORM_SCALING", "AFTER_SHARD_ID"),
        *(str(2**126), "5", "eA==", CONSUMER, "c", "LATEST", "KMS", "ALL", "ON_DEMAND"),
    ]
)


LEAVES = PLAUSIBLE | st.integers() | st.floats() | st.text(max_size=8) | st.none() | st.booleans()


VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=8,
)


# Cbor has what JSON has not: bytes, times, numbers that are none, tags.
CBOR_VALUES = st.recursive(
    LEAVES
    | st.binary(max_size=8)
    | st.builds(cbor2.CBORTag, st.integers(0, 60), st.integers() | st.floats() | st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=8,
)


CBOR_BODIES = st.dictionaries(FIELDS, CBOR_VALUES, max_size=6).map(
    lambda body: {"StreamName": "s"} | body
)


BODIES = st.dictionaries(FIELDS, VALUES, max_size=6).map(lambda body: {"StreamName": "s"} | body)


@examples(400)
@given(operation=st.sampled_from(sorted(OPERATIONS)), body=BODIES)
def test_any_body_is_answered_with_success_or_a_named_refusal(operation, body):
    given_answer = answer(with_consumer(), operation, json.dumps(body).encode(), NOW)

    if isinstance(given_answer, Subscription):
        assert given_answer.next_event(NOW) is not None
        return
    assert given_answer.status in (200, 400)
    if given_answer.status == 400:
        assert json.loads(given_answer.body)["__type"].endswith("Exception")


@examples(400)
@given(operation=st.sampled_from(sorted(OPERATIONS)), body=CBOR_BODIES)
def test_any_cbor_is_answered_with_success_or_a_named_refusal(operation, body):
    kinesis = with_consumer()
    given_answer = answer(kinesis, operation, cbor2.dumps(body), NOW, encoding=Encoding.CBOR)

    if isinstance(given_answer, Subscription):
        return
    assert given_answer.status in (200, 400)
    if given_answer.status == 400:
        assert decode_cbor(given_answer.body)["__type"].endswith("Exception")


@pytest.mark.parametrize("encoding", Encoding)
@examples(200)
@given(operation=st.sampled_from(sorted(OPERATIONS)), body=st.binary(max_size=60))
def test_any_bytes_are_answered_too(operation, body, encoding):
    assert answer(service(), operation, body, NOW, encoding=encoding).status in (200, 400)
