"""The stream of a DynamoDB table in the settings: known by its ARN, refused where it cannot be."""

import pytest

from kclrun.config.changes import is_of_changes
from kclrun.config.load import settings_of
from kclrun.config.schema import stream_name
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime
from tests.support.tables import over_rows

ARN = "arn:aws:dynamodb:eu-west-1:123456789012:table/orders.v2/stream/2026-01-01T00:00:00.000"
BASE = f"application: shop\nstream: {ARN}\nprocessor: a:B\n"


def settings(text):
    return settings_of(text, environment={}, now=WallTime(1.8e9))


def test_a_stream_of_a_table_is_known_by_its_arn_and_called_by_its_table():
    made = settings(BASE + "decode: json\nstart: LATEST\n")

    assert is_of_changes(made)
    assert made.stream_names == stream_name(ARN) == "orders.v2"
    assert not is_of_changes(settings(BASE.replace(ARN, "orders")))


@over_rows(
    ("text", "words"),
    [
        (
            BASE.replace("stream: ", "streams: [{name: ").replace("000\n", "000}]\n"),
            "streams: takes",
        ),
        (BASE + "engine: spark\nspark: {checkpoint: /c}\n", "engine: is fleet"),
        (BASE + "fetch: {mode: fan-out}\n", "fetch.mode: is polling"),
        (BASE + "fetch: {kpl_range: drop}\n", "fetch.kpl_range: is keep"),
        (BASE + "start: '2026-01-01T00:00:00Z'\n", "start: is TRIM_HORIZON or LATEST"),
        (BASE + "state: {store: kept}\n", "state: cannot be kept"),
        (BASE + "decode: glue\n", "decode: is json"),
        (BASE + "decode: msgpack\n", "decode: is json"),
        (BASE + "aws: {endpoint: embedded}\n", "aws.endpoint: is not embedded"),
        (BASE.replace("/stream/", "/index/"), "stream: expected"),
    ],
)
def test_what_the_stream_of_a_table_cannot_have_is_refused_in_words(text, words):
    with pytest.raises(SettingsError, match=words):
        settings(text)
