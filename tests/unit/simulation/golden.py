"""Figures of whole runs, held to those in a file: they say that a run has changed. Not a test.

`KCLRUN_GOLDEN=write` writes them again, after a change of a core or of the simulator that was meant
to change runs. Any other change changes none of them.
"""

import functools
import json
import os
from pathlib import Path

import yaml

RUNS = Path(__file__).parent / "runs.yaml"


def require_as_before(name, figures):
    """`figures` of plain values are as the file has them under `name`."""
    figures = json.loads(json.dumps(figures))
    if os.environ.get("KCLRUN_GOLDEN") == "write":
        known = yaml.safe_load(RUNS.read_text()) if RUNS.exists() else {}
        known[name] = figures
        text = yaml.safe_dump(known, default_flow_style=None, width=100)
        RUNS.write_text(text)
        _known.cache_clear()
    assert figures == _known()[name]


@functools.cache
def _known():
    return yaml.load(RUNS.read_text(), Loader=yaml.CSafeLoader)
