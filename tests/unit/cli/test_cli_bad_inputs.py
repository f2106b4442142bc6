"""What a person gets for each way to be wrong: the message, the code, and never a traceback."""

import inspect
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kclrun.cli.program import run_program
from kclrun.loading import load_pipeline
from tests.support.programs import needs_spark, run_to_end

Project = Callable[..., Path]
# One case of a kind imports user code in a process of its own, the others in this one.
here = pytest.mark.usefixtures("user_code_here")
LEAST = "application: orders\nstream: orders\nprocessor: mine:Mine\naws: {endpoint: embedded}\n"
MINE = """
from kclrun import RecordProcessor
class Mine(RecordProcessor):
    def process_records(self, batch, checkpointer): ...
class Half(RecordProcessor):
    pass
class Other: pass
number = 3
"""


@pytest.fixture
def project(tmp_path):
    def make(config: str = LEAST, code: str = MINE, mode: int = 0o600) -> Path:
        (tmp_path / "mine.py").write_text(code)
        file = tmp_path / "app.yaml"
        file.write_text(config)
        file.chmod(mode)
        return file

    return make


def check(file: Path, *more: str) -> int:
    return run_program(["check", "--no-environment", "--config", str(file), *more])


def test_what_is_right_is_reported_so(project, capsys):
    assert check(project()) == 0
    assert capsys.readouterr().out.splitlines() == [
        "settings   ok  application orders, stream orders",
        "user code  ok  mine:Mine",
    ]


@here
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LEAST + "streem: x", "streem: no such setting; did you mean stream? (app.yaml line 5)"),
        (LEAST.replace("mine:Mine", "theirs:Mine"), "there is no module theirs\n  Searched: "),
        (LEAST.replace("mine:Mine", "mine:Minne"), "defines no Minne\n  It defines: Half, Mine"),
        (LEAST.replace("mine:Mine", "mine:Other"), "is the class Other, not a subclass of Record"),
        (
            LEAST.replace("mine:Mine", "mine:number"),
            "is of type int, not a subclass",
        ),
        (LEAST.replace("mine:Mine", "mine:Half"), "mine:Half does not define process_records"),
        (LEAST.replace("processor: mine:Mine\n", ""), "processor: is missing"),
        (
            LEAST + "start: 2999-01-01T00:00:00Z",
            "line 5)\n  Records that are yet to come are read with start: LATEST",
        ),
        (LEAST.replace("mine:Mine", "theirs:Mine"), "Set `path:`"),
        (LEAST + "decode: mine:Other", "decode: mine:Other is the class Other: neither a type for"),
        (LEAST + "decode: theirs:Order", "decode: there is no module theirs"),
        (
            "application: orders\nprocessor: mine:Mine\nstreams: [{name: a, decode: 'mine:no'}]",
            "streams[0].decode: ",
        ),
    ],
)
def test_a_wrong_configuration_is_78(project, config, said, capsys):
    assert check(project(config)) == 78
    reported = capsys.readouterr().err
    assert said in reported
    assert reported.startswith("Check failed: ")
    assert "Traceback" not in reported


@here
def test_decoders_are_checked_with_the_processor(project, capsys):
    code = MINE + "def plain(data): return data\n"
    assert check(project(LEAST + "decode: mine:plain", code)) == 0
    assert capsys.readouterr().out.endswith("user code  ok  mine:Mine, mine:plain\n")
    assert check(project(LEAST + "decode: json", code)) == 0
    assert check(project(LEAST, MINE + "Mine.decode_as = Other\n")) == 78
    assert (
        "decode_as of Mine is the class Other: neither a type for JSON" in capsys.readouterr().err
    )


def test_a_schema_registry_needs_its_extra(project, capsys):
    assert check(project(LEAST + "decode: glue")) == 0
    without = MINE + "import importlib.util\nimportlib.util.find_spec = lambda *_: None\n"
    assert check(project(LEAST + "decode: glue", without)) == 78
    assert "pip install 'kclrun[glue]'" in capsys.readouterr().err


@here
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import nowhere", "mine.py line 1)\n  ModuleNotFoundError: No module named 'nowhere'"),
        ("x = 1 / 0", "importing mine failed ("),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import sys; sys.stderr.write('noise\\n'); 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_processor_that_cannot_be_imported_says_why(project, code, said, capsys):
    assert check(project(code=code)) == 78
    reported = capsys.readouterr().err
    assert said in reported
    assert "noise" not in reported


