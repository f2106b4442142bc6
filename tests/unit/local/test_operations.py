"""Whatever a request says, the answer is one of the service's."""

import base64
import json

import cbor2
import pytest

from kclrun.codec.cbor import encode_cbor
from kclrun.codec.event_stream import MessageDecoder
from kclrun.local.operations import (
    Encoding,
    answer,
    event_message,
    exception_message,
    initial_response,
)
from kclrun.local.refusals import (
    resource_not_found,
)
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.stream import (
    PutEntry,
)
from tests.support.tables import over_rows

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


@pytest.fixture
def kinesis():
    return service()


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


def test_shards_are_listed_as_they_were_at_a_time(kinesis):
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


def test_a_request_above_ten_mebibytes_is_refused_whole(kinesis):
    records = [{"Data": "eHh4" * 250_000, "PartitionKey": "k"}] * 14
    body = json.dumps({"StreamName": "s", "Records": records}).encode()

    refusal = answer(kinesis, "PutRecords", body, NOW)

    assert json.loads(refusal.body)["__type"] == "InvalidArgumentException"
    assert kinesis.storage.used_bytes < 1000


ARN = "arn:aws:kinesis:us-east-1:123456789012:stream/s"
CONSUMER = f"{ARN}/consumer/c:{int(NOW)}"


def by_json(kinesis, operation, now=NOW, **request):
    """The body of an answer, or of a refusal."""
    given = answer(kinesis, operation, json.dumps(request).encode(), now)
    return json.loads(given.body or b"{}")


def with_consumer(name="c"):
    kinesis = service()
    by_json(kinesis, "RegisterStreamConsumer", StreamARN=ARN, ConsumerName=name)
    return kinesis


def test_a_consumer_is_registered_described_counted_and_deregistered(kinesis):
    consumer = {
        "ConsumerName": "c",
        "ConsumerARN": CONSUMER,
        "ConsumerStatus": "ACTIVE",
        "ConsumerCreationTimestamp": NOW,
    }

    made = by_json(kinesis, "RegisterStreamConsumer", StreamARN=ARN, ConsumerName="c")

    assert made == {"Consumer": consumer}
    assert by_json(kinesis, "DescribeStreamConsumer", ConsumerARN=CONSUMER) == {
        "ConsumerDescription": consumer | {"StreamARN": ARN}
    }
    summary = by_json(kinesis, "DescribeStreamSummary", StreamName="s")
    assert summary["StreamDescriptionSummary"]["ConsumerCount"] == 1
    named = {"StreamARN": ARN, "ConsumerName": "c"}
    assert by_json(kinesis, "DeregisterStreamConsumer", **named) == {}
    assert by_json(kinesis, "ListStreamConsumers", StreamARN=ARN) == {"Consumers": []}


def test_consumers_are_listed_in_pages():
    kinesis = with_consumer()
    for name in ("b", "a"):
        by_json(kinesis, "RegisterStreamConsumer", StreamARN=ARN, ConsumerName=name)
    pages, more = [], {}

    while len(pages) < 2:
        page = by_json(kinesis, "ListStreamConsumers", StreamARN=ARN, MaxResults=2, **more)
        pages.append([each["ConsumerName"] for each in page["Consumers"]])
        more = {"NextToken": page.get("NextToken")}

    assert (pages, more) == ([["a", "b"], ["c"]], {"NextToken": None})


@over_rows(
    ("named", "code"),
    [
        ({}, "InvalidArgumentException"),
        ({"StreamARN": ARN}, "InvalidArgumentException"),
        ({"StreamARN": ARN, "ConsumerName": "c"}, None),
        ({"ConsumerARN": CONSUMER}, None),
        ({"ConsumerName": "c"}, "InvalidArgumentException"),
        ({"ConsumerARN": ARN}, "ValidationException"),
        ({"ConsumerARN": f"{ARN}/consumer/c:1"}, "ResourceNotFoundException"),
        ({"ConsumerARN": f"{ARN}2/consumer/c:1"}, "ResourceNotFoundException"),
        ({"StreamARN": ARN, "ConsumerName": "d"}, "ResourceNotFoundException"),
    ],
)
def test_a_consumer_is_named_by_its_arn_or_by_its_streams_and_its_name(named, code):
    refusal = by_json(with_consumer(), "DescribeStreamConsumer", **named)

    assert refusal.get("__type") == code


