"""`streams:` instead of `stream:`: what each has of its own, and what is refused."""

import pytest

from kclrun.config.convert import json_schema
from kclrun.config.load import settings_of
from kclrun.config.schema import Settings
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime
from tests.support.tables import over_rows

NOW = WallTime(1_780_000_000.0)
TWO = """\
application: shop
processor: m:Both
options: {window: 15m, level: 1}
start: LATEST
streams:
  - {name: orders, options: {level: 2}}
  - name: arn:aws:kinesis:eu-west-1:123456789012:stream/audits
    processor: m:Audit
    priority: 10
    start: TRIM_HORIZON
"""


def load(text: str) -> Settings:
    return settings_of(text, environment={}, now=NOW)


def test_what_a_stream_does_not_say_of_its_own_is_the_applications():
    orders, audits = load(TWO).sources

    assert (orders.processor, audits.processor) == ("m:Both", "m:Audit")
    assert orders.options == {"window": "15m", "level": 2}
    assert audits.options == {"window": "15m", "level": 1}
    assert (orders.priority, audits.priority) == (0, 10)
    assert (orders.start, audits.start) == ("LATEST", "TRIM_HORIZON")


def test_one_stream_is_a_source_with_all_that_is_the_applications():
    (source,) = load("application: shop\nstream: orders\nprocessor: m:C\noptions: {x: 1}").sources

    assert (source.name, source.processor, source.options) == ("orders", "m:C", {"x": 1})
    assert (source.priority, source.start) == (0, "TRIM_HORIZON")


@pytest.mark.parametrize(
    "named", ["audits", "arn:aws:kinesis:eu-west-1:123456789012:stream/audits"]
)
def test_settings_are_narrowed_to_one_stream_by_its_name_or_arn(named):
    narrowed = load(TWO).of_stream(named)

    assert load(TWO).of_stream("orders").start == "LATEST", "the application's"
    assert narrowed.only_stream == "arn:aws:kinesis:eu-west-1:123456789012:stream/audits"
    assert (narrowed.processor, narrowed.start, narrowed.streams) == (
        "m:Audit",
        "TRIM_HORIZON",
        (),
    )


def test_no_stream_is_meant_where_there_are_several_and_none_that_is_not_there():
    settings = load(TWO)

    with pytest.raises(SettingsError, match=r"has several streams \(orders, .*: name one of them"):
        _ = settings.only_stream
    with pytest.raises(
        SettingsError, match="other is not a stream of this application: orders, aud"
    ):
        settings.of_stream("other")


def test_no_processor_for_all_is_needed_where_each_stream_has_one():
    text = TWO.replace("processor: m:Both\n", "").replace("name: orders", "name: o, processor: m:C")

    assert [source.processor for source in load(text).sources] == ["m:C", "m:Audit"]


@over_rows(
    ("text", "said"),
    [
        ("application: shop\nprocessor: m:C\n", "stream: is missing"),
        ("application: shop\nprocessor: m:C\nstreams: []\n", "stream: is missing"),
        (f"stream: orders\n{TWO}", "streams: and stream exclude each other"),
        (f"engine: spark\nspark: {{checkpoint: c}}\n{TWO}", "streams: is for engine: fleet"),
        (
            TWO.replace("name: orders", "name: audits"),
            "streams[1].name: is named twice: streams[0]",
        ),
        (TWO.replace("processor: m:Both\n", ""), "streams[0].processor: is missing"),
        (TWO.replace("TRIM_HORIZON", "YESTERDAY"), "streams[1].start: "),
        (TWO.replace("priority: 10", "priority: 20"), "streams[1].priority: expected a whole"),
        (TWO.replace("priority: 10", "nice: 10"), "streams[1].nice: no such setting"),
        (TWO.replace("name: orders, ", ""), "streams[0].name: is missing"),
    ],
)
def test_streams_that_contradict_are_refused_with_their_place(text, said):
    with pytest.raises(SettingsError) as caught:
        load(text)

    assert said in str(caught.value)


def test_a_missing_stream_is_reported_with_whatever_else_is_wrong():
    with pytest.raises(SettingsError) as caught:
        load("application: shop\nleases: {max: 0}\nstall: 1s\n")

    assert "stream: is missing" in str(caught.value)
    assert "leases.max: expected" in str(caught.value)


def test_the_schema_wants_one_stream_or_several():
    schema = json_schema()

    assert schema["oneOf"] == [{"required": ["stream"]}, {"required": ["streams"]}]
    assert schema["properties"]["streams"]["items"]["required"] == ["name"]


def test_a_stream_may_have_a_concurrency_of_its_own():
    text = (
        "application: shop\nprocessor: m:C\nconcurrency: {records: 8}\nstreams:\n"
        "  - {name: orders}\n  - {name: audits, concurrency: {order: none, timeout: 5s}}\n"
    )
    settings = load(text)

    found = [
        (each.records, each.order, each.timeout)
        for source in settings.sources
        if (each := source.concurrency) is not None
    ]
    assert found == [(8, "key", None), (64, "none", 5.0)]
    assert settings.of_stream("audits").concurrency == settings.sources[1].concurrency
