"""A Spark query stopped and started again by the other version, forward and back: exactly once."""

import json
import os
import sys

import pytest
import yaml

from kclrun.local.server import start_embedded
from tests.spark.source_rig import ACCESS_KEY, REGION, SECRET_KEY, Stream
from tests.support.programs import run_to_end
from tests.upgrades.versions import HEAD

pytest_plugins = ("tests.upgrades.fixtures",)
pytestmark = [pytest.mark.slow, pytest.mark.alone]

PROCESSOR = """
import kclrun
from kclrun import RecordProcessor


class Coded(RecordProcessor):
    def initialize(self, context):
        self.context = context

    def process_records(self, batch, checkpointer):
        for record in batch:
            self.context.emit({"number": int(record.data), "code": kclrun.__file__})
"""


@pytest.fixture
def stream():
    with start_embedded() as running:
        yield Stream(running.kinesis_endpoint, shards=2)


def test_a_query_goes_on_from_the_checkpoint_folder_of_the_other_version(stream, older, tmp_path):
    (tmp_path / "coded.py").write_text(PROCESSOR)
    config = tmp_path / "app.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "application": "numbers",
                "stream": stream.name,
                "engine": "spark",
                "spark": {"master": "local[2]", "checkpoint": str(tmp_path / "checkpoint")},
                "processor": "coded:Coded",
                "until": "caught-up",
                "output": {
                    "path": str(tmp_path / "out"),
                    "format": "json",
                    "schema": "number long, code string",
                },
                "aws": {"region": REGION, "endpoint": stream.endpoint},
            }
        )
    )
    codes = []

    # Each start of Spark takes long: the way back is for `KCLRUN_UPGRADES_LONG=1`.
    is_long = os.environ.get("KCLRUN_UPGRADES_LONG") == "1"
    versions = (older, HEAD, older) if is_long else (older, HEAD)

    for version in versions:
        stream.put(50, size=8)
        stream.split(stream.open_shards()[0])
        stream.put(50, size=8)
        run_to_the_end(version, config)
        rows = written(tmp_path / "out")
        assert sorted(row["number"] for row in rows) == list(range(len(stream.put_records)))
        codes.append({row["code"] for row in rows if row["number"] >= len(rows) - 100})

    assert codes == [{version.code} for version in versions]


def run_to_the_end(version, config):
    done = run_to_end(
        [sys.executable, "-P", "-m", "kclrun", "--config", config],
        env=os.environ
        | version.environment
        | {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
        },
        cwd=config.parent,
    )
    assert done.returncode == 0, done.stderr


def written(folder):
    """All rows; no run was ended, so there is no file that is not committed."""
    text = "".join(path.read_text() for path in folder.glob("*.json"))
    return [json.loads(line) for line in text.splitlines()]
