"""`kclrun --config …` with engine: spark: real processes, an embedded AWS, a JVM of their own."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.patience import HUNG_S, until
from tests.processes.cli_rig.terminal import OnTerminal
from tests.support.programs import run_to_end

pytestmark = pytest.mark.slow

PIPELINES = """
import operator
import time
from collections import Counter
from pathlib import Path

from kclrun import RecordProcessor
from kclrun.windows import Tumbling, Windows
from pyspark.sql import DataFrame, SparkSession, functions as F


def events():
    for number in range(20_000):
        yield f"key{number % 50}", str(number).encode()


def numbers(records):
    return records.select(F.col("data").cast("string").cast("long").alias("number"), "shardId")


def summary(folder):
    found = SparkSession.active().read.parquet(str(folder))
    last = found.agg(F.max("number")).first()[0]
    return f"{found.count()} rows, {found.distinct().count()} distinct, up to {last}"


def slowly(records, options):
    started = Path(options["started"])

    def pass_on(batches):
        for batch in batches:
            started.touch()
            time.sleep(3)
            yield batch

    return records.select("data").mapInArrow(pass_on, "data binary")


def failing(records):
    @F.udf("int")
    def halve(data):
        raise ValueError("odd")

    return records.select(halve("data"))


def miscounted(folder):
    found = SparkSession.active().read.parquet(str(folder))
    return f"{found.count()} rows, {found.where('seen != number DIV 50 + 1').count()} miscounted"


class Count(RecordProcessor):
    def process_record(self, record, context):
        context.emit({"number": int(record.data), "seen": context.counter("seen").add(record)})


def second(number):
    return 1_000_000_000 + number // 2


