"""`processor: kclpy:…`: found by name or as a script, whether amazon_kclpy is installed or not."""

import os
import sys
import textwrap

import pytest

from kclrun.cli.trial_import import Loaded, try_import
from kclrun.compat.kclpy import stand_in
from kclrun.config.load import settings_of
from kclrun.errors import LeaseLost, ProcessorLoadError, SettingsError
from kclrun.loading import load_processor
from kclrun.model.time import WallTime
from kclrun.processor import Checkpointer
from kclrun.testing import run_processor
from tests.patience import HUNG_S

CONSUMER = """
import sys

from amazon_kclpy import kcl
from amazon_kclpy.v3 import processor

from counting_help import greeting


class Consumer(processor.RecordProcessorBase):
    made = []

    def __init__(self, table="none"):
        self.table = table
        self.noted = [greeting()]
        Consumer.made.append(self)

    def initialize(self, initialize_input):
        self.noted.append(initialize_input.shard_id)

    def process_records(self, process_records_input):
        self.noted += [record.binary_data for record in process_records_input.records]

    def lease_lost(self, lease_lost_input):
        pass

    def shard_ended(self, shard_ended_input):
        shard_ended_input.checkpointer.checkpoint()

    def shutdown_requested(self, shutdown_requested_input):
        try:
            shutdown_requested_input.checkpointer.checkpoint()
        except kcl.CheckpointError as error:
            self.noted.append(error.value)
"""
MAIN = """
if __name__ == "__main__":
    try:
        kcl.KCLProcess(Consumer(*sys.argv[1:])).run()
    except Exception:
        raise SystemExit("no processor survives this")
    print("never reached")
"""
HELP = "def greeting():\n    return 'hello'\n"
# The shape of the installed package: its own base classes, its own error, a process that would read
# the daemon's messages.
INSTALLED = {
    "__init__.py": "",
    "checkpoint_error.py": """
        class CheckpointError(Exception):
            def __init__(self, value):
                self.value = value
    """,
    "kcl.py": """
        from amazon_kclpy.checkpoint_error import CheckpointError

        class KCLProcess:
            def __init__(self, processor):
                raise AssertionError("this would read the daemon's messages")
    """,
    "v3/__init__.py": "",
    "v3/processor.py": """
        class RecordProcessorBase:
            version = 3
            is_installed = True
    """,
}


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "consumer.py", CONSUMER + MAIN)
    write(tmp_path / "counting_help.py", HELP)
    yield tmp_path
    for name in ("consumer", "counting_help"):
        sys.modules.pop(name, None)


@pytest.fixture
def installed(folder):
    for name, text in INSTALLED.items():
        write(folder / "amazon_kclpy" / name, text)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def lived(reference, folder, **options):
    """The user's processor after a life over two records."""
    processor = load_processor(reference, [folder])
    done = run_processor(
        processor, [b"a", b"b"], settings={"checkpoint": {"every": "manual"}, "options": options}
    )
    assert str(done.position) == "SHARD_END"
    return done.processors[0]._processor_of_user


@pytest.mark.parametrize("reference", ["kclpy:consumer:Consumer", "kclpy:consumer.py"])
def test_a_consumer_runs_without_amazon_kclpy(folder, reference):
    consumer = lived(reference, folder)

    assert consumer.noted == ["hello", "shardId-000000000000", b"a", b"b"]
    assert not hasattr(consumer, "is_installed")


@pytest.mark.parametrize("reference", ["kclpy:consumer:Consumer", "kclpy:consumer.py"])
def test_a_consumer_runs_on_the_classes_of_an_installed_amazon_kclpy(installed, folder, reference):
    consumer = lived(reference, folder)

    assert consumer.is_installed
    assert consumer.noted == ["hello", "shardId-000000000000", b"a", b"b"]


def test_the_error_is_of_the_class_that_the_processor_catches(installed, folder):
    processor = load_processor("kclpy:consumer:Consumer", [folder])
    started = run_processor(
        processor, [], settings={"checkpoint": {"every": "manual"}}, end_of_shard=False
    ).processors[0]

    def refuse(_position):
        raise LeaseLost("x")

    started.shutdown_requested(Checkpointer(refuse))

    assert started._processor_of_user.noted[-1] == "ShutdownException"


