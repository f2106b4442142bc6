"""Whatever a request says, the answer is one of the service's."""

from __future__ import annotations

import json

import cbor2
import pytest

from kclrun.codec.cbor import encode_cbor
from kclrun.local.operations import Encoding, answer
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.stream import PutEntry

NOW = 1_700_000_000.0
CANARY = "canary-in-the-data"


def service():
    kinesis = Kinesis(KinesisSettings(), b"s" * 32)
    stream = kinesis.create_stream("s", 2, NOW)
    kinesis.put(stream, PutEntry(b"x", "k"), NOW)
    return kinesis


TIMES_AS_TAGS = {1: lambda value, _immutable: ("time", value)}


def by_cbor(kinesis, operation, now=NOW, **request):
    given_answer = answer(kinesis, operation, encode_cbor(request), now, encoding=Encoding.CBOR)
    return given_answer.status, cbor2.loads(given_answer.body, semantic_decoders=TIMES_AS_TAGS)


def test_cbor_carries_bytes_as_bytes_and_times_as_tagged_milliseconds():
    kinesis = Kinesis(KinesisSettings(), b"s" * 32)
    kinesis.create_stream("s", 1, NOW)
    records = [{"Data": b"\xff\x00", "PartitionKey": "k"}]
    by_cbor(kinesis, "PutRecords", NOW + 1.25, StreamName="s", Records=records)

    # A real number of the request is written as tag 1 over milliseconds, as the Java SDK does it.
    at = {"ShardIteratorType": "AT_TIMESTAMP", "Timestamp": NOW + 1.0}
    shard = {"StreamName": "s", "ShardId": "shardId-000000000000"}
    _, iterator = by_cbor(kinesis, "GetShardIterator", NOW + 2, **shard, **at)
    _, page = by_cbor(kinesis, "GetRecords", NOW + 2, **iterator)

    (record,) = page["Records"]
    assert (record["Data"], record["PartitionKey"]) == (b"\xff\x00", "k")
    assert record["ApproximateArrivalTimestamp"] == ("time", round((NOW + 1.25) * 1000))
    assert page["MillisBehindLatest"] == 0
    _, described = by_cbor(kinesis, "DescribeStreamSummary", StreamName="s")
    created = described["StreamDescriptionSummary"]["StreamCreationTimestamp"]
    assert created == ("time", round(NOW * 1000))


def test_a_refusal_of_a_cbor_request_is_cbor():
    status, refusal = by_cbor(service(), "DescribeStream", StreamName="nothing")

    assert (status, refusal["__type"]) == (400, "ResourceNotFoundException")
    assert "nothing" in refusal["message"]


@pytest.mark.parametrize(
    ("content_type", "encoding"),
    [
        (b"application/x-amz-cbor-1.1", Encoding.CBOR),
        (b"Application/X-Amz-Cbor-1.1; charset=x", Encoding.CBOR),
        (b"application/x-amz-json-1.1", Encoding.JSON),
        (b"", Encoding.JSON),
    ],
)
def test_the_content_type_says_which_encoding(content_type, encoding):
    assert Encoding.of(content_type) is encoding


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


def test_shards_are_listed_as_they_were_at_a_time():
    kinesis = service()
    kinesis.split_shard(kinesis.stream("s", None, NOW), "shardId-000000000000", 2**126, NOW + 60)

    def listed(at):
        shard_filter = {"Type": "AT_TIMESTAMP", "Timestamp": at}
        body = json.dumps({"StreamName": "s", "ShardFilter": shard_filter}).encode()
        shards = json.loads(answer(kinesis, "ListShards", body, NOW + 90).body)["Shards"]
        return [shard["ShardId"][-1] for shard in shards]

    assert listed(NOW + 30) == ["0", "1"]
    assert listed(NOW + 80) == ["1", "2", "3"]


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
