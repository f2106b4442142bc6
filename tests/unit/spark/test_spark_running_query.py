"""What is asked of Spark for the query of an application, and what is refused before it runs."""

from types import SimpleNamespace

import msgspec
import pyspark.sql
import pyspark.sql.streaming.query
import pytest
from pyspark.errors import AnalysisException

from kclrun.config.destinations import OutputSettings
from kclrun.config.load import settings_of
from kclrun.errors import DataLoss, EngineFailed, ProcessorLoadError, SettingsError
from kclrun.model.letter import LetterDestination
from kclrun.model.policies import Concurrency, ErrorPolicy
from kclrun.model.time import WallTime
from kclrun.processor import RecordProcessor
from kclrun.spark.options import SourceSettings, StreamAddress
from kclrun.spark.processors import source as processors
from kclrun.spark.processors.arguments import REPLACED
from kclrun.spark.processors.source import ProcessorReader, process
from kclrun.spark.running import query
from kclrun.spark.running.query import as_kclrun_errors, made_query, start_query
from kclrun.spark.source import ShardsPartition, StreamReader
from tests.unit.spark.noted import Frame, Functions

READ = [
    "format kclrun",
    "options ('streamName', 's') ('region', 'eu-west-1') ('startingOffsets', 'earliest')",
    "load",
]
COUNTED = "observe kclrun count(lit(1)) records sum(octet_length(data)) bytes"
BY_SHARD = " expr(approx_top_k(shardId, 100000, 100000)) by_shard"
STORED = ["queryName orders", "option checkpointLocation /c"]


class Running(Frame):
    """A query that was started."""


@pytest.fixture
def spark(monkeypatch):
    """A session whose frames and functions need no JVM."""
    monkeypatch.setattr(pyspark.sql, "DataFrame", Frame)
    monkeypatch.setattr(pyspark.sql, "functions", Functions())
    monkeypatch.setattr(pyspark.sql.streaming.query, "StreamingQuery", Running)
    monkeypatch.setattr(processors.uuid, "uuid4", lambda: SimpleNamespace(hex="r1"))
    return Frame([], isStreaming=True)


def query_of(monkeypatch, spark, more, *, runs=None, counts=True):
    """The query of these settings; `runs` is the pipeline."""
    user_code = "processor: m:P" if runs is None else "pipeline: m:p"
    text = f"application: orders\nstream: s\nengine: spark\naws: {{region: eu-west-1}}\n{user_code}"
    text += f"\nspark: {{checkpoint: /c}}\n{more}"
    settings = settings_of(text, environment={}, now=WallTime(1.0))
    monkeypatch.setattr(query, "load_pipeline", lambda *_: runs)
    return made_query(settings, spark, (), SimpleNamespace(counts_by_value=counts))


AS_FILES = ["outputMode append", "options", "option path out"]


# Settings, the trigger; the formats of a pipeline's rows and of emitted ones, the rest of the call.
@pytest.mark.parametrize(
    ("output", "trigger", "formats", "asked"),
    [
        (
            "path: out, format: parquet, options: {x: true}, partition_by: [a, b], mode: update",
            2.5,
            ["parquet", None],
            [
                *("outputMode update", "options ('x', 'true')", "partitionBy a b"),
                *("option path out", "trigger ('processingTime', '2500 milliseconds')"),
            ],
        ),
        (
            "path: out",
            "available-now",
            ["json", "text"],
            [*AS_FILES, "trigger ('availableNow', True)"],
        ),
        ("path: out, format: json", "asap", ["json", "text"], AS_FILES),
        ("path: out, schema: a int", "asap", [None, "json"], AS_FILES),
        ("path: out, schema: a int, format: orc", "asap", [None, "orc"], AS_FILES),
        ("format: kclrun", "asap", ["kclrun", None], AS_FILES[:2]),
    ],
)
def test_a_query_is_written_as_the_settings_say(
    monkeypatch, spark, output, trigger, formats, asked
):
    monkeypatch.setattr(processors, "processor_stream", lambda *_: spark)
    typed = ["select from_json(row, a int, {'mode': 'FAILFAST'}) row", "select row.*"]
    emitted = typed if "schema" in output else ["select col(row) value"]
    ways = [(lambda records: records, [*READ, COUNTED + BY_SHARD]), (None, emitted)]
    for form, (runs, rows) in zip(formats, ways, strict=True):
        if form is None:
            continue
        spark.calls.clear()
        made = query_of(monkeypatch, spark, f"output: {{{output}}}", runs=runs)
        assert made.start(trigger) is spark
        assert spark.calls == [*rows, *STORED, f"format {form}", *asked, "start"]


