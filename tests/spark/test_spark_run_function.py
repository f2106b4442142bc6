"""`kclrun.run` with `engine="spark"`: the way of the verb, from a Python program."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_to_end

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
import os
import kclrun

if __name__ == "__main__":
    before = dict(os.environ)
    result = kclrun.run(
        "kclrun.samples.hello:Hello", application="greetings", stream="greetings", engine="spark",
        aws={"endpoint": "embedded"}, spark={"master": "local[2]"}, until="caught-up",
        embedded={"shards": 2, "fill": {"source": "kclrun.samples.hello:greetings"}},
        output={"path": "out", "format": "json"},
    )
    print(result.reason, result.exit_code, result.records, dict(result.halted))
    print([os.environ.get(name) == before.get(name) for name in ("PYTHONPATH", "AWS_PROFILE")])
"""


def test_a_program_runs_a_processor_on_spark_and_gets_its_environment_back(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)

    ran = run_to_end(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )

    assert ran.stdout.splitlines() == ["caught up 0 1000 {}", "[True, True]"], ran.stderr
    rows = [
        json.loads(line)["times"]
        for file in tmp_path.glob("out/*/part-*")
        for line in file.read_text().splitlines()
    ]
    assert sum(rows) == 1_000
