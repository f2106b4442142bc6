"""What is told about a configuration with engine: spark before any JVM is started."""

import sys

import pytest

from kclrun.cli.program import run_program

PIPELINES = """
def one(records): return records
def two(records, options=None): return records
def three(records, options, more): return records
"""


@pytest.fixture
def reported(tmp_path, capsys):
    """Runs a verb on a configuration with this in it: exit code, and what was said."""
    (tmp_path / "pipelines.py").write_text(PIPELINES)

    def run(more, *arguments):
        file = tmp_path / "app.yaml"
        file.write_text(f"application: orders\nstream: orders\nengine: spark\n{more}\n")
        file.chmod(0o600)
        code = run_program([*arguments, "--config", str(file)])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


CHECK = ("check", "--no-environment")
GOOD = "spark: {checkpoint: /c}\npipeline: pipelines:one\n"


@pytest.mark.parametrize("pipeline", ["one", "two"])
def test_a_pipeline_takes_the_records_and_the_options_if_it_wants_them(reported, pipeline):
    code, said = reported(f"spark: {{checkpoint: /c}}\npipeline: pipelines:{pipeline}", *CHECK)

    assert code == 0, said
    assert "PySpark " in said
    assert f"ok  pipelines:{pipeline}" in said


def test_settings_without_a_meaning_on_spark_are_named(reported):
    code, said = reported(GOOD + "leases: {max: 8}\nstall: 5m", *CHECK)

    assert code == 0
    assert "no effect with engine: spark: leases, stall" in said


@pytest.mark.parametrize("verb", [CHECK, ("run",)], ids=["check", "run"])
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            "spark: {checkpoint: /c}\npipeline: pipelines:three",
            "pipelines:three cannot be called with (records) or (records, options)",
        ),
        ("spark: {checkpoint: /c}\npipeline: pipelines:four", "defines no four"),
        ("spark: {checkpoint: /c}\n", "processor: is missing; name your RecordProcessor"),
        ("pipeline: pipelines:one", "spark.checkpoint: is missing"),
        (
            "spark: {checkpoint: /c, source: {maxRecordPerTrigger: 5}}\npipeline: pipelines:one",
            "maxRecordsPerTrigger",
        ),
        (
            "spark: {checkpoint: /c, source: {consumerMode: efo}}\npipeline: pipelines:one",
            "spark.source.consumerMode: is set by fetch.mode",
        ),
        (
            "spark: {checkpoint: /c, master: yarn}\naws: {profile: x}\npipeline: pipelines:one",
            "aws.profile: is a file of this machine",
        ),
        (GOOD + "checkpoint: {every: manual}", "checkpoint.every: manual has no meaning"),
    ],
)
def test_what_is_wrong_is_78_and_told_before_spark_starts(reported, more, words, verb):
    code, said = reported(more, *verb)

    assert code == 78, said
    assert words in said


def test_an_older_pyspark_is_refused_in_clear_words(reported, monkeypatch):
    monkeypatch.setattr("pyspark.__version__", "3.5.1")

    code, said = reported(GOOD, *CHECK)

    assert code == 78
    assert "kclrun needs PySpark 4.0 or later; found 3.5.1" in said


def test_without_pyspark_the_extra_is_named(reported, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)

    code, said = reported(GOOD, *CHECK)

    assert code == 78
    assert "pip install 'kclrun[spark]'" in said


def test_there_are_no_leases_to_show(reported):
    code, said = reported(GOOD, "leases")

    assert code == 78
    assert "positions are in the query's checkpoint, /c" in said
