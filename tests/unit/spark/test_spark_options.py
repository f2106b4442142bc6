"""The texts of options become settings, or one message that names every mistake."""

import pytest

from kclrun.errors import SettingsError
from kclrun.model.names import hint
from kclrun.spark.option_reading import Use, read_source_options, sink_settings, source_texts
from kclrun.spark.option_table import default_texts
from kclrun.spark.options import (
    SOURCE_OPTIONS,
    LeasesAt,
    SinkSettings,
    SourceSettings,
    Start,
    StartKind,
    StreamAddress,
)
from kclrun.spark.other_connectors import ALIASES
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, after, before
from tests.support.tables import over_rows

NAMES = tuple(option.name for option in SOURCE_OPTIONS)
ARN = "arn:aws:kinesis:eu-west-1:123456789012:stream/flights"
FIRST = "shardId-000000000000"


def read(use=Use.STREAM, **options):
    return read_source_options({"streamName": "flights"} | options, use)


def refusal(options, use=Use.STREAM):
    with pytest.raises(SettingsError) as caught:
        read_source_options(options, use)
    return str(caught.value)


def test_a_name_is_enough_and_the_rest_is_what_the_table_says():
    assert read() == SourceSettings(address=StreamAddress(stream="flights"))


def test_every_option_finds_its_setting_in_any_case():
    options = {
        "streamName": "flights",
        "region": "eu-west-1",
        "endpointUrl": "http://127.0.0.1:4567",
        "roleArn": "arn:aws:iam::123456789012:role/reader",
        "roleExternalId": "partner",
        "roleSessionName": "nightly",
        "startingOffsets": "earliest",
        "failOnDataLoss": "False",
        "maxRecordsPerTrigger": "1000",
        "maxBytesPerTrigger": "16MiB",
        "targetBatchDuration": "1m30s",
        "pollInterval": "500ms",
        "maxReadsPerSecondPerShard": "1.5",
        "shardsPerTask": "4",
        "maxPartitions": "16",
        "inlineMaxBytes": "0",
        "alignShards": "false",
        "deaggregate": "FALSE",
        "shardListInterval": "30s",
        "retryAttempts": "5",
        "retryBackoffMax": "10s",
        "consumerMode": "POLLING",
    }
    expected = SourceSettings(
        address=StreamAddress(
            stream="flights",
            region="eu-west-1",
            endpoint_url="http://127.0.0.1:4567",
            role_arn="arn:aws:iam::123456789012:role/reader",
            role_external_id="partner",
            role_session_name="nightly",
        ),
        start=Start(StartKind.EARLIEST),
        fails_on_data_loss=False,
        records_per_trigger_max=1000,
        bytes_per_trigger_max=16 * 2**20,
        target_batch_s=90.0,
        poll_interval_s=0.5,
        reads_per_second_max=1.5,
        shards_per_task=4,
        partitions_max=16,
        inline_bytes_max=0,
        aligns_shards=False,
        opens_aggregates=False,
        shard_list_interval_s=30.0,
        retry_attempts=5,
        retry_backoff_max_s=10.0,
    )

    # PySpark's own dictionary of options lists its keys in lower case.
    lower = {name.lower(): value for name, value in options.items()}

    assert read_source_options(options, Use.STREAM) == expected
    assert read_source_options(lower, Use.STREAM) == expected
    assert read_source_options(source_texts(expected), Use.STREAM) == expected


@over_rows(
    ("options", "field", "value"),
    [
        ({"startingPosition": "TRIM_HORIZON"}, "start", Start(StartKind.EARLIEST)),
        ({"initialPosition": "latest"}, "start", Start(StartKind.LATEST)),
        ({"maxOffsetsPerTrigger": "7"}, "records_per_trigger_max", 7),
        (
            {"from": "2026-03-01T06:00:00Z"},
            "start",
            Start(StartKind.TIMESTAMP, timestamp_ms=1_772_344_800_000),
        ),
        (
            {"startingTimestamp": "1772344800000"},
            "start",
            Start(StartKind.TIMESTAMP, timestamp_ms=1_772_344_800_000),
        ),
    ],
)
def test_names_of_other_connectors_are_understood(options, field, value):
    assert getattr(read(**options), field) == value


