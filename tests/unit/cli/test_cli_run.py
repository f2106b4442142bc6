"""`kclrun run` up to the engine it starts: what is checked, made, told, and returned."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kclrun.cli import user_code
from kclrun.cli.config_options import Configuration
from kclrun.cli.program import run_program
from kclrun.cli.run import application, embedded, spark
from kclrun.errors import ProcessorLoadError, SettingsError, Unavailable
from kclrun.local.filling import FillReport
from kclrun.manager import forks, runtime
from tests.patience import HUNG_S
from tests.support.build import settings

LEAST = "application: orders\nstream: orders\nprocessor: mine:Mine\naws: {region: us-east-1}\n"
EMBEDDED = LEAST.replace("region: us-east-1", "endpoint: embedded")
SPARK = LEAST.replace("processor", "engine: spark\nspark: {checkpoint: c}\nprocessor")
FILLED = FillReport(records=7, user_records=1_000, reshards=2)


class Ran(SimpleNamespace):
    """What the engine was started with."""


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """Everything below the verb in place of the real: no process, no AWS, no JVM."""
    seen = Ran(code=0, stopped=0, started=0, fails=None, world=None, spark=None)
    monkeypatch.chdir(tmp_path)

    class Launcher:
        def __init__(self, entry: str, preload: object, *, only: object) -> None:
            seen.entry, seen.preload, seen.only = entry, preload, only

        def start(self) -> None:
            seen.started += 1
            if seen.fails is not None:
                raise seen.fails

        def stop(self) -> None:
            seen.stopped += 1

    def open_world(settings: object, _paths: object) -> str:
        if seen.world is not None:
            raise seen.world
        return "the world"

    def run_fleet(settings: object, world: object, **more: Any) -> SimpleNamespace:
        seen.settings, seen.opened, seen.more = settings, world, more
        Path("out").mkdir(exist_ok=True)
        return SimpleNamespace(exit_code=seen.code)

    def spark_run(*arguments: Any, on_sample: Any, stop_signals: Any) -> tuple[int, str | None]:
        seen.arguments = (*arguments, on_sample)
        return seen.code, arguments[4]()

    monkeypatch.setattr(forks, "Launcher", Launcher)
    monkeypatch.setattr(runtime, "run_fleet", run_fleet)
    monkeypatch.setattr("kclrun.cli.startup.open_world", open_world)
    monkeypatch.setattr(application, "require_user_code", lambda _: None)
    monkeypatch.setattr(spark, "spark_run", spark_run)
    monkeypatch.setattr(spark, "require_spark", lambda settings: setattr(seen, "spark", settings))
    return seen


def write(text: str) -> None:
    Path("app.yaml").write_text(text)
    Path("app.yaml").chmod(0o600)


def test_a_fleet_is_run_with_the_settings_the_places_of_the_code_and_the_command(
    ran, tmp_path, capsys
):
    write(LEAST + "path: code\n")
    (tmp_path / "code").mkdir()
    ran.code = 75

    assert run_program(["run", "--set", "stream=s", "--set", "leases.max=3"]) == 75

    assert capsys.readouterr().err == ""
    assert (ran.settings.stream, ran.opened, ran.entry) == ("s", "the world", runtime.WORKER_ENTRY)
    assert (ran.started, ran.stopped, ran.spark) == (1, 0, None)
    more = ran.more
    assert more["import_paths"] == [str(tmp_path / "code")]
    assert more["leases_command"] == "kclrun leases --config app.yaml --set stream=s"
    assert (more["until"], more["report_path"], more["on_sample"]) == (None, None, None)
    assert more["source_is_done"]() is True


def test_folders_are_made_before_anything_starts_and_rows_are_reported_after(ran, tmp_path, capsys):
    write(
        LEAST
        + "output: {path: out/rows}\non_error: {then: dead-letter, dead_letter: {path: letters}}\n"
    )

    assert run_program(["run", "--until", "caught-up", "--report", "reports/r.json"]) == 0

    for name in ("out/rows", "letters", "reports"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700
    assert ran.settings.output.path == str(tmp_path / "out/rows")
    assert ran.settings.on_error.dead_letter.path == str(tmp_path / "letters")
    assert (ran.more["until"], ran.more["report_path"]) == ("caught-up", Path("reports/r.json"))
    assert capsys.readouterr().err == ""
    Path("out/rows/part").write_text("")
    assert run_program(["run"]) == 0
    assert capsys.readouterr().err == "Rows are in out/rows\n"
    assert run_program(["run", "--set", f"output.path={tmp_path.parent}"]) == 0
    assert capsys.readouterr().err == f"Rows are in {tmp_path.parent}\n"
    assert run_program(["run", "--set", "output.path=app.yaml/x"]) == 78
    assert "output.path: cannot make the folder" in capsys.readouterr().err


def test_an_embedded_part_that_is_not_used_is_said(ran, capsys):
    write(LEAST + "embedded: {shards: 2}\n")
    there = "aws.endpoint=http://127.0.0.1:1"
    assert run_program(["run", "--set", there]) == 0
    assert "embedded: is not used with aws.endpoint http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fails", "code"), [(OSError(11, "no process left"), 69), (OSError(1, "not permitted"), 78)]
)
def test_a_host_that_starts_no_process_ends_it_in_words(ran, fails, code, capsys):
    write(LEAST)
    ran.fails = fails
    assert run_program(["run"]) == code
    reported = capsys.readouterr().err
    assert fails.strerror in reported
    assert "The fork server is a process in a session of its own." in reported


def test_what_was_launched_is_stopped_if_the_world_cannot_be_opened(ran):
    write(LEAST)
    ran.world = Unavailable("AWS is away")
    assert run_program(["run"]) == 69
    assert (ran.started, ran.stopped) == (1, 1)


# On the embedded AWS


@pytest.fixture
def filled(ran, monkeypatch):
    """An embedded AWS whose filler is not a process: `ran.filled` is its report."""
    ran.filled = FILLED
    ran.ends = []

    @contextmanager
    def run(configuration: Configuration) -> Iterator[SimpleNamespace]:
        output = msgspec.structs.replace(configuration.settings.output, path="out")
        yield SimpleNamespace(
            settings=msgspec.structs.replace(configuration.settings, output=output),
            source_is_done=lambda: "done",
            filling=lambda: "progress",
            report=lambda: ran.filled,
        )
        ran.ends.append("ended")

    monkeypatch.setattr(embedded, "embedded_run", run)
    return ran


WITH_SUMMARY = (
    EMBEDDED + "summary: sums:total\npath: .\noutput: {path: out}\n"
    "embedded: {fill: {source: 'a:b'}}\n"
)
SUM = "def total(folder):\n    return f'sum of {folder.name}'\n"


def test_a_whole_embedded_run_is_summed_up_after_its_end(filled, capsys):
    write(WITH_SUMMARY)
    Path("sums.py").write_text(SUM)

    assert run_program(["run"]) == 0

    reported = capsys.readouterr()
    assert reported.out == "sum of out\n"
    assert reported.err == "Put 1,000 records in 7 Kinesis records; 2 reshards.\n"
    assert (filled.more["source_is_done"](), filled.ends) == ("done", ["ended"])
    # Its table ends with it.
    assert filled.more["leases_command"] is None


@pytest.mark.parametrize(
    ("code", "report", "more", "summed"),
    [
        (75, FILLED, [], False),
        (0, None, [], False),
        (0, None, ["--set", "embedded.fill=null"], True),
        (0, None, ["--set", "embedded=null"], True),
        (0, FILLED, ["--set", "summary=null"], False),
    ],
)
def test_a_run_that_was_cut_short_has_no_summary(filled, code, report, more, summed, capsys):
    write(WITH_SUMMARY)
    sys.modules.pop("sums", None)
    Path("sums.py").write_text(SUM)
    filled.code, filled.filled = code, report

    assert run_program(["run", *more]) == code
    reported = capsys.readouterr()
    assert ("sum of" in reported.out, "Put 1,000" in reported.err) == (summed, report is not None)


def test_a_summary_that_is_not_a_text_is_refused(filled, capsys):
    write(WITH_SUMMARY)
    sys.modules.pop("sums", None)
    Path("sums.py").write_text("def total(folder):\n    return 7\n")
    assert run_program(["run"]) == 78
    assert "summary: sums:total returned a int, no text" in capsys.readouterr().err
    sys.modules.pop("sums", None)


def test_on_spark_the_summary_is_made_before_the_session_ends(filled, capsys, monkeypatch):
    watched: list[Any] = []

    @contextmanager
    def watching(settings: object, filling: Any) -> Iterator[tuple[object, str]]:
        watched.append(filling())
        yield settings, "show"

    monkeypatch.setattr(application, "watched", watching)
    write(WITH_SUMMARY.replace("processor", "engine: spark\nprocessor"))
    sys.modules.pop("sums", None)
    Path("sums.py").write_text(SUM)

    assert run_program(["run", "--report", "r.json"]) == 0

    run, paths, report, is_done, _, on_sample = filled.arguments
    assert (report, is_done(), on_sample) == (Path("r.json"), "done", "show")
    assert (paths, watched) == ((Path.cwd(),), ["progress"])
    assert run.output.path == str(Path("out").absolute())
    assert filled.spark.engine == "spark"
    reported = capsys.readouterr()
    assert (reported.out, reported.err.count("Put 1,000 records")) == ("sum of out\n", 1)
    filled.filled = None
    assert run_program(["run"]) == 0
    assert capsys.readouterr() == ("", "")
    sys.modules.pop("sums", None)


def test_spark_in_aws_needs_no_filler(ran, capsys):
    write(SPARK)
    ran.code = 65
    assert run_program(["run"]) == 65
    assert ran.arguments[3]() is True
    assert capsys.readouterr() == ("", "")


def test_the_live_table_is_for_a_terminal_and_the_format_auto(monkeypatch):
    made: list[object] = []

    @contextmanager
    def display(bars: Any) -> Iterator[SimpleNamespace]:
        made.append(bars._is_until)
        yield SimpleNamespace(show="show")

    monkeypatch.setattr("kclrun.cli.run.live_table.LiveDisplay", display)

    def shown(text: str = "", *, out: bool = True, err: bool = True) -> tuple[str, object]:
        for name, is_terminal in (("stdout", out), ("stderr", err)):
            stream = SimpleNamespace(isatty=lambda is_terminal=is_terminal: is_terminal)
            monkeypatch.setattr(application.sys, name, stream)
        with application.watched(settings(LEAST + text)) as (seen, on_sample):
            return seen.log.format, on_sample

    results = [
        shown(),
        shown("until: caught-up\n"),
        shown(out=False),
        shown(err=False),
        shown("log: {format: json}\n"),
    ]
    monkeypatch.undo()
    assert results == [
        ("text", "show"),
        ("text", "show"),
        ("auto", None),
        ("auto", None),
        ("json", None),
    ]
    assert made == [False, True]


def configuration(text: str, folder: Path) -> Configuration:
    return Configuration(settings(text), folder, folder / "app.yaml")


# The user's code


def test_a_function_of_the_trace_context_is_user_code_too():
    text = LEAST + "observe: {otlp: {traces: {context: 'mine:context_of'}}}\n"

    assert user_code.named_user_code(configuration(text, Path())) == {
        "processor": "mine:Mine",
        "observe.otlp.traces.context": "mine:context_of",
    }


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(user_code, "find_spec", missing)
    with pytest.raises(SettingsError, match=r"pip install 'kclrun\[otel\]'"):
        user_code.named_user_code(configuration(LEAST + "observe: {otlp: {}}\n", Path()))


def test_user_code_is_named_by_its_setting():
    named = user_code.named_user_code
    text = EMBEDDED + "summary: s:f\noutput: {path: o}\nembedded: {fill: {source: 'a:b'}}\n"
    assert named(configuration(text, Path())) == {
        "processor": "mine:Mine",
        "summary": "s:f",
        "embedded.fill.source": "a:b",
    }
    several = LEAST.replace(
        "stream: orders", "streams: [{name: a}, {name: b, processor: 'other:One'}]"
    )
    assert named(configuration(several, Path())) == {
        "processor": "mine:Mine",
        "streams[1].processor": "other:One",
    }
    missing = LEAST.replace("processor: mine:Mine\n", "")
    with pytest.raises(SettingsError) as refused:
        named(configuration(missing, Path()))
    assert str(refused.value).endswith("processors.hello:Hello")
    on_spark = SPARK.replace("processor: mine:Mine\n", "")
    with pytest.raises(SettingsError, match=r"processors.hello:Hello, or a pipeline$"):
        named(configuration(on_spark, Path()))
    assert named(configuration(on_spark + "pipeline: m:f\n", Path())) == {"pipeline": "m:f"}


def test_an_import_that_hangs_or_dies_is_reported(tmp_path, monkeypatch):
    def program(text: str) -> None:
        monkeypatch.setattr(user_code, "own_module", lambda _: [sys.executable, "-c", text])

    monkeypatch.setattr(user_code, "_IMPORT_MAX_S", 0.05)
    program("import time; time.sleep(1000)")
    with pytest.raises(ProcessorLoadError, match=r"importing mine:Mine takes longer than 0.05 s"):
        user_code.require_user_code(configuration(LEAST, tmp_path))
    monkeypatch.setattr(user_code, "_IMPORT_MAX_S", HUNG_S)
    program("raise SystemExit(9)")
    with pytest.raises(ProcessorLoadError, match=r"the import ended with exit code 9$"):
        user_code.require_user_code(configuration(LEAST, tmp_path))
    # What the import prints is not the terminal's, and it has nothing to read but the options.
    program(
        "import os, sys; print('out');"
        "assert sys.stdin.buffer.read() == b'\\x81\\xa9processor\\x91\\x80';"
        "os.write(int(sys.argv[1]), b'{}\\n')"
    )
    user_code.require_user_code(configuration(LEAST, tmp_path))


def test_a_variable_that_is_withheld_is_named(monkeypatch):
    for name in ("B_VARIABLE", "A_VARIABLE", "KEPT_VARIABLE"):
        monkeypatch.setenv(name, "x")
    said = "KeyError: 'B_VARIABLE', 'A_VARIABLE', 'KEPT_VARIABLE'"
    advice = user_code._on_withheld_variables(said, {"KEPT_VARIABLE": "x"})
    assert advice == (
        "\nenvironment.only keeps A_VARIABLE, B_VARIABLE from lease processes: name it there"
    )
    assert user_code._on_withheld_variables("KeyError: 'C'", {}) == ""


def test_a_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(user_code.os, "access", lambda _, mode: asked.append(mode))
    with pytest.raises(SettingsError, match=r"^x: user \d+ may not write to "):
        user_code.require_folder("x", tmp_path)
    assert asked == [os.W_OK | os.X_OK]


def test_a_comparison_has_the_outputs_of_the_application_though_its_rows_go_to_one_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from kclrun import RecordProcessor\n"
        "class Mine(RecordProcessor):\n"
        "    def process_record(self, record, context):\n"
        "        context.emit({}, to='late')\n"
    )
    replayed = configuration(LEAST + "output: {path: rows}\n", tmp_path)

    user_code.require_user_code(replayed, ["output", "late"])
    with pytest.raises(SettingsError, match=r"mine\.py:4: .*there is no outputs\.late"):
        user_code.require_user_code(replayed)