@pytest.mark.parametrize("encoding", Encoding)
def test_a_subscriptions_messages_are_in_the_encoding_of_its_request(encoding):
    kinesis = with_consumer()
    request = {
        "ConsumerARN": CONSUMER,
        "ShardId": "shardId-000000000000",
        "StartingPosition": {"Type": "TRIM_HORIZON"},
    }
    encode = encode_cbor if encoding is Encoding.CBOR else lambda value: json.dumps(value).encode()
    decode = cbor2.loads if encoding is Encoding.CBOR else json.loads

    subscription = answer(kinesis, "SubscribeToShard", encode(request), NOW, encoding=encoding)
    event = subscription.next_event(NOW)

    data = initial_response(encoding) + event_message(event, encoding)
    data += exception_message(resource_not_found("gone"), encoding)
    first, second, third = MessageDecoder().feed(data)
    content_type = {":content-type": encoding.value.decode()}
    of_event = {":message-type": "event"} | content_type
    assert first.headers == {":event-type": "initial-response"} | of_event
    assert decode(first.payload) == {}
    assert second.headers == {":event-type": "SubscribeToShardEvent"} | of_event
    body = decode(second.payload)
    assert (body["Records"], body["MillisBehindLatest"]) == ([], 0)
    assert body["ContinuationSequenceNumber"].isdigit()
    assert (
        third.headers
        == {
            ":exception-type": "ResourceNotFoundException",
            ":message-type": "exception",
        }
        | content_type
    )
    assert decode(third.payload) == {"message": "gone"}


def test_the_last_event_of_a_shard_has_its_children_and_no_continuation():
    kinesis = with_consumer()
    stream = kinesis.stream("s", None, NOW)
    kinesis.split_shard(stream, "shardId-000000000000", 2**126, NOW)
    start = {"Type": "AT_TIMESTAMP", "Timestamp": NOW}
    body = {"ConsumerARN": CONSUMER, "ShardId": "shardId-000000000000", "StartingPosition": start}
    subscription = answer(kinesis, "SubscribeToShard", json.dumps(body).encode(), NOW)

    (message,) = MessageDecoder().feed(event_message(subscription.next_event(NOW), Encoding.JSON))

    last = json.loads(message.payload)
    assert [child["ShardId"][-1] for child in last["ChildShards"]] == ["2", "3"]
    assert "ContinuationSequenceNumber" not in last


def test_a_stream_with_consumers_is_deleted_with_a_word_only():
    kinesis = with_consumer()

    refusal = by_json(kinesis, "DeleteStream", StreamName="s")

    assert refusal["__type"] == "ResourceInUseException"
    assert by_json(kinesis, "DeleteStream", StreamName="s", EnforceConsumerDeletion=True) == {}
    assert by_json(kinesis, "ListStreams")["StreamNames"] == []


def test_the_limits_of_the_account_are_described(kinesis):
    on_demand = {"StreamMode": "ON_DEMAND"}
    by_json(kinesis, "CreateStream", StreamName="t", StreamModeDetails=on_demand)
    by_json(kinesis, "CreateStream", StreamName="u", ShardCount=1)

    assert by_json(kinesis, "DescribeLimits") == {
        "ShardLimit": 20_000,
        "OpenShardCount": 7,
        "OnDemandStreamCount": 1,
        "OnDemandStreamCountLimit": 50,
    }


