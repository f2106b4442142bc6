"""The settings of the state: where it is, its limits, and how often it is committed."""

import pytest

from kclrun.config.load import settings_of
from kclrun.config.state import checkpoint_every, state_place
from kclrun.errors import SettingsError
from kclrun.model.state import StateDestination, Watermarks
from kclrun.model.time import WallTime
from tests.support.tables import over_rows

BASE = "application: orders\nstream: clicks\nprocessor: a:B\n"


def settings(text):
    return settings_of(BASE + text, environment={}, now=WallTime(1e9))


@over_rows(
    ("text", "place"),
    [
        ("", None),
        ("state: {store: kept}", StateDestination(path="kept")),
        ("state: {store: s3://bucket/a/b}", StateDestination(s3="s3://bucket/a/b")),
        ("state: {store: dynamodb://kept}", StateDestination(dynamodb="kept")),
        (
            "state: {store: dynamodb://kept}\naws: {endpoint: 'http://127.0.0.1:1'}",
            StateDestination(dynamodb="kept", endpoint_url="http://127.0.0.1:1"),
        ),
        (
            "state: {store: /mnt/x, max_bytes: 1MiB, retain: 1h}",
            StateDestination(path="/mnt/x", max_bytes=2**20, retain_s=3600.0),
        ),
        (
            "state: {store: kept}\nwatermark: {lateness: 1m, every: 5s, idle: 30s}",
            StateDestination(path="kept", watermarks=Watermarks(60.0, 5.0, 30.0)),
        ),
        ("state: {store: kept, begin: empty}", StateDestination(path="kept", may_begin_empty=True)),
        (
            "state: {store: kept, outbox: on}\noutput: {path: rows, roll: {}}",
            StateDestination(path="kept", has_outbox=True),
        ),
        (
            "state: {store: s3://bucket}\naws: {endpoints: {s3: 'http://127.0.0.1:1'}}",
            StateDestination(s3="s3://bucket", endpoint_url="http://127.0.0.1:1"),
        ),
    ],
)
def test_the_store_is_a_folder_a_bucket_or_a_table(text, place):
    assert state_place(settings(text)) == place


@over_rows(
    ("text", "every"),
    [
        ("", 10.0),
        ("state: {store: kept}", 10.0),
        ("state: {store: dynamodb://kept}", 10.0),
        ("state: {store: s3://bucket}", 30.0),
        ("state: {store: s3://bucket}\ncheckpoint: {every: 5s}", 5.0),
        ("state: {store: s3://bucket}\ncheckpoint: {every: batch}", "batch"),
    ],
)
def test_a_commit_to_s3_is_each_30_s_unless_the_settings_say(text, every):
    assert checkpoint_every(settings(text)) == every


@over_rows(
    ("checkpoint", "store"),
    [
        ("/data/checkpoint/", "/data/checkpoint/kclrun-state"),
        ("checkpoint", "checkpoint/kclrun-state"),
        ("file:///data/a%20b", "/data/a b/kclrun-state"),
        ("s3a://bucket/orders/", "s3://bucket/orders/kclrun-state"),
        ("s3://bucket", "s3://bucket/kclrun-state"),
    ],
)
def test_on_spark_the_state_is_below_the_checkpoint_unless_the_settings_say(checkpoint, store):
    text = f"state: {{}}\nengine: spark\nspark: {{checkpoint: '{checkpoint}'}}"
    place = state_place(settings(text))
    assert (place.path or place.s3) == store
    place = state_place(settings(text.replace("state: {}", "state: {store: kept}")))
    assert place.path == "kept"


@over_rows(
    ("text", "words"),
    [
        ("state: {}", "state.store: is missing"),
        ("state: {store: ''}", "state.store: expected a folder"),
        ("state: {store: 'gs://bucket'}", "state.store: expected a folder"),
        ("state: {store: 's3:/bucket'}", "state.store: expected a text like s3://bucket/prefix"),
        ("state: {store: kept, outbox: on}", "state.outbox: is for rows, and there is no `output`"),
        (
            "state: {store: kept, outbox: on}\noutput: {path: rows}",
            "output.roll: is missing: with state.outbox a file is rolled",
        ),
        (
            "state: {store: kept, outbox: on}\noutputs: {a: {sqs: a}, b: {s3: s3://bucket}}",
            "outputs.a: is the first output, and with state.outbox that decides",
        ),
        ("state: {store: kept, max_bytes: 0B}", "state.max_bytes: expected more than nothing"),
        ("watermark: {lateness: 1s}", "watermark: is for timers, which are kept with `state`"),
        ("state: {store: kept}\nwatermark: {every: 0s}", "watermark.every: expected more"),
        (
            "state: {store: kept, local: /x}\nengine: spark\nspark: {checkpoint: /x}",
            "state.local: is for engine: fleet",
        ),
        (
            "state: {outbox: on}\nengine: spark\nspark: {checkpoint: /x}",
            "state.outbox: is for engine: fleet",
        ),
        (
            "state: {}\nengine: spark\nspark: {checkpoint: 'hdfs://a/b'}",
            "state.store: is missing: spark.checkpoint is neither a folder nor in S3",
        ),
        (
            "state: {}\nwatermark: {idle: 1m}\nengine: spark\nspark: {checkpoint: /x}",
            "watermark.idle: is for engine: fleet",
        ),
    ],
)
def test_what_is_no_store_is_refused_in_words(text, words):
    with pytest.raises(SettingsError) as refused:
        settings(text)
    assert words in str(refused.value)
