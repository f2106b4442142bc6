"""A properties file of the MultiLangDaemon as an app.yaml: read, converted, told."""

import pytest

from kclrun.compat.kclpy.app_yaml import Script, app_yaml, convert
from kclrun.compat.kclpy.property_table import known_properties, read_properties
from kclrun.config.convert import field_types, members, plain_type
from kclrun.config.load import settings_of
from kclrun.config.schema import Settings
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime
from tests.support.tables import over_rows

NOW = WallTime(1_780_000_000.0)
BASE = {"applicationName": "orders-app", "streamName": "orders", "executableName": "consumer.py"}
SCRIPT = Script("consumer.py")


def text_of(script=SCRIPT, **properties):
    return app_yaml(BASE | properties, script, "app.properties", NOW)


def settings(script=SCRIPT, **properties):
    text = text_of(script, **properties)
    return settings_of(text, environment={}, now=NOW)


# The format.


@over_rows(
    ("text", "expected"),
    [
        ("a = 1", {"a": "1"}),
        ("a=1", {"a": "1"}),
        ("a:1", {"a": "1"}),
        ("a 1", {"a": "1"}),
        ("  a  =  b c  ", {"a": "b c  "}),
        ("a = b = c", {"a": "b = c"}),
        ("# a = 1\n! b = 2\n\n", {}),
        ("a = 1\\\n    2\nb = 3", {"a": "12", "b": "3"}),
        ("a = 1\\\\\nb = 3", {"a": "1\\", "b": "3"}),
        ("a = \\u00e9\\t|", {"a": "é\t|"}),
        ("a = \\ud83d\\ude00", {"a": "😀"}),
        ("a\\ b = 1", {"a b": "1"}),
        ("a\\=b = 1", {"a=b": "1"}),
        ("a", {"a": ""}),
        ("a = 1\r\nb = 2\rc = 3", {"a": "1", "b": "2", "c": "3"}),
        ("a = 1\nb = 2\na = 3", {"b": "2", "a": "3"}),
        ("a = 1\\", {"a": "1"}),
    ],
)
def test_properties_are_read_as_java_reads_them(text, expected):
    assert list(read_properties(text).items()) == list(expected.items())


def test_a_broken_escape_is_reported():
    with pytest.raises(SettingsError, match="four hexadecimal digits"):
        read_properties("a = \\u00")


# What becomes of them.


def test_the_least_there_can_be_is_an_application_that_goes_on():
    made = settings()

    assert made.application == made.table == "orders-app"
    assert made.stream == "orders"
    assert made.processor == "kclpy:consumer.py"
    assert made.start == "LATEST"
    assert made.aws.region == "us-east-1"
    assert made.leases.max == 1024
    assert made.checkpoint.every == "manual"


