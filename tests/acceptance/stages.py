"""The checks, in order. Each takes the account and a folder, and returns what it found in words.

Raises: AssertionError, or the errors of the service, for a check that failed.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.acceptance.account import Account
from tests.patience import HUNG_S, until
from tests.support.programs import run_to_end, started

ROOT = Path(__file__).parents[2]
RECORDS = 600
MORE = 100
PROCESSOR = """
from kclrun import RecordProcessor


class Numbers(RecordProcessor):
    def initialize(self, context):
        self.emit = context.emit

    def process_records(self, batch, checkpointer):
        for record in batch:
            self.emit({"n": int(record.data)})
"""


@dataclass(frozen=True)
class Stage:
    """`usage` is what it costs at most, in the units of `command.PRICES`."""

    name: str
    about: str
    check: Callable[[Account, Path], str]
    usage: dict[str, float]


class Application:
    """kclrun over the stream of the account, with a lease table of its own; rows are numbers."""

    def __init__(self, account, folder, name, **settings):
        self.account = account
        self.folder = folder / name
        self.folder.mkdir()
        (self.folder / "numbers_of.py").write_text(PROCESSOR)
        self.config = self.folder / "app.yaml"
        aws = {"region": account.region, "endpoint": account.endpoint}
        self.config.write_text(
            yaml.safe_dump(
                {
                    "application": f"{account.table}-{name}",
                    "stream": account.stream,
                    "processor": "numbers_of:Numbers",
                    "output": {"path": str(self.folder / "rows")},
                    "leases": {"tags": account.tags},
                    "checkpoint": {"every": "1s"},
                    "aws": {key: value for key, value in aws.items() if value},
                }
                | settings
            )
        )
        self.config.chmod(0o600)

    def start(self, *words, machine="a"):
        """kclrun as on a machine of its own."""
        return started(
            [sys.executable, "-m", "kclrun", *words, "--config", self.config],
            self.folder / f"{machine}.log",
            cwd=self.folder,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "KCLRUN_STATE_DIR": str(self.folder / f"locks-{machine}")},
        )

    def run(self, *words):
        process = self.start(*words)
        try:
            code = process.wait(HUNG_S)
        finally:
            end(process)
        assert code == 0, f"kclrun {' '.join(words)} ended with {code}\n{self.log()}"

    def log(self, machine="a"):
        lines = (self.folder / f"{machine}.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:])

    def events(self, machine):
        for line in (self.folder / f"{machine}.log").read_text(errors="replace").splitlines():
            if line.startswith("{"):
                yield json.loads(line)

    def numbers(self):
        return sorted(
            json.loads(line)["n"]
            for file in (self.folder / "rows").rglob("*.json*")
            for line in file.read_bytes().rpartition(b"\n")[0].splitlines()
        )


def end(process):
    """Whatever became of the check: it does not run on."""
    if process.poll() is None:
        process.kill()
        process.wait()


def put(account, numbers):
    """Put these numbers, each with a key of its own; a refused record again."""
    kinesis = account.client("kinesis")
    entries = [{"Data": str(n).encode(), "PartitionKey": f"key-{n}"} for n in numbers]
    deadline = time.monotonic() + HUNG_S
    while entries:
        answer = kinesis.put_records(StreamName=account.stream, Records=entries[:500])
        refused = [
            entry
            for entry, reported in zip(entries, answer["Records"], strict=False)
            if reported.get("ErrorCode")
        ]
        entries = refused + entries[500:]
        assert time.monotonic() < deadline, "records are refused again and again"


def contract(*files):
    def check(account, folder):
        ran = run_to_end(
            [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files],
            cwd=ROOT,
            env=account.environment() | {"PYTHONPATH": str(ROOT)},
            timeout_s=None,
        )
        (folder / f"{Path(files[0]).stem}.txt").write_text(ran.stdout + ran.stderr)
        last = ran.stdout.strip().splitlines()[-1:]
        assert ran.returncode == 0, "\n".join(ran.stdout.splitlines()[-25:])
        return last[0].strip("= ")

    return check


def demo(account, folder):
    """A stream that is split and merged while it is filled; every record has a row, once."""
    kinesis = account.client("kinesis")
    account.create_stream(account.stream, 2)
    put(account, range(200))
    first, *_ = open_shards(kinesis, account.stream)
    bounds = [int(first["HashKeyRange"][f"{edge}HashKey"]) for edge in ("Starting", "Ending")]
    kinesis.split_shard(
        StreamName=account.stream,
        ShardToSplit=first["ShardId"],
        NewStartingHashKey=str((sum(bounds) + 1) // 2),
    )
    account.until_active(kinesis, account.stream)
    put(account, range(200, 400))
    _, one, other = open_shards(kinesis, account.stream)
    kinesis.merge_shards(
        StreamName=account.stream,
        ShardToMerge=one["ShardId"],
        AdjacentShardToMerge=other["ShardId"],
    )
    account.until_active(kinesis, account.stream)
    put(account, range(400, RECORDS))
    application = Application(account, folder, "demo")
    application.run("run", "--until", "caught-up")
    assert application.numbers() == list(range(RECORDS))
    return f"{RECORDS} records through a split and a merge, each once"


def open_shards(kinesis, stream):
    shards = kinesis.list_shards(StreamName=stream)["Shards"]
    still = [each for each in shards if "EndingSequenceNumber" not in each["SequenceNumberRange"]]
    return sorted(still, key=lambda each: int(each["HashKeyRange"]["StartingHashKey"]))


def all_numbers(folder):
    """Of all records in the stream: `fleet` puts more."""
    return list(range(RECORDS + (MORE if (folder / "fleet").exists() else 0)))


def fleet(account, folder):
    """Two managers share the shards; one drains, the other is killed; nothing is lost or twice."""
    application = Application(account, folder, "fleet")
    one = other = None
    try:
        one = application.start("run", machine="one")
        other = application.start("run", machine="other")

        def has_lease(machine):
            return any(each["event"] == "lease_claimed" for each in application.events(machine))

        until(
            lambda: has_lease("one") and has_lease("other"),
            why=lambda: f"no lease:\n{application.log('one')}\n{application.log('other')}",
        )
        one.send_signal(signal.SIGTERM)
        assert one.wait(HUNG_S) == 0, application.log("one")
        count = len(application.numbers())
        until(
            lambda: len(application.numbers()) == RECORDS, why=lambda: f"{count} of {RECORDS} rows"
        )
        put(account, range(RECORDS, RECORDS + MORE))
        other.kill()
        other.wait()
    finally:
        for process in (one, other):
            if process is not None:
                end(process)
    application.run("run", "--until", "caught-up")
    assert application.numbers() == all_numbers(folder)
    return "two managers, a drain and a kill; each record once"


def fan_out(account, folder):
    fetch = {"mode": "fan-out", "consumer": f"{account.stream}-acceptance"}
    application = Application(account, folder, "fan-out", fetch=fetch)
    application.run("run", "--until", "caught-up")
    assert application.numbers() == all_numbers(folder)
    kinesis = account.client("kinesis")
    arn = account.summary(kinesis, account.stream)["StreamARN"]
    names = [
        each["ConsumerName"] for each in kinesis.list_stream_consumers(StreamARN=arn)["Consumers"]
    ]
    assert names == [fetch["consumer"]]
    application.run("consumers", "remove", fetch["consumer"], "--yes")
    return "every record by a consumer of its own, which was registered and removed"


def spark(account, folder):
    application = Application(
        account,
        folder,
        "spark",
        engine="spark",
        spark={"trigger": "available-now", "checkpoint": str(folder / "spark.checkpoint")},
        output={"path": str(folder / "spark" / "rows"), "schema": "n long"},
    )
    application.run("run")
    assert application.numbers() == all_numbers(folder)
    return "every record by a query of Spark"


def deployment(account, folder):
    """The template and the task definition of config/deploy, and the table as kclrun left it."""
    deploy = ROOT / "config" / "deploy"
    formation, ecs = account.client("cloudformation"), account.client("ecs")
    formation.validate_template(TemplateBody=(deploy / "cloudformation.yaml").read_text())
    task = json.loads((deploy / "ecs-task.json").read_text()) | {"family": account.table}
    task["tags"] = [{"key": key, "value": value} for key, value in account.tags.items()]
    # Roles that are not there are refused when a task starts, not here.
    made = ecs.register_task_definition(**task)["taskDefinition"]["taskDefinitionArn"]
    ecs.deregister_task_definition(taskDefinition=made)
    ecs.delete_task_definitions(taskDefinitions=[made])
    application = Application(account, folder, "deployment")
    application.config.write_text(
        application.config.read_text().replace(
            f"{account.table}-deployment", f"{account.table}-demo"
        )
    )
    for words in (("check",), ("doctor",), ("lag",)):
        application.run(*words)
    return "template and task definition accepted; check, doctor and lag find nothing"


STAGES = (
    Stage(
        "stream",
        "the contract of a stream: 39 streams, one after the other",
        contract("tests/contract/test_kinesis_stream.py"),
        {"shard hours": 39 * 4, "million put units": 0.01},
    ),
    Stage(
        "table",
        "the contract of a lease table: two tables",
        contract(
            "tests/contract/test_lease_table.py",
            "tests/contract/test_lease_table_handoffs.py",
            "tests/contract/test_lease_table_late.py",
            "tests/contract/test_lease_table_reset.py",
            "tests/contract/test_lease_table_streams.py",
        ),
        {"million table writes": 0.02, "million table reads": 0.02},
    ),
    Stage(
        "demo",
        "a stream that is split and merged, through kclrun",
        demo,
        {"shard hours": 5, "million put units": 0.01, "million table writes": 0.01},
    ),
    Stage("fleet", "two managers, a drain and a kill", fleet, {"million table writes": 0.01}),
    Stage(
        "fan-out",
        "the same records by enhanced fan-out",
        fan_out,
        {"consumer shard hours": 5, "million table writes": 0.01},
    ),
    Stage("spark", "the same records by Spark", spark, {}),
    Stage("deployment", "what config/deploy has, and the doctor", deployment, {}),
)