def test_rows_without_an_output_are_for_the_processor_alone(monkeypatch, spark):
    monkeypatch.setattr(processors, "processor_stream", lambda *_: spark)
    query_of(monkeypatch, spark, "").start("asap")

    assert spark.calls == ["select col(row) value", *STORED, "format noop", "start"]
    with pytest.raises(SettingsError, match="output: is missing"):
        query_of(monkeypatch, spark, "", runs=lambda records: records)


def test_a_pipeline_gets_the_options_if_it_takes_them_and_may_start_its_query(monkeypatch, spark):
    given = []
    running = Running([])

    def pipeline(records, options):
        given.append((records, options))
        return running

    made = query_of(monkeypatch, spark, "options: {a: 1}", runs=pipeline, counts=False)

    assert made.start("asap") is running
    assert running.calls == []
    assert given == [(spark, {"a": 1})]
    assert spark.calls == [*READ, COUNTED]
    with pytest.raises(SettingsError, match="until: caught-up needs a pipeline that returns"):
        query_of(monkeypatch, spark, "until: caught-up", runs=pipeline)
    assert running.calls == ["stop"]
    query_of(
        monkeypatch, spark, "until: caught-up\noutput: {path: out}", runs=lambda records: records
    )


def fails(_):
    raise ValueError(" wrong\nmore")


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        (fails, "pipeline: m:p raised ValueError: wrong$"),
        (lambda _: None, "pipeline: m:p returned <class 'NoneType'>"),
        (lambda _: SimpleNamespace(isStreaming=True), "returned <class 'types.SimpleNamespace'>"),
        (lambda _: Frame([], isStreaming=False), "returned a DataFrame that is not a stream"),
    ],
)
def test_what_a_pipeline_raises_or_returns_is_refused_by_its_name(
    monkeypatch, spark, pipeline, said
):
    with pytest.raises(ProcessorLoadError, match=said):
        query_of(monkeypatch, spark, "output: {path: out}", runs=pipeline)


def test_what_spark_refuses_is_reported_as_ours(spark):
    def start_with(failure):
        def start():
            raise failure

        frame = Frame([], start=start)
        output = OutputSettings(format="x")
        start_query(
            frame, name="n", output=output, checkpoint="/c", trigger="asap", is_emitted=False
        )

    with pytest.raises(SettingsError, match=r"output: Spark cannot write the DataFrame so: no x$"):
        start_with(AnalysisException("no x\nat here"))
    with pytest.raises(DataLoss, match="gone"):
        start_with(AnalysisException("kclrun.errors.DataLoss: gone"))
    for failure, said in {
        AnalysisException("no x"): "Spark ended the query: no x",
        ConnectionError(): r"the JVM is gone \(ConnectionError\)",
    }.items():
        with pytest.raises(EngineFailed, match=said), as_kclrun_errors():
            raise failure


# Processors as a source of rows.


class Word(RecordProcessor):
    """What `load_processor` returns."""

    def process_records(self, batch, checkpointer):
        pass


def job_of(monkeypatch, spark, **given):
    """The job behind the rows of `process`, and what is asked of Spark."""
    monkeypatch.setattr(processors, "load_processor", lambda *_: Word)
    registered = []
    spark.register = registered.append
    assert process(spark, "m:Word", {"streamName": "s"}, **given) is spark
    (source,) = registered
    assert source.name() == f"kclrun-processor-{source.job.application}"
    return source


def test_a_processor_is_a_format_of_its_own_whose_rows_leave_without_accounts(monkeypatch, spark):
    source = job_of(
        monkeypatch,
        spark,
        paths=["/p"],
        options={"a": 1},
        settings={
            "fetch": {"batch_max": 100_000},
            "on_error": {"retries": 0, "backoff": "0s"},
            "decode": "json",
            "output": {"schema": "a long"},
        },
    )
    read, options, load, observed, *rest = spark.calls

    assert (source.job.paths, source.job.options, source.job.batch_max) == (
        ("/p",),
        {"a": 1},
        10**5,
    )
    assert source.job.on_error == ErrorPolicy(0, 0)
    assert (source.job.decode, source.job.schema) == ("json", "a long")
    assert (source.job.application, source.job.stream, source.job.run) == ("Word", "s", "r1")
    assert [read, options, load] == [
        f"format {source.name()}",
        "options ('streamName', 's')",
        "load",
    ]
    assert observed.startswith("observe kclrun sum(when(False, from_json(row, shardId string,")
    assert observed.count("collect_list(when(False, struct(col(shardId) item, ")
    assert rest == ["where kind = 'row'", "drop kind", "drop stream"]
    assert job_of(monkeypatch, spark, application="a.b").job.application == "a.b"
    with pytest.raises(SettingsError, match="a RecordProcessor runs on a stream only"):
        source({"streamName": "s"}).reader(None)
    reader = source({"streamName": "s"}).streamReader(None)
    assert (reader._job, reader._settings.address.stream) == (source.job, "s")


