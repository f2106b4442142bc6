"""Options of other connectors get the name or the advice that holds here, each its own; and the
offset of a query of ours is a place to begin."""

import json

import pytest

from kclrun.errors import SettingsError
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard, ShardGraph
from kclrun.spark.offsets import Offset, StreamIs, encode_offset
from kclrun.spark.option_reading import Use, read_source_options, sink_settings, source_texts
from kclrun.spark.options import Start, StartKind
from kclrun.spark.other_connectors import OF_SINKS, OF_SOURCES
from kclrun.spark.planning.beginnings import beginnings
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, after, before
from tests.support.tables import over_rows

FIRST = "shardId-000000000000"
SECOND = "shardId-000000000001"
ARN = "arn:aws:kinesis:eu-west-1:123456789012:stream/flights"

# The names as the connectors' own documentation has them, and a part of the answer.
AWSLABS = {
    "kinesis.endpointUrl": "no such option; did you mean endpointUrl?",
    "kinesis.region": "no such option; did you mean region?",
    "kinesis.streamName": "no such option; did you mean streamName?",
    "kinesis.consumerType": "consumerMode=fan-out is SubscribeToShard",
    "kinesis.failOnDataLoss": "no such option; did you mean failOnDataLoss?",
    "kinesis.maxFetchRecordsPerShard": "maxRecordsPerTrigger and maxBytesPerTrigger",
    "kinesis.maxFetchTimePerShardSec": "targetBatchDuration",
    "kinesis.startingPosition": "no such option; did you mean startingOffsets?",
    "kinesis.describeShardInterval": "its name here is shardListInterval",
    "kinesis.minBatchesToRetain": "spark.sql.streaming.minBatchesToRetain",
    "kinesis.checkNewRecordThreads": "leave it out",
    "kinesis.metadataCommitterType": "Spark's own checkpoint",
    "kinesis.metadataPath": "Spark's own checkpoint",
    "kinesis.metadataNumRetries": "Spark's own checkpoint",
    "kinesis.metadataRetryIntervalsMs": "Spark's own checkpoint",
    "kinesis.metadataMaxRetryIntervalMs": "Spark's own checkpoint",
    "kinesis.clientNumRetries": "its name here is retryAttempts",
    "kinesis.clientRetryIntervalsMs": "retryBackoffMax",
    "kinesis.clientMaxRetryIntervalMs": "its name here is retryBackoffMax",
    "kinesis.consumerName": "no such option; did you mean consumerName?",
    "kinesis.stsRoleArn": "its name here is roleArn",
    "kinesis.stsSessionName": "its name here is roleSessionName",
    "kinesis.stsEndpointUrl": "AWS_ENDPOINT_URL_STS",
    "kinesis.awsAccessKeyId": "credentials are not options",
    "kinesis.awsSecretKey": "credentials are not options",
    "kinesis.kinesisRegion": "its name here is region",
    "kinesis.credentialProviderClass": "credentials are not options",
    "kinesis.credentialProviderParam": "credentials are not options",
    "kinesis.dynamodb.tableName": "Spark's own checkpoint",
    "kinesis.subscribeToShard.timeoutSec": "leave it out",
    "kinesis.subscribeToShard.maxRetries": "leave it out",
    "kinesis.getRecords.numberOfRecordsPerFetch": "maxRecordsPerTrigger",
    "kinesis.getRecords.fetchIntervalMs": "maxReadsPerSecondPerShard",
}
QUBOLE = {
    "awsAccessKeyId": "credentials are not options",
    "awsSecretKey": "credentials are not options",
    "awsSTSRoleARN": "its name here is roleArn",
    "awsSTSSessionName": "its name here is roleSessionName",
    "awsUseInstanceProfile": "instance profile included: leave it out",
    "kinesis.executor.maxFetchTimeInMs": "targetBatchDuration",
    "kinesis.executor.maxFetchRecordsPerShard": "maxRecordsPerTrigger",
    "kinesis.executor.maxRecordPerRead": "maxRecordsPerTrigger bounds a batch",
    "kinesis.executor.addIdleTimeBetweenReads": "maxReadsPerSecondPerShard",
    "kinesis.executor.idleTimeBetweenReadsInMs": "maxReadsPerSecondPerShard",
    "kinesis.client.describeShardInterval": "its name here is shardListInterval",
    "kinesis.client.numRetries": "its name here is retryAttempts",
    "kinesis.client.retryIntervalMs": "retryBackoffMax",
    "kinesis.client.maxRetryIntervalMs": "its name here is retryBackoffMax",
    "kinesis.client.avoidEmptyBatches": "makes no batch: leave it out",
    "maxFetchRecordsPerShard": "maxRecordsPerTrigger",
}
DATABRICKS = {
    "endpoint": "its name here is endpointUrl",
    "stsEndpoint": "AWS_ENDPOINT_URL_STS",
    "awsAccessKey": "credentials are not options",
    "serviceCredential": "credentials are not options",
    "maxRecordsPerFetch": "maxRecordsPerTrigger",
    "maxFetchRate": "maxBytesPerTrigger",
    "maxFetchDuration": "targetBatchDuration",
    "minFetchPeriod": "maxReadsPerSecondPerShard",
    "fetchBufferSize": "maxBytesPerTrigger",
    "coalesceThresholdBlockSize": "leave it out",
    "coalesceBinSize": "leave it out",
    "shardFetchInterval": "its name here is shardListInterval",
    "maxShardsPerDescribe": "leave it out",
    "consumerNamePrefix": "consumerName",
    "consumerRefreshInterval": "kclrun consumers",
    "registerConsumerTimeoutInterval": "kclrun consumers",
    "requireConsumerDeregistration": "kclrun consumers",
    "deregisterConsumerTimeoutInterval": "kclrun consumers",
    "registeredConsumerId": "consumerName takes",
    "registeredConsumerIdType": "leave it out",
}
SINKS = {
    "kinesis.sink.flushWaitTimeMs": "leave it out",
    "kinesis.sink.recordMaxBufferedTimeMs": "leave it out",
    "kinesis.sink.maxConnections": "leave it out",
    "kinesis.sink.aggregationEnabled": "its name here is aggregate",
    "kinesis.sink.recordTtl": "drops none",
    "kinesis.executor.recordMaxBufferedTime": "leave it out",
    "kinesis.executor.maxConnections": "leave it out",
    "kinesis.executor.aggregationEnabled": "its name here is aggregate",
    "awsSTSRoleARN": "its name here is roleArn",
}