def test_mode_encryption_and_monitoring_are_remembered(kinesis):
    def described():
        body = by_json(kinesis, "DescribeStreamSummary", StreamName="s")["StreamDescriptionSummary"]
        metrics = body["EnhancedMonitoring"][0]["ShardLevelMetrics"]
        mode = body["StreamModeDetails"]["StreamMode"]
        return mode, body["EncryptionType"], body.get("KeyId"), metrics

    key = {"StreamName": "s", "EncryptionType": "KMS", "KeyId": "alias/aws/kinesis"}
    some = {"StreamName": "s", "ShardLevelMetrics": ["OutgoingBytes", "IncomingBytes"]}
    both = ["IncomingBytes", "OutgoingBytes"]
    assert described() == ("PROVISIONED", "NONE", None, [])
    assert by_json(kinesis, "StartStreamEncryption", **key) == {}
    changed = by_json(kinesis, "EnableEnhancedMonitoring", **some)
    assert (changed["CurrentShardLevelMetrics"], changed["DesiredShardLevelMetrics"]) == ([], both)
    mode = {"StreamMode": "ON_DEMAND"}
    assert by_json(kinesis, "UpdateStreamMode", StreamARN=ARN, StreamModeDetails=mode) == {}
    assert described() == ("ON_DEMAND", "KMS", "alias/aws/kinesis", both)
    assert by_json(kinesis, "StopStreamEncryption", **key) == {}
    by_json(kinesis, "EnableEnhancedMonitoring", StreamName="s", ShardLevelMetrics=["ALL"])
    left = by_json(kinesis, "DisableEnhancedMonitoring", **some)["DesiredShardLevelMetrics"]
    assert len(left) == 5
    assert described() == ("ON_DEMAND", "NONE", None, left)


def test_a_stream_is_made_with_what_its_request_says_and_else_with_four_shards():
    kinesis = Kinesis(KinesisSettings(), b"s" * 32)

    def summary(name):
        body = by_json(kinesis, "DescribeStreamSummary", StreamName=name)
        summary = body["StreamDescriptionSummary"]
        tags = by_json(kinesis, "ListTagsForStream", StreamName=name)["Tags"]
        return summary["OpenShardCount"], summary["MaxRecordSizeInKiB"], tags

    by_json(kinesis, "CreateStream", StreamName="plain")
    sized = {"ShardCount": 3, "MaxRecordSizeInKiB": 2048, "Tags": {"a": "1"}}
    by_json(kinesis, "CreateStream", StreamName="sized", **sized)

    assert summary("plain") == (4, 1024, [])
    assert summary("sized") == (3, 2048, [{"Key": "a", "Value": "1"}])
    arn = ARN.replace("stream/s", "stream/plain")
    by_json(kinesis, "UpdateMaxRecordSize", StreamARN=arn, MaxRecordSizeInKiB=4096)
    assert summary("plain")[1] == 4096
    assert answer(kinesis, "ListStreams", b"", NOW).status == 200, "a body may be left out"


def test_shards_are_split_merged_and_counted(kinesis):
    first, second = "shardId-000000000000", "shardId-000000000001"

    def shards():
        listed = by_json(kinesis, "ListShards", StreamName="s")["Shards"]
        closed = ["EndingSequenceNumber" in each["SequenceNumberRange"] for each in listed]
        parents = [each.get("ParentShardId") for each in listed]
        return [*zip((each["ShardId"][-1] for each in listed), parents, closed, strict=True)]

    merge = {"ShardToMerge": first, "AdjacentShardToMerge": second}
    assert by_json(kinesis, "MergeShards", StreamName="s", **merge) == {}
    assert shards() == [("0", None, True), ("1", None, True), ("2", first, False)]
    cut = {"ShardToSplit": "shardId-000000000002", "NewStartingHashKey": str(2**126)}
    assert by_json(kinesis, "SplitShard", StreamName="s", **cut) == {}
    assert [number for number, _, is_closed in shards() if not is_closed] == ["3", "4"]
    scaled = {"StreamName": "s", "TargetShardCount": 1, "ScalingType": "UNIFORM_SCALING"}
    assert by_json(kinesis, "UpdateShardCount", **scaled) == {
        "StreamName": "s",
        "StreamARN": ARN,
        "CurrentShardCount": 2,
        "TargetShardCount": 1,
    }
    refusal = by_json(kinesis, "UpdateShardCount", **scaled | {"ScalingType": "OTHER"})
    assert refusal["__type"] == "ValidationException"