def test_a_batch_is_read_from_the_oldest_record_to_the_newest():
    settings = read(Use.BATCH)
    assert (settings.start.kind, settings.end.kind) == (StartKind.EARLIEST, StartKind.LATEST)

    ranged = read(Use.BATCH, **{"from": "1000", "to": "2026-03-01T07:00:00+01:00"})
    assert ranged.start == Start(StartKind.TIMESTAMP, timestamp_ms=1000)
    assert ranged.end == Start(StartKind.TIMESTAMP, timestamp_ms=1_772_344_800_000)


def test_positions_are_given_by_shard():
    text = (
        f'{{"{FIRST}": "4959", "shardId-000000000001": "@4960", '
        '"shardId-000000000002": "SHARD_END", "*": "earliest"}'
    )
    settings = read(startingOffsets=text)
    assert read_source_options(source_texts(settings), Use.STREAM) == settings
    assert settings.start == Start(
        StartKind.POSITIONS,
        positions={
            FIRST: after("4959"),
            "shardId-000000000001": before("4960"),
            "shardId-000000000002": SHARD_END,
            "*": TRIM_HORIZON,
        },
    )


@pytest.mark.parametrize(
    "url", ["http://kinesis.example", "ftp://127.0.0.1", "https://me:pw@kinesis.example", "x"]
)
def test_an_endpoint_is_https_or_on_this_host(url):
    with pytest.raises(SettingsError, match="endpointUrl") as raised:
        read_source_options({"streamName": "s", "endpointUrl": url}, Use.STREAM)

    assert "pw" not in str(raised.value)


def test_an_arn_names_the_stream_and_its_region():
    settings = read_source_options({"streamarn": ARN}, Use.STREAM)
    assert settings.address == StreamAddress(stream=ARN)
    assert settings.address.name == "flights"