@over_rows(("name", "said"), [*AWSLABS.items(), *QUBOLE.items(), *DATABRICKS.items()])
def test_an_option_of_another_source_says_what_it_is_here(name, said):
    for given in (name, name.lower()):
        with pytest.raises(SettingsError) as refused:
            read_source_options({"streamName": "flights", given: "1"}, Use.STREAM)
        assert said in str(refused.value)
        assert ("did you mean" in str(refused.value)) == said.startswith("no such option")
        assert "known:" not in str(refused.value)


@over_rows(("name", "said"), SINKS.items())
def test_an_option_of_another_sink_says_what_it_is_here(name, said):
    with pytest.raises(SettingsError) as refused:
        sink_settings({"streamName": "flights", name: "1"})
    assert said in str(refused.value)


def test_advice_about_other_connectors_names_no_option_of_ours():
    ours = {"streamname", "region", "endpointurl", "rolearn", "consumername", "shardspertask"}
    assert not ours & {name.lower() for name in (*OF_SOURCES, *OF_SINKS)}


def test_what_databricks_calls_efo_is_named():
    options = {"streamName": "flights", "consumerMode": "EFO", "consumerName": "mine"}

    with pytest.raises(SettingsError, match="got 'efo', which is fan-out here"):
        read_source_options(options, Use.STREAM)


@pytest.mark.parametrize(
    "name",
    [
        *("streamName", "streamARN", "region", "endpointUrl", "roleArn", "roleExternalId"),
        *("startingOffsets", "startingTimestamp", "startingLeases", "consumerName"),
        *("maxRecordsPerTrigger", "failOnDataLoss"),
    ],
)
@pytest.mark.parametrize("empty", ["", "  "])
def test_an_option_without_a_value_is_refused_as_that(name, empty):
    with pytest.raises(SettingsError, match=f"{name}: is empty: leave it out, or give it a value"):
        read_source_options({"streamName": "flights"} | {name: empty}, Use.STREAM)


def test_a_role_is_an_arn():
    with pytest.raises(SettingsError, match="roleArn: expected arn:aws:iam::<account>:role/<name>"):
        read_source_options({"streamName": "flights", "roleArn": "reader"}, Use.STREAM)


@over_rows(
    ("position", "said"),
    [
        (
            {
                "metadata": {"streamName": "flights", "batchId": "7"},
                FIRST: {"iteratorType": "AFTER_SEQUENCE_NUMBER", "iteratorPosition": "495"},
                SECOND: {"iteratorType": "AT_SEQUENCE_NUMBER", "iteratorPosition": "496"},
            },
            f'here they are {{"{FIRST}":"495","{SECOND}":"@496"}}',
        ),
        (
            {FIRST: {"iteratorType": "TRIM_HORIZON", "iteratorPosition": ""}},
            f'here they are {{"{FIRST}":"TRIM_HORIZON"}}',
        ),
        (
            {FIRST: {"iteratorType": "AT_TIMESTAMP", "iteratorPosition": "1700000000000"}},
            f'here they are {{"{FIRST}":"TS:1700000000000"}}',
        ),
        (
            {FIRST: {"iteratorType": "LATEST", "iteratorPosition": ""}},
            'AFTER_SEQUENCE_NUMBER n is "n"',
        ),
        (
            {"at_timestamp": "06/25/2020 10:23:45 PDT", "format": "MM/dd/yyyy HH:mm:ss ZZZ"},
            "a time is given in startingTimestamp, with its zone",
        ),
        ({FIRST: {"0": 23}}, f"{FIRST}: expected a position as a text"),
        ({"topic": {"0": 23}}, "expected shard ids and \"*\", not 'topic'"),
    ],
)
def test_positions_of_other_connectors_say_what_they_are_here(position, said):
    options = {"streamName": "flights", "initialPosition": json.dumps(position)}

    with pytest.raises(SettingsError) as refused:
        read_source_options(options, Use.STREAM)
    assert said in str(refused.value)
    assert "$[...]" not in str(refused.value)


