"""`kclrun run` up to the engine it starts: what is checked, made, told, and returned."""

import json
import os
import signal
import stat
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kclrun.cli import user_code
from kclrun.cli.config_options import Configuration
from kclrun.cli.program import run_program
from kclrun.cli.run import command, embedded, spark
from kclrun.config.load import settings_of
from kclrun.errors import HostFailed, ProcessorLoadError, SettingsError, Unavailable
from kclrun.local.filling import Filling, FillReport
from kclrun.manager import forks, runtime
from kclrun.model.time import WallTime
from kclrun.spark.running.runtime import ExitReason
from tests.patience import HUNG_S

LEAST = "application: orders\nstream: orders\nprocessor: mine:Mine\naws: {region: us-east-1}\n"
EMBEDDED = LEAST.replace("region: us-east-1", "endpoint: embedded")
SPARK = LEAST.replace("processor", "engine: spark\nspark: {checkpoint: c}\nprocessor")
FILLED = FillReport(records=7, user_records=1_000, reshards=2)


class Ran(SimpleNamespace):
    """What the engine was started with."""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ran:
    """Everything below the verb in place of the real: no process, no AWS, no JVM."""
    seen = Ran(code=0, warnings=[], stopped=0, started=0, fails=None, world=None, spark=None)
    monkeypatch.chdir(tmp_path)

    class Launcher:
        def __init__(self, entry: str, *, only: object) -> None:
            seen.entry, seen.only = entry, only

        def start(self) -> None:
            seen.started += 1
            if seen.fails is not None:
                raise seen.fails

        def stop(self) -> None:
            seen.stopped += 1

    def open_world(settings: object) -> str:
        if seen.world is not None:
            raise seen.world
        return "the world"

    def run_fleet(settings: object, world: object, **more: Any) -> SimpleNamespace:
        seen.settings, seen.opened, seen.more = settings, world, more
        Path("out").mkdir(exist_ok=True)
        return SimpleNamespace(exit_code=seen.code)

    def spark_run(*arguments: Any) -> tuple[int, str | None]:
        seen.arguments = arguments
        return seen.code, arguments[3]()

    monkeypatch.setattr(forks, "Launcher", Launcher)
    monkeypatch.setattr(runtime, "run_fleet", run_fleet)
    monkeypatch.setattr("kclrun.cli.world.open_world", open_world)
    monkeypatch.setattr(command, "require_user_code", lambda _: seen.warnings)
    monkeypatch.setattr(spark, "spark_run", spark_run)
    monkeypatch.setattr(spark, "require_spark", lambda settings: setattr(seen, "spark", settings))
    return seen


def write(text: str) -> None:
    Path("app.yaml").write_text(text)
    Path("app.yaml").chmod(0o600)