LETTERS = {"then": "dead-letter"}


@pytest.mark.filterwarnings("ignore:kclrun.spark.process:DeprecationWarning")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch_max": 0}, "batch_max: expected a whole number from 1 to 100000, got 0"),
        ({"batch_max": 100_001}, "batch_max"),
        ({"retries": -1}, "retries: expected a whole number of at least 0, got -1"),
        ({"retries": 0.5}, "retries: expected a whole number of at least 0, got 0.5"),
        ({"backoff_s": -0.1}, "backoff_s: expected 0 seconds or more, got -0.1"),
        ({"backoff_s": 1e12}, "backoff_s: expected a duration of at most 36500d"),
        ({"backoff_s": float("nan")}, "backoff_s: expected 0 seconds or more, got nan"),
        ({"application": "a b"}, "application: expected letters"),
        ({"then": "drop"}, "then: expected halt, dead-letter or skip, got 'drop'"),
        ({"order": "keys"}, "order: expected key or none, got 'keys'; did you mean key?"),
        ({"concurrency": 1001}, "concurrency: expected a whole number from 1 to 1000, got 1001"),
        ({"limit": 0}, "limit: expected a whole number of at least 1, got 0"),
        ({"timeout_s": 0.0}, "timeout_s: expected more than 0s; left out, there is none"),
        ({"schema": "a text"}, "schema: expected a type"),
        ({"decode": "jso"}, "decode: expected a text: json, text, msgpack, glue"),
        ({"then": "dead-letter"}, "dead_letter: is missing: `then: dead-letter` needs a place"),
        ({"dead_letter": {"path": "/l"}}, "dead_letter.path: has no meaning with `then: halt`"),
        ({**LETTERS, "dead_letter": {"bucket": "b"}}, "dead_letter.bucket: no such setting"),
        ({**LETTERS, "dead_letter": {"s3": "b"}}, "dead_letter.s3: expected a text like s3://"),
        ({**LETTERS, "dead_letter": {"path": "s3a://b"}}, "dead_letter.path: expected a folder"),
        ({**LETTERS, "dead_letter": {"path": "l", "sqs": "q"}}, "dead_letter.sqs: and path excl"),
        ({**LETTERS, "dead_letter": {"stream": "s"}}, "dead_letter.stream: is read by this appl"),
        (
            {"batch_max": 0, "limit": 0},
            "batch_max: expected .*, got 0\nlimit: expected .*, got 0$",
        ),
    ],
)
def test_arguments_that_no_processor_can_have_are_refused(monkeypatch, spark, given, said):
    with pytest.raises(SettingsError, match=said):
        job_of(monkeypatch, spark, **given)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fetch": {"batch_max": 0}}, "fetch.batch_max: expected a whole number from 1 to 100000"),
        ({"on_error": {"backoff": "-1s"}}, "on_error.backoff: expected"),
        ({"on_error": {"retires": 1}}, "on_error.retires: no such setting"),
        ({"concurrency": {"timeout": "0s"}}, "concurrency.timeout: expected more than 0s"),
        ({"output": {"schema": "a text"}}, "output.schema: expected a type"),
        ({"output": {"path": "o"}}, "output.path: is not a setting of kclrun.spark.process"),
        ({"fetch": {"idle": "1s"}}, "fetch.idle: is not a setting of kclrun.spark.process"),
        ({"stream": "s"}, "stream: is not a setting of kclrun.spark.process, which takes decode"),
    ],
)
def test_settings_that_no_processor_can_have_are_refused(monkeypatch, spark, settings, said):
    with pytest.raises(SettingsError, match=said):
        job_of(monkeypatch, spark, settings=settings)


