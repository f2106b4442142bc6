"""config/demo.yaml: it loads, and all it names is there."""

import importlib
from pathlib import Path

import pytest

from kclrun.config.load import load_settings
from kclrun.model.time import WallTime
from kclrun.processor import RecordProcessor

DEMO = Path(__file__).parents[3] / "config" / "demo.yaml"


@pytest.mark.parametrize(
    ("environment", "folder"), [({}, "out/flights"), ({"KCLRUN_OUT": "/else"}, "/else")]
)
def test_the_demo_loads_and_its_names_exist(environment, folder):
    settings = load_settings(DEMO, environment=environment, now=WallTime(1_800_000_000.0))

    assert settings.output is not None
    assert settings.output.path == folder
    assert settings.embedded is not None
    assert settings.embedded.fill is not None
    names = [settings.processor, settings.embedded.fill.source, settings.summary]
    processor, source, summary = (_named(name) for name in names if name)
    assert issubclass(processor, RecordProcessor)
    assert callable(source)
    assert callable(summary)


def _named(name: str):
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)