def test_a_fleet_is_run_with_the_settings_the_places_of_the_code_and_the_command(
    ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(LEAST + "path: code\n")
    (tmp_path / "code").mkdir()
    ran.code, ran.warnings = 75, ["look \x1b here"]

    assert run_program(["run", "--set", "stream=s", "--set", "leases.max=3"]) == 75

    assert capsys.readouterr().err == "warning: look � here\n"
    assert (ran.settings.stream, ran.opened, ran.entry) == ("s", "the world", runtime.WORKER_ENTRY)
    assert (ran.started, ran.stopped, ran.spark) == (1, 0, None)
    more = ran.more
    assert more["import_paths"] == [str(tmp_path / "code")]
    assert more["leases_command"] == "kclrun leases --config app.yaml --set stream=s"
    assert (more["until"], more["report_path"], more["on_sample"]) == (None, None, None)
    assert more["source_is_done"]() is True


def test_folders_are_made_before_anything_starts_and_rows_are_told_after(
    ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_an_embedded_part_that_is_not_used_is_said(
    ran: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    write(LEAST + "embedded: {shards: 2}\n")
    there = "aws.endpoint=http://127.0.0.1:1"
    assert run_program(["run", "--set", there]) == 0
    assert "embedded: is not used with aws.endpoint http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fails", "code"), [(OSError(11, "no process left"), 69), (OSError(1, "not permitted"), 78)]
)
def test_a_host_that_starts_no_process_ends_it_in_words(
    ran: Ran, fails: OSError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write(LEAST)
    ran.fails = fails
    assert run_program(["run"]) == code
    told = capsys.readouterr().err
    assert fails.strerror in told
    assert "The fork server is a process in a session of its own." in told


def test_what_was_launched_is_stopped_if_the_world_cannot_be_opened(ran: Ran) -> None:
    write(LEAST)
    ran.world = Unavailable("AWS is away")
    assert run_program(["run"]) == 69
    assert (ran.started, ran.stopped) == (1, 1)


# On the embedded AWS


@pytest.fixture
def filled(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> Ran:
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


def test_a_whole_embedded_run_is_summed_up_after_its_end(
    filled: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    write(WITH_SUMMARY)
    Path("sums.py").write_text(SUM)

    assert run_program(["run"]) == 0

    told = capsys.readouterr()
    assert told.out == "sum of out\n"
    assert told.err == "Put 1,000 records in 7 Kinesis records; 2 reshards.\n"
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
def test_a_run_that_was_cut_short_has_no_summary(
    filled: Ran,
    code: int,
    report: FillReport | None,
    more: list[str],
    summed: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(WITH_SUMMARY)
    sys.modules.pop("sums", None)
    Path("sums.py").write_text(SUM)
    filled.code, filled.filled = code, report

    assert run_program(["run", *more]) == code
    told = capsys.readouterr()
    assert ("sum of" in told.out, "Put 1,000" in told.err) == (summed, report is not None)


def test_a_summary_that_is_not_a_text_is_refused(
    filled: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    write(WITH_SUMMARY)
    sys.modules.pop("sums", None)
    Path("sums.py").write_text("def total(folder):\n    return 7\n")
    assert run_program(["run"]) == 78
    assert "summary: sums:total returned a int, no text" in capsys.readouterr().err
    sys.modules.pop("sums", None)


def test_on_spark_the_summary_is_made_before_the_session_ends(
    filled: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    write(WITH_SUMMARY.replace("processor", "engine: spark\nprocessor"))
    sys.modules.pop("sums", None)
    Path("sums.py").write_text(SUM)

    assert run_program(["run", "--report", "r.json"]) == 0

    configuration, report, is_done, _, filling = filled.arguments
    assert (report, is_done(), filling()) == (Path("r.json"), "done", "progress")
    assert configuration.settings.output.path == "out"
    assert filled.spark.engine == "spark"
    told = capsys.readouterr()
    assert (told.out, told.err.count("Put 1,000 records")) == ("sum of out\n", 1)
    filled.filled = None
    assert run_program(["run"]) == 0
    assert capsys.readouterr() == ("", "")
    sys.modules.pop("sums", None)


def test_spark_in_aws_needs_no_filler(ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    write(SPARK)
    ran.code = 65
    assert run_program(["run"]) == 65
    assert ran.arguments[2]() is True
    assert capsys.readouterr() == ("", "")


def test_the_live_table_is_for_a_terminal_and_the_format_auto(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []

    @contextmanager
    def display(bars: Any) -> Iterator[SimpleNamespace]:
        made.append(bars._is_until)
        yield SimpleNamespace(show="show")

    monkeypatch.setattr("kclrun.cli.run.live_table.LiveDisplay", display)

    def shown(text: str = "", *, out: bool = True, err: bool = True) -> tuple[str, object]:
        for name, is_terminal in (("stdout", out), ("stderr", err)):
            stream = SimpleNamespace(isatty=lambda is_terminal=is_terminal: is_terminal)
            monkeypatch.setattr(command.sys, name, stream)
        with command.watched(settings(LEAST + text)) as (seen, on_sample):
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


def settings(text: str) -> Any:
    return settings_of(text, environment={}, now=WallTime(time.time()))


def configuration(text: str, folder: Path) -> Configuration:
    return Configuration(settings(text), folder, folder / "app.yaml")


# The embedded AWS of a run, and its filler


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    seen = SimpleNamespace(limits=None, made=[], ended=False)

    @contextmanager
    def start(*, limits: bool) -> Iterator[SimpleNamespace]:
        seen.limits = limits
        yield SimpleNamespace(
            endpoint="http://all", kinesis_endpoint="http://k", dynamodb_endpoint="http://d"
        )
        seen.ended = True

    monkeypatch.setattr(embedded, "start_embedded", start)

    def make(at: Any, *made: object) -> None:
        seen.made.append((at.url, *made))

    monkeypatch.setattr(embedded, "make_stream", make)
    return seen


def test_a_run_gets_the_endpoints_and_folders_of_its_own(
    served: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = EMBEDDED.replace("embedded}", "embedded, profile: p, role_arn: 'arn:aws:iam::1:role/r'}")
    text += "output: {path: rows/}\nembedded: {shards: 3, limits: true}\n"
    before = settings(text)

    with embedded.embedded_run(configuration(text, tmp_path)) as run:
        reached = run.settings
        assert run.source_is_done()
        assert run.filling() is run.report() is None
        assert not served.ended

    assert served.ended
    assert (served.limits, served.made) == (True, [("http://k", "orders", 3)])
    assert (reached.aws.endpoint, reached.aws.profile, reached.aws.role_arn) == (
        "http://all",
        None,
        None,
    )
    assert reached.aws.endpoints == {"kinesis": "http://k", "dynamodb": "http://d"}
    assert reached.output.path.startswith("rows/2")
    assert reached.spark == before.spark

    with embedded.embedded_run(configuration(EMBEDDED, tmp_path)) as run:
        assert (run.settings.output, run.settings.spark) == (None, before.spark)
    assert (served.limits, served.made[1][2]) == (False, before_shards())


def before_shards() -> int:
    return embedded.EmbeddedSettings().shards


@pytest.mark.parametrize(
    ("output", "place"),
    [
        ("output: {path: rows, format: json}\n", "{folder}/rows/"),
        ("output: {path: 's3a://b/rows', format: json}\n", "s3a://b/rows/"),
        ("", "kclrun-checkpoint-"),
    ],
)
def test_on_spark_its_checkpoint_is_beside_its_rows_or_gone_with_it(
    served: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    output: str,
    place: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = EMBEDDED.replace("processor", "engine: spark\nprocessor") + output
    with embedded.embedded_run(configuration(text, tmp_path)) as run:
        checkpoint = run.settings.spark.checkpoint
        assert place.format(folder=tmp_path) in checkpoint
        if run.settings.output is not None and "://" not in checkpoint:
            assert checkpoint.endswith(".checkpoint")
            assert Path(checkpoint).is_absolute()
        elif not output:
            assert Path(checkpoint).is_dir()
    assert not Path(checkpoint).exists()


def test_an_arn_is_not_the_name_of_an_embedded_stream(
    served: SimpleNamespace, tmp_path: Path
) -> None:
    arn = "arn:aws:kinesis:us-east-1:123456789012:stream/orders"
    text = EMBEDDED.replace("stream: orders", f"stream: '{arn}'")
    with (
        pytest.raises(SettingsError, match="give a name, not an ARN"),
        embedded.embedded_run(configuration(text, tmp_path)),
    ):
        pass


FILL = EMBEDDED + (
    "path: code\nembedded:\n  fill: {source: 'a:b', aggregate: 0.5, rate: 9}\n"
    "  reshard: [{after: 0.25, split: 0}, {after: 0.5, merge: 1}]\n"
)


@pytest.fixture
def filler(
    served: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Any]:
    """A run whose filler is this program; it has its order in `order`."""

    def made(program: str) -> Any:
        text = "import json, os, sys, time\norder = json.loads(sys.stdin.readline())\n"
        script = tmp_path / "filler.py"
        script.write_text(text + textwrap.dedent(program))
        (tmp_path / "code").mkdir(exist_ok=True)
        monkeypatch.setattr(embedded, "own_module", lambda _: [sys.executable, str(script)])
        return embedded.embedded_run(configuration(FILL, tmp_path))

    return made


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + HUNG_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_filler_gets_its_order_and_its_progress_and_report_are_the_runs(
    filler: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = msgspec.json.encode(FILLED).decode()
    progress = msgspec.json.encode(Filling(3, 10)).decode()
    program = f"""
        json.dump(order, open({str(tmp_path / "order")!r}, "w"))
        print("a line of the source", flush=True)
        print({progress!r}, flush=True)
        while not os.path.exists("go"):
            time.sleep(0.005)
        print({report!r}, flush=True)
    """
    with filler(program) as run:
        assert run.filling().done in {0, 3}
        until(lambda: run.filling().done == 3)
        assert run.filling().total == 10
        assert not run.source_is_done()
        assert run.report() is None
        Path("go").touch()
        until(run.source_is_done)
        assert run.report() == FILLED
        assert (run.filling().done, run.filling().total) == (1_000, 1_000)
    order = json.loads((tmp_path / "order").read_text())
    assert order["endpoint"]["url"] == "http://k"
    assert (order["stream"], order["source"], order["paths"]) == (
        "orders",
        "a:b",
        [str(tmp_path / "code")],
    )
    assert (order["aggregate"], order["rate"]) == (0.5, 9)
    assert [list(step.values()) for step in order["reshard"]] == [[0.25, 0, None], [0.5, None, 1]]


@pytest.mark.parametrize(
    ("code", "kind"), [(69, Unavailable), (1, SettingsError), (0, SettingsError)]
)
def test_a_filler_that_fails_ends_the_run_as_an_operator_would(
    filler: Callable[[str], Any], code: int, kind: type[Exception]
) -> None:
    former = signal.getsignal(signal.SIGTERM)

    def run() -> None:
        with filler(f"sys.exit({code})"):
            time.sleep(HUNG_S)  # until the signal comes

    with pytest.raises(kind, match=r"embedded\.fill did not put all its records"):
        run()
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_run_that_ends_first_ends_its_filler_and_no_signal_comes(
    filler: Callable[[str], Any],
) -> None:
    came: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with filler("sys.stdin.read()") as run:
            process = run._filler._process
            assert os.getpgid(process.pid) == process.pid  # Ctrl-C does not reach it
            assert os.getsid(process.pid) == os.getsid(0)
            assert run._filler._watch.daemon
        assert process.returncode == 0
        assert run.source_is_done()
    finally:
        signal.signal(signal.SIGTERM, former)
    assert came == []
    assert process.stdin.closed
    assert process.stdout.closed


def test_a_filler_that_does_not_end_is_killed(
    filler: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_FILLER_END_MAX_S", 0.05)
    with filler("time.sleep(1000)") as run:
        process = run._filler._process
    assert process.returncode == -signal.SIGKILL


# The user's code


def test_user_code_is_named_by_its_setting() -> None:
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


def test_an_import_that_hangs_or_dies_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    # What the import prints is not the terminal's, and it has nothing to read.
    program("import sys; print('out'); assert sys.stdin.read() == ''")
    assert user_code.require_user_code(configuration(LEAST, tmp_path)) == ()


def test_a_variable_that_is_withheld_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("B_VARIABLE", "A_VARIABLE", "KEPT_VARIABLE"):
        monkeypatch.setenv(name, "x")
    said = "KeyError: 'B_VARIABLE', 'A_VARIABLE', 'KEPT_VARIABLE'"
    advice = user_code._on_withheld_variables(said, {"KEPT_VARIABLE": "x"})
    assert advice == (
        "\nenvironment.only keeps A_VARIABLE, B_VARIABLE from lease processes: name it there"
    )
    assert user_code._on_withheld_variables("KeyError: 'C'", {}) == ""


def test_a_folder_that_may_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(user_code.os, "access", lambda _, mode: asked.append(mode))
    with pytest.raises(SettingsError, match=r"^x: user \d+ may not write to "):
        user_code.require_folder("x", tmp_path)
    assert asked == [os.W_OK | os.X_OK]


# A run on Spark


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
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    reason: ExitReason,
    until: str,
    is_summed: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
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
    done = spark.spark_run(
        spark_configuration(until),
        tmp_path / "r",
        "is_done",
        lambda: "sum",  # type: ignore[arg-type]
    )
    assert done == (reason.exit_code, "sum" if is_summed else None)
    assert reports == ["is_done", (tmp_path / "r", reason.value)]
    assert spark.spark_run(spark_configuration(until), None, "is_done", lambda: "sum") == done  # type: ignore[arg-type]
    assert len(reports) == 3


def test_a_failed_run_is_reported_too(tmp_path: Path) -> None:
    reports: list[object] = []

    def fail(_: object) -> None:
        raise HostFailed("no memory")

    run: Any = SimpleNamespace(run=fail, write_report=lambda *told: reports.append(told))
    for report in (tmp_path, None):
        with pytest.raises(HostFailed):
            spark._reported(run, "capabilities", report)  # type: ignore[arg-type]
    assert reports == [(tmp_path, "failed: HostFailed")]


def test_the_table_says_that_spark_is_starting(capfd: pytest.CaptureFixture[str]) -> None:
    samples: list[Any] = []
    notes: list[object] = []
    log: Any = SimpleNamespace(note=lambda *args, **more: notes.append((args, more)))
    spark._tell_starting(settings(SPARK), log, samples.append, "4.1.0")
    spark._tell_starting(settings(SPARK), log, None, "4.1.0")
    assert notes == [(("engine_starting",), {"version": "4.1.0"})] * 2
    [sample] = samples
    assert (sample.owner, sample.has_leases, sample.uptime_s) == (f"spark:{os.getpid()}", False, 0)


def test_a_session_has_the_profile_and_the_folders_and_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed: list[object] = []

    @contextmanager
    def nothing(*_: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(spark, "captured_engine", nothing)
    monkeypatch.setattr(spark, "told_as_ours", nothing)
    monkeypatch.setattr(spark, "open_session", lambda **_: "session")
    monkeypatch.setattr(spark, "close_session", closed.append)
    monkeypatch.setenv("PYTHONPATH", "former")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    made = settings(SPARK.replace("us-east-1", "us-east-1, profile: p"))

    with spark._session(made, (tmp_path,), None) as session:  # type: ignore[arg-type]
        assert session == "session"
        assert os.environ["AWS_PROFILE"] == "p"
        assert os.environ["PYTHONPATH"] == f"{tmp_path}{os.pathsep}former"
        assert closed == []
    assert closed == ["session"]
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.delenv("AWS_PROFILE")
    with spark._session(settings(SPARK), (tmp_path,), None):  # type: ignore[arg-type]
        assert os.environ["PYTHONPATH"] == str(tmp_path)
        assert "AWS_PROFILE" not in os.environ
    monkeypatch.delenv("PYTHONPATH")


def test_a_profile_is_for_spark_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
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