@over_rows(("properties", "path", "expected"), [
        ({"tableName": "other"}, "leases.table", "other"),
        ({"initialPositionInStream": "TRIM_HORIZON"}, "start", "TRIM_HORIZON"),
        ({"initialPositionInStream": "latest"}, "start", "LATEST"),
        ({"initialPositionInStreamExtended": "1636609142"}, "start", "2021-11-11T05:39:02Z"),
        ({"regionName": "eu-west-1"}, "aws.region", "eu-west-1"),
        ({"kinesisEndpoint": "http://localhost:4566"}, "aws.endpoints", {"kinesis": "http://localhost:4566"}),
        ({"dynamoDBEndpoint": "https://ddb.example"}, "aws.endpoints", {"dynamodb": "https://ddb.example"}),
        ({"failoverTimeMillis": "30000"}, "leases.failover", 30.0),
        ({"failoverTimeMillis": "1"}, "leases.failover", 1.0),
        ({"maxLeasesForWorker": "7"}, "leases.max", 7),
        ({"maxLeasesForWorker": "2147483647"}, "leases.max", 1024),
        ({"maxLeasesToStealAtOneTime": "3"}, "leases.moves_per_cycle", 3),
        ({"cleanupLeasesUponShardCompletion": "false"}, "leases.cleanup", False),
        ({"cleanupLeasesUponShardCompletion": "Yes"}, "leases.cleanup", True),
        ({"idleTimeBetweenReadsInMillis": "1500"}, "fetch.idle", 1.5),
        ({"idleTimeBetweenReadsInMillis": "50"}, "fetch.idle", 0.2),
        ({"idleTimeBetweenReadsInMillis": "1500"}, "fetch.every", 1.5),
        ({"maxRecords": "500"}, "fetch.batch_max", 500),
        ({"taskBackoffTimeMillis": "250"}, "on_error.backoff", 0.25),
        ({"timeoutInSeconds": "300"}, "stall", 300.0),
        ({"timeoutInSeconds": "5"}, "stall", 120.0),
        ({"shutdownGraceMillis": "5000"}, "shutdown.grace", 5.0),
        ({"shutdownGraceMillis": "0"}, "shutdown.grace", 60.0),
        ({"metricsLevel": "SUMMARY"}, "observe.cloudwatch.namespace", "orders-app"),
        ({"metricsLevel": "detailed"}, "observe.cloudwatch.detail", "shard"),
        ({"metricsLevel": "NONE"}, "observe.cloudwatch", None),
        ({"retrievalMode": "FANOUT"}, "fetch.mode", "fan-out"),
        ({}, "fetch.mode", "fan-out"),
        ({"maxRecords": "500"}, "fetch.mode", "polling"),
        ({"retrievalMode": "POLLING"}, "fetch.mode", "polling"),
        ({"retrievalMode": "FANOUT", "fanoutConfig.consumerName": "etl"}, "fetch.consumer", "etl"),
        ({"awsCredentialsProvider": "ProfileCredentialsProvider|etl"}, "aws.profile", "etl"),
        (
            {
                "AWSCredentialsProvider": "StsAssumeRoleCredentialsProvider"
                "|arn:aws:iam::123456789012:role/reader|kcl, DefaultCredentialsProvider"
            },
            "aws.role_arn",
            "arn:aws:iam::123456789012:role/reader",
        ),
        ({"AwsCredentialsProvider": "DefaultCredentialsProvider"}, "aws.role_arn", None),
        ({"applicationName": "12345"}, "application", "12345"),
        ({"applicationName": "null"}, "application", "null"),
    ])  # fmt: skip
def test_a_property_becomes_its_setting(properties, path, expected):
    found = settings(**properties)
    for step in path.split("."):
        found = getattr(found, step)

    assert found == expected


BESIDE = "fetch.mode: fan-out  # as the KCL reads these shards"
NEW = "for shards without a lease; checkpoints in the table go on"
ARN = "arn:aws:kinesis:eu-central-1:123456789012:stream/orders"
ROLE = "arn:aws:iam::123456789012:role/reader"
OTHERS = "of the credentials provider; the other providers are left to the usual chain"
SAME = "the same on all machines, those of amazon_kclpy included"