@here
@pytest.mark.parametrize(
    ("method", "takes"),
    [
        ("process_records(self, batch)", "process_records takes (self, batch, checkpointer)"),
        ("shard_ended(self)", "shard_ended takes (self, checkpointer)"),
        ("initialize(self)", "initialize takes (self, context)"),
    ],
)
def test_a_method_that_cannot_take_its_arguments_is_found_before_any_shard_halts(
    project, method, takes, capsys
):
    code = (
        "from kclrun import RecordProcessor\n"
        "class Mine(RecordProcessor):\n"
        "    def process_records(self, batch, checkpointer): pass\n"
        f"    def {method}: pass\n"
    )

    assert check(project(code=code)) == 78
    assert takes in capsys.readouterr().err


def test_a_package_without_init_next_to_an_installed_one_is_explained(project, tmp_path, capsys):
    (tmp_path / "kclrun").mkdir()
    (tmp_path / "kclrun" / "mine.py").write_text(MINE)

    assert check(project(LEAST.replace("mine:Mine", "kclrun.mine:Mine"))) == 78
    assert f"create {tmp_path / 'kclrun' / '__init__.py'}" in capsys.readouterr().err


DEFERRED = """
from kclrun import RecordProcessor

class Base(RecordProcessor):
    def process_records(self, batch, checkpointer): pass

class AsyncRecords(RecordProcessor):
    async def process_records(self, batch, checkpointer): pass

class Yields(RecordProcessor):
    def process_records(self, batch, checkpointer):
        for record in batch:
            yield record

class AsyncStart(Base):
    async def initialize(self, context): pass

class AsyncYields(Base):
    async def shard_ended(self, checkpointer):
        yield

class AsyncLost(Base):
    async def lease_lost(self): pass

class AsyncStop(Base):
    async def shutdown_requested(self, checkpointer): pass

class Kclpy:
    version = 3
    def initialize(self, given): pass
    async def process_records(self, given): pass
    def lease_lost(self, given): pass
    def shard_ended(self, given): pass
    def shutdown_requested(self, given): pass
"""


@here
@pytest.mark.parametrize(
    ("processor", "said"),
    [
        ("mine:AsyncRecords", "mine:AsyncRecords: process_records is `async def`"),
        ("mine:Yields", "mine:Yields: process_records has a `yield`"),
        ("mine:AsyncStart", "initialize is `async def`"),
        ("mine:AsyncYields", "shard_ended is `async def`"),
        ("mine:AsyncLost", "lease_lost is `async def`"),
        ("mine:AsyncStop", "shutdown_requested is `async def`"),
        ("kclpy:mine:Kclpy", "Kclpy: process_records is `async def`"),
    ],
)
def test_a_method_whose_call_would_run_nothing_is_refused(project, processor, said, capsys):
    """Or every record would count as processed, and its checkpoint pass, with nothing done."""
    manual = "checkpoint: {every: manual, uncheckpointed_max: 10000000}\n"
    config = LEAST.replace("mine:Mine", processor)
    file = project(config + manual * processor.startswith("kclpy:"), DEFERRED)

    assert check(file) == 78
    assert said in capsys.readouterr().err


SINGLE = """
from kclrun import RecordProcessor

class Batches(RecordProcessor):
    def process_records(self, batch, checkpointer): pass

class Threads(RecordProcessor):
    def process_record(self, record, context): pass

class Tasks(RecordProcessor):
    async def process_record(self, record, context): pass

class Both(Batches):
    def process_record(self, record, context): pass

class Yields(RecordProcessor):
    async def process_record(self, record, context):
        yield

class Few(RecordProcessor):
    def process_record(self, record): pass
"""
AT_ONCE = "concurrency: {records: 8}\n"
IN_TIME = "concurrency: {timeout: 10s}\n"
UNORDERED = "concurrency: {records: 8, order: none}\n"
MANUAL = "checkpoint: {every: manual}\n"


@here
@pytest.mark.parametrize(
    ("processor", "settings", "said"),
    [
        ("Threads", "", None),
        ("Tasks", IN_TIME, None),
        ("Threads", AT_ONCE, None),
        ("Both", "", "mine:Both defines process_records and process_record"),
        ("Yields", "", "process_record is `async def`"),
        ("Few", "", "process_record takes (self, record, context)"),
        ("Batches", AT_ONCE, "mine:Batches: concurrency: is for process_record"),
        ("Threads", IN_TIME, "concurrency.timeout: is for `async def process_record`"),
        ("Tasks", MANUAL, "checkpoint.every: manual is for process_records"),
        ("Tasks", AT_ONCE + "leases: {per_process: 4}\n", "leases that share a process take turns"),
        ("Tasks", "state: {store: kept}\n", None),
        ("Threads", AT_ONCE + "state: {store: kept}\n", None),
        ("Tasks", UNORDERED + "state: {store: kept}\n", "state: needs concurrency.order: key"),
        ("Tasks", "concurrency: {records: 0}\n", "concurrency.records"),
        ("Tasks", "concurrency: {timeout: 0s}\n", "expected more than 0s"),
    ],
)
def test_a_processor_of_single_records_fits_its_settings_or_is_refused(
    project, processor, settings, said, capsys
):
    file = project(LEAST.replace("mine:Mine", f"mine:{processor}") + settings, SINGLE)

    assert check(file) == (0 if said is None else 78)
    assert said is None or said in capsys.readouterr().err