def misclosed(folder):
    found = SparkSession.active().read.parquet(str(folder)).collect()
    closed = {(row["key"], row["start"]): row["clicks"] for row in found}
    windows = Counter((number % 50, second(number) // 60 * 60) for number in range(20_000))
    ended = {window for window in windows if window[1] + 60 <= second(19_999) - 60}
    wrong = sum(windows[window] != clicks for window, clicks in closed.items())
    return f"{len(found) - len(closed)} twice, {wrong} wrong, {len(ended - set(closed))} not closed"


class Clicks(RecordProcessor):
    def initialize(self, context):
        self.context = context
        minutes = (context, "clicks", Tumbling(60), int, operator.add)
        self.windows = Windows(*minutes)

    def event_time(self, record):
        return second(int(record.data))

    def process_records(self, batch, checkpointer):
        for record in batch:
            assert self.windows.add(record, 1), "no record is late"

    def on_timer(self, timer, checkpointer):
        for each in self.windows.closed(timer):
            row = {"key": int(each.key[3:]), "start": int(each.start), "clicks": each.value}
            self.context.emit(row)


class Sum(RecordProcessor):
    def initialize(self, context):
        self.context = context

    def process_records(self, batch, checkpointer):
        print("a line of user code")
        self.context.emit({"total": sum(int(record.data) for record in batch), "rows": len(batch)})
"""


@pytest.fixture
def application(tmp_path):
    """Writes a configuration with this in it; returns how it is run."""
    (tmp_path / "pipelines.py").write_text(PIPELINES)

    def configured(more, *, fill="source: 'pipelines:events', aggregate: 0.3"):
        file = tmp_path / "app.yaml"
        file.write_text(
            "application: numbers\nstream: numbers\nengine: spark\nspark: {master: 'local[2]'}\n"
            f"aws: {{endpoint: embedded}}\n{more}\n"
            f"embedded:\n  shards: 2\n  fill: {{{fill}}}\n"
            "  reshard: [{after: 0.3, split: 0}, {after: 0.6, merge: 1}]\n"
        )
        file.chmod(0o600)
        report = tmp_path / "report.json"
        command = [sys.executable, "-m", "kclrun", "--config", str(file), "--report", str(report)]
        return command, report

    return configured


def lines(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def checkpoint_of(folder):
    (found,) = folder.glob("*.checkpoint")
    return {name: {each.name for each in (found / name).glob("[0-9]*")} for name in ENTRIES}


ENTRIES = ("offsets", "commits")


@contextlib.contextmanager
def running(command, folder, **how):
    """The program of the pipeline `slowly`, once its first batch has begun."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder, **how)
    try:
        until(lambda: (folder / "started").exists() or process.poll() is not None)
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_process_record_counts_in_state_below_the_checkpoint_over_reshards(application, tmp_path):
    command, _ = application(
        "processor: pipelines:Count\nstate: {}\nconcurrency: {records: 8}\nuntil: caught-up\n"
        "output: {path: out, format: parquet, schema: 'number long, seen long'}\n"
        "summary: pipelines:miscounted",
    )
    done = run_to_end(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "20000 rows, 0 miscounted" in done.stdout
    # The end of a shard is one claim: of four shards, three ended.
    ends = list(tmp_path.glob("out/*.checkpoint/kclrun-state/spark/*/*/*/*/shard_end.*.state"))
    assert len({path.parent.name for path in ends}) == 3


def test_windows_of_event_time_close_once_over_reshards(application, tmp_path):
    command, _ = application(
        "processor: pipelines:Clicks\nstate: {}\nwatermark: {lateness: 10s}\nuntil: caught-up\n"
        "output: {path: out, format: parquet, schema: 'key long, start long, clicks long'}\n"
        "summary: pipelines:misclosed",
        fill="source: 'pipelines:events'",
    )
    done = run_to_end(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "0 twice, 0 wrong, 0 not closed" in done.stdout


def test_a_pipeline_reads_a_resharding_stream_to_its_end_and_sums_up(application, tmp_path):
    command, report = application(
        "pipeline: pipelines:numbers\nuntil: caught-up\nsummary: pipelines:summary\n"
        f"output: {{path: {tmp_path / 'out'}, format: parquet}}"
    )

    done = run_to_end(command, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "20000 rows, 20000 distinct, up to 19999" in done.stdout
    left = {each.name for each in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"app.yaml", "out", "pipelines.py", "report.json"}, "Spark leaves nothing here"
    reported = json.loads(report.read_bytes())
    assert reported["exit_reason"] == "caught up"
    assert reported["totals"]["records"] == 20_000
    assert sum(shard["records"] for shard in reported["shards"].values()) == 20_000
    assert (reported["totals"]["shards"], reported["totals"]["ended"]) == (5, 3)
    # A JVM says which options of the environment it has picked up.
    quiet = {"engine_said", "start_waiting"}
    events = [line["event"] for line in lines(done.stderr) if line["event"] not in quiet]
    assert events[:2] == ["engine_starting", "query_started"]
    assert events[-2:] == ["caught_up", "query_stopped"]
    assert events.count("shard_ended") == 3
    # Quiet when healthy: transitions, where the rows are, and the filler's account.
    rest = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    (folder,) = (each for each in (tmp_path / "out").iterdir() if each.suffix != ".checkpoint")
    assert rest[0] == f"Rows are in {folder.relative_to(tmp_path)}"
    assert [line[:22] for line in rest[1:]] == ["Put 20,000 records in "]
    between = {"shard_ended", "caught_up", "query_stopped"}
    assert set(events) == {"engine_starting", "query_started", *between}


def test_a_stop_lets_the_running_batch_be_committed_and_leaves_no_process(application, tmp_path):
    command, report = application(
        f"pipeline: pipelines:slowly\noptions: {{started: {tmp_path / 'started'}}}\n"
        f"output: {{path: {tmp_path / 'out'}}}",
        fill="source: 'pipelines:events', rate: 500",
    )
    with running(command, tmp_path) as process:
        family = psutil.Process(process.pid).children(recursive=True)
        groups = {os.getpgid(each.pid) for each in family if each.name() == "java"}
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=HUNG_S)

    assert process.returncode == 0, said
    entries = checkpoint_of(tmp_path / "out")
    assert entries["commits"]
    assert entries["commits"] == entries["offsets"]
    reported = json.loads(report.read_bytes())
    assert reported["exit_reason"] == "drained"
    assert reported["totals"]["batches"] == len(entries["commits"])
    events = [line["event"] for line in lines(said)]
    assert "draining" in events
    assert events[-1] == "query_stopped"
    # What `timeout` or a closing terminal sends to our whole group does not reach the JVM.
    assert len(groups) == 1
    assert os.getpgid(0) not in groups
    _, left = psutil.wait_procs(family, timeout=HUNG_S)
    assert left == []


def is_the_jvm_of_spark(process):
    try:
        return process.name() == "java" and "pyspark-shell" in process.cmdline()
    except psutil.Error:
        return False  # it has just ended


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_stop_while_the_jvm_starts_leaves_no_process(application, tmp_path, number):
    command, _ = application(
        f"pipeline: pipelines:numbers\noutput: {{path: {tmp_path / 'out'}}}",
        fill="source: 'pipelines:events', rate: 500",
    )
    starting = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        for line in starting.stderr:
            if '"engine_starting"' in line:
                break
        ours = psutil.Process(starting.pid)
        until(lambda: any(is_the_jvm_of_spark(child) for child in ours.children()))
        family = ours.children(recursive=True)
        starting.send_signal(number)
        # Its pipes end once no process has them: a JVM that is left would keep them open.
        _, said = starting.communicate(timeout=HUNG_S)
    finally:
        starting.kill()
        starting.wait()
    assert "Traceback" not in said
    _, left = psutil.wait_procs(family, timeout=HUNG_S)
    assert left == []


def test_a_run_whose_terminal_is_closed_commits_its_batch(application, tmp_path):
    command, report = application(
        f"pipeline: pipelines:slowly\noptions: {{started: {tmp_path / 'started'}}}\n"
        f"output: {{path: {tmp_path / 'out'}}}",
        fill="source: 'pipelines:events', rate: 500",
    )
    program = OnTerminal(*command[3:], cwd=tmp_path)
    try:
        until(lambda: (tmp_path / "started").exists() or program.process.poll() is not None)
        program.close_terminal()

        assert program.wait() == 0
    finally:
        program.close()
    assert json.loads(report.read_bytes())["exit_reason"] == "drained"
    entries = checkpoint_of(tmp_path / "out")
    assert entries["commits"]
    assert entries["commits"] == entries["offsets"]


def test_a_person_who_presses_twice_cuts_the_batch_short(application, tmp_path):
    command, report = application(
        f"pipeline: pipelines:slowly\noptions: {{started: {tmp_path / 'started'}}}\n"
        "shutdown: {grace: 60s}\n"
        f"output: {{path: {tmp_path / 'out'}}}",
        fill="source: 'pipelines:events', rate: 500",
    )
    # A terminal sends Ctrl-C to the whole group.
    with running(command, tmp_path, start_new_session=True) as process:
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGQUIT)
        _, said = process.communicate(timeout=HUNG_S)

    assert process.returncode == 75, said
    entries = checkpoint_of(tmp_path / "out")
    assert len(entries["offsets"] - entries["commits"]) == 1
    assert json.loads(report.read_bytes())["exit_reason"] == "stopped before it was drained"


def test_user_code_that_raises_ends_the_run_with_65_and_its_place(application, tmp_path):
    command, report = application(
        f"pipeline: pipelines:failing\noutput: {{path: {tmp_path / 'out'}}}\nuntil: caught-up"
    )

    done = run_to_end(command, cwd=tmp_path)

    assert done.returncode == 65, done.stderr
    assert (
        "Ended: user code raised on Spark, and Spark's retries did not help: ValueError: odd"
        in (done.stderr)
    )
    assert "pipelines.py line " in done.stderr
    assert "This is a bug in kclrun" not in done.stderr
    assert json.loads(report.read_bytes())["exit_reason"] == "failed: ProcessorError"


def test_a_processor_emits_typed_rows_and_its_prints_are_log_lines(application, tmp_path):
    command, report = application(
        "processor: pipelines:Sum\nuntil: caught-up\n"
        f"output: {{path: {tmp_path / 'out'}, format: json, schema: 'total long, rows long'}}"
    )

    done = run_to_end(command, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    written = "".join(path.read_text() for path in tmp_path.glob("out/*/*.json"))
    rows = [json.loads(line) for line in written.splitlines()]
    assert sum(row["rows"] for row in rows) == 20_000
    assert sum(row["total"] for row in rows) == sum(range(20_000))
    reported = json.loads(report.read_bytes())
    assert reported["totals"]["records"] == 20_000
    assert (
        sum(shard["bytes"] for shard in reported["shards"].values()) == reported["totals"]["bytes"]
    )
    assert "a line of user code" in {line.get("text") for line in lines(done.stderr)}


def test_a_jvm_that_dies_is_worth_a_restart(application, tmp_path):
    command, report = application(
        f"pipeline: pipelines:slowly\noptions: {{started: {tmp_path / 'started'}}}\n"
        f"output: {{path: {tmp_path / 'out'}}}"
    )
    with running(command, tmp_path) as process:
        children = psutil.Process(process.pid).children()
        (jvm,) = (each for each in children if each.name() == "java")
        jvm.kill()
        _, said = process.communicate(timeout=HUNG_S)

    assert process.returncode == 75, said
    assert "Ended: Spark ended the query" in said
    assert json.loads(report.read_bytes())["exit_reason"] == "failed: EngineFailed"


def test_a_stream_that_is_not_there_is_66_before_a_jvm_is_started(application, embedded, tmp_path):
    command, _ = application(f"pipeline: pipelines:numbers\noutput: {{path: {tmp_path / 'out'}}}")
    more = [f"aws.endpoint={embedded.endpoint}", "aws.region=us-east-1", "embedded=null"]
    more += [f"spark.checkpoint={tmp_path / 'c'}", "stream=nowhere"]

    done = run_to_end(
        [*command, *(part for each in more for part in ("--set", each))],
        env=os.environ | {"JAVA_HOME": "/nowhere"},
    )

    assert done.returncode == 66, done.stderr
    assert "Cannot start: " in done.stderr