@over_rows(
    ("properties", "settings"),
    [
        ({}, [f"start: LATEST  # the default of the KCL, {NEW}", BESIDE]),
        ({"initialPositionInStream": "LATEST"}, [f"start: LATEST  # {NEW}"]),
        ({"initialPositionInStreamExtended": "0"}, [f"start: 1970-01-01T00:00:00Z  # {NEW}"]),
        (
            {"initialPositionInStreamExtended": "253402300799"},
            [f"start: 9999-12-31T23:59:59Z  # {NEW}"],
        ),
        ({}, ["stream: orders  # ", "aws.region: us-east-1  # the default of amazon_kclpy"]),
        ({"regionName": "us-west-2"}, ["aws.region: us-west-2  # "]),
        ({"streamArn": ARN}, [f"stream: {ARN}  # comes before", "aws.region: eu-central-1  # "]),
        ({"streamArn": ARN, "streamName": ""}, [f"stream: {ARN}  # "]),
        ({"streamArn": ARN, "regionName": "eu-central-1"}, ["aws.region: eu-central-1  # "]),
        (
            {"streamArn": ARN, "regionName": "us-east-1"},
            ["aws.region: us-east-1  # the stream's ARN has eu-central-1"],
        ),
        (
            {"awsCredentialsProvider": f"S|{ROLE}"},
            [f"aws.role_arn: {ROLE}  # of the credentials provider"],
        ),
        (
            {"awsCredentialsProvider": f"S|{ROLE}|externalId=3,D"},
            [f"aws.role_arn: {ROLE}  # {OTHERS}; its externalId has no setting: write"],
        ),
        ({"awsCredentialsProvider": "ProfileX|etl,D"}, [f"aws.profile: etl  # {OTHERS}"]),
        ({"awsCredentialsProvider": "ProfileX"}, ["aws.profile"]),
        ({"awsCredentialsProvider": "Other|etl"}, ["aws.profile", "aws.role_arn"]),
        (
            {"failoverTimeMillis": "999"},
            [f"leases.failover: 1s  # 999 ms is outside 1s to 15m; {SAME}"],
        ),
        ({"failoverTimeMillis": "1000"}, [f"leases.failover: 1s  # {SAME}"]),
        ({"failoverTimeMillis": "900000"}, [f"leases.failover: 15m  # {SAME}"]),
        (
            {"failoverTimeMillis": "900001"},
            [f"leases.failover: 15m  # 900001 ms is outside 1s to 15m; {SAME}"],
        ),
        ({}, ["leases.max: 1024  # the KCL takes any number"]),
        ({"maxLeasesForWorker": "0"}, ["leases.max: 1  # "]),
        ({"maxLeasesForWorker": "1025"}, ["leases.max: 1024  # "]),
        ({"maxLeasesToStealAtOneTime": "0"}, ["leases.moves_per_cycle: 1  # leases are asked for"]),
        (
            {"retrievalMode": "FANOUT", "maxRecords": "0"},
            [BESIDE, "fetch.batch_max: 1  # the most in one call"],
        ),
        ({"retrievalMode": "default"}, [BESIDE]),
        ({"retrievalMode": "POLLING"}, ["fetch.mode"]),
        ({"maxRecords": "5"}, ["fetch.mode", "fetch.batch_max: 5"]),
        ({"idleTimeBetweenReadsInMillis": "200"}, ["fetch.mode", "fetch.idle: 200ms"]),
        ({"metricsLevel": "NONE"}, ["observe.cloudwatch.namespace", "observe.cloudwatch.detail"]),
        ({"maxRecords": "100001"}, ["fetch.batch_max: 100000  # the most in one call"]),
        ({"idleTimeBetweenReadsInMillis": "199"}, ["fetch.idle: 200ms  # at the tip only"]),
        ({"taskBackoffTimeMillis": "-1"}, ["on_error.backoff: 0s  # before the same records"]),
        (
            {"timeoutInSeconds": "10"},
            ["stall: 2m  # 10 s is not more than a move of a lease may take"],
        ),
        ({"timeoutInSeconds": "11"}, ["stall: 11s  # the one shard that stands still"]),
        (
            {"timeoutInSeconds": "900", "failoverTimeMillis": "2000000"},
            ["stall: 2m  # 900 s is not"],
        ),
        (
            {"timeoutInSeconds": "901", "failoverTimeMillis": "2000000"},
            ["stall: 901s  # the one shard"],
        ),
        ({"shutdownGraceMillis": "0"}, ["shutdown.grace"]),
        ({"shutdownGraceMillis": "5000"}, ["shutdown.grace: 5s  # "]),
        (
            {"metricsLevel": "SUMMARY"},
            [
                "observe.cloudwatch.namespace: orders-app  # other metrics",
                "observe.cloudwatch.detail",
            ],
        ),
        (
            {"metricsLevel": "DETAILED"},
            [
                "observe.cloudwatch.namespace: orders-app  # other metrics",
                "observe.cloudwatch.detail: shard  # CloudWatch bills",
            ],
        ),
    ],
)
def test_a_setting_says_how_it_differs_from_its_property(properties, settings):
    given = {name.lower(): value for name, value in (BASE | properties).items() if value}

    found = [f"{setting}: {value}  # {comment}" for setting, value, comment in convert(given)]

    for expected in settings:
        name, _, value = expected.partition(": ")
        reported = [each for each in found if each.startswith(f"{name}: ")]
        assert len(reported) == bool(value)
        for line in reported:
            assert line == expected if expected.endswith("# ") else line.startswith(expected)


def test_an_arn_comes_before_a_name_and_says_the_region():
    arn = "arn:aws:kinesis:eu-central-1:123456789012:stream/orders"

    made = settings(streamArn=arn)

    assert (made.stream, made.aws.region) == (arn, "eu-central-1")


def test_an_arn_of_another_region_is_pointed_at():
    arn = "arn:aws:kinesis:eu-central-1:123456789012:stream/orders"

    text = text_of(streamArn=arn, regionName="us-east-1")

    assert "# the stream's ARN has eu-central-1: one of the two is wrong" in text


