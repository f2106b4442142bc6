"""A run of `engine: spark` up to its session, which a JVM is started for."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kclrun.cli.config_options import Configuration
from kclrun.cli.run import spark as spark_run
from kclrun.config.load import settings_of
from kclrun.errors import SettingsError

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

    monkeypatch.setattr(spark_run, "require_spark", lambda _: SimpleNamespace(version="4.1.0"))
    monkeypatch.setattr(spark_run, "require_stream", lambda _: None)
    monkeypatch.setattr(spark_run, "_session", no_session)
    settings = settings_of(SETTINGS, environment={}, now=0.0)
    configuration = Configuration(settings, tmp_path, tmp_path / "app.yaml")

    with pytest.raises(SettingsError, match="no JVM here"):
        spark_run.spark_run(configuration, None, lambda: True, lambda: None)

    [line] = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert (line["event"], line["version"]) == ("engine_starting", "4.1.0")
