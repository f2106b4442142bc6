import pytest

from kclrun.config.load import settings_of
from kclrun.config.outputs import output_places
from kclrun.config.schema import Settings
from kclrun.errors import SettingsError
from kclrun.model.output import OutputDestination
from kclrun.model.stream import ONLY_STREAM, StreamKey
from kclrun.model.time import WallTime
from tests.support.tables import over_rows

LEAST = "application: app\nstream: orders\n"
SPARK = "engine: spark\nspark: {checkpoint: /c}\n"
SQL = "sql: 'sqlite:///x'"
TOPIC = "sns: 'arn:aws:sns:eu-west-1:123456789012:t'"
MIB = 2**20
TABLE_ARN = "arn:aws:dynamodb:eu-west-1:999999999999:table/items"


def loaded(more: str) -> Settings:
    return settings_of(LEAST + more, environment={"PW": "secret"}, now=WallTime(1_780_000_000.0))


def places(more: str, stream: StreamKey = ONLY_STREAM) -> tuple[OutputDestination, ...]:
    return output_places(loaded(more), stream)


@over_rows(
    ("output", "said"),
    [
        ("{}", "output: names no destination: write one of path, s3, sql, "),
        ("{path: o, sqs: q}", "output.sqs: and path exclude each other"),
        *(
            (f"{{{destination}, {more}}}", said)
            for destination, more, said in (
                ("sqs: q", "table: t", "output.table: is for sql; it has no meaning with sqs"),
                ("dynamodb: abc", "write: upsert", "output.write: is for sql; it has no meaning"),
                ("dynamodb: abc", "key: [a]", "output.key: is for kinesis, sns, sql and sqs"),
                ("path: o", "create: on", "output.create: is for sql"),
                (SQL, "roll: {}", "output.roll: is for path and s3; it has no meaning with sql"),
                (SQL, "format: json", "output.format: is for firehose, kinesis, path, s3, sns"),
                (TOPIC, "format: csv", "output.format: expected json with sns"),
                ("s3: 's3://b-1'", "format: csv", "output.format: expected json or parquet with"),
                ("path: o", "roll: {}, format: xml", "output.format: expected json or csv or parq"),
                ("path: o", "format: parquet", "output.format: parquet needs `roll: {}`"),
                ("path: o", "roll: {}, format: csv", "output.schema: is missing: `format: csv`"),
                ("s3: 's3://b-1'", "format: parquet", "output.schema: is missing: `format: parq"),
                ("path: o", "roll: {every: 0s}", "output.roll: expected a time and a size"),
                ("path: o", "mode: update", "output.mode: is for engine: spark"),
                ("path: o", "options: {a: 1}", "output.options: is for engine: spark"),
                ("path: o", "buffer: 0", "output.buffer: expected more than nothing"),
                (SQL, "schema: a int", "output.table: is missing"),
                (SQL, "table: t, write: upsert", "output.key: is missing: the columns of the key"),
                (SQL, "table: t, key: [a]", "output.key: is for `write: upsert`, or for a table"),
                (SQL, "table: t, create: on", "output.schema: is missing: `create` needs the"),
                ("sqs: q", "schema: a blob", "output.schema: "),
                ("sqs: q", "key: [a]", "output.key: orders the messages of a FIFO queue (….fifo)"),
                ("kinesis: o", "key: [b], schema: a int", "output.key: b is not a column of `sche"),
                ("kinesis: o", "key: [a, b]", "output.key: is one column"),
                ("kinesis: orders", "key: [a]", "output.kinesis: is read by this application"),
                ("firehose: 'a b'", "key: [a]", "output.firehose: expected a text that is"),
                ("sns: topic", "key: [a]", "output.sns: expected a text that is a topic's ARN"),
                ("use: a", "schema: a int", "output.use: expected a text like module:Class"),
                ("use: 'a:B'", "key: [a]", "output.key: is for kinesis, sns, sql and sqs"),
                ("use: 'a:B'", "roll: {}", "output.roll: is for path and s3; it has no meaning"),
                ("use: 'a:B'", f"options: {{a: {'x' * 50_000}}}", "bytes of `schema` and `options"),
            )
        ),
        ("{path: 's3://b/x'}", "not a URL (s3://…). Write s3: instead"),
        (
            f"{{dynamodb: '{TABLE_ARN}'}}\naws: {{region: us-east-1}}",
            "is a table of eu-west-1, and",
        ),
        ("{dynamodb: 'arn:aws:dynamodb:table/x'}", "that is a table's name (3 to"),
    ],
)
def test_an_output_that_contradicts_itself_is_refused(output, said):
    with pytest.raises(SettingsError) as caught:
        loaded(f"output: {output}")

    assert said in str(caught.value)