def test_who_stands_in_is_said(folder):
    assert stand_in()
    assert stand_in()


def test_nobody_stands_in_for_an_installed_package(installed, folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))

    assert not stand_in()


def test_a_mere_folder_of_that_name_answers_for_nothing(folder):
    (folder / "amazon_kclpy").mkdir()

    assert lived("kclpy:consumer:Consumer", folder).noted[-1] == b"b"


def test_a_script_finds_its_arguments_in_the_options(folder):
    assert lived("kclpy:consumer.py", folder, arguments=["orders"]).table == "orders"


def test_arguments_that_are_no_list_are_refused(folder):
    with pytest.raises(ProcessorLoadError, match=r"options\.arguments: expected a list"):
        lived("kclpy:consumer.py", folder, arguments="orders")


@pytest.mark.parametrize(
    ("main", "ended"),
    [
        ("", "it came to its end"),
        ("import argparse\nargparse.ArgumentParser().error('no table')\n", "it ended with 2"),
    ],
)
def test_a_script_that_runs_no_process_is_refused_with_how_it_ended(folder, main, ended):
    write(folder / "script.py", main)

    with pytest.raises(ProcessorLoadError, match=ended):
        lived("kclpy:script.py", folder)


def test_a_process_outside_of_a_lease_process_says_how_to_start_it(folder):
    stand_in()
    from amazon_kclpy import kcl

    sys.argv = ["/srv/consumer.py"]
    with pytest.raises(RuntimeError, match=r"processor: kclpy:consumer\.py"):
        kcl.KCLProcess(object()).run()


def test_a_script_that_is_not_there_is_refused_with_where_it_was_looked_for(folder):
    with pytest.raises(ProcessorLoadError, match=rf"no script other\.py\nSearched: {folder}"):
        load_processor("kclpy:other.py", [folder])


# What `kclrun check` asks in a process of its own.


def checked(reference, folder):
    command = [sys.executable, "-P", "-m", "kclrun.cli.trial_import"]
    named = {"processor": reference}
    return try_import(command, named, [folder], os.environ, within_s=HUNG_S).loaded


@pytest.mark.parametrize("reference", ["kclpy:consumer:Consumer", "kclpy:consumer.py"])
def test_a_consumer_is_checked_without_being_made(folder, reference):
    assert checked(reference, folder) == Loaded(kinds={"processor": "process_records"})


def test_what_a_script_imports_in_vain_is_said(folder):
    write(folder / "counting_help.py", "import nowhere_to_be_found\n")

    error = checked("kclpy:consumer.py", folder).error

    assert "importing consumer.py failed" in error
    assert "No module named 'nowhere_to_be_found'" in error


# The settings around it.


def settings(more):
    text = "application: orders\nstream: orders\nprocessor: kclpy:consumer.py\n" + more
    return settings_of(text, environment={}, now=WallTime(1_780_000_000.0))


def test_such_a_processor_checkpoints_by_itself_and_the_file_says_so():
    assert settings("checkpoint: {every: manual}").processor == "kclpy:consumer.py"
    with pytest.raises(SettingsError, match=r"checkpoint\.every: is manual for a processor of"):
        settings("")


def test_such_a_processor_is_for_the_fleet():
    with pytest.raises(SettingsError, match=r"processor: kclpy: is for engine: fleet"):
        settings("engine: spark\nspark: {checkpoint: /tmp/x}\n")


@pytest.mark.parametrize(
    "reference", ["kclpy:../consumer.py", "kclpy:/srv/consumer.py", "kclpy:consumer", "kclpy:a:b:c"]
)
def test_a_script_is_a_name_and_no_path(reference):
    with pytest.raises(SettingsError, match=r"kclpy:script\.py"):
        settings_of(
            f"application: orders\nstream: orders\nprocessor: '{reference}'\n",
            environment={},
            now=WallTime(1_780_000_000.0),
        )
