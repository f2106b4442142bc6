import pytest

from kclrun.config.load import settings_of
from kclrun.config.rules import unused_settings
from kclrun.config.schema import Settings
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime
from tests.support.tables import over_rows

NOW = WallTime(1_780_000_000.0)
LEAST = "application: orders\nstream: orders\n"
SPARK = "engine: spark\nspark: {checkpoint: /c}\n"


def loaded(more: str) -> Settings:
    return settings_of(LEAST + more, environment={"PASSWORD": "x"}, now=NOW)


@over_rows(
    ("more", "said"),
    [
        ("pipeline: a:b", "pipeline: is for engine: spark"),
        ("on_error: {then: dead-letter}", "on_error.dead_letter: is missing"),
        (
            "on_error: {then: halt, dead_letter: {s3: 's3://b-1/d'}}",
            "on_error.dead_letter.s3: has no meaning with `then: halt`",
        ),
        *(
            (f"on_error: {{then: dead-letter, dead_letter: {{{places}}}}}", words)
            for places, words in (
                ("path: d, sqs: q", "dead_letter.sqs: and path exclude each other"),
                ("path: d, s3: 's3://b-1'", "dead_letter.s3: and path exclude each other"),
                ("sqs: q, stream: s", "dead_letter.stream: and sqs exclude each other"),
                ("stream: orders", "dead_letter.stream: is read by this application"),
                ("s3: bucket", "dead_letter.s3: expected a text like s3://bucket/prefix"),
                ("sqs: 'a b'", "dead_letter.sqs: expected a text that is a queue's name or URL"),
            )
        ),
        (
            "on_error: {then: skip, dead_letter: {path: d}}",
            "on_error.dead_letter.path: has no meaning with `then: skip`",
        ),
        (
            "on_error: {then: dead-letter, dead_letter: {path: 's3://b/d'}}",
            "on_error.dead_letter.path: expected a folder of this machine, not a URL (s3://…)",
        ),
        (SPARK + "on_error: {then: skip}", "on_error.then: skip is for a processor"),
        (
            SPARK + "processor: m:C\non_error: {then: dead-letter}",
            "on_error.dead_letter: is missing",
        ),
        ("engine: spark", "spark.checkpoint: is missing"),
        (
            "engine: spark\naws: {endpoint: embedded}\nspark: {checkpoint: /c}",
            "spark.checkpoint: is made by each run",
        ),
        (SPARK + "processor: a:B\npipeline: a:b", "pipeline: and processor exclude each other"),
        (SPARK + "checkpoint: {every: manual}", "checkpoint.every: manual has no meaning"),
        (SPARK + "fetch: {kpl_range: drop}", "fetch.kpl_range: drop is for engine: fleet"),
        (
            "engine: spark\nspark: {checkpoint: /c, source: {STREAMNAME: x}}",
            "spark.source.STREAMNAME: is set by stream",
        ),
        (
            "engine: spark\nspark: {checkpoint: /c, source: {pollInterval: 2s}}",
            "spark.source.pollInterval: is set by fetch.idle",
        ),
        (
            "engine: spark\nspark: {checkpoint: /c, source: {consumerMode: fan-out}}",
            "spark.source.consumerMode: is set by fetch.mode",
        ),
        (
            "engine: spark\nspark: {checkpoint: /c, source: {consumerName: c}}",
            "spark.source.consumerName: is set by fetch.consumer",
        ),
        (
            "engine: spark\nspark: {checkpoint: /c, trigger: often}",
            "spark.trigger: expected a duration",
        ),
        (SPARK + "output: {format: parquet}", "output.path: is missing"),
        (SPARK + "pipeline: a:b\noutput: {path: o, schema: a int}", "output.schema: is for a"),
        (SPARK + "processor: a:B\noutput: {path: o, mode: update}", "output.mode: is append"),
        (
            SPARK + "processor: a:B\noutput: {path: o, format: parquet}",
            "output.schema: is missing: emitted rows are JSON",
        ),
        ("processor: a:B\noutput: {path: o, schema: a text}", "output.schema: expected a type ("),
        (
            "processor: a:B\noutput: {path: o, schema: a int, format: csv}",
            "output.format: csv needs `roll",
        ),
        (
            SPARK + "processor: a:B\noutput: {path: o, schema: ''}",
            "output.schema: expected the name",
        ),
        (SPARK + "pipeline: a:b\ndecode: json", "decode: is for a processor; a pipeline decodes"),
        ("processor: kclpy:a:B\ndecode: json", "decode: is for a RecordProcessor; one of amazon_"),
        ("processor: a:B\ndecode: csv", "decode: expected a text: json, text, msgpack, glue, mod"),
        (SPARK + "summary: a:b\noutput: {path: 's3a://b/o'}", "summary: needs output.path"),
        (SPARK + "pipeline: a:b\noutput: {path: o, options: {a: [1]}}", "output.options.a"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(more, said):
    with pytest.raises(SettingsError) as caught:
        loaded(more)

    assert said in str(caught.value)


@over_rows(
    "more",
    [
        SPARK,
        "engine: spark\naws: {endpoint: embedded}",
        SPARK
        + "pipeline: a:b\noutput: {path: o, format: parquet, mode: update, partition_by: [h]}",
        SPARK + "pipeline: a:b\noutput: {format: kclrun, options: {streamName: other}}",
        SPARK + "processor: a:B\noutput: {path: o, format: parquet, schema: a int}",
        SPARK + "processor: a:B\noutput: {path: o}",
        SPARK + "processor: a:B\noutput: {format: noop}",
        SPARK + "output: {format: jdbc, options: {password: '${PASSWORD}'}}",
    ],
)
def test_settings_of_spark_that_agree_are_taken(more):
    assert loaded(more).engine == "spark"


@pytest.mark.parametrize(
    ("trigger", "taken"), [("asap", "asap"), ("5s", 5.0), ("available-now", "available-now")]
)
def test_a_trigger_is_a_word_or_a_duration(trigger, taken):
    more = f"engine: spark\nspark: {{checkpoint: /c, trigger: {trigger}}}"

    assert loaded(more).spark.trigger == taken


def test_settings_of_spark_keep_numbers_and_switches():
    conf = loaded("engine: spark\nspark: {checkpoint: /c, conf: {a: 4, b: true, c: 4g}}").spark.conf

    assert conf == {"a": 4, "b": True, "c": "4g"}


# One file for both engines: `engine: ${ENGINE:-fleet}`.
BOTH = (
    "processor: a:B\nspark: {checkpoint: /c}\nleases: {max: 8}\nstall: 5m\n"
    "checkpoint: {every: 2s}\n"
    "output: {path: out, format: parquet, schema: n long, roll: {every: 5m}, buffer: 1MB}\n"
)


@pytest.mark.parametrize(
    ("more", "unused"),
    [
        ("processor: a:B", ()),
        (SPARK, ()),
        (f"engine: fleet\n{BOTH}", ("spark",)),
        (
            f"engine: spark\n{BOTH}",
            ("checkpoint.every", "leases", "output.buffer", "output.roll", "stall"),
        ),
    ],
)
def test_one_file_serves_both_engines_and_what_has_no_effect_is_named(more, unused):
    assert unused_settings(loaded(more)) == unused


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", ".then: needs the application's place: set on_error.then: dead-letter with its"),
        (SPARK, ": is for engine: fleet"),
    ],
)
def test_a_stream_keeps_letters_in_the_applications_place_and_not_on_spark(more, said):
    own = "{name: a, on_error: {then: dead-letter}}"
    streams = f"application: app\nprocessor: m:C\nstreams: [{own}]\n"
    with pytest.raises(SettingsError, match=rf"streams.*on_error{said}"):
        settings_of(streams + more, environment={}, now=NOW)
    letters = "on_error: {then: dead-letter, dead_letter: {path: l}}"
    settings_of(streams + letters, environment={}, now=NOW)
