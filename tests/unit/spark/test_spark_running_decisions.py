import signal

import pytest

from kclrun.config.load import settings_of
from kclrun.lifecycle.stopping import Stage, StopPlan
from kclrun.model.time import Instant, WallTime
from kclrun.spark.options import LeasesAt, StartKind, Use, read_source_options
from kclrun.spark.running.failures import level_of_line
from kclrun.spark.running.query import as_option_texts, source_options

NOW = WallTime(1_780_000_000.0)


def options(more: str, stream: str = "orders") -> dict[str, str]:
    text = f"application: orders\nstream: {stream}\nengine: spark\n{more}"
    if "spark:" not in more.replace("engine: spark", ""):
        text += "\nspark: {checkpoint: /c}"
    return source_options(settings_of(text, environment={}, now=NOW), NOW)


def test_the_settings_of_the_file_are_options_that_the_source_takes() -> None:
    given = options(
        "aws: {region: eu-west-1, role_arn: 'arn:aws:iam::1:role/r', endpoint: 'https://k.x'}\n"
        "fetch: {idle: 500ms}\n"
        "spark: {checkpoint: /c, source: {maxRecordsPerTrigger: 1000, failOnDataLoss: false}}"
    )

    read = read_source_options(given, Use.STREAM)

    assert read.reached.stream == "orders"
    assert read.reached.region == "eu-west-1"
    assert read.reached.role_arn == "arn:aws:iam::1:role/r"
    assert read.reached.endpoint_url == "https://k.x"
    assert (read.poll_interval_s, read.records_per_trigger_max) == (0.5, 1000)
    assert not read.fails_on_data_loss
    assert read.start.kind is StartKind.EARLIEST


def test_one_service_elsewhere_is_where_the_source_goes() -> None:
    given = options("aws: {endpoint: 'https://a.x', endpoints: {kinesis: 'https://k.x'}}")

    assert given["endpointUrl"] == "https://k.x"


def test_a_start_at_leases_is_an_option_and_dynamodb_is_found_where_the_file_says() -> None:
    given = options("start: {leases: shop}")
    elsewhere = options(
        "start: {leases: shop}\naws: {endpoint: 'https://a.x', endpoints: {dynamodb: 'https://d.x'}}"
    )

    assert read_source_options(given, Use.STREAM).start.leases == LeasesAt("shop")
    assert read_source_options(elsewhere, Use.STREAM).start.leases == LeasesAt(
        "shop", "https://d.x"
    )


def test_an_arn_says_its_region_itself() -> None:
    arn = "arn:aws:kinesis:eu-west-1:123456789012:stream/orders"
    given = options("aws: {region: us-east-1}", arn)

    assert given["streamARN"] == arn
    assert "region" not in given
    assert read_source_options(given, Use.STREAM).reached.name == "orders"


@pytest.mark.parametrize(
    ("start", "kind", "timestamp_ms"),
    [
        ("LATEST", StartKind.LATEST, 0),
        ("TRIM_HORIZON", StartKind.EARLIEST, 0),
        ("2026-03-01T06:00:00.25Z", StartKind.TIMESTAMP, 1_772_344_800_250),
    ],
)
def test_start_says_where_a_query_without_a_checkpoint_begins(
    start: str, kind: StartKind, timestamp_ms: int
) -> None:
    read = read_source_options(options(f"start: {start}"), Use.STREAM)

    assert (read.start.kind, read.start.timestamp_ms) == (kind, timestamp_ms)


def test_options_are_texts_as_spark_reads_them() -> None:
    assert as_option_texts({"a": True, "b": 3, "c": 0.5, "d": "x"}) == {
        "a": "true",
        "b": "3",
        "c": "0.5",
        "d": "x",
    }


def test_a_first_signal_lets_the_batch_finish_within_the_grace() -> None:
    plan = StopPlan(grace_s=60.0)

    assert plan.press(signal.SIGTERM, Instant(10.0)) is Stage.DRAINING
    assert plan.is_wanted
    assert not plan.is_over(Instant(69.9))
    assert plan.is_over(Instant(70.0))


def test_a_second_signal_shortens_the_grace_and_never_lengthens_it() -> None:
    plan = StopPlan(grace_s=60.0)
    plan.press(signal.SIGINT, Instant(10.0))

    assert plan.press(signal.SIGINT, Instant(20.0)) is Stage.HURRIED
    assert plan.is_over(Instant(22.0))
    plan.press(signal.SIGTERM, Instant(21.9))
    assert plan.is_over(Instant(22.0))


def test_a_quit_ends_the_patience_at_once_and_for_good() -> None:
    plan = StopPlan(grace_s=60.0)

    assert plan.press(signal.SIGQUIT, Instant(10.0)) is Stage.QUITTING
    assert plan.is_over(Instant(10.0))
    assert plan.press(signal.SIGTERM, Instant(10.0)) is Stage.QUITTING
    assert plan.is_over(Instant(10.0))


def test_without_a_signal_the_patience_has_no_end() -> None:
    assert not StopPlan(grace_s=0.0).is_over(Instant(1e9))


@pytest.mark.parametrize(
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
def test_what_spark_always_says_is_for_debugging(line: str, level: str) -> None:
    assert level_of_line(line) == level
