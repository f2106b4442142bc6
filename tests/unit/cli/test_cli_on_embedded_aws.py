"""The verbs against the embedded AWS, with real processes."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from kclrun.aws.control import ControlPlane
from kclrun.aws.endpoints import EndpointSettings, open_session
from kclrun.aws.put_records import batches, send_all
from kclrun.cli.program import run_program
from kclrun.cli.services import Aws
from kclrun.codec.kpl import open_aggregates
from kclrun.config.load import settings_of
from kclrun.config.schema import Settings
from kclrun.local.filling import wait_until_active
from kclrun.local.server import start_embedded
from kclrun.model.lease import LeaseKey, OwnerId
from kclrun.model.record import IteratorType, PutEntry, StartPoint
from kclrun.model.time import WallTime
from tests.patience import HUNG_S
from tests.support.descriptors import everything_on
from tests.support.programs import run_to_end

pytestmark = pytest.mark.seconds
KEY = LeaseKey("shardId-000000000000")
OWNER = OwnerId("kclrun:az1:host:abc")


def settings(config: Path) -> Settings:
    return settings_of(config.read_text(), environment={}, now=WallTime(time.time()))


def stream_of(config: Path, shards: int) -> Aws:
    import msgspec

    from kclrun.aws.operations import Operation

    aws = Aws(settings(config))
    request = {"StreamName": aws.settings.stream, "ShardCount": shards}
    create = Operation("kinesis", "CreateStream", is_write=True)
    aws.kinesis_client.call(create, msgspec.json.encode(request))
    wait_until_active(aws.stream)
    return aws


def payloads(aws: Aws) -> dict[str, list[tuple[str, bytes]]]:
    """(key, data) of every shard, aggregates opened, in order."""
    read: dict[str, list[tuple[str, bytes]]] = defaultdict(list)
    for shard in aws.stream.list_shards():
        iterator: str | None = aws.reader.iterator(
            shard.shard_id, StartPoint(IteratorType.TRIM_HORIZON)
        )
        while iterator is not None:
            page = aws.reader.fetch(iterator, 10_000)
            opened = open_aggregates(page.records)
            read[shard.shard_id] += [(user.partition_key, user.data) for user in opened]
            iterator = page.next_iterator if page.millis_behind_latest else None
    return read


@pytest.mark.parametrize("more", [[], ["--aggregate"], ["--ordered"]], ids=["as is", "kpl", "key"])
def test_every_row_is_put_once_and_keys_keep_their_order(config, tmp_path, more, capsys):
    aws = stream_of(config, shards=3)
    rows = tmp_path / "rows.csv"
    rows.write_text("k,n\n" + "".join(f"key{n % 97},{n}\n" for n in range(5_000)))

    assert run_program(["put", "--config", str(config), str(rows), "--key", "k", *more]) == 0

    assert "5,000 rows put" in capsys.readouterr().out
    by_key = defaultdict(list)
    for records in payloads(aws).values():
        for key, data in records:
            by_key[key].append(int(json.loads(data)["n"]))
    assert sum(map(len, by_key.values())) == 5_000
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


def test_a_stream_that_is_not_there_is_66(config, capsys):
    assert run_program(["check", "--config", str(config), "--set", "processor=json:x"]) == 78
    config.write_text(config.read_text() + "processor: kclrun.samples.hello:Hello\n")
    assert run_program(["--config", str(config)]) == 66
    reported = capsys.readouterr().err
    assert "Cannot start: " in reported
    assert "It is made on this emulator with:\n    echo hello | kclrun put" in reported
    assert "--create 2 --stream test-a-stream" in reported


LETTERS = "on_error: {then: dead-letter, dead_letter: {%s}}"
CREATE = "\n  Create it, or correct its name in the settings"
TOPIC = "arn:aws:sns:us-east-1:123456789012:none"


@pytest.mark.parametrize(
    ("line", "said", "code"),
    [
        *(
            (line, said + ".*" + CREATE, 78)
            for line, said in (
                ("output: {kinesis: none}", "output: the stream none: ListShards: ResourceNotFo"),
                ("outputs: {a: {s3: 's3://none'}}", "outputs.a: cannot create s3://none/_kclrun/"),
                (LETTERS % "sqs: none", "on_error.dead_letter: cannot find the queue none: GetQ"),
            )
        ),
        *(
            pytest.param(line, said + ".*" + CREATE, 78, marks=pytest.mark.long)
            for line, said in (
                ("output: {sqs: none}", "output: the queue none: GetQueueUrl: AWS.SimpleQueueSer"),
                (f"output: {{sns: '{TOPIC}'}}", f"output: the topic {TOPIC}: GetTopicAttributes"),
                ("output: {firehose: none}", "output: the delivery stream none: DescribeDeliv"),
                ("output: {s3: 's3://none/x'}", "output: cannot create s3://none/x/_kclrun/probe"),
                (LETTERS % "s3: 's3://none'", "on_error.dead_letter: cannot look into the bucket"),
                (LETTERS % "stream: none", "on_error.dead_letter: cannot look at the stream none"),
            )
        ),
        (
            "outputs: {a: {dynamodb: none}}",
            "outputs.a: the table none does not exist\n  Create it with its key, or correct its na",
            78,
        ),
        (
            "outputs: {a: {sql: 'sqlite:///text/x.db', table: t}}",
            r"outputs.a: cannot use table t of .*CANTOPEN\): is .*\n  Check that it runs and c",
            69,
        ),
    ],
)
def test_a_destination_that_is_not_there_ends_a_check_and_a_run_with_what_to_do(
    config, line, said, code, capsys
):
    stream_of(config, shards=1)
    with config.open("a") as file:
        file.write(f"processor: kclrun.samples.hello:Hello\n{line}\n")

    assert run_program(["check", "--config", str(config)]) == code
    reported = capsys.readouterr()
    assert " --  wrong\n" in reported.out
    assert re.search(f"^Check failed: {said}", reported.err, re.DOTALL)
    assert run_program(["run", "--config", str(config), "--set", "aws.start_timeout=10ms"]) == code
    told_by_run = capsys.readouterr().err
    assert re.search(f"^Cannot start: .*{said}", told_by_run, re.DOTALL)
    assert ("The destination has not answered" in told_by_run) == (code == 69)


@pytest.mark.parametrize(
    ("line", "setting"),
    [
        ("output: {path: %s}", "output"),
        ("output: {path: %s, roll: {}}", "output"),
        (LETTERS % "path: %s", "on_error.dead_letter"),
    ],
)
def test_a_folder_is_checked_and_not_made(config, line, setting, capsys, monkeypatch):
    stream_of(config, shards=1)
    text = config.read_text() + "processor: kclrun.samples.hello:Hello\n"
    free, taken = config.parent / "free", config.parent / "taken"
    taken.write_text("a file")

    config.write_text(text + line % (free / "rows"))
    assert run_program(["check", "--config", str(config)]) == 0
    assert f"ok  the folder {free}/rows\n" in capsys.readouterr().out
    assert not free.exists()
    # No mode of a folder stops root, and the tests may be root's.
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != config.parent)
    for folder, why in (
        (taken / "rows", f"{taken} is a file"),
        (free / "rows", f"{config.parent} is read-only, or user {os.geteuid()} may not write to"),
    ):
        config.write_text(text + line % folder)
        assert run_program(["check", "--config", str(config)]) == 78
        reported = capsys.readouterr().err
        assert f"Check failed: {setting}: cannot use the folder {folder}: {why}" in reported


def test_the_destinations_of_all_outputs_are_checked(config, endpoint, capsys):
    stream_of(config, shards=1)
    aws = Aws(settings(config))
    own = EndpointSettings(region="us-east-1", endpoint_url=endpoint)
    control = ControlPlane(open_session(own), own, aws.credentials.current())
    control.sqs().create_queue(QueueName="late")
    with config.open("a") as file:
        file.write("processor: kclrun.samples.hello:Hello\n")
        file.write(f"outputs: {{late: {{sqs: late}}, put: {{kinesis: rows-{os.getpid()}}}}}\n")
    rows = config.parent / "rows.txt"
    rows.write_text("one\n")
    made = ["--stream", f"rows-{os.getpid()}", "--endpoint", endpoint, "--create", "3", str(rows)]
    assert run_program(["put", *made]) == 0

    assert run_program(["check", "--config", str(config)]) == 0
    reported = capsys.readouterr().out
    assert "outputs.late  ok  the queue late; may write: proven\n" in reported
    shards = f"rows-{os.getpid()}, 3 open shards; may write: not proven, because "
    assert f"outputs.put   ok  the stream {shards}" in reported
    assert {line.index("ok  ") for line in reported.splitlines() if "ok  " in line} == {14}


def test_put_makes_a_stream_of_an_emulator_once(endpoint, tmp_path, capsys):
    rows = tmp_path / "rows.txt"
    rows.write_text("one\ntwo\n")
    line = ["put", "--stream", "made", "--endpoint", endpoint, "--create", "3", str(rows)]

    assert [run_program(line), run_program(line)] == [0, 0]

    reported = capsys.readouterr().out
    assert reported.count("Made the stream made with 3 shards") == 1
    aws = Aws(
        settings_of(
            f"application: made\nstream: made\naws: {{endpoint: '{endpoint}'}}\n",
            environment={},
            now=WallTime(time.time()),
        )
    )
    assert sum(len(read) for read in payloads(aws).values()) == 4
    assert len(aws.stream.list_shards()) == 3


@pytest.mark.slow
def test_the_starter_runs_on_the_local_aws_as_its_help_says(tmp_path):
    """The commands that `kclrun local --help` shows; nothing of AWS is configured."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("AWS_")
    } | {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "KCLRUN_STATE_DIR": str(tmp_path / "state"),
    }
    program = [sys.executable, "-m", "kclrun"]
    folder = tmp_path / "hello"
    assert run_program(["init", str(folder)]) == 0
    local = subprocess.Popen(
        [*program, "local", "--port", "0", "--stream", "hello:2"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert local.stdout is not None
        ready, streams = local.stdout.readline(), local.stdout.readline()
        there = ["--set", f"aws.endpoint={re.search(r'http://[0-9.:]+', ready)[0]}"]
        put = subprocess.run(
            [*program, "put", "app.yaml", *there],
            input="moon\nsun\nmoon\n",
            text=True,
            cwd=folder,
            env=environment,
            timeout=HUNG_S,
        )
        ran = run_to_end([*program, "app.yaml", *there], cwd=folder, env=environment)
    finally:
        local.terminate()
        local.communicate(timeout=HUNG_S)

    assert streams == "Streams in us-east-1: hello (shards: 2)\n"
    assert (put.returncode, ran.returncode) == (0, 0), ran.stderr
    assert "embedded: is not used" in ran.stderr
    assert ran.stderr.endswith("Rows are in out\n")
    rows = [
        json.loads(line)
        for path in (folder / "out").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert {row["word"] for row in rows} == {"moon", "sun"}


def test_throttled_records_are_sent_until_all_are_taken(tmp_path):
    """With the service's limits on, one shard takes 1,000 records a second and refuses the rest."""
    with start_embedded(limits=True) as embedded:
        file = tmp_path / "app.yaml"
        file.write_text(
            "application: limited\nstream: limited\n"
            f"aws: {{region: us-east-1, endpoint: '{embedded.endpoint}'}}\n"
        )
        aws = stream_of(file, shards=1)
        rows = [PutEntry(str(n).encode(), "k") for n in range(2_500)]

        refusals = sum(send_all(aws.kinesis_client, "limited", batch) for batch in batches(rows))

        deadline = time.monotonic() + HUNG_S
        read = payloads(aws)["shardId-000000000000"]
        while len(read) < len(rows) and time.monotonic() < deadline:
            read = payloads(aws)["shardId-000000000000"]
    assert refusals > 0
    assert sorted(int(data) for _, data in read) == list(range(2_500))


@pytest.fixture
def project(tmp_path):
    """A command that runs the starter project with some settings changed."""
    run_program(["init", str(tmp_path / "p")])

    def command(*overrides: str) -> list[str]:
        sets = [part for override in overrides for part in ("--set", override)]
        return [sys.executable, "-m", "kclrun", "--config", str(tmp_path / "p" / "app.yaml"), *sets]

    return command


def rows_in(folder: Path) -> int:
    lines = [line for file in folder.rglob("*.jsonl") for line in file.read_text().splitlines()]
    return sum(json.loads(line)["times"] for line in lines)


@pytest.mark.slow
def test_an_embedded_run_fills_reshards_reads_all_and_sums_up(project, tmp_path):
    (tmp_path / "p" / "sums.py").write_text(
        "def total(folder):\n    return f'{len(list(folder.glob(\"*.jsonl\")))} files'\n"
    )
    command = project(
        "embedded.fill.aggregate=0.5",
        "embedded.reshard=[{after: 0.3, split: 0}, {after: 0.6, merge: 1}]",
        "summary=sums:total",
    )
    report = tmp_path / "report.json"

    done = run_to_end([*command, "--report", str(report)], cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "Put 1,000 records" in done.stderr
    assert "2 reshards" in done.stderr
    (folder,) = (tmp_path / "out").iterdir()
    assert f"Rows are in out/{folder.name}\n" in done.stderr
    assert done.stdout.splitlines()[-1].endswith(" files")
    assert rows_in(tmp_path / "out") == 1_000
    assert json.loads(report.read_text())["totals"]["records"] == 1_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["embedded.reshard=[{after: 0.3, split: 7}]"], "cannot split open shard 7: there are 2"),
        (["embedded.fill.source=bad:not_pairs"], "item 1 is not a (key: str, data: bytes) pair"),
        (["embedded.fill.source=bad:raises"], "ValueError: no more"),
    ],
)
def test_a_fill_that_fails_ends_the_run_with_its_reason(project, tmp_path, overrides, said):
    (tmp_path / "p" / "bad.py").write_text(
        "def not_pairs():\n    yield 'k', 'text'\n"
        "def raises():\n    yield 'k', b'x'\n    raise ValueError('no more')\n"
    )

    done = run_to_end(project(*overrides), cwd=tmp_path)

    assert done.returncode == 78, done.stderr
    assert said in done.stderr
    assert "embedded.fill did not put all its records" in done.stderr


@pytest.mark.slow
def test_a_terminal_gets_a_table_and_ctrl_c_drains(project, tmp_path):
    master, slave = pty.openpty()
    # What is resharded is counted first, so that there is a whole for the bar of the fill.
    reshard = "embedded.reshard=[{after: 1.0, split: 0}]"
    command = project("until=null", "embedded.fill.rate=200", reshard)
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"TERM": "xterm"},  # a dumb terminal gets no table
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    shown, deadline = b"", time.monotonic() + 60
    wanted = (b"leases here", b" of 1,000 records")
    while not all(each in shown for each in wanted) and time.monotonic() < deadline:
        shown += os.read(master, 65_536)
    os.kill(process.pid, signal.SIGINT)
    shown += everything_on(master)
    os.close(master)

    assert process.wait(HUNG_S) == 0, shown[-3000:]
    assert b"hello on hello" in shown
    assert all(each in shown for each in wanted)
    assert b'{"ts"' not in shown
