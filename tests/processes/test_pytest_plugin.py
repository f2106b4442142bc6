"""The pytest plugin: the examples of its page, under xdist; its cost unused; a missing extra."""

import os
import sys

import pytest
from kclrun.samples.count import ByKey

from kclrun.errors import SettingsError
from kclrun.pytest_plugin.applications import _named
from tests.docs.blocks import blocks_of
from tests.docs.pages import DOCS
from tests.patience import TEST_S
from tests.support.programs import run_to_end

PLUGIN = "kclrun.pytest_plugin.registration"
PAGE = DOCS / "how-to" / "test-a-processor.md"
ROOT = DOCS.parent
UNUSED = f"""
import importlib.util, sys
import pytest
before = set(sys.modules)
found = importlib.util.spec_from_file_location(
    "pytest_kclrun", {str(ROOT / "kclrun/pytest_plugin/registration/__init__.py")!r}
)
module = importlib.util.module_from_spec(found)
found.loader.exec_module(module)
print(sorted(set(sys.modules) - before))
"""


def run_pytest(folder, *arguments):
    """pytest with the plugin in a process of its own: (exit code, output)."""
    ran = run_to_end(
        [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        timeout_s=TEST_S,
    )
    return ran.returncode, ran.stdout


@pytest.fixture
def project(tmp_path):
    """A folder outside of this checkout, with a configuration of pytest of its own."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(2 * TEST_S)
def test_the_examples_of_the_page_pass_as_they_stand_side_by_side(project):
    files = [block for block in blocks_of(PAGE.read_text()) if block.kind == "file"]
    for block in files:
        (project / block.note).write_text(block.text)
    (project / "app.yaml").chmod(0o600)

    code, output = run_pytest(project, "-n", "2", "-q")

    assert code == 0, output
    tests = sum(block.text.count("\ndef test_") for block in files)
    assert f"{tests} passed" in output


def test_unused_it_imports_nothing_but_itself():
    ran = run_to_end([sys.executable, "-c", UNUSED])

    assert ran.stdout == "[]\n", ran.stderr


def test_without_the_extra_a_test_that_needs_it_fails_and_says_what_to_install(project):
    (project / "conftest.py").write_text("import sys\nsys.modules['moto'] = None\n")
    (project / "test_it.py").write_text(
        "def test_stream(kclrun_stream):\n    pass\n\n\ndef test_other():\n    pass\n"
    )

    code, output = run_pytest(project)

    assert code == 1
    assert "a fixture of kclrun needs the extra: pip install 'kclrun[local]'" in output
    assert "1 passed, 1 error" in output


@pytest.mark.slow
def test_a_halted_shard_and_settings_that_cannot_be_fail_the_test_with_the_reason(project):
    (project / "test_it.py").write_text(
        "from kclrun import RecordProcessor\n\n\n"
        "class Poison(RecordProcessor):\n"
        "    def process_record(self, record, context):\n"
        "        raise ValueError('it is poison')\n\n\n"
        "def test_expected(kclrun_stream, run_application):\n"
        "    kclrun_stream.put(['a'])\n"
        "    run = run_application({'processor': Poison}, 'on_error.retries=0', exit_code=65)\n"
        "    assert run.halted == kclrun_stream.shards()\n"
        "    run_application({'processor': Poison}, 'on_error.retries=0')\n\n\n"
        "def test_settings(run_application):\n"
        "    run_application({'processor': Poison, 'check_point': 1})\n\n\n"
        "class Lost(RecordProcessor):\n"
        "    def process_record(self, record, context):\n"
        "        context.emit({'n': 1}, to='lat')\n\n\n"
        "def test_name(run_application):\n"
        "    late = {'path': 'late', 'roll': {'every': '10s'}}\n"
        "    run_application({'processor': Lost, 'outputs': {'late': late}})\n"
    )

    code, output = run_pytest(project)

    assert code == 1
    assert "kclrun ended with 65, not 0; halted: ['shardId-000000000000']" in output
    assert "SettingsError: check_point:" in output
    assert "there is no outputs.lat in the settings; did you mean 'late'?" in output
    assert "3 failed" in output


EVERYWHERE = """
from kclrun import RecordProcessor


class Counts(RecordProcessor):
    def initialize(self, context):
        self.emit, self.state, self.stream = context.emit, context.state, context.stream

    def process_records(self, batch, checkpointer):
        for record in batch:
            self.state[record]["n"] = n = self.state[record].get("n", 0) + 1
            self.emit({"key": record.partition_key, "n": n})
            self.emit({"stream": self.stream}, to="audit")


CONFIG = {
    "processor": Counts,
    "streams": [{"name": "test"}, {"name": "other"}],
    "output": {"sql": "postgresql://nowhere/x", "table": "t", "schema": "key string, n long"},
    "outputs": {
        "audit": {"s3": "s3://bucket/audit", "format": "parquet", "schema": "stream string"},
    },
    "state": {"store": "s3://bucket/state"},
    "fetch": {"mode": "fan-out"},
    "observe": {"listen": "0.0.0.0:1", "cloudwatch": {}},
    "aws": {"profile": "prod", "role_arn": "arn:aws:iam::111122223333:role/x"},
}


def test_it(kclrun_stream, run_application):
    kclrun_stream.another("other", shards=2).put([("c", "")])
    kclrun_stream.put([("a", ""), ("a", ""), ("b", "")])
    run_application(CONFIG)
    kclrun_stream.put([("a", "")])
    run = run_application(CONFIG)
    rows = sorted((row["key"], row["n"]) for row in run.rows)
    assert rows == [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("c", 1)]
    assert sorted(row["stream"] for row in run.outputs["audit"]) == ["other", *["test"] * 4]
"""


@pytest.mark.long
@pytest.mark.seconds
def test_a_run_stays_in_its_folder_whatever_the_settings_name_and_keeps_its_state(project):
    (project / "test_it.py").write_text(EVERYWHERE)

    code, output = run_pytest(project)

    assert code == 0, output
    assert {path.name for path in project.iterdir()} <= {"pytest.ini", "test_it.py", "__pycache__"}


def test_a_class_is_named_by_the_folder_that_its_module_is_imported_from():
    found = _named(ByKey)

    assert found["processor"] == f"{ByKey.__module__}:ByKey"

    class Local:
        pass

    with pytest.raises(SettingsError, match="at the top of a module"):
        _named(Local)
