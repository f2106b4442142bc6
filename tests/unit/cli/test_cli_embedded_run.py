"""A run on the embedded AWS: its services, its folders, its filler, and what it is told of it."""

import json
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kclrun.cli.run import embedded
from kclrun.cli.run.embedded import EmbeddedRun
from kclrun.errors import SettingsError, Unavailable
from kclrun.local.filling import Filling
from tests.patience import HUNG_S, until
from tests.processes.cli_rig import Program, ended
from tests.unit.cli.test_cli_run import EMBEDDED, FILLED, configuration, settings

pytestmark = pytest.mark.seconds  # its fillers are processes


def test_without_a_fill_the_source_is_complete_from_the_beginning():
    run = EmbeddedRun(None, None)

    assert run.source_is_done()
    assert run.filling() is None
    assert run.report() is None


def test_with_a_fill_the_source_is_complete_once_the_filler_has_ended():
    filler = SimpleNamespace(is_done=False, filling=Filling(3, 10), result=lambda: "put")
    run = EmbeddedRun(None, filler)

    assert not run.source_is_done()
    assert run.filling() == Filling(3, 10)
    filler.is_done = True
    assert run.source_is_done()
    assert run.report() == "put"


@pytest.fixture
def served(monkeypatch):
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


def test_a_run_gets_the_endpoints_and_folders_of_its_own(served, tmp_path, monkeypatch):
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
        (
            "output: {format: kclrun, schema: a string, options: {streamName: rows}}\n",
            "kclrun-checkpoint-",
        ),
    ],
)
def test_on_spark_its_checkpoint_is_beside_its_rows_or_gone_with_it(
    served, tmp_path, monkeypatch, output, place
):
    monkeypatch.chdir(tmp_path)
    text = EMBEDDED.replace("processor", "engine: spark\nprocessor") + output
    with embedded.embedded_run(configuration(text, tmp_path)) as run:
        checkpoint = run.settings.spark.checkpoint
        assert place.format(folder=tmp_path) in checkpoint
        if "path: rows" in output:
            assert checkpoint.endswith(".checkpoint")
            assert Path(checkpoint).is_absolute()
        elif "path" not in output:
            assert Path(checkpoint).is_dir()
    assert not Path(checkpoint).exists()


def test_an_arn_is_not_the_name_of_an_embedded_stream(served, tmp_path):
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
def filler(served, tmp_path, monkeypatch):
    """A run whose filler is this program; it has its order in `order`."""

    def made(program: str) -> Any:
        text = "import json, os, sys, time\norder = json.loads(sys.stdin.readline())\n"
        script = tmp_path / "filler.py"
        script.write_text(text + textwrap.dedent(program))
        (tmp_path / "code").mkdir(exist_ok=True)
        monkeypatch.setattr(embedded, "own_module", lambda _: [sys.executable, str(script)])
        return embedded.embedded_run(configuration(FILL, tmp_path))

    return made


def test_a_filler_gets_its_order_and_its_progress_and_report_are_the_runs(
    filler, tmp_path, monkeypatch
):
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
def test_a_filler_that_fails_ends_the_run_as_an_operator_would(filler, code, kind):
    former = signal.getsignal(signal.SIGTERM)

    def run() -> None:
        with filler(f"sys.exit({code})"):
            time.sleep(HUNG_S)  # until the signal comes

    with pytest.raises(kind, match=r"embedded\.fill did not put all its records"):
        run()
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_filler_that_fails_at_once_finds_the_handler_of_its_signal(filler, monkeypatch):
    """Without a handler the signal kills the run, without its message."""
    former, install, found = signal.getsignal(signal.SIGTERM), signal.signal, []

    def install_late(number: int, handler: Any) -> Any:
        for thread in threading.enumerate():
            if thread.name == "filler":
                thread.join(HUNG_S)
        return install(number, handler)

    monkeypatch.setattr(embedded.signal, "signal", install_late)
    monkeypatch.setattr(
        embedded.os, "kill", lambda _, number: found.append(signal.getsignal(number))
    )
    with filler("sys.exit(1)") as run:
        until(lambda: found)
        monkeypatch.undo()
        with pytest.raises(SettingsError):
            run.report()
    assert found[0] is not former


def test_a_failure_is_known_before_its_signal_comes(filler, tmp_path, monkeypatch):
    """The signal may be handled while the thread that sends it still runs."""
    monkeypatch.chdir(tmp_path)
    known: list[bool] = []
    with filler("while not os.path.exists('go'):\n    time.sleep(0.005)") as run:
        monkeypatch.setattr(embedded.os, "kill", lambda *_: known.append(run.source_is_done()))
        Path("go").touch()
        until(lambda: known)
        monkeypatch.undo()
        with pytest.raises(SettingsError):
            run.report()
    assert known == [True]


def test_a_run_that_ends_first_ends_its_filler_and_no_signal_comes(filler):
    came: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with filler("sys.stdin.read()") as run:
            process = run.filler._process
            assert os.getpgid(process.pid) == process.pid  # Ctrl-C does not reach it
            assert os.getsid(process.pid) == os.getsid(0)
            assert run.filler._watch.daemon
        assert process.returncode == 0
        assert run.source_is_done()
    finally:
        signal.signal(signal.SIGTERM, former)
    assert came == []
    assert process.stdin.closed
    assert process.stdout.closed


def test_a_filler_that_does_not_end_is_killed(filler, monkeypatch):
    monkeypatch.setattr(embedded, "_FILLER_END_MAX_S", 0.05)
    with filler("time.sleep(1000)") as run:
        process = run.filler._process
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "source", ["code:greetings", pytest.param("code:broken", marks=pytest.mark.long)]
)
def test_local_is_ready_once_the_records_of_the_configuration_are_in(source, tmp_path):
    (tmp_path / "code.py").write_text(
        "def greetings():\n    yield 'k', b'v'\n\n\ndef broken():\n    raise KeyError('x')\n"
    )
    config = tmp_path / "app.yaml"
    config.write_text(EMBEDDED + f"embedded: {{shards: 3, fill: {{source: '{source}'}}}}\n")
    config.chmod(0o600)
    local = Program("local", "--config", config, "--port", "0")
    try:
        if source.endswith("broken"):
            assert local.wait() == 78
            assert any(
                "embedded.fill did not put all its records" in line for line in local.reported
            )
            return
        local.until_lines(2)
        assert local.lines[1] == "Streams in us-east-1: orders (shards: 3)"
        endpoint = local.lines[0].split(" at ")[1].split()[0]
        where = ["--stream", "orders", "--endpoint", endpoint, "--from", "TRIM_HORIZON"]
        code, out, _ = ended("tail", *where, "--max", 1, "--json")
        assert (code, json.loads(out)["data"]) == (0, "v")
        assert local.end(signal.SIGTERM) == 0
    finally:
        local.close()
