import pytest

from kclrun.config.load import settings_of
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime
from tests.support.tables import over_rows

NOW = WallTime(1_780_000_000.0)
LEAST = "application: orders\nstream: orders\n"
COLUMNS = ("a int, " * 3_333 + "b int").ljust(20_000)[:20_000]
FILLED = "aws: {endpoint: embedded}\nembedded:\n  fill: {source: 'a:b'}\n"


@over_rows(
    ("more", "said"),
    [
        ("start: 2030-01-01T00:00:00Z", "start: 2030-01-01T00:00:00Z is in the future"),
        ("embedded: {shards: 2}", "embedded: is for aws.endpoint: embedded"),
        (
            "aws: {endpoint: 'https://x.com'}\nembedded: {shards: 2}",
            "embedded: is for aws.endpoint: embedded",
        ),
        ("aws: {region: EU West}", "aws.region: expected a region such as eu-west-1 (the"),
        (
            "aws: {region: eu-west}",
            "aws.region: is not a region of AWS: expected one such as eu-w",
        ),
        ("aws: {region: us-east-1a}", "aws.region: is not a region of AWS"),
        ("aws: {role_arn: ''}", "aws.role_arn: expected arn:aws:iam::<account>:role/<name>"),
        ("aws: {role_arn: reader}", "aws.role_arn: expected arn:aws:iam::<account>:role/<name>"),
        ("aws: {endpoint: somewhere}", "aws.endpoint: expected embedded or a URL: this is not a"),
        ("aws: {endpoint: embeded}", "did you mean embedded?"),
        ("aws: {endpoint: '127.0.0.1:4567'}", "URL: write http://127.0.0.1:4567 (the file line"),
        ("aws: {endpoint: 'localhost:4567'}", "URL: write http://localhost:4567"),
        ("aws: {endpoint: 'kinesis.example.com'}", "URL: write https://kinesis.example.com"),
        ("aws: {endpoint: 'user:secret@x.com'}", "a URL: this is not a URL that starts with"),
        ("output: {path: 's3://bucket/x'}", "output.path: expected a folder of this machine, not"),
        ("output: {path: 's3:/bucket/x'}", "output.path: expected a folder"),
        ("output: {path: 'file:///x'}", "output.path: expected a folder"),
        ("aws: {endpoint: 'http://10.0.0.1'}", "plain http is for this machine only"),
        ("aws: {endpoint: 'http://127.0.0.1.evil.com'}", "plain http is for this machine only"),
        ("aws: {endpoint: 'https://u:p@x.com'}", "a user, a password or a query has no place"),
        ("aws: {endpoint: 'ftp://x.com'}", "not a URL that starts with https"),
        ("aws: {endpoints: {kinesis: 'http://x.com'}}", "aws.endpoints.kinesis: expected"),
        ("leases: {failover: 10ms}", "leases.failover: expected 1s to 15m"),
        ("stall: 99999999d", "stall: expected a duration of at most 36500d"),
        ("fetch: {buffer: 99999999999GiB}", "fetch.buffer: expected a size of less than 8 EiB"),
        ("fetch: {idle: 100ms}", "fetch.idle: expected 200ms or more"),
        ("fetch: {every: 199ms}", "fetch.every: expected 200ms or more"),
        ("fetch: {mode: fanout}", "fetch.mode"),
        ("fetch: {mode: fan-out, consumer: a b}", "that is a consumer's name or ARN"),
        (
            "fetch: {mode: fan-out, consumer: 'arn:aws:kinesis:eu-west-1:123456789012:stream/o'}",
            "that is a consumer's name or ARN",
        ),
        ("fetch: {buffer: 0}", "fetch.buffer: expected more than nothing"),
        ("checkpoint: {every: 0s}", "checkpoint.every: expected more than 0s"),
        ("stall: 10s", "stall: expected more than leases.failover"),
        (
            "processor: 'kclpy:a.py'\nleases: {per_process: 2}",
            "leases.per_process: is 1 for a processor of amazon_kclpy",
        ),
        ("processor: 'kclpy:a.py'", "checkpoint.every: is manual for a processor of amazon_kclpy"),
        (
            "processor: 'kclpy:a.py'\nengine: spark\nspark: {checkpoint: c}",
            "processor: kclpy: is for engine: fleet",
        ),
        ("summary: a:b", "summary: needs output.path"),
        (f"options: {{a: {'x' * 50_000}}}", "options: 50,006 bytes, at most 49,152: each start"),
        (
            f"options: {{a: {'x' * 30_000}}}\noutput: {{s3: 's3://bucket', schema: '{COLUMNS}'}}",
            "output: 20,000 bytes of `schema` and 30,006 bytes of `options`, at most 49,152",
        ),
        ('options: {a: "\\ud800"}', "options: a text in it is not Unicode"),
        ("output: {path: ''}", "output.path: expected a folder: a text that is not empty"),
        ('output: {path: "a\\0"}', "output.path: expected a folder: a text that is not empty"),
        ('outputs: {x: {path: "\\ud800", roll: {}}}', "outputs.x.path: expected a folder: a text"),
        (
            "on_error: {then: dead-letter, dead_letter: {path: ''}}",
            "on_error.dead_letter.path: expected a folder: a text that is not empty",
        ),
        ("state: {store: kept, local: ''}", "state.local: expected a folder: a text that is not"),
        ("leases:\n  table: |\n    orders\n", "leases.table: expected a text that is a table's"),
        ('processor: "a:B\\n"', "processor: expected a text like module:Class"),
        ('leases: {group: "zone\\n"}', "leases.group: expected a text without colons or spaces"),
        (
            "aws: {endpoint: embedded}\nembedded: {reshard: [{after: 0.1, split: 0}]}",
            "embedded.reshard: needs embedded.fill",
        ),
        (FILLED + "  reshard: [{after: 0.1}]", "embedded.reshard[0]: expected one of split"),
        (FILLED + "  reshard: [{after: 0.1, split: 0, merge: 1}]", "expected one of split"),
        (FILLED + "  reshard: [{after: 0.1, split: -1}]", "shards are counted from 0"),
        (
            FILLED + "  reshard: [{after: 0.5, split: 0}, {after: 0.1, merge: 0}]",
            "expected the steps in the order of `after`",
        ),
    ],
)
def test_settings_that_contradict_are_refused(more, said):
    with pytest.raises(SettingsError) as caught:
        settings_of(LEAST + more, environment={}, now=NOW)

    assert said in str(caught.value)


