import signal

import pytest

from kclrun.config.load import settings_of
from kclrun.errors import SettingsError
from kclrun.lifecycle.stopping import Stage, StopPlan
from kclrun.model.time import Instant, WallTime
from kclrun.spark.option_reading import Use, read_source_options, source_texts
from kclrun.spark.options import LeasesAt, SourceSettings, Start, StartKind, StreamAddress
from kclrun.spark.running.failures import level_of_line
from kclrun.spark.running.query import as_option_texts, source_settings
from tests.support.tables import over_rows

NOW = WallTime(1_780_000_000.0)
ARN = "arn:aws:kinesis:us-east-1:123456789012:stream/orders"


def source(more: str, stream: str = "orders") -> SourceSettings:
    """The source of these settings; Spark is given texts that mean the same."""
    text = f"application: orders\nstream: {stream}\nengine: spark\n{more}"
    if "spark:" not in more.replace("engine: spark", ""):
        text += "\nspark: {checkpoint: /c}"
    found = source_settings(settings_of(text, environment={}, now=NOW), NOW)
    assert read_source_options(source_texts(found), Use.STREAM) == found
    return found


def test_the_settings_of_the_file_are_those_of_the_source():
    assert source(
        "aws: {region: eu-west-1, role_arn: 'arn:aws:iam::1:role/r', endpoint: 'https://k.x'}\n"
        "fetch: {idle: 500ms}\n"
        "spark: {checkpoint: /c, source: {maxRecordsPerTrigger: 1000, failOnDataLoss: false,"
        " maxBytesPerTrigger: 1048576, retryBackoffMax: 10s, maxReadsPerSecondPerShard: 2}}"
    ) == SourceSettings(
        address=StreamAddress(
            stream="orders",
            region="eu-west-1",
            endpoint_url="https://k.x",
            role_arn="arn:aws:iam::1:role/r",
        ),
        start=Start(StartKind.EARLIEST),
        poll_interval_s=0.5,
        records_per_trigger_max=1000,
        bytes_per_trigger_max=2**20,
        retry_backoff_max_s=10.0,
        reads_per_second_max=2.0,
        fails_on_data_loss=False,
    )


@pytest.mark.parametrize(
    ("more", "consumer"),
    [
        ("fetch: {mode: fan-out}", "orders"),  # the application
        ("fetch: {mode: fan-out, consumer: mine}", "mine"),
        (f"fetch: {{mode: fan-out, consumer: '{ARN}/consumer/mine:1'}}", f"{ARN}/consumer/mine:1"),
        ("fetch: {consumer: mine}", None),
    ],
)
def test_the_mode_and_the_consumer_of_the_file_are_those_of_the_source(more, consumer):
    found = source(more)

    assert found.consumer == consumer
    assert found.consumer_mode == ("polling" if consumer is None else "fan-out")


@pytest.mark.parametrize(
    ("more", "reported"),
    [
        ("fetch: {idle: 2m}", "pollInterval: expected 200ms to 1m, got '2m'"),
        ("spark: {checkpoint: /c, source: {failOnDataLoss: 1}}", "expected true or false, got '1'"),
        ("spark: {checkpoint: /c, source: {targetBatchDuration: 30}}", "a duration such as 10s"),
    ],
)
def test_a_setting_that_the_source_refuses_is_named_as_its_option(more, reported):
    with pytest.raises(SettingsError, match="the kclrun source cannot be used") as raised:
        source(more)
    assert reported in str(raised.value)


def test_a_start_at_leases_finds_dynamodb_where_the_file_says():
    elsewhere = source(
        "start: {leases: shop}\naws: {endpoint: 'https://a.x', endpoints: {dynamodb: 'https://d.x'}}"
    )

    assert source("start: {leases: shop}").start.leases == LeasesAt("shop")
    assert elsewhere.start.leases == LeasesAt("shop", "https://d.x")


@pytest.mark.parametrize(
    ("start", "kind", "timestamp_ms"),
    [
        ("LATEST", StartKind.LATEST, 0),
        ("TRIM_HORIZON", StartKind.EARLIEST, 0),
        ("2026-03-01T06:00:00.25Z", StartKind.TIMESTAMP, 1_772_344_800_250),
    ],
)
def test_start_says_where_a_query_without_a_checkpoint_begins(start, kind, timestamp_ms):
    assert source(f"start: {start}").start == Start(kind, timestamp_ms)


def test_options_are_texts_as_spark_reads_them():
    assert as_option_texts({"a": True, "b": 3, "c": 0.5, "d": "x"}) == {
        "a": "true",
        "b": "3",
        "c": "0.5",
        "d": "x",
    }


def test_a_first_signal_lets_the_batch_finish_within_the_grace():
    plan = StopPlan(grace_s=60.0)

    assert plan.press(signal.SIGTERM, Instant(10.0)) is Stage.DRAINING
    assert plan.is_wanted
    assert not plan.is_over(Instant(69.9))
    assert plan.is_over(Instant(70.0))


def test_a_second_signal_shortens_the_grace_and_never_lengthens_it():
    plan = StopPlan(grace_s=60.0)
    plan.press(signal.SIGINT, Instant(10.0))

    assert plan.press(signal.SIGINT, Instant(20.0)) is Stage.HURRIED
    assert plan.is_over(Instant(22.0))
    plan.press(signal.SIGTERM, Instant(21.9))
    assert plan.is_over(Instant(22.0))


def test_a_quit_ends_the_patience_at_once_and_for_good():
    plan = StopPlan(grace_s=60.0)

    assert plan.press(signal.SIGQUIT, Instant(10.0)) is Stage.QUITTING
    assert plan.is_over(Instant(10.0))
    assert plan.press(signal.SIGTERM, Instant(10.0)) is Stage.QUITTING
    assert plan.is_over(Instant(10.0))


def test_without_a_signal_the_patience_has_no_end():
    assert not StopPlan(grace_s=0.0).is_over(Instant(1e9))


@over_rows(
    ("line", "level"),
    [
        ("WARNING: Using incubator modules: jdk.incubator.vector", "debug"),
        (
            "Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties",
            "debug",
        ),
        ("\tat org.apache.spark.scheduler.DAGScheduler.run(DAGScheduler.scala:1)", "debug"),
        ("Caused by: java.io.IOException: no", "debug"),
        ("2026-11-21T13:08:25Z ERROR MicroBatchExecution: Query terminated", "warning"),
        ("what the user's UDF printed", "warning"),
    ],
)
def test_what_spark_always_says_is_for_debugging(line, level):
    assert level_of_line(line) == level
