"""What the API reference of Kinesis refuses is refused: the bounds of every field of every
operation, as botocore's model has them, and the errors that the texts of the operations name."""

import itertools
import json

import botocore.session
import pytest

from kclrun.local.limits import AWS_LIMITS
from kclrun.local.operations import OPERATIONS, answer
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.stream import PutEntry
from kclrun.model.shard import HASH_KEY_MAX
from tests.support.tables import over_rows

NOW = 1_700_000_000.0
ARN = "arn:aws:kinesis:us-east-1:123456789012:stream/s"
CONSUMER = f"{ARN}/consumer/c:{int(NOW)}"
FIRST, SECOND = "shardId-000000000000", "shardId-000000000001"
MODEL = botocore.session.get_session().get_service_model("kinesis")
REFUSED = {"ValidationException", "InvalidArgumentException", "SerializationException"}
STREAM = {"StreamName": "s"}
ON_STREAM = {"StreamARN": ARN}
PUT = {"Data": "eA==", "PartitionKey": "k"}
MODE = {"StreamModeDetails": {"StreamMode": "ON_DEMAND"}}
KMS = {"EncryptionType": "KMS", "KeyId": "alias/mine"}
TAGS, TAG_KEYS = {"Tags": {"a": "1"}}, {"TagKeys": ["a"]}
METRICS = {"ShardLevelMetrics": ["IncomingBytes"]}
FILTER = {"ShardFilter": {"Type": "AFTER_SHARD_ID", "ShardId": FIRST}}
START = {"StartingPosition": {"Type": "AT_TIMESTAMP", "Timestamp": NOW}}

# A request of each operation that is carried out.
VALID = {
    "AddTagsToStream": STREAM | TAGS,
    "CreateStream": {"StreamName": "new", "ShardCount": 1} | TAGS,
    "DecreaseStreamRetentionPeriod": STREAM | {"RetentionPeriodHours": 24},
    "DeleteStream": STREAM | {"EnforceConsumerDeletion": True},
    "DeregisterStreamConsumer": {"ConsumerARN": CONSUMER},
    "DescribeLimits": {},
    "DescribeStream": STREAM | {"ExclusiveStartShardId": FIRST},
    "DescribeStreamConsumer": ON_STREAM | {"ConsumerName": "c"},
    "DescribeStreamSummary": STREAM,
    "DisableEnhancedMonitoring": STREAM | METRICS,
    "EnableEnhancedMonitoring": STREAM | METRICS,
    "GetRecords": {},  # with an iterator, below
    "GetShardIterator": STREAM | {"ShardId": FIRST, "ShardIteratorType": "LATEST"},
    "IncreaseStreamRetentionPeriod": STREAM | {"RetentionPeriodHours": 48},
    "ListShards": STREAM | FILTER,
    "ListStreamConsumers": ON_STREAM,
    "ListStreams": {},
    "ListTagsForResource": {"ResourceARN": ARN},
    "ListTagsForStream": STREAM,
    "MergeShards": STREAM | {"ShardToMerge": FIRST, "AdjacentShardToMerge": SECOND},
    "PutRecord": STREAM | PUT,
    "PutRecords": STREAM | {"Records": [PUT]},
    "RegisterStreamConsumer": ON_STREAM | {"ConsumerName": "new"} | TAGS,
    "RemoveTagsFromStream": STREAM | TAG_KEYS,
    "SplitShard": STREAM | {"ShardToSplit": FIRST, "NewStartingHashKey": str(2**126)},
    "StartStreamEncryption": STREAM | KMS,
    "StopStreamEncryption": STREAM | KMS,
    "SubscribeToShard": {"ConsumerARN": CONSUMER, "ShardId": FIRST} | START,
    "TagResource": {"ResourceARN": CONSUMER} | TAGS,
    "UntagResource": {"ResourceARN": CONSUMER} | TAG_KEYS,
    "UpdateMaxRecordSize": ON_STREAM | {"MaxRecordSizeInKiB": 2048},
    "UpdateShardCount": STREAM | {"TargetShardCount": 4, "ScalingType": "UNIFORM_SCALING"},
    "UpdateStreamMode": ON_STREAM | MODE,
}


