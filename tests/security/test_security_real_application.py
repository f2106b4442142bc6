"""A real application, run through a bad day, and everything it left behind searched for secrets.

The day: four shards at `log.level: debug`, one whose user code cannot parse its records, one whose
process crashes, one whose user code calls AWS itself; Kinesis and DynamoDB refuse for a while and
quote what they were asked. Canaries are short words, so that no rule about long runs helps.
"""

import contextlib
import json
import re
import stat
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from kclrun.aws.operations import OPERATIONS
from kclrun.aws.policies import Site, run_policy
from kclrun.config.load import load_settings
from kclrun.model.time import WallTime
from tests.processes.bad_input_rig.denying import DenyingEndpoint
from tests.processes.ledger_rig.application import Application
from tests.processes.ledger_rig.aws import REGION

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

CANARIES = {
    "payload": "payload-canary-4f1d",
    "partition key": "key-canary-93ab",
    "secret key": "secret-canary-07ce",
    "session token": "token-canary-b2a8",
    "variable of the processor": "password-canary-51e0",
}
# How the service begins a refusal that goes on with the request, iterator and all.
QUOTED = "GetRecords: InvalidArgumentException: it was not possible"
PROCESSOR = """
import json, logging, os
from pathlib import Path

import boto3
from kclrun import RecordProcessor

class BadDay(RecordProcessor):
    def initialize(self, context):
        self.shard = context.shard_id[-1]
        self.context = context
        print("ordinary words of user code")
        logging.getLogger("mine").debug("a debug line of user code")

    def process_records(self, batch, checkpointer):
        for record in batch:
            everything = (record, record.data, record.partition_key, dict(os.environ))
            getattr(self, "shard_" + self.shard)(record, everything)
            self.context.emit({"shard": self.shard, "bytes": len(record.data)})

    def shard_0(self, record, everything):
        json.loads(record.data)

    def shard_1(self, record, everything):
        crashed = Path(self.context.options["crashed"])
        if not crashed.exists():
            crashed.touch()
            os.abort()

    def shard_2(self, record, everything):
        client = boto3.client("kinesis", endpoint_url=self.context.options["endpoint"])
        client.describe_stream_summary(StreamName=self.context.stream)
        logging.getLogger("botocore.endpoint").debug("%s", everything)

    def shard_3(self, record, everything):
        repr(everything[0])
"""


_CORE = re.compile(r"Max core file size +(\d+) +(\d+)")


class BadDay(Application):
    """With canaries for credentials, and a folder for temporary files that it should not need."""

    @property
    def environment(self):
        return super().environment | {
            "AWS_ACCESS_KEY_ID": "AKIACANARYCANARY",
            "AWS_SECRET_ACCESS_KEY": CANARIES["secret key"],
            "AWS_SESSION_TOKEN": CANARIES["session token"],
            "AWS_DEFAULT_REGION": "us-east-1",
            "DATABASE_PASSWORD": CANARIES["variable of the processor"],
            "TMPDIR": str(self.folder / "tmp"),
        }


class Facts:
    """What was seen of the application while it ran and after its end."""

    def __init__(self, app):
        self.app = app
        self.exit_code = None
        self.report = app.folder / "report.json"
        self.processes = {}
        self.lock_modes = {}
        self.calls = set()
        self.iterators = set()
        self.rows = ""

    def look_at_processes(self):
        for pid in self.app.lease_pids():
            self.processes[pid] = _facts_of(pid)

    def texts(self):
        """Everything that a person, a collector or a successor may read, by where it stands."""
        found = {"log": self.app.log_path.read_text(), "lease table": self.rows}
        for folder in (self.app.state, self.app.folder / "out", self.app.folder / "tmp"):
            found |= {str(p): p.read_text() for p in folder.rglob("*") if p.is_file()}
        found["report"] = self.report.read_text()
        for pid, process in self.processes.items():
            found[f"command line of {pid}"] = " ".join(process["cmdline"])
        return found


def _facts_of(pid):
    process = psutil.Process(pid)
    kernel = Path(f"/proc/{pid}")
    status = (kernel / "status").read_text()
    links = {}
    for fd in (kernel / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a connection that ended meanwhile
            links[int(fd.name)] = str(fd.readlink())
    return {
        "environ": process.environ(),
        "cmdline": process.cmdline(),
        "core": _CORE.search((kernel / "limits").read_text()).groups(),
        "status": dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line),
        "links": links,
        "unix": [c for c in process.net_connections("unix") if c.fd > 2],
    }


@pytest.fixture(scope="module")
def facts(embedded_aws, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad-day")
    kinesis = DenyingEndpoint(embedded_aws.embedded.kinesis_endpoint)
    dynamodb = DenyingEndpoint(embedded_aws.embedded.dynamodb_endpoint)
    (folder / "bad_day.py").write_text(textwrap.dedent(PROCESSOR))
    stream = embedded_aws.stream(shards=4)
    app = BadDay(
        folder,
        embedded_aws,
        stream,
        processor="bad_day:BadDay",
        path=str(folder),
        options={"crashed": str(folder / "crashed"), "endpoint": kinesis.url},
        aws={"endpoints": {"kinesis": kinesis.url, "dynamodb": dynamodb.url}},
        output={"path": str(folder / "a" / "out")},
        on_error={"retries": 1, "backoff": "50ms"},
        leases={"failover": "2s"},
    )
    app.state.mkdir(mode=0o777)
    (app.state / app.table).mkdir()
    (app.state / app.table).chmod(0o777)
    (app.folder / "tmp").mkdir()
    facts = Facts(app)
    try:
        _live_through(app, facts, embedded_aws, stream, kinesis, dynamodb)
    finally:
        app.close()
        kinesis.close()
        dynamodb.close()
    return facts


def _live_through(app, facts, aws, stream, kinesis, dynamodb):
    app.start("--report", str(facts.report))
    _put(aws, stream)
    app.until(lambda: app.of("lease_halted") and app.of("process_died") and _rows_of(app) >= 3)
    facts.look_at_processes()
    facts.lock_modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in (app.state / app.table).glob("*.lock")
    }
    throttled = "ProvisionedThroughputExceededException"
    kinesis.refused = {"GetRecords": throttled, "ListShards": "LimitExceededException"}
    dynamodb.refused = {"UpdateItem": throttled, "Scan": throttled}
    app.until(lambda: app.of("service_unreachable"))
    dynamodb.refused = {}
    kinesis.refused = {"GetRecords": "InvalidArgumentException"}
    app.until(lambda: QUOTED in app.log_path.read_text())
    kinesis.refused = {}
    _put(aws, stream)
    app.until(lambda: _rows_of(app) >= 6)
    facts.rows = json.dumps(aws.rows(app.table))
    facts.exit_code = app.stop()
    facts.calls = set(kinesis.calls) | set(dynamodb.calls)
    facts.iterators = kinesis.iterators


