"""A run of `engine: spark` up to its session, which a JVM is started for."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kclrun.cli.config_options import Configuration
from kclrun.cli.run import spark
from kclrun.errors import HostFailed, SettingsError
from kclrun.spark.running.runtime import ExitReason
from tests.unit.cli.test_cli_run import EMBEDDED, SPARK, configuration, settings

SETTINGS = (
    "application: shop\nstream: orders\nengine: spark\npipeline: m:f\n"
    "aws: {region: eu-west-1}\nspark: {checkpoint: c}\nlog: {format: json}\n"
)


def test_the_log_says_that_spark_is_being_started_before_anything_is_waited_for(
    tmp_path, monkeypatch, capfd
):
    @contextmanager
    def no_session(*_):
        raise SettingsError("no JVM here")
        yield

    monkeypatch.setattr(spark, "require_spark", lambda _: SimpleNamespace(version="4.1.0"))
    monkeypatch.setattr(spark, "require_stream", lambda _: None)
    monkeypatch.setattr(spark, "_session", no_session)
    run = configuration(SETTINGS, tmp_path)

    with pytest.raises(SettingsError, match="no JVM here"):
        spark.spark_run(run.settings, (), None, lambda: True, lambda: None, on_sample=None)

    [line] = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert (line["event"], line["version"]) == ("engine_starting", "4.1.0")


def spark_configuration(text: str = "") -> Configuration:
    return configuration(SPARK + "log: {format: json}\n" + text, Path.cwd())


@pytest.mark.parametrize(
    ("reason", "until", "is_summed"),
    [
        (ExitReason.CAUGHT_UP, "", True),
        (ExitReason.CAUGHT_UP, "until: caught-up\n", True),
        (ExitReason.DRAINED, "", True),
        (ExitReason.DRAINED, "until: caught-up\n", False),
        (ExitReason.CUT_SHORT, "", False),
    ],
)
def test_a_whole_run_on_spark_is_summed_up_and_reported(
    monkeypatch, tmp_path, reason, until, is_summed, capfd
):
    reports: list[object] = []

    class Run:
        def __init__(self, *_: object, **more: Any) -> None:
            reports.append(more["source_is_done"])

        def run(self, _: object) -> ExitReason:
            return reason

        def write_report(self, path: Path, why: str) -> None:
            reports.append((path, why))

    @contextmanager
    def session(*_: object) -> Iterator[str]:
        yield "spark"

    monkeypatch.setattr(spark, "require_spark", lambda _: SimpleNamespace(version="4.1.0"))
    monkeypatch.setattr(spark, "require_stream", lambda _: None)
    monkeypatch.setattr(spark, "_session", session)
    monkeypatch.setattr(spark, "SparkRun", Run)
    run = spark_configuration(until).settings
    is_done: Any = "is_done"
    done = spark.spark_run(run, (), tmp_path / "r", is_done, lambda: "sum", on_sample=None)
    assert done == (reason.exit_code, "sum" if is_summed else None)
    assert reports == ["is_done", (tmp_path / "r", reason.value)]
    assert spark.spark_run(run, (), None, is_done, lambda: "sum", on_sample=None) == done
    assert len(reports) == 3


def test_a_failed_run_is_reported_too(tmp_path):
    reports: list[object] = []

    def fail(_: object) -> None:
        raise HostFailed("no memory")

    run: Any = SimpleNamespace(run=fail, write_report=lambda *reported: reports.append(reported))
    for report in (tmp_path, None):
        with pytest.raises(HostFailed):
            spark._reported(run, "capabilities", report)
    assert reports == [(tmp_path, "failed: HostFailed")]


def test_the_table_says_that_spark_is_starting(capfd):
    samples: list[Any] = []
    notes: list[object] = []
    log: Any = SimpleNamespace(note=lambda *args, **more: notes.append((args, more)))
    spark._show_starting(settings(SPARK), log, samples.append, "4.1.0")
    spark._show_starting(settings(SPARK), log, None, "4.1.0")
    assert notes == [(("engine_starting",), {"version": "4.1.0"})] * 2
    [sample] = samples
    assert (sample.owner, sample.has_leases, sample.uptime_s) == (f"spark:{os.getpid()}", False, 0)


def test_a_session_has_the_profile_and_the_folders_and_is_closed(monkeypatch, tmp_path):
    closed: list[object] = []

    @contextmanager
    def nothing(*_: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(spark, "captured_engine", nothing)
    monkeypatch.setattr(spark, "as_kclrun_errors", nothing)
    monkeypatch.setattr(spark, "open_session", lambda **_: "session")
    monkeypatch.setattr(spark, "close_session", closed.append)
    monkeypatch.setenv("PYTHONPATH", "former")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    made = settings(SPARK.replace("us-east-1", "us-east-1, profile: p"))

    with spark._session(made, (tmp_path,), None) as session:
        assert session == "session"
        assert os.environ["AWS_PROFILE"] == "p"
        assert os.environ["PYTHONPATH"] == f"{tmp_path}{os.pathsep}former"
        assert closed == []
    assert closed == ["session"]
    monkeypatch.delenv("PYTHONPATH")
    del os.environ["AWS_PROFILE"]  # monkeypatch would put it back at the end
    with spark._session(settings(SPARK), (tmp_path,), None):
        assert os.environ["PYTHONPATH"] == str(tmp_path)
        assert "AWS_PROFILE" not in os.environ
    monkeypatch.delenv("PYTHONPATH")


def test_a_profile_is_for_spark_on_this_machine(monkeypatch):
    required: list[Any] = []
    monkeypatch.setattr(spark, "require_runnable", lambda made, _: required.append(made))
    monkeypatch.delenv(spark.SUBMITTED, raising=False)
    profile = SPARK.replace("us-east-1", "us-east-1, profile: p")

    def of(spark_settings: str) -> Any:
        return settings(profile.replace("checkpoint: c", f"checkpoint: c, {spark_settings}"))

    for local in ("master: 'local[2]'", "conf: {spark.master: 'local[2]'}", "conf: {}"):
        spark.require_spark(of(local))
    for elsewhere in ("master: 'yarn'", "conf: {spark.master: yarn}"):
        with pytest.raises(SettingsError, match=r"aws.profile: is a file of this machine"):
            spark.require_spark(of(elsewhere))
    monkeypatch.setenv(spark.SUBMITTED, "1")
    with pytest.raises(SettingsError, match=r"aws\.profile"):
        spark.require_spark(of("conf: {}"))
    spark.require_spark(settings(SPARK))
    spark.require_spark(settings(EMBEDDED.replace("processor", "engine: spark\nprocessor")))
    assert [made.aws.endpoint for made in required] == [None] * 5