@over_rows(
    "more",
    [
        "aws: {endpoint: 'http://localhost:4567'}",
        "aws: {endpoint: 'http://localhost:4567'}\nembedded: {shards: 2}",
        "output: {path: 'a:b/c'}",
        "engine: spark\nspark: {checkpoint: c}\noutput: {path: 's3a://bucket/x'}",
        "aws: {endpoint: 'http://[::1]:4567'}",
        "aws: {endpoint: 'https://kinesis.example.com'}",
        "start: 2020-01-01T00:00:00Z",
        FILLED + "  reshard: [{after: 0.1, split: 0}, {after: 0.5, merge: 0}]",
        "output: {path: out}\nsummary: a:b",
        "fetch: {buffer: 1}",
        "stall: 10001ms",
        "processor: 'kclpy:a.py'\ncheckpoint: {every: manual}",
    ],
)
def test_settings_that_agree_are_taken(more):
    settings_of(LEAST + more, environment={}, now=NOW)


def test_a_consumer_is_named_by_itself_where_the_applications_name_is_too_long():
    text = f"application: {'a' * 129}\nstream: orders\nfetch: {{mode: fan-out}}"

    with pytest.raises(SettingsError, match=r"fetch\.consumer: is needed"):
        settings_of(text, environment={}, now=NOW)
    assert settings_of(text, ["fetch.consumer=short"], environment={}, now=NOW)
    assert settings_of(text, ["fetch.mode=polling"], environment={}, now=NOW)


@over_rows(
    ("more", "url"),
    [
        ("", None),
        ("aws: {endpoint: 'https://h:1'}", "https://h:1"),
        ("aws: {endpoints: {dynamodb: 'https://h:2'}}", "https://h:2"),
        (
            "aws: {endpoints: {dynamodbstreams: 'https://h:3', dynamodb: 'https://h:2'}}",
            "https://h:3",
        ),
        ("aws: {endpoints: {kinesis: 'https://h:4'}}", None),
    ],
)
def test_the_streams_of_tables_have_a_url_of_their_own_or_that_of_the_tables(more, url):
    assert (
        settings_of(
            f"application: orders\nstream: orders\nprocessor: a:B\n{more}\n",
            environment={},
            now=WallTime(1_780_000_000.0),
        ).aws.url_of("dynamodbstreams")
        == url
    )