@pytest.mark.parametrize(
    ("keyword", "value", "settings"),
    [
        ("batch_max", 7, {"fetch": {"batch_max": 7}}),
        ("retries", 3, {"on_error": {"retries": 3}}),
        ("backoff_s", 2.0, {"on_error": {"backoff": "2s"}}),
        ("then", "skip", {"on_error": {"then": "skip"}}),
        ("limit", 9, {"on_error": {"limit": 9}}),
        ("decode", "json", {"decode": "json"}),
        ("schema", "a long", {"output": {"schema": "a long"}}),
        ("concurrency", 4, {"concurrency": {"records": 4}}),
        ("order", "none", {}),  # without `concurrency`
        ("timeout_s", 1.0, {}),
        ("dead_letter", None, {}),
    ],
)
def test_a_keyword_of_before_is_its_setting_and_names_it(
    monkeypatch, spark, keyword, value, settings
):
    monkeypatch.setattr(processors, "require_fit", lambda *_, **__: True)
    setting = ".".join(REPLACED[keyword])
    with pytest.warns(DeprecationWarning, match=rf"{keyword}=….*use the setting {setting}.*2\.0"):
        before = job_of(monkeypatch, spark, **{keyword: value}).job
    now = job_of(monkeypatch, spark, settings=settings).job
    assert msgspec.structs.replace(before, run=now.run) == now


def test_a_keyword_that_there_never_was_is_a_type_error(monkeypatch, spark):
    with pytest.raises(TypeError, match="unexpected keyword argument 'retires'"):
        job_of(monkeypatch, spark, retires=1)


def test_an_argument_left_out_is_what_the_setting_is_left_out(monkeypatch, spark):
    """With a processor and nothing else, a file and a call of `process` make the same job."""
    ours = job_of(monkeypatch, spark, application="orders").job
    text = "application: orders\nstream: s\nengine: spark\nprocessor: m:Word\n"
    whole = f"{text}spark: {{checkpoint: /c}}\noutput: {{path: o}}"
    settings = settings_of(whole, environment={}, now=WallTime(1.0))
    registered = []
    spark.register = registered.append
    processors.processor_stream(
        spark, settings, SourceSettings(address=StreamAddress(stream="s")), []
    )

    assert registered[0].job == ours


def test_letters_and_concurrency_of_a_call_are_those_of_the_settings(monkeypatch, spark):
    monkeypatch.setattr(processors, "require_fit", lambda *_, **__: True)
    settings = {
        "on_error": {"then": "dead-letter", "dead_letter": {"s3": "s3://bucket/p"}},
        "concurrency": {"records": 9, "order": "none", "timeout": "0.5s"},
    }
    job = job_of(monkeypatch, spark, settings=settings).job

    assert job.letters == LetterDestination(s3="s3://bucket/p")
    assert job.concurrency == Concurrency(9, "none", 0.5)


def test_rows_of_several_streams_keep_the_column_and_settings_make_the_same_job(spark):
    registered = []
    spark.register = registered.append
    text = (
        "application: orders\nstream: s\nengine: spark\nprocessor: m:P\noptions: {a: 1}\n"
        "spark: {checkpoint: /c}\non_error: {retries: 3, backoff: 2s}\n"
        "decode: glue\naws: {endpoints: {glue: https://x}}\noutput: {path: o, schema: a int}"
    )
    settings = settings_of(text, environment={}, now=WallTime(1.0))
    reached = StreamAddress(stream="a,b")
    processors.processor_stream(spark, settings, SourceSettings(address=reached), ["/p"])

    job = registered[0].job
    assert (job.application, job.stream, job.processor, job.paths) == (
        "orders",
        "a,b",
        "m:P",
        ("/p",),
    )
    assert (job.options, job.on_error, job.run) == ({"a": 1}, ErrorPolicy(3, 2.0), "r1")
    assert (job.decode, job.glue_url, job.schema) == ("glue", "https://x", "a int")
    assert spark.calls[-1] == "drop kind"


def test_the_tasks_of_one_reader_have_the_second_of_its_first_batch(monkeypatch):
    seconds = iter([7.9, 9.0])
    monkeypatch.setattr(processors.time, "time", lambda: next(seconds))
    monkeypatch.setattr(
        StreamReader, "partitions", lambda *_: [ShardsPartition(("one",)), ShardsPartition(())]
    )
    reader = ProcessorReader(
        SourceSettings(address=StreamAddress(stream="s")), SimpleNamespace(state=None)
    )

    made = [each for _ in range(2) for each in reader.partitions({}, {})]
    assert [(each.ranges, each.began_s) for each in made] == [(("one",), 7), ((), 7)] * 2