@here
def test_the_processor_comes_from_path_if_that_is_set(project, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "elsewhere.py").write_text(MINE)
    file = project(LEAST.replace("mine:Mine", "elsewhere:Mine"))

    assert check(file) == 78
    assert check(file, "--set", "path=code") == 0


def test_the_processor_does_not_come_from_the_current_folder(
    project, tmp_path_factory, monkeypatch
):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "stray.py").write_text(MINE)
    monkeypatch.chdir(elsewhere)

    assert check(project(LEAST.replace("mine:Mine", "stray:Mine"))) == 78


def test_the_path_goes_before_the_environment(project, tmp_path):
    (tmp_path / "uvicorn.py").write_text(MINE)

    assert check(project(LEAST.replace("mine:Mine", "uvicorn:Mine"))) == 0


def test_loading_takes_the_current_folder_off_the_path(tmp_path):
    (tmp_path / "stray.py").write_text(MINE)
    code = (
        "import sys; from pathlib import Path; from kclrun.loading import load_processor\n"
        "assert '' in sys.path\n"
        "load_processor('stray:Mine', [Path('/nowhere')])"
    )

    done = run_to_end([sys.executable, "-c", code], cwd=tmp_path)

    assert "ProcessorLoadError: processor: there is no module stray" in done.stderr


def test_a_pipeline_written_in_c_whose_arguments_cannot_be_seen_is_loaded():
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(dict)

    assert load_pipeline("builtins:dict", ()) is dict


def test_the_schema_is_json(capsys):
    assert run_program(["check", "--schema"]) == 0
    assert '"title": "kclrun"' in capsys.readouterr().out


def test_embedded_has_no_leases_to_show_afterwards(project, capsys):
    assert run_program(["leases", "--config", str(project())]) == 78
    assert "kclrun local --port" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["lag", "init", "migrate kclpy"])
def test_a_name_that_is_too_long_for_a_file_is_no_bug_of_ours(verb, capsys):
    assert run_program([*verb.split(), "x" * 5_000]) in {64, 78}
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "simulate --minutes nan",
        "simulate --skew nan",
        "simulate --records inf",
    ],
)
def test_a_number_that_is_not_finite_is_64(line, capsys):
    assert run_program(line.split()) == 64
    assert f"{line.rsplit(maxsplit=1)[-1]} is not a finite number" in capsys.readouterr().err


def test_an_empty_address_is_not_every_address(project, capsys):
    assert run_program(["page", "--config", str(project()), "--listen", ""]) == 64
    assert "--listen is empty" in capsys.readouterr().err


def test_a_stream_with_a_quote_in_its_name_is_refused_as_a_name(capsys):
    assert run_program(["tail", "--stream", "it's", "--region", "eu-west-1"]) == 78
    assert "stream: expected a text that is a stream's name or ARN, got \"it's\"" in (
        capsys.readouterr().err
    )


def test_an_argument_that_cannot_be_read_is_64(project, capsys):
    assert run_program(["--config", str(project()), "--until", "tomorrow"]) == 64
    assert "Invalid value for '--until'" in capsys.readouterr().err


@pytest.fixture
def out_of_reach(monkeypatch):
    """Settings of an application whose AWS is on this machine, and not there."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return LEAST.replace("embedded", "'http://127.0.0.1:9'").replace(
        "aws: {", "aws: {region: eu-west-1, start_timeout: 10m, "
    )


@here
def test_an_emulator_that_is_not_there_is_69_at_once_and_named(project, capsys, out_of_reach):
    file = project(out_of_reach)

    assert run_program(["--config", str(file)]) == 69
    reported = capsys.readouterr().err
    assert reported == (
        "Cannot start: DescribeStreamSummary: nothing listens at 127.0.0.1:9"
        " (connection refused)\n"
        "  Start the service there, or correct aws.endpoint;"
        "  kclrun local --port 9  serves an AWS on this machine\n"
    )


EMITTING = """
from kclrun import RecordProcessor
class Base(RecordProcessor):
    def initialize(self, context):
        self.context = context
    def send(self, batch):
        return [self.context.emit({"n": 1}) for record in batch]
class Mine(Base):
    def process_records(self, batch, checkpointer):
        self.send(batch)
class Quiet(RecordProcessor):
    def process_records(self, batch, checkpointer):
        self.logger.emit(batch)
        print("emit")