IS = StreamIs(ARN, 5_000)


def own(shards, stream=""):
    offset = Offset(streams={stream: IS}, shards=shards, began=dict.fromkeys(shards, TRIM_HORIZON))
    return json.dumps(encode_offset(offset))


SHARDS = {FIRST: after("495"), SECOND: before("496")}


@pytest.mark.parametrize("count", [2, 60])  # plain, and packed
def test_the_end_of_a_query_of_ours_is_where_another_begins(count):
    shards = {f"shardId-{number:012}": after(str(495 + number)) for number in range(count)}
    for named in ({"streamName": "flights"}, {"streamARN": ARN}):
        settings = read_source_options(named | {"startingOffsets": own(shards)}, Use.STREAM)
        assert settings.start == Start(StartKind.POSITIONS, positions=shards, streams={"": IS})
        assert read_source_options(source_texts(settings), Use.STREAM) == settings


def test_the_offset_of_several_streams_is_taken_by_a_source_of_the_same():
    text = own({f"a:{FIRST}": after("1")}, "a").replace("stream/flights", "stream/a")

    whole = json.loads(text)
    whole["streams"]["b"] = whole["streams"]["a"] | {"stream": ARN.replace("flights", "b")}
    options = {"streamName": "b,a", "startingOffsets": json.dumps(whole)}
    assert read_source_options(options, Use.STREAM).start.positions == {
        f"a:{FIRST}": after("1"),
        f"b:{FIRST}": after("1"),
    }
    with pytest.raises(SettingsError, match="this is the offset of a query of"):
        read_source_options(options | {"streamName": "a"}, Use.STREAM)


def test_both_ends_of_a_progress_are_those_of_a_batch_read():
    options = {"startingOffsets": own(SHARDS), "endingOffsets": own(SHARDS)}

    settings = read_source_options({"streamName": "flights"} | options, Use.BATCH)

    assert settings.end.positions == SHARDS


@pytest.mark.parametrize(
    ("offset", "said"),
    [
        (own(SHARDS).replace("flights", "other"), "this is the offset of a query of arn:aws"),
        (own(SHARDS).replace('"v": 1', '"v": 9'), "written by a newer kclrun"),
        ('{"v": 1}', "this offset cannot be read"),
    ],
)
def test_an_offset_that_is_not_of_this_source_is_refused_in_words(offset, said):
    with pytest.raises(SettingsError) as refused:
        read_source_options({"streamName": "flights", "startingOffsets": offset}, Use.STREAM)
    assert said in str(refused.value)


HALF = HASH_KEY_MAX // 2
LOW, HIGH = HashRange(0, HALF), HashRange(HALF + 1, HASH_KEY_MAX)
QUARTERS = (HashRange(0, HALF // 2), HashRange(HALF // 2 + 1, HALF))
# a was split into b and c; x is of another line.
GRAPH = ShardGraph(
    (
        Shard("a", LOW, "0", "9"),
        Shard("b", QUARTERS[0], "0", None, "a"),
        Shard("c", QUARTERS[1], "0", None, "a"),
        Shard("x", HIGH, "0"),
    )
)
LATER = ShardGraph(shard for shard in GRAPH if shard.shard_id != "a")


@over_rows(
    ("graph", "shards", "expected"),
    [
        (GRAPH, {"a": after("5"), "x": after("8")}, {"a": after("5"), "x": after("8")}),
        (GRAPH, {"a": SHARD_END, "x": after("8")}, {"a": SHARD_END, "x": after("8")}),
        (
            GRAPH,
            {"a": SHARD_END, "b": after("6"), "x": after("8")},
            {"a": SHARD_END, "b": after("6"), "x": after("8")},
        ),
        (
            GRAPH,
            {"a": SHARD_END, "b": after("6"), "c": after("7"), "x": after("8")},
            {"b": after("6"), "c": after("7"), "x": after("8")},
        ),
        # a has expired since: its children were not begun, and begin with their first record.
        (
            LATER,
            {"a": SHARD_END, "x": after("8")},
            {"b": TRIM_HORIZON, "c": TRIM_HORIZON, "x": after("8")},
        ),
    ],
)
def test_a_query_goes_on_where_the_offset_was_and_skips_nothing(graph, shards, expected):
    start = Start(StartKind.POSITIONS, positions=shards, streams={"": IS})

    assert beginnings(start, graph, 0) == expected


def test_a_shard_that_expired_before_it_was_read_is_named():
    start = Start(StartKind.POSITIONS, positions={"a": after("5")}, streams={"": IS})

    with pytest.raises(SettingsError, match="no shard a any more: its records expired before"):
        beginnings(start, LATER, 0)