def test_the_retention_is_lengthened_and_shortened_each_by_its_own_call(kinesis):
    def change(direction, hours):
        operation = f"{direction}StreamRetentionPeriod"
        return by_json(kinesis, operation, StreamName="s", RetentionPeriodHours=hours).get("__type")

    calls = [("Decrease", 48), ("Increase", 48), ("Increase", 24), ("Decrease", 24)]
    refused = "InvalidArgumentException"
    assert [change(*call) for call in calls] == [refused, None, refused, None]


def test_tags_are_added_removed_and_listed_by_name_and_by_arn(kinesis):
    tags = {f"k{number:02}": str(number) for number in range(50)}

    def keys(**request):
        return [tag["Key"] for tag in by_json(kinesis, "ListTagsForStream", **request)["Tags"]]

    assert by_json(kinesis, "AddTagsToStream", StreamName="s", Tags=tags) == {}
    refusal = by_json(kinesis, "AddTagsToStream", StreamName="s", Tags={"one more": ""})
    assert refusal["__type"] == "InvalidArgumentException"
    assert by_json(kinesis, "TagResource", ResourceARN=ARN, Tags={"k00": "again"}) == {}
    assert by_json(kinesis, "UntagResource", ResourceARN=ARN, TagKeys=["k01", "none"]) == {}
    assert by_json(kinesis, "RemoveTagsFromStream", StreamARN=ARN, TagKeys=["k02"]) == {}
    of_resource = by_json(kinesis, "ListTagsForResource", ResourceARN=ARN)
    assert [tag["Value"] for tag in of_resource["Tags"]][:2] == ["again", "3"]
    assert (len(of_resource["Tags"]), "HasMoreTags" in of_resource) == (48, False)
    assert keys(StreamName="s", ExclusiveStartTagKey="k03", Limit=2) == ["k04", "k05"]
    for limit, has_more in ((47, True), (48, False)):
        page = by_json(kinesis, "ListTagsForStream", StreamARN=ARN, Limit=limit)
        assert page["HasMoreTags"] is has_more


def test_streams_and_shards_are_listed_in_pages(kinesis):
    for name in ("t", "u"):
        by_json(kinesis, "CreateStream", StreamName=name, ShardCount=3)

    def streams(**request):
        page = by_json(kinesis, "ListStreams", **request)
        assert [each["StreamName"] for each in page["StreamSummaries"]] == page["StreamNames"]
        tokens.append(page.get("NextToken"))
        assert page["HasMoreStreams"] is (tokens[-1] is not None)
        return page["StreamNames"], page["HasMoreStreams"]

    tokens = []
    assert streams() == (["s", "t", "u"], False)
    assert streams(Limit=3) == (["s", "t", "u"], False)
    assert streams(Limit=2) == (["s", "t"], True)
    assert streams(Limit=2, NextToken=tokens[-1]) == (["u"], False)
    assert streams(Limit=1, ExclusiveStartStreamName="s") == (["t"], True)

    def shards(**request):
        page = by_json(kinesis, "DescribeStream", StreamName="t", **request)["StreamDescription"]
        return [shard["ShardId"][-1] for shard in page["Shards"]], page["HasMoreShards"]

    assert shards() == (["0", "1", "2"], False)
    assert shards(Limit=3) == (["0", "1", "2"], False)
    assert shards(Limit=2) == (["0", "1"], True)
    assert shards(ExclusiveStartShardId="shardId-000000000000") == (["1", "2"], False)
    page = by_json(kinesis, "ListShards", StreamName="t", MaxResults=2)
    assert len(page["Shards"]) == 2
    rest = by_json(kinesis, "ListShards", NextToken=page["NextToken"])
    assert [shard["ShardId"][-1] for shard in rest["Shards"]] == ["2"]
    assert "NextToken" not in rest
    for more in ({"StreamName": "t"}, {"ExclusiveStartShardId": "shardId-000000000000"}):
        refusal = by_json(kinesis, "ListShards", NextToken=page["NextToken"], **more)
        assert refusal["__type"] == "InvalidArgumentException"