def test_a_script_elsewhere_and_its_arguments_are_settings():
    arguments = ("--table", "null", "a: b #c", "${HOME}", 'q"\\', "é\x7f\u2028😀")

    made = settings(Script("consumer.py", "src", arguments))

    assert made.path == "src"
    assert made.options == {"arguments": list(arguments)}


def test_a_script_that_cannot_be_run_is_asked_for():
    text = text_of(Script(None, remark="executableName (./run.sh) is not named like a .py script."))

    assert "# executableName (./run.sh) is not named like a .py script. Name the script" in text
    assert "\n# processor: kclpy:script.py\n" in text


@over_rows(
    ("properties", "said"),
    [
        ({"applicationName": ""}, "app.properties: applicationName is missing"),
        ({"streamName": " "}, "streamName is missing, and streamArn, too"),
        ({"maxRecords": "many"}, "maxRecords: expected a whole number, got 'many'"),
        ({"cleanupLeasesUponShardCompletion": "maybe"}, "expected true or false, got 'maybe'"),
        ({"initialPositionInStream": "AT_TIMESTAMP"}, "stands in initialPositionInStreamExtended"),
        ({"initialPositionInStreamExtended": "-1"}, "expected seconds since 1970"),
        ({"initialPositionInStreamExtended": "1790000000"}, "is in the future"),
        ({"applicationName": "a b"}, "would be accepted:\napplication: expected a text of"),
        ({"kinesisEndpoint": "kinesis.example"}, "kinesisEndpoint: expected an https URL"),
        ({"dynamoDBEndpoint": "http://db.example"}, "plain http is for this machine only"),
        (
            {"regionName": "eu-west-1", "dynamoDBRegionName": "us-east-1"},
            "dynamoDBRegionName: the lease table is in us-east-1 and the stream in eu-west-1",
        ),
    ],
)
def test_what_would_read_another_stream_or_other_checkpoints_is_refused(properties, said):
    with pytest.raises(SettingsError, match=said):
        text_of(**properties)


def test_what_has_no_counterpart_and_what_is_unknown_is_named_without_its_value():
    text = text_of(workerId="w", AWSCredentialsProviderDynamoDB="S|key", Foo="secret")

    without, unknown = text.split("# These properties have no counterpart:")[1].split("\n\n")
    assert "#   workerId: each start has an identity of its own" in without
    assert "#   AWSCredentialsProviderDynamoDB: one identity for all services" in without
    assert unknown.strip().splitlines()[1:] == ["#   Foo"]
    assert "secret" not in text
    assert "S|key" not in text


def test_keys_in_a_credentials_provider_are_not_repeated():
    text = text_of(AwsCredentialsProvider="StaticCredentialsProvider|AKIAEXAMPLEEXAMPLE|hush")

    assert "AKIA" not in text
    assert "hush" not in text


def test_a_name_cannot_end_its_comment():
    text = text_of(**{"x\nstream: other": "1"})

    assert settings_of(text, environment={}, now=NOW).stream == "orders"


def test_a_file_that_sets_every_property_is_accepted():
    numbers = dict.fromkeys((each.name for each in known_properties()), "5000")
    odd = {
        **BASE,
        "streamArn": "arn:aws:kinesis:eu-west-1:123456789012:stream/orders",
        "regionName": "eu-west-1",
        "dynamoDBRegionName": "eu-west-1",
        "tableName": "orders-leases",
        "kinesisEndpoint": "https://kinesis.example",
        "dynamoDBEndpoint": "https://dynamodb.example",
        "initialPositionInStream": "LATEST",
        "cleanupLeasesUponShardCompletion": "true",
    }

    made = settings(**(numbers | odd))

    assert made.leases.failover == 5.0


def test_the_table_names_each_property_once_and_settings_that_exist():
    names = [each.name.lower() for each in known_properties()]
    assert len(names) == len(set(names)) > 60
    for each in known_properties():
        assert each.note or each.setting
        level = Settings
        for step in filter(None, each.setting.split(".")):
            fields = field_types(level)
            assert step in fields, each.setting
            inner = [plain_type(choice) for choice in members(fields[step])]
            level = next((kind for kind in inner if hasattr(kind, "__struct_fields__")), None)
            if level is None:
                break
