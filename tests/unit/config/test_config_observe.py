"""`observe:`: where it listens, and what CloudWatch is given."""

import pytest

from kclrun.config.load import settings_of
from kclrun.config.observing import CloudWatchSettings, ObserveSettings
from kclrun.config.rules import unused_settings
from kclrun.config.schema import Settings
from kclrun.config.units import parse_listen
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime
from tests.support.tables import over_rows

NOW = WallTime(1_780_000_000.0)
DIMENSIONS = "observe.cloudwatch.dimensions"
LEAST = "application: orders\nstream: orders\n"


def loaded(more: str, **environment: str) -> Settings:
    return settings_of(LEAST + more, environment=environment, now=NOW)


def test_nothing_listens_and_nothing_is_published_unless_asked_for():
    assert loaded("").observe == ObserveSettings(listen=None, cloudwatch=None)
    assert loaded("observe:\n  cloudwatch:\n").observe == ObserveSettings()


def test_naming_cloudwatch_is_asking_for_it():
    assert loaded("observe: {cloudwatch: {}}").observe.cloudwatch == CloudWatchSettings()
    cloudwatch = loaded(
        "observe: {cloudwatch: {namespace: a/b, detail: shard, dimensions: {Environment: prod}}}"
    ).observe.cloudwatch
    assert cloudwatch == CloudWatchSettings(
        namespace="a/b", detail="shard", dimensions={"Environment": "prod"}
    )


@over_rows(
    ("listen", "address"),
    [
        (9464, ("127.0.0.1", 9464)),
        ("9464", ("127.0.0.1", 9464)),
        (0, ("127.0.0.1", 0)),
        (65535, ("127.0.0.1", 65535)),
        ("localhost:1", ("127.0.0.1", 1)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("[::1]:9464", ("::1", 9464)),
    ],
)
def test_a_port_alone_is_on_loopback(listen, address):
    assert parse_listen(listen) == address


@over_rows(
    "listen",
    [
        *("", ":", ":9464", "box.example:9464", "1:9464", "1.2.3.4", 65536, -1),
        *(f"127.0.0.1:{port}" for port in ("http", "²", "\u0661", "+5", "1_0", " 5", "9" * 5000)),
    ],
)
def test_what_is_no_address_is_refused(listen):
    with pytest.raises(ValueError, match="expected a port of this machine"):
        parse_listen(listen)


@over_rows(
    ("more", "said"),
    [
        ("observe: {listen: box.example:9464}", "observe.listen: expected a port"),
        ("observe: {listen: 70000}", "observe.listen: expected a port"),
        ("observe: {cloudwatch: on}", "observe.cloudwatch: expected settings"),
        (
            "observe: {cloudwatch: {namespace: AWS/Kinesis}}",
            "observe.cloudwatch.namespace: expected a text of at most 255",
        ),
        ("observe: {cloudwatch: {detail: owner}}", "observe.cloudwatch.detail: expected"),
        ("observe: {otlp: {endpoint: collector}}", "observe.otlp.endpoint: expected a text like"),
        ("observe: {otlp: {endpoint: 'http://u:p@c:4318'}}", "without user, path or query"),
        ("observe: {otlp: {traces: {sample: 1.1}}}", "observe.otlp.traces.sample: expected"),
        ("observe: {otlp: {traces: {context: 'a b'}}}", "observe.otlp.traces.context: expected"),
        ("observe: {otlp: {traces: {context: 'm:f:g'}}}", "observe.otlp.traces.context: expected"),
        *(
            (f"observe: {{cloudwatch: {{dimensions: {dimensions}}}}}", f"{DIMENSIONS}{said}")
            for dimensions, said in (
                ("{Shard: x}", ".Shard: is set by kclrun"),
                ("{':a': x}", ".:a: is not the name"),
                ("{Köln: x}", ".Köln: is not the name"),
                ("{' ': x}", ". : is not the name"),
                (f"{{{'n' * 256}: x}}", f".{'n' * 256}: is not the name"),
                ('{a: "x\\ty"}', ".a: expected a value of plain text"),
                ("{a: Köln}", ".a: expected a value of plain text"),
                ("{a: ''}", ".a: expected a value"),
                (f"{{a: {'v' * 1025}}}", ".a: expected a value"),
                (str({f"d{number}": "x" for number in range(29)}), ": expected at most 28"),
            )
        ),
    ],
)
def test_what_would_fail_later_is_refused_now(more, said):
    with pytest.raises(SettingsError) as caught:
        loaded(more)

    assert said in str(caught.value)


@pytest.mark.parametrize("context", ["traceparent", "meta.trace-parent", "shop.traces:context_of"])
def test_a_field_or_a_function_has_the_trace_context(context):
    otlp = loaded(f"observe: {{otlp: {{traces: {{context: '{context}'}}}}}}").observe.otlp

    assert otlp is not None
    assert otlp.traces is not None
    assert otlp.traces.context == context


def test_dimensions_up_to_the_limits_of_cloudwatch_are_taken():
    dimensions = {f"d{number}": "x" for number in range(27)} | {"n" * 255: "v" * 1024}

    observe = loaded(f"observe: {{cloudwatch: {{dimensions: {dimensions}}}}}").observe

    assert observe.cloudwatch == CloudWatchSettings(dimensions=dimensions)


def test_on_spark_it_means_nothing_and_is_named():
    spark = "engine: spark\nspark: {checkpoint: /c}\nobserve: {listen: 9464}"

    assert unused_settings(loaded(spark)) == ("observe",)


def test_a_port_may_come_from_the_environment():
    assert loaded("observe: {listen: '${PORT}'}", PORT="9464").observe.listen == 9464


@pytest.mark.parametrize("window", ["0s", "2s", "60s", "1h"])
def test_the_window_of_hot_shards_is_of_seconds_to_an_hour_or_nothing(window):
    assert loaded(f"observe: {{hot_window: {window}}}").observe.hot_window.text in {window, "1m"}


@pytest.mark.parametrize("window", ["1s", "1999ms", "61m"])
def test_another_window_of_hot_shards_is_refused(window):
    with pytest.raises(SettingsError, match="hot_window: expected 2s to 1h, or 0s"):
        loaded(f"observe: {{hot_window: {window}}}")