@over_rows(
    ("options", "reported"),
    [
        (
            {"startingOfset": "latest"},
            "startingOfset: no such option; did you mean startingOffsets?",
        ),
        (
            {"kinesis.streamName": "x"},
            "kinesis.streamName: no such option; did you mean streamName?",
        ),
        ({"zzz": "x"}, "zzz: no such option; known: streamName, streamARN, region"),
        ({"path": "flights"}, "name the stream in streamName"),
        ({"startingOffsets": "lastest"}, "did you mean latest?, got 'lastest'"),
        ({"startingOffsets": "AT_TIMESTAMP 2026"}, "a time is given in startingTimestamp"),
        ({"startingOffsets": "{"}, "expected JSON such as"),
        ({"startingOffsets": "{}"}, "expected at least one shard"),
        ({"startingOffsets": '{"shard-1": "1"}'}, "expected shard ids and \"*\", not 'shard-1'"),
        ({"startingOffsets": f'{{"{FIRST}": "latest"}}'}, f"{FIRST}: 'latest' is not a position"),
        ({"startingOffsets": "latest", "from": "0"}, "and startingTimestamp say the same thing"),
        ({"startingTimestamp": "2026-03-01T06:00:00"}, "the time zone is missing; add Z for UTC"),
        ({"startingTimestamp": "yesterday"}, "expected an instant such as"),
        ({"startingTimestamp": "-1"}, "expected an instant such as"),
        ({"startingTimestamp": "1" * 40}, "between the years 1970 and 9999"),
        ({"startingPosition": "latest", "initialPosition": "latest"}, "is given twice"),
        ({"endingOffsets": "latest"}, "a stream has no end; this is for spark.read"),
        ({"to": "0"}, "a stream has no end; this is for spark.read"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss: expected true or false, got 'maybe'"),
        ({"maxRecordsPerTrigger": "0"}, "a whole number from 1 to"),
        ({"maxRecordsPerTrigger": "1e6"}, "a whole number from 1 to"),
        ({"maxBytesPerTrigger": "many"}, "expected a size such as 16MiB"),
        ({"inlineMaxBytes": "5MiB"}, "expected 0B to 4MiB, got '5MiB'"),
        ({"targetBatchDuration": "30"}, "expected a duration such as 10s"),
        ({"pollInterval": "199ms"}, "pollInterval: expected 200ms to 1m, got '199ms'"),
        ({"maxReadsPerSecondPerShard": "6"}, "a number from 0.1 to 5, got '6'"),
        ({"maxReadsPerSecondPerShard": "nan"}, "a number from 0.1 to 5"),
        ({"maxReadsPerSecondPerShard": "x"}, "a number from 0.1 to 5"),
        ({"shardsPerTask": "0"}, "shardsPerTask: expected a whole number from 1"),
        ({"retryAttempts": "0"}, "retryAttempts: expected a whole number from 1"),
        ({"consumerMode": "efo"}, "consumerMode: expected polling or fan-out, got 'efo'"),
        ({"consumerMode": "fan-out"}, "consumerName: is needed with consumerMode=fan-out: one for"),
        ({"consumerName": "mine"}, "consumerName: is for consumerMode=fan-out"),
        (
            {"consumerMode": "fan-out", "consumerName": "a b"},
            "consumerName: expected a consumer's name (letters, digits, '_', '.', '-') or its ARN",
        ),
        ({"consumerMode": "fan-out", "consumerName": ARN}, "or its ARN, got 'arn:aws"),
        (
            {"streamName": "a,b", "consumerMode": "fan-out", "consumerName": f"{ARN}/consumer/c:1"},
            "consumerName: several streams: give a name, each has a consumer of it",
        ),
        ({"startingLeases": "a b"}, "expected an application, or its lease table"),
        ({"startingLeases": "orders", "from": "0"}, "and startingTimestamp say the same thing"),
        ({"startingLeasesEndpointUrl": "https://d.x"}, "is for a lease table: name startingLeases"),
        (
            {"startingLeases": "orders", "startingLeasesEndpointUrl": "http://d.x"},
            "startingLeasesEndpointUrl: expected an https URL",
        ),
        ({"roleSessionName": "x"}, "is for a role: name that in roleArn"),
        ({"endpointUrl": "http://kinesis.example"}, "plain http is for this machine only"),
        ({"streamName": "a,,b"}, "expected names with commas between them, not ''"),
        ({"streamName": f"a,{ARN}"}, "several streams have no ARNs here"),
        ({"streamName": "a, b,a"}, "names a stream twice"),
        ({"streamName": ",".join(f"s{n}" for n in range(65))}, "names 65 streams: at most 64"),
        (
            {"streamName": "a,b", "startingOffsets": '{"shardId-000000000000": "earliest"}'},
            "a shard is named with its own: 'a:shardId-000000000000', for example",
        ),
        (
            {"streamName": "a", "startingOffsets": '{"b:shardId-000000000000": "earliest"}'},
            "expected shard ids and \"*\", not 'b:shardId-000000000000'",
        ),
        ({"streamName": "a b"}, "expected letters, digits"),
        ({"streamName": ARN}, "this is an ARN: give it as streamARN"),
        ({"streamARN": ARN}, "streamName: and streamARN are two names for one"),
    ],
)
def test_a_mistake_is_named_with_what_would_be_right(options, reported):
    assert reported in refusal({"streamName": "flights"} | options)


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({}, "streamName: is needed, or streamARN"),
        ({"streamARN": "arn:aws:s3:::flights"}, "expected arn:aws:kinesis:<region>"),
        ({"streamARN": f"{ARN},{ARN}"}, "several streams are named in streamName"),
        ({"streamARN": ARN, "region": "us-east-1"}, "the stream's ARN says eu-west-1"),
    ],
)
def test_a_stream_is_named_once(options, reported):
    assert reported in refusal(options)


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"startingOffsets": "latest"}, "a batch read that starts at latest reads nothing"),
        ({"endingOffsets": "earliest"}, "a batch read that ends at earliest reads nothing"),
    ],
)
def test_a_batch_read_of_nothing_is_a_mistake(options, reported):
    assert reported in refusal({"streamName": "flights"} | options, Use.BATCH)