@over_rows(
    ("more", "said"),
    [
        ("outputs: {output: {sqs: q}}", "outputs.output: is not the name of an output"),
        ("outputs: {Late: {sqs: q}}", "outputs.Late: is not the name of an output"),
        ("outputs: {late: {path: o}}", "outputs.late.roll: is missing: only `output` may be"),
        ("outputs: {late: {}}", "outputs.late: names no destination"),
        ("output: {sqs: q}\noutputs: {a: {sqs: q}}", "outputs.a.sqs: is the destination of output"),
        (
            "outputs: {" + ", ".join(f"o{number}: {{sqs: q{number}}}" for number in range(5)) + "}",
            "outputs: are 5 with `output`: at most 4",
        ),
        (SPARK + "outputs: {a: {sqs: q}}", "outputs: is for engine: fleet"),
        (SPARK + "output: {format: jdbc, sql: 'a://b'}", "output.sql: is for engine: fleet"),
        (SPARK + "output: {path: o, key: [a]}", "output.key: is for engine: fleet"),
        (SPARK + "output: {use: 'a:B'}", "output.use: is for engine: fleet; on Spark the output"),
        ("output: {use: 'a:B'}\noutputs: {a: {use: 'a:B'}}", "outputs.a.use: is the destination"),
        (
            "output: {use: 'a:B'}\nstate: {store: /s, outbox: on}",
            "output: is the first output, and with state.outbox that decides",
        ),
    ],
)
def test_outputs_that_contradict_each_other_or_the_engine_are_refused(more, said):
    with pytest.raises(SettingsError) as caught:
        loaded(more)

    assert said in str(caught.value)


def test_each_output_is_resolved_in_the_order_of_the_settings():
    text = """
aws: {endpoint: 'http://localhost:4567', endpoints: {sns: 'http://localhost:99'}}
outputs:
  b: {sql: 'sqlite:///x', table: t, write: upsert, key: [a, d], create: on, schema: 'a int, d int'}
  a: {sns: 'arn:aws:sns:eu-west-1:123456789012:t.fifo', key: [id], buffer: 1MiB}
  c: {path: o, roll: {every: 5s}, format: parquet, schema: a int}
output: {s3: 's3://bucket/x'}
"""
    common = {"buffer_bytes": 64 * MIB}
    assert places(text) == (
        OutputDestination(
            name="output",
            s3="s3://bucket/x",
            roll_s=60.0,
            roll_bytes=64 * MIB,
            endpoint_url="http://localhost:4567",
            **common,
        ),
        OutputDestination(
            name="b",
            sql="sqlite:///x",
            table="t",
            is_upsert=True,
            creates_table=True,
            key=("a", "d"),
            schema="a int, d int",
            **common,
        ),
        OutputDestination(
            name="a",
            sns="arn:aws:sns:eu-west-1:123456789012:t.fifo",
            key=("id",),
            buffer_bytes=MIB,
            endpoint_url="http://localhost:99",
        ),
        OutputDestination(
            name="c",
            path="o",
            roll_s=5.0,
            roll_bytes=64 * MIB,
            format="parquet",
            schema="a int",
            **common,
        ),
    )


def test_a_class_of_user_code_gets_its_options_as_they_are_and_no_endpoint():
    text = """
outputs:
  a: {use: 'own:Rows', options: {url: 'http://x', deep: [{a: '${PW}'}]}, schema: a int}
  b: {use: 'own:Rows', options: {url: 'http://y'}}
"""
    first, second = places(text)

    assert first == OutputDestination(
        name="a",
        use="own:Rows",
        options={"url": "http://x", "deep": [{"a": "secret"}]},
        schema="a int",
        buffer_bytes=64 * MIB,
    )
    assert type(first.options["deep"][0]["a"]) is str
    assert second.options == {"url": "http://y"}
    assert first.stores_cursor, "it may: the class says so when it is loaded"


def test_a_file_that_grows_has_no_roll_and_a_stream_among_several_a_folder_of_its_own():
    (place,) = places("output: {path: out}", StreamKey("123456789012:orders:1700000000"))

    assert (place.path, place.roll_s, place.roll_bytes) == ("out/orders", 0.0, 0)
    assert place.grows
    assert places("") == ()
    assert places("output: {path: out}")[0].path == "out"


def test_the_representation_of_an_output_shows_no_password():
    (place,) = places("output: {sql: 'postgresql://me:${PW}@host/db', table: t}")

    assert place.sql == "postgresql://me:secret@host/db"
    assert "secret" not in repr(place)
    assert "output" in repr(place)


def test_a_table_of_another_account_is_named_by_its_arn():
    (place,) = places(f"output: {{dynamodb: '{TABLE_ARN}'}}\naws: {{region: eu-west-1}}\n")

    assert place.dynamodb == TABLE_ARN