def _put(aws, stream):
    for shard in aws.kinesis.list_shards(StreamName=stream)["Shards"]:
        aws.kinesis.put_record(
            StreamName=stream,
            PartitionKey=CANARIES["partition key"],
            Data=CANARIES["payload"].encode(),
            ExplicitHashKey=shard["HashKeyRange"]["StartingHashKey"],
        )


def _rows_of(app):
    return sum(len(p.read_text().splitlines()) for p in (app.folder / "out").glob("*.jsonl"))


def test_the_bad_day_was_one_and_was_written_down(facts):
    """Or the search below would find nothing because nothing was said."""
    log = facts.app.log_path.read_text()
    events = {line.get("event") for line in facts.app.lines()}

    assert facts.exit_code == 0
    assert events >= {"lease_halted", "processor_failed", "process_died", "service_unreachable"}
    assert "ordinary words of user code" in log
    assert "a debug line of user code" in log
    assert "Fatal Python error: Aborted" in log
    assert "JSONDecodeError" in facts.rows
    assert len(facts.iterators) > 8


@pytest.mark.parametrize("what", CANARIES)
def test_no_secret_is_found_in_anything_it_left(facts, what):
    """S6."""
    found = [where for where, text in facts.texts().items() if CANARIES[what] in text]

    assert found == []


def test_no_iterator_is_found_in_anything_it_left(facts):
    """S6."""
    found = [
        where
        for where, text in facts.texts().items()
        if any(iterator in text for iterator in facts.iterators)
    ]

    assert found == []


def test_the_policies_allow_all_that_was_called_and_nothing_else_was(facts):
    """S1, as seen from the services."""
    settings = load_settings(facts.app.config, environment={}, now=WallTime(time.time()))
    site = Site(partition="aws", region=REGION, account="123456789012")
    policy = run_policy(settings, site)
    allowed = {
        action
        for statement in policy["Statement"]
        if statement["Effect"] == "Allow"
        for action in statement["Action"]
    }
    # This application reads Kinesis; a table's stream has operations of the same names.
    called = [each for each in OPERATIONS if each.service != "dynamodbstreams"]
    needed = {operation.name: set(operation.iam_actions) for operation in called}

    assert facts.calls <= needed.keys()
    assert set().union(*(needed[name] for name in facts.calls)) <= allowed
    assert facts.calls >= {"GetRecords", "UpdateItem", "PutItem", "CreateTable"}


def test_lease_processes_have_few_rights_and_the_whole_environment(facts):
    """S9, as seen from outside."""
    assert len(facts.processes) >= 3
    for process in facts.processes.values():
        assert process["core"] == ("0", "0")
        assert process["status"]["NoNewPrivs"] == "1"
        assert process["status"]["Umask"] == "0077"
        # As any program has it; that it stays out of everything else is searched for above.
        assert process["environ"]["DATABASE_PASSWORD"] == CANARIES["variable of the processor"]


def test_lease_processes_hold_the_descriptors_they_need_and_no_other(facts):
    """S9: no sibling's channel, no other lease's file, one lock."""
    for process in facts.processes.values():
        links = [link for fd, link in process["links"].items() if fd > 2]
        named = [link for link in links if link.startswith("/")]
        locks = [link for link in named if link.endswith(".lock")]
        rows = [link for link in named if "/out/" in link]
        shards = {re.search(r"shardId-\d+", link)[0] for link in rows}
        assert len(locks) == 1
        assert len(shards) <= 1
        others = set(named) - set(locks) - set(rows)
        assert others <= {"/memfd:kclrun (deleted)", "/dev/urandom", "/dev/null"}, others
        assert len(process["unix"]) == 1


def test_files_are_for_their_owner_only(facts):
    """S13: also where the folder had been made for everybody."""
    folder = facts.app.state / facts.app.table

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert facts.lock_modes
    assert set(facts.lock_modes.values()) == {0o600}
    rows = [path for path in (facts.app.folder / "out").rglob("*") if path.is_file()]
    assert rows
    assert {stat.S_IMODE(path.stat().st_mode) for path in rows} == {0o600}


def test_nothing_was_left_among_temporary_files(facts):
    """S13."""
    assert list((facts.app.folder / "tmp").iterdir()) == []
    assert [path.name for path in facts.app.folder.glob(".report*")] == []


def test_the_search_can_find_something(facts):
    """A search that finds nothing proves nothing."""
    assert any("lease_halted" in text for text in facts.texts().values())
    assert any("haltReason" in text for text in facts.texts().values())