@over_rows(
    "name",
    [
        "awsAccessKeyId",
        "awsSecretKey",
        "aws_secret_access_key",
        "sessionToken",
        "kinesis.aws-secret",
        "credentialProviderClass",
        "proxyPassword",
    ],
)
def test_a_credential_is_no_option_and_is_not_repeated(name):
    reported = refusal({"streamName": "flights", name: "wJalrXUtnFEMI"})
    assert f"{name}: credentials are not options" in reported
    assert "wJalrXUtnFEMI" not in reported


def test_the_value_of_an_unknown_option_and_of_a_url_is_not_repeated():
    reported = refusal(
        {"streamName": "s", "tokn": "hunter2", "endpointUrl": "https://me:hunter2@h"}
    )
    assert "hunter2" not in reported


def test_all_mistakes_are_reported_at_once_one_a_line():
    reported = refusal({"pollInterval": "0s", "shardsPerTask": "none", "regoin": "eu-west-1"})

    first, *more = reported.splitlines()
    assert first == "the kclrun source cannot be used:"
    assert [line.split(":")[0].strip() for line in more] == [
        "regoin",
        "streamName",
        "pollInterval",
        "shardsPerTask",
    ]


def test_every_name_is_known_once_and_aliases_lead_to_names():
    lower = [name.lower() for name in NAMES]
    assert len(set(lower)) == len(lower)
    assert set(ALIASES.values()) <= set(NAMES)
    assert not {alias.lower() for alias in ALIASES} & set(lower)


def test_a_suggestion_keeps_the_spelling_of_what_is_known():
    assert hint("endpointurk", NAMES) == "; did you mean endpointUrl?"
    assert hint("q", ("a", "B")) == "; known: a, B"


def test_a_problem_is_reported_under_the_name_the_option_was_given_by():
    with pytest.raises(SettingsError, match="from: the time zone is missing"):
        read_source_options({"streamname": "s", "from": "2026-03-01T06:00:00"}, Use.STREAM)


@pytest.mark.parametrize("name", ["minOffsetsPerTrigger", "maxTriggerDelay"])
def test_kafkas_least_size_of_a_batch_is_not_taken_for_a_limit(name):
    with pytest.raises(SettingsError, match=f"{name}: a batch has no least size") as caught:
        read_source_options({"streamname": "s", name.lower(): "5"}, Use.STREAM)

    assert "maxBytesPerTrigger" not in str(caught.value)


# By option: its default, the least and the most that is taken, and what is just beyond.
BOUNDS = {
    "maxRecordsPerTrigger": (None, "1", f"{10**12}", ("0", f"{10**12 + 1}")),
    "maxBytesPerTrigger": (None, "1B", f"{2**50}B", ("0B", f"{2**50 + 1}B")),
    "targetBatchDuration": ("30s", "100ms", "1h", ("99ms", "1h1ms")),
    "pollInterval": ("1s", "200ms", "1m", ("199ms", "1m1ms")),
    "maxReadsPerSecondPerShard": ("2.5", "0.1", "5", ("0.09", "5.01")),
    "shardsPerTask": ("8", "1", "1000", ("0", "1001")),
    "maxPartitions": (None, "1", "100000", ("0", "100001")),
    "inlineMaxBytes": ("512KiB", "0", "4MiB", (f"{4 * 2**20 + 1}B",)),
    "shardListInterval": ("10s", "1s", "10m", ("999ms", "10m1ms")),
    "retryAttempts": (None, "1", "1000000", ("0", "1000001")),
    "retryBackoffMax": ("3s", "100ms", "5m", ("99ms", "5m1ms")),
    "consumerMode": ("polling", "polling", "POLLING", ("efo",)),
    "failOnDataLoss": ("true", "true", "false", ("yes",)),
    "alignShards": ("true", "true", "false", ("yes",)),
    "deaggregate": ("true", "true", "false", ("yes",)),
}
SINK_BOUNDS = {
    "ordering": ("key", "key", "none", ("shard",)),
    "aggregate": ("false", "true", "false", ("yes",)),
    "maxRecordBytes": (None, "1KiB", "10MiB", ("1023B", f"{10 * 2**20 + 1}B")),
    "giveUpAfter": ("2m", "15s", "1h", ("14999ms", "1h1ms")),
}