def service(settle_s=0.0, note=lambda _: None, **settings):
    """A stream of two shards with a record and a consumer."""
    kinesis = Kinesis(KinesisSettings(settle_s=settle_s, **settings), b"s" * 32, note=note)
    stream = kinesis.create_stream("s", 2, NOW - settle_s)
    kinesis.put(stream, PutEntry(b"x", "k"), NOW)
    kinesis.consumers_of(stream).register("c", NOW)
    return kinesis


def code_of(kinesis, operation, request, now=NOW):
    """The error code of an answer; None for a subscription or a 200."""
    given = answer(kinesis, operation, json.dumps(request).encode(), now)
    if getattr(given, "status", 200) == 200:
        return None
    return json.loads(given.body)["__type"]


def body_of(kinesis, operation, request, now=NOW):
    given = answer(kinesis, operation, json.dumps(request).encode(), now)
    assert given.status == 200, given.body
    return json.loads(given.body or b"{}")


def valid(kinesis, operation):
    request = VALID[operation]
    if operation == "GetRecords":
        request = body_of(kinesis, "GetShardIterator", VALID["GetShardIterator"])
    return request


def beyond(shape):
    """Values outside the bounds of a shape: of itself and of what it holds. Each with its name."""
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    yield "another type", {"another": ["type"]} if shape.type_name != "structure" else ["another"]
    match shape.type_name:
        case "string":
            if shape.enum:
                yield "not in the enum", "SOMETHING"
            if shape.metadata.get("pattern"):
                yield "against the pattern", "a b\u00e9"
            if low:
                yield "too short", ""
            if high:
                yield "too long", "x" * (high + 1)
        case "integer":
            if low is not None:
                yield "too small", low - 1
            if high is not None:
                yield "too large", high + 1
        case "blob":
            yield "too long", "eHh4" * (high // 3 + 1)
        case "list":
            element = next(iter(_within(shape.member)))
            if low:
                yield "too few", []
            yield "too many", [element] * (high + 1)
            yield from ((f"an element {name}", [value]) for name, value in beyond(shape.member))
        case "map":
            if low:
                yield "too few", {}
            yield "too many", {f"k{number}": "" for number in range(high + 1)}
            yield from (
                (f"a key {name}", {value: ""})
                for name, value in beyond(shape.key)
                if isinstance(value, str)
            )
            yield from ((f"a value {name}", {"k": value}) for name, value in beyond(shape.value))
        case "structure":
            for member, inner in shape.members.items():
                for name, value in beyond(inner):
                    yield f"{member} {name}", _inside(shape) | {member: value}


def _within(shape):
    yield PUT if shape.type_name == "structure" else "IncomingBytes" if shape.enum else "a"


def _inside(shape):
    """The rest of a structure, without fault."""
    return {
        "ShardFilter": {"Type": "FROM_TRIM_HORIZON"},
        "StartingPosition": {"Type": "LATEST"},
        "StreamModeDetails": {"StreamMode": "PROVISIONED"},
        "PutRecordsRequestEntry": PUT,
    }[shape.name]


def _faults():
    for operation in OPERATIONS:
        shape = MODEL.operation_model(operation).input_shape
        for member, inner in () if shape is None else shape.members.items():
            if member in shape.required_members:
                yield operation, member, "is missing", None
            for name, value in beyond(inner):
                yield operation, member, name, value


def test_every_operation_is_in_the_table_and_its_request_is_carried_out():
    assert sorted(VALID) == sorted(OPERATIONS)
    for operation in VALID:
        kinesis = service()
        assert code_of(kinesis, operation, valid(kinesis, operation)) is None, operation


@over_rows(("operation", "member", "fault", "value"), _faults)
def test_a_field_outside_its_bounds_is_refused(operation, member, fault, value):
    kinesis = service()
    request = valid(kinesis, operation) | {member: value}
    if value is None:
        del request[member]

    assert code_of(kinesis, operation, request) in REFUSED


@over_rows(
    ("operation", "more"),
    [
        ("PutRecord", {"DryRun": True}),
        ("PutRecords", {"DryRun": True}),
        ("GetRecords", {"DryRun": True}),
        ("CreateStream", {"WarmThroughputMiBps": 10}),
        ("UpdateStreamMode", {"WarmThroughputMiBps": 10}),
        ("CreateStream", {"RecordDistributionStrategy": "AUTO"}),
        *(
            (operation, {"StreamId": "a" * 20 + "-abc"})
            for operation in ("PutRecord", "ListShards")
        ),
    ],
)
def test_what_is_not_emulated_is_refused_and_not_left_aside(operation, more):
    kinesis = service()
    bytes_before = kinesis.storage.used_bytes

    assert code_of(kinesis, operation, valid(kinesis, operation) | more) in REFUSED
    assert kinesis.storage.used_bytes == bytes_before


def token(operation, request):
    """A token of a listing of more than one page."""

    def made(kinesis):
        return {"NextToken": body_of(kinesis, operation, request)["NextToken"]}

    return made


SHARDS_TOKEN = token("ListShards", STREAM | {"MaxResults": 1})
STREAMS_TOKEN = token("ListStreams", {"Limit": 1})
CONSUMERS_TOKEN = token("ListStreamConsumers", ON_STREAM | {"MaxResults": 1})
INVALID, IN_USE, LIMIT = (
    "InvalidArgumentException",
    "ResourceInUseException",
    "LimitExceededException",
)
NOT_FOUND, EXPIRED = "ResourceNotFoundException", "ExpiredNextTokenException"
SCALE = {"ScalingType": "UNIFORM_SCALING"}
OTHER_MOMENT = {"StreamCreationTimestamp": NOW - 3600}

# The operation, what its request has besides the valid one (or in its place, with a token), the
# error. From the text of the operation in the reference.
SENTENCES = [
    ("AddTagsToStream", {"Tags": {f"k{n}": "" for n in range(51)}}, INVALID),
    ("AddTagsToStream", {"Tags": {"aws:x": ""}}, INVALID),
    ("TagResource", {"Tags": {f"k{n}": "" for n in range(51)}}, INVALID),
    ("CreateStream", {"Tags": {f"k{n}": "" for n in range(51)}}, INVALID),
    ("RegisterStreamConsumer", {"Tags": {f"k{n}": "" for n in range(51)}}, INVALID),
    ("RegisterStreamConsumer", {"Tags": {"AWS:x": ""}}, INVALID),
    ("RegisterStreamConsumer", {"ConsumerName": "c"}, IN_USE),
    ("CreateStream", {"StreamName": "s"}, IN_USE),
    ("CreateStream", {"ShardCount": 20_001}, LIMIT),
    ("CreateStream", MODE, INVALID),
    (
        "CreateStream",
        {"StreamName": "new", "StreamModeDetails": {"StreamMode": "PROVISIONED"}},
        None,
    ),
    ("DeleteStream", {"EnforceConsumerDeletion": False}, IN_USE),
    ("DescribeStream", {"StreamName": "other"}, NOT_FOUND),
    ("DescribeStream", {"StreamARN": ARN.replace("stream/s", "stream/t")}, INVALID),
    ("IncreaseStreamRetentionPeriod", {"RetentionPeriodHours": 23}, INVALID),
    ("IncreaseStreamRetentionPeriod", {"RetentionPeriodHours": 8761}, INVALID),
    ("DecreaseStreamRetentionPeriod", {"RetentionPeriodHours": 25}, INVALID),
    ("GetShardIterator", {"ShardIteratorType": "AT_SEQUENCE_NUMBER"}, INVALID),
    ("GetShardIterator", {"ShardIteratorType": "AT_TIMESTAMP"}, INVALID),
    ("GetShardIterator", {"ShardIteratorType": "AT_TIMESTAMP", "Timestamp": NOW + 60}, INVALID),
    ("GetShardIterator", {"ShardId": "shardId-000000000009"}, NOT_FOUND),
    ("GetRecords", {"ShardIterator": "AAAA"}, INVALID),
    ("ListShards", OTHER_MOMENT, NOT_FOUND),
    ("ListShards", {"StreamCreationTimestamp": NOW}, None),
    ("ListShards", {"ShardFilter": {"Type": "AT_TIMESTAMP"}}, INVALID),
    ("ListShards", {"ShardFilter": {"Type": "AFTER_SHARD_ID"}}, INVALID),
    ("ListStreamConsumers", OTHER_MOMENT, NOT_FOUND),
    ("MergeShards", {"AdjacentShardToMerge": FIRST}, INVALID),
    ("PutRecord", {"ExplicitHashKey": str(HASH_KEY_MAX + 1)}, INVALID),
    ("PutRecord", {"SequenceNumberForOrdering": "abc"}, "ValidationException"),
    ("SplitShard", {"NewStartingHashKey": "0"}, INVALID),
    ("SplitShard", {"NewStartingHashKey": str(2**127)}, INVALID),
    ("SubscribeToShard", {"StartingPosition": {"Type": "AT_SEQUENCE_NUMBER"}}, INVALID),
    ("UpdateShardCount", {"TargetShardCount": 5}, INVALID),
    ("UpdateShardCount", {"TargetShardCount": 1}, None),
]


@over_rows(("operation", "more", "code"), SENTENCES)
def test_what_an_operation_says_that_it_refuses_is_refused(operation, more, code):
    kinesis = service()

    assert code_of(kinesis, operation, valid(kinesis, operation) | more) == code


@over_rows(
    ("operation", "made", "more"),
    [
        *(
            ("ListShards", SHARDS_TOKEN, more)
            for more in (
                STREAM,
                ON_STREAM,
                FILTER,
                {"StreamCreationTimestamp": NOW},
                {"ExclusiveStartShardId": FIRST},
            )
        ),
        ("ListStreamConsumers", CONSUMERS_TOKEN, ON_STREAM | {"StreamCreationTimestamp": NOW}),
        # The token of another listing.
        ("ListShards", STREAMS_TOKEN, {}),
        ("ListStreams", SHARDS_TOKEN, {}),
        ("ListStreams", CONSUMERS_TOKEN, {}),
        ("ListStreamConsumers", STREAMS_TOKEN, ON_STREAM),
        ("ListStreamConsumers", CONSUMERS_TOKEN, {"StreamARN": ARN.replace("/s", "/t")}),
    ],
)
def test_a_token_says_all_that_a_listing_needs(operation, made, more):
    kinesis = service()
    other = kinesis.create_stream("t", 1, NOW)
    kinesis.consumers_of(other).register("c", NOW)
    kinesis.consumers_of(kinesis.stream("s", None, NOW)).register("d", NOW)

    assert code_of(kinesis, operation, made(kinesis) | more) == INVALID


@pytest.mark.parametrize(
    ("operation", "made", "more"),
    [
        ("ListShards", SHARDS_TOKEN, {}),
        ("ListStreams", STREAMS_TOKEN, {}),
        ("ListStreamConsumers", CONSUMERS_TOKEN, ON_STREAM),
    ],
)
def test_a_token_is_valid_for_five_minutes(operation, made, more):
    kinesis = service()
    kinesis.create_stream("t", 1, NOW)
    kinesis.consumers_of(kinesis.stream("s", None, NOW)).register("d", NOW)
    request = made(kinesis) | more

    assert code_of(kinesis, operation, request, NOW + 299) is None
    assert code_of(kinesis, operation, request, NOW + 301) == EXPIRED
    assert code_of(kinesis, operation, request | {"NextToken": "made-up"}) == INVALID


RESHARDS = ("SplitShard", "MergeShards", "UpdateShardCount")
CHANGES = (
    *RESHARDS,
    "DecreaseStreamRetentionPeriod",
    "DisableEnhancedMonitoring",
    "EnableEnhancedMonitoring",
    "IncreaseStreamRetentionPeriod",
    "StartStreamEncryption",
    "StopStreamEncryption",
    "UpdateMaxRecordSize",
    "UpdateStreamMode",
)


@over_rows(("first", "second"), itertools.product(CHANGES, CHANGES))
def test_a_stream_that_is_updating_is_not_changed(first, second):
    kinesis = service(settle_s=10.0)

    assert code_of(kinesis, first, VALID[first]) is None
    described = body_of(kinesis, "DescribeStreamSummary", STREAM, NOW + 9)
    assert described["StreamDescriptionSummary"]["StreamStatus"] == "UPDATING"
    assert code_of(kinesis, second, VALID[second], NOW + 9) == IN_USE
    for operation in ("PutRecord", "ListShards", "GetShardIterator", "DescribeStream"):
        assert code_of(kinesis, operation, VALID[operation], NOW + 9) is None


@pytest.mark.parametrize("operation", RESHARDS)
def test_an_on_demand_stream_is_not_resharded(operation):
    kinesis = service()
    body_of(kinesis, "UpdateStreamMode", VALID["UpdateStreamMode"])

    assert code_of(kinesis, operation, VALID[operation]) == "ValidationException"


def test_a_stream_without_a_count_is_on_demand_and_one_with_a_count_is_provisioned():
    def mode(**request):
        kinesis = service()
        body_of(kinesis, "CreateStream", {"StreamName": "new"} | request)
        described = body_of(kinesis, "DescribeStreamSummary", {"StreamName": "new"})
        return described["StreamDescriptionSummary"]["StreamModeDetails"]["StreamMode"]

    assert (mode(), mode(ShardCount=1), mode(**MODE)) == ("ON_DEMAND", "PROVISIONED", "ON_DEMAND")
    provisioned = {"StreamModeDetails": {"StreamMode": "PROVISIONED"}}
    assert code_of(service(), "CreateStream", {"StreamName": "new"} | provisioned) == INVALID


def test_five_streams_may_be_created_at_once_and_fifty_be_on_demand():
    slow = service(settle_s=10.0)
    for number in range(5):
        assert code_of(slow, "CreateStream", {"StreamName": f"n{number}", "ShardCount": 1}) is None
    assert code_of(slow, "CreateStream", {"StreamName": "more", "ShardCount": 1}) == LIMIT
    assert code_of(slow, "CreateStream", {"StreamName": "more", "ShardCount": 1}, NOW + 10) is None

    quick = service()
    for number in range(50):
        assert code_of(quick, "CreateStream", {"StreamName": f"n{number}"}) is None
    assert code_of(quick, "CreateStream", {"StreamName": "more"}) == LIMIT
    assert code_of(quick, "CreateStream", {"StreamName": "more", "ShardCount": 1}) is None


def test_with_limits_a_stream_is_scaled_ten_times_a_day():
    kinesis, counts = service(limits=AWS_LIMITS), [4, 2] * 5
    for count in counts:
        assert (
            code_of(kinesis, "UpdateShardCount", STREAM | SCALE | {"TargetShardCount": count})
            is None
        )
    once_more = STREAM | SCALE | {"TargetShardCount": 4}
    assert code_of(kinesis, "UpdateShardCount", once_more) == LIMIT
    assert code_of(kinesis, "UpdateShardCount", once_more, NOW + 86_400) is None


@pytest.mark.parametrize(
    ("operation", "limit", "listed", "most"),
    [("DescribeStream", "Limit", "Shards", 100), ("ListShards", "MaxResults", "Shards", 1000)],
)
def test_a_page_has_no_more_than_the_service_gives(operation, limit, listed, most):
    kinesis = Kinesis(KinesisSettings(), b"s" * 32)
    kinesis.create_stream("s", most + 1, NOW)

    for wanted in (most, 10_000):
        page = body_of(kinesis, operation, STREAM | {limit: wanted})
        page = page.get("StreamDescription", page)
        assert len(page[listed]) == most
        assert page.get("HasMoreShards", "NextToken" in page)


def test_a_page_of_names_has_a_hundred_at_most():
    kinesis = Kinesis(KinesisSettings(), b"s" * 32)
    for number in range(101):
        kinesis.create_stream(f"s{number}", 1, NOW)

    page = body_of(kinesis, "ListStreams", {"Limit": 10_000})
    assert (len(page["StreamNames"]), page["HasMoreStreams"]) == (100, True)


def test_the_tags_of_a_consumer_are_kept():
    kinesis = service()
    made = body_of(kinesis, "RegisterStreamConsumer", VALID["RegisterStreamConsumer"])
    arn = {"ResourceARN": made["Consumer"]["ConsumerARN"]}

    def tags(**resource):
        listed = body_of(kinesis, "ListTagsForResource", resource)["Tags"]
        return {tag["Key"]: tag["Value"] for tag in listed}

    assert tags(**arn) == {"a": "1"}
    body_of(kinesis, "TagResource", arn | {"Tags": {"b": "2"}})
    body_of(kinesis, "UntagResource", arn | {"TagKeys": ["a"]})
    assert (tags(**arn), tags(ResourceARN=CONSUMER), tags(ResourceARN=ARN)) == ({"b": "2"}, {}, {})
    unknown = {"ResourceARN": f"{ARN}/consumer/nothing:1"}
    assert code_of(kinesis, "ListTagsForResource", unknown) == NOT_FOUND


def widths(shards):
    ranges = [shard["HashKeyRange"] for shard in shards]
    return sorted(
        int(hash_range["EndingHashKey"]) - int(hash_range["StartingHashKey"]) + 1
        for hash_range in ranges
    )


@over_rows(("before", "after", "made_most"), [
        (1, 2, 2), (2, 4, 4), (3, 6, 6), (5, 10, 10), (7, 14, 14), (11, 22, 22), (100, 200, 200),
        (6, 3, 3), (10, 5, 5), (200, 100, 100), (4, 6, 12), (3, 2, 4), (4, 3, 7), (5, 7, 16),
    ])  # fmt: skip
def test_scaling_ends_in_equal_ranges_without_slivers_on_the_way(before, after, made_most):
    kinesis = Kinesis(KinesisSettings(), b"s" * 32)
    kinesis.create_stream("s", before, NOW)
    body_of(kinesis, "UpdateShardCount", STREAM | SCALE | {"TargetShardCount": after})

    every = body_of(kinesis, "ListShards", STREAM)["Shards"]
    latest = {"ShardFilter": {"Type": "AT_LATEST"}}
    last = widths(body_of(kinesis, "ListShards", STREAM | latest)["Shards"])
    assert len(last) == after
    assert last[-1] - last[0] <= 1
    assert len(every) - before <= made_most
    assert widths(every)[0] >= 2**128 // (before * after)


def test_scaling_keeps_edges_that_a_split_made_nearly_in_their_place():
    kinesis = Kinesis(KinesisSettings(), b"s" * 32)
    kinesis.create_stream("s", 1, NOW)
    split = {"ShardToSplit": FIRST, "NewStartingHashKey": str(2**127 - 1)}
    body_of(kinesis, "SplitShard", STREAM | split)
    body_of(kinesis, "UpdateShardCount", STREAM | SCALE | {"TargetShardCount": 4})

    every = body_of(kinesis, "ListShards", STREAM)["Shards"]
    assert len(every) == 7
    assert widths(every)[0] >= 2**126 - 1