"""


@here
def test_rows_without_a_place_are_refused_where_the_code_shows_them(project, capsys):
    file = project(code=EMITTING)

    assert check(file) == 78
    reported = capsys.readouterr().err
    assert f"{file.parent / 'mine.py'}:7: context.emit() needs a place for the rows" in reported
    assert "set output.path" in reported
    assert check(file, "--set", "output.path=rows") == 0
    assert check(file, "--set", "processor=mine:Quiet") == 0


NAMING = """
from kclrun import RecordProcessor
class Mine(RecordProcessor):
    def initialize(self, context):
        self.context = context
    def process_records(self, batch, checkpointer):
        self.context.emit({"n": len(batch)}, to=NAME)
"""


@here
@pytest.mark.parametrize("engine", ["fleet", pytest.param("spark", marks=needs_spark)])
@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ('"late"', 0, []),
        ('"lat"', 78, ["mine.py:7: context.emit(…, to='lat'): there is no outputs.lat", "'late'?"]),
        ("self.context.options['to']", 0, []),
    ],
)
def test_an_output_that_the_code_names_and_the_settings_do_not_have_is_refused(
    project, capsys, engine, name, code, words
):
    file = project(code=NAMING.replace("NAME", name))
    outputs = ["--set", "outputs.late={path: late, roll: {every: 10s}}", "--set", "output.path=o"]
    if engine == "spark":
        outputs = ["--set", "engine=spark", "--set", "output.path=o"]
        # Its rows go to one DataFrame.
        code, words = (78, ["mine.py:7: context.emit(…, to="]) if name[0] == '"' else (0, [])

    assert check(file, *outputs) == code
    reported = capsys.readouterr().err
    for each in words:
        assert each in reported


@here
@pytest.mark.parametrize("command", [["--config"], ["run", "--config"]])
def test_a_start_refuses_rows_without_a_place_as_check_does(project, capsys, out_of_reach, command):
    file = project(out_of_reach, code=EMITTING)

    assert run_program([*command, str(file)]) == 78
    assert f"{file.parent / 'mine.py'}:7: context.emit() needs" in capsys.readouterr().err


# Real processes: the encoding of the output, and readers that go away, are of the process.


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("command", "code", "out", "err"),
    [
        ("kclrun check --schema | head -c 1", 0, b"{", b""),
        ("kclrun dashboards grafana | true", 0, b"", b""),
        ("kclrun --help | true", 0, b"", b""),
        ("kclrun check --help | true", 0, b"", b""),
        ("kclrun completion bash > /dev/full", 69, b"", b"See what its disks have left (df -h"),
        ("kclrun version > /dev/full", 69, b"", b"See what its disks have left (df -h"),
        ("kclrun lag --config nowhere.yaml 2>&1 | true", 78, b"", b""),
    ],
)
def test_where_the_output_goes_to_ends_no_verb_with_a_wrong_code(tmp_path, command, code, out, err):
    program = f"{shlex.quote(sys.executable)} -m kclrun"
    script = f"set -o pipefail; {command.replace('kclrun ', f'{program} ', 1)}"
    # As for a user: this variable would hide an error of Python's flush at the exit.
    environment = {name: each for name, each in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(
        ["bash", "-c", script], capture_output=True, cwd=tmp_path, env=environment, check=False
    )

    assert (ended.returncode, ended.stderr if not err else err in ended.stderr) == (
        code,
        b"" if not err else True,
    )
    assert ended.stdout.startswith(out)


@pytest.mark.seconds
def test_a_character_that_the_output_has_not_is_a_question_mark():
    script = "import sys; from kclrun import cli; cli._print_in_every_encoding(); print('a…b')"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        check=True,
        env={"PYTHONIOENCODING": "latin-1"},
    )
    assert ended.stdout == b"a?b\n"


@here
def test_a_processor_that_uses_the_state_without_settings_for_it_is_refused(tmp_path, capsys):
    (tmp_path / "counting.py").write_text(
        "from kclrun import RecordProcessor\n"
        "class Counting(RecordProcessor):\n"
        "    def initialize(self, context): self.context = context\n"
        "    def process_records(self, batch, checkpointer):\n"
        "        for record in batch: self.context.state[record]['n'] = 1\n"
    )
    file = tmp_path / "app.yaml"
    file.write_text(
        "application: shop\nstream: orders\nprocessor: counting:Counting\n"
        "aws: {endpoint: embedded}\n"
    )

    assert run_program(["check", "--config", str(file)]) == 78
    assert "counting.py:5: context.state needs a place" in capsys.readouterr().err
    assert run_program(["check", "--config", str(file), "--set", "state.store=kept"]) == 0