def test_a_stream_that_is_being_created_has_no_shards_to_describe_yet():
    kinesis = Kinesis(KinesisSettings(settle_s=2.0), b"s" * 32)
    kinesis.create_stream("s", 1, NOW)

    counts = [
        len(by_json(kinesis, "DescribeStream", now, StreamName="s")["StreamDescription"]["Shards"])
        for now in (NOW + 1, NOW + 2)
    ]

    assert counts == [0, 1]


def test_a_closed_shard_is_read_to_its_end_and_failed_records_are_counted():
    kinesis = Kinesis(KinesisSettings(stored_bytes_max=4000), b"s" * 32)
    kinesis.create_stream("s", 1, NOW)
    entries = [{"Data": data, "PartitionKey": "k"} for data in ("eA==", "eA==", "eHh4" * 1500)]
    put = by_json(kinesis, "PutRecords", StreamName="s", Records=entries)
    first = "shardId-000000000000"
    position = {"ShardId": first, "ShardIteratorType": "TRIM_HORIZON"}
    iterator = by_json(kinesis, "GetShardIterator", StreamName="s", **position)["ShardIterator"]
    page = by_json(kinesis, "GetRecords", ShardIterator=iterator)
    cut = {"ShardToSplit": first, "NewStartingHashKey": str(2**127)}
    by_json(kinesis, "SplitShard", StreamName="s", **cut)
    end = by_json(kinesis, "GetRecords", ShardIterator=page["NextShardIterator"])

    assert put["FailedRecordCount"] == 1
    assert [record["Data"] for record in page["Records"]] == ["eA==", "eA=="]
    assert "ChildShards" not in page
    assert len(end["ChildShards"]) == 2
    assert "NextShardIterator" not in end


def test_a_request_of_just_ten_mebibytes_with_its_keys_is_taken(kinesis):
    kinesis.stream("s", None, NOW).record_bytes_max = 10 * 1024 * 1024
    half = base64.b64encode(b"x" * (5 * 1024 * 1024 - 1)).decode()

    def put(key):
        entries = [{"Data": half, "PartitionKey": each} for each in ("k", key)]
        return by_json(kinesis, "PutRecords", StreamName="s", Records=entries)

    assert put("kk")["__type"] == "InvalidArgumentException"
    assert put("k")["FailedRecordCount"] == 0


@pytest.mark.parametrize("operation", ["StartStreamEncryption", "UpdateStreamMode"])
def test_a_stream_that_is_being_changed_is_not_changed_again(operation):
    kinesis = Kinesis(KinesisSettings(settle_s=2.0), b"s" * 32)
    kinesis.create_stream("s", 1, NOW)
    more = {
        "StartStreamEncryption": {"EncryptionType": "KMS", "KeyId": "k"},
        "UpdateStreamMode": {"StreamModeDetails": {"StreamMode": "ON_DEMAND"}},
    }[operation]

    def code(now):
        return by_json(kinesis, operation, now, StreamARN=ARN, **more).get("__type")

    assert [code(NOW + after) for after in (1.0, 2.0, 3.0, 4.0)] == [
        *("ResourceInUseException", None, "ResourceInUseException", None)
    ]