@over_rows("name", [*BOUNDS, *SINK_BOUNDS])
def test_an_option_has_a_default_and_bounds_that_are_part_of_its_values(name):
    settings, refused_by = (
        (SourceSettings, lambda text: refusal({"streamName": "flights", name: text}))
        if name in BOUNDS
        else (SinkSettings, lambda text: sink_refusal({"streamName": "flights", name: text}))
    )
    default, least, most, beyond = (BOUNDS | SINK_BOUNDS)[name]

    assert default_texts(settings).get(name) == default
    assert default_texts(settings).keys() <= (BOUNDS | SINK_BOUNDS).keys()
    for text in (least, most):
        if name in BOUNDS:
            read(**{name: text})
        else:
            sink_settings({"streamName": "flights", name: text})
    for text in beyond:
        assert f"{name}: expected" in refused_by(text)


def sink_refusal(options):
    with pytest.raises(SettingsError) as caught:
        sink_settings(options)
    return str(caught.value)


@over_rows(
    ("name", "longest", "beyond"),
    [
        ("streamName", "x" * 128, "x" * 129),
        ("streamARN", ARN[:-7] + "x" * 128, ARN[:-7] + "x" * 129),
        ("streamName", ",".join(map(str, range(64))), ",".join(map(str, range(65)))),
        ("startingTimestamp", "253402300799000", "253402300799001"),
        ("startingTimestamp", "0", "1969-12-31T23:59:59Z"),
        ("startingTimestamp", "9999-12-31T23:59:59Z", "1969-12-31T23:59:59.999Z"),
        ("startingLeases", "xyz", "xy"),
        ("startingLeases", "x" * 255, "x" * 256),
    ],
)
def test_names_and_times_have_their_longest(name, longest, beyond):
    stream = {} if name.startswith("stream") else {"streamName": "flights"}

    read_source_options({name: longest} | stream, Use.STREAM)
    assert f"{name}: " in refusal({name: beyond} | stream)


@pytest.mark.parametrize(
    ("given", "stream", "several", "name"),
    [
        ("flights", "flights", (), "flights"),
        ("returns, orders", "orders,returns", ("orders", "returns"), "orders,returns"),
    ],
)
def test_several_streams_are_one_source_in_the_order_of_their_names(given, stream, several, name):
    found = read_source_options({"streamName": given, "region": "eu-west-1"}, Use.STREAM).address

    assert found == StreamAddress(stream=stream, region="eu-west-1")
    assert (found.several, found.name) == (several, name)
    assert found.each() == (
        tuple(StreamAddress(stream=each, region="eu-west-1") for each in several) or (found,)
    )
    assert found.named("orders:shardId-0") == ("orders", "shardId-0")
    assert found.named("shardId-0") == (name, "shardId-0")
    assert "one stream: rows are put into each" in sink_refusal({"streamName": "a,b"})
    assert "names a stream twice" in refusal({"streamName": "a,a"})
    assert "not 'a/b'" in refusal({"streamName": "c,a/b"})


@pytest.mark.parametrize(
    "start",
    [
        Start(StartKind.LATEST),
        Start(StartKind.EARLIEST),
        Start(StartKind.TIMESTAMP, timestamp_ms=1_772_344_800_001),
        Start(StartKind.POSITIONS, positions={FIRST: after("4959", 3), "*": TRIM_HORIZON}),
        Start(StartKind.LEASES, leases=LeasesAt("orders")),
        Start(StartKind.LEASES, leases=LeasesAt("orders", "http://127.0.0.1:8000")),
    ],
)
@pytest.mark.parametrize("stream", ["flights", "orders,returns", ARN])
def test_settings_become_texts_that_become_the_same_settings(start, stream):
    if start.positions and "," in stream:
        start = Start(StartKind.POSITIONS, positions={f"orders:{FIRST}": after("4959")})
    settings = SourceSettings(address=StreamAddress(stream=stream), start=start, retry_attempts=3)

    texts = source_texts(settings)

    assert read_source_options(texts, Use.STREAM) == settings
    assert texts["retryAttempts"] == "3"
    assert len(texts) <= 4, "defaults are not repeated"
    assert ("streamARN" in texts) == (stream == ARN)
