"""Whole lease processes: the real entry, real pipes and shared memory, the embedded AWS."""

import fcntl
import signal
import subprocess
import sys
import time
import uuid

import boto3
import pytest
from botocore.config import Config

from kclrun.aws.lease_table import DynamoLeaseTable
from kclrun.aws.wire import WireClient
from kclrun.ipc import exit_codes
from kclrun.ipc import transitions as told
from kclrun.ipc.channel import Channel
from kclrun.ipc.doorbell import Doorbell
from kclrun.ipc.messages import Begin, Drain, channel_to_worker
from kclrun.ipc.segment import Segment
from kclrun.ipc.spec import CheckpointSpec, FetchSpec, LogSpec, OnErrorSpec, StartSpec
from kclrun.local.server import start_embedded
from kclrun.model import changes
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.worker.clock import boottime

FIRST = "shardId-000000000000"
ME = "kclrun::host:a"
FAILOVER_S = 2.0
ENTRY = (
    "import sys; from kclrun.worker.main import run; raise SystemExit(run(*map(int, sys.argv[1:])))"
)
PROCESSOR = """
import ctypes
from kclrun import RecordProcessor

class Noting(RecordProcessor):
    def initialize(self, context):
        self.path = context.options["notes"]
        self.context = context
    def process_records(self, batch, checkpointer):
        for record in batch:
            self.note(record.data.decode())
            if record.data == b"hold":
                self.hold(record)
    def hold(self, record):
        pass
    def note(self, text):
        with open(self.path, "a") as notes:
            notes.write(text + "\\n")
    def shard_ended(self, checkpointer):
        self.note("shard_ended")
    def shutdown_requested(self, checkpointer):
        self.note("shutdown_requested")
    def lease_lost(self):
        self.note("lease_lost")

class HoldsGil(Noting):
    def hold(self, record):
        ctypes.PyDLL(None).usleep(3_500_000)

class Raises(Noting):
    def hold(self, record):
        raise ValueError("cannot take it")
"""


@pytest.fixture(scope="module")
def embedded():
    with start_embedded() as embedded:
        yield embedded


def until(condition, most_s=15.0):
    deadline = time.monotonic() + most_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)
    return found


class Stage:
    """One stream, one table, one lease; processes started on it one after the other."""

    def __init__(self, embedded, tmp_path):
        self.name = f"s{uuid.uuid4().hex[:8]}"
        self.tmp_path = tmp_path
        self.credentials = WireCredentials("AKIAEXAMPLEEXAMPLE", "secret")
        self.kinesis = self._boto("kinesis", embedded.kinesis_endpoint)
        self.kinesis.create_stream(StreamName=self.name, ShardCount=1)
        self.dynamodb = self._boto("dynamodb", embedded.dynamodb_endpoint)
        self.dynamodb.create_table(
            TableName=self.name,
            KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "leaseKey", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )
        self.endpoints = {
            service: WireEndpoint(url=url, region="us-east-1", signing_region="us-east-1")
            for service, url in (
                ("kinesis", embedded.kinesis_endpoint),
                ("dynamodb", embedded.dynamodb_endpoint),
            )
        }
        self.client = WireClient(
            self.endpoints["dynamodb"], lambda: self.credentials, service="dynamodb"
        )
        self.table = DynamoLeaseTable(self.client, self.name)
        self.table.write(
            changes.CreateLease(
                Lease(key=LeaseKey(FIRST), checkpoint=TRIM_HORIZON, owner=ME, counter=5)
            )
        )
        (tmp_path / "noting.py").write_text(PROCESSOR)
        self.notes_path = tmp_path / "notes"
        self.lock_path = tmp_path / "lock"
        self.lock_path.touch()
        self.segment = Segment.create(1)
        self.ring = self.segment.ring(0)
        self.doorbell = Doorbell.create()
        self.transitions = []
        self.process = None
        self.channel = None

    def _boto(self, service, endpoint):
        return boto3.client(
            service,
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="AKIAEXAMPLEEXAMPLE",
            aws_secret_access_key="secret",
            config=Config(retries={"max_attempts": 0}),
        )

    def put(self, *texts):
        for text in texts:
            self.kinesis.put_record(StreamName=self.name, PartitionKey="k", Data=text.encode())

    def start(self, processor="noting:Noting", **settings):
        spec = StartSpec(
            application="test",
            stream_name=self.name,
            lease_key=FIRST,
            shard_id=FIRST,
            owner=ME,
            seen_counter=self.row.counter,
            place=0,
            incarnation=1,
            expires_instant=boottime() + 10.0,
            failover_s=FAILOVER_S,
            processor=processor,
            import_paths=(str(self.tmp_path),),
            options={"notes": str(self.notes_path)},
            fetch=FetchSpec(
                mode="polling",
                idle_s=0.05,
                floor_s=0.02,
                buffer_bytes=2**20,
                batch_max=1,
                kpl_range="keep",
            ),
            checkpoint=CheckpointSpec(
                mode=settings.get("mode", "auto"),
                every_s=settings.get("every_s", 0.2),
                uncheckpointed_max=100,
            ),
            on_error=OnErrorSpec(retries=0, backoff_s=0.01),
            table_name=self.name,
            kinesis=self.endpoints["kinesis"],
            dynamodb=self.endpoints["dynamodb"],
            credentials=self.credentials,
            lock_path=str(self.lock_path),
            log=LogSpec(level="info", json=True),
        )
        mine, its = Channel.pair()
        fds = (self.segment.fd, self.doorbell.write_fd, its.fileno())
        with (self.tmp_path / "stderr").open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", ENTRY, *map(str, fds)], pass_fds=fds, stderr=stderr
            )
        its.close()
        self.channel = channel_to_worker(mine)
        self.channel.send(Begin(spec))

    def told(self, kind):
        self.transitions += [told.decode(each) for each in self.ring.drain()]
        return [each for each in self.transitions if isinstance(each, kind)]

    def drain(self):
        self.channel.send(Drain("the test is over", 10.0))

    def end(self, most_s=15.0):
        code = self.process.wait(most_s)
        self.told(told.Started)
        return code

    @property
    def row(self):
        return self.table.read(LeaseKey(FIRST))

    @property
    def notes(self):
        return self.notes_path.read_text().split() if self.notes_path.exists() else []

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.channel is not None:
            self.channel.close()
        self.doorbell.close()
        self.segment.close()
        self.client.close()
        self.kinesis.close()
        self.dynamodb.close()


@pytest.fixture
def stage(embedded, tmp_path):
    stage = Stage(embedded, tmp_path)
    yield stage
    stage.close()


def test_it_processes_checkpoints_and_is_drained_without_a_trace(stage):
    stage.put("a", "b", "c")
    stage.start()
    until(lambda: stage.told(told.Checkpointed))
    until(lambda: len(stage.notes) == 3)
    stage.put("d")
    until(lambda: len(stage.notes) == 4)

    stage.drain()

    assert stage.end() == exit_codes.DONE
    assert stage.notes == ["a", "b", "c", "d", "shutdown_requested"]
    assert stage.row.owner is None
    (released,) = stage.told(told.Released)
    assert stage.row.checkpoint == released.position
    assert [type(each) for each in stage.transitions[:2]] == [told.Started, told.Claimed]


def test_killed_its_row_stays_owned_and_a_restart_goes_on_from_the_checkpoint(stage):
    stage.put("a", "b")
    stage.start(mode="batch")
    until(lambda: len(stage.told(told.Checkpointed)) == 2)

    stage.process.send_signal(signal.SIGKILL)

    assert stage.end() == -signal.SIGKILL
    assert stage.row.owner == ME
    stage.channel.close()
    stage.put("c")
    stage.start(mode="batch")
    until(lambda: stage.notes[-1:] == ["c"])
    stage.drain()
    assert stage.end() == exit_codes.DONE
    assert stage.notes == ["a", "b", "c", "shutdown_requested"]


def test_without_a_manager_it_drains_within_its_fence(stage):
    stage.put("a")
    stage.start(every_s=100.0)
    until(lambda: stage.notes)

    gone_at = time.monotonic()
    stage.channel.close()

    assert stage.end() == exit_codes.DONE
    assert time.monotonic() - gone_at < FAILOVER_S + 1.0
    assert stage.row.owner is None
    assert stage.row.checkpoint > TRIM_HORIZON


def test_a_call_that_holds_the_gil_past_the_fence_ends_the_lease_and_is_named(stage):
    stage.put("a", "hold", "never")
    stage.start("noting:HoldsGil", every_s=100.0)

    assert stage.end() == exit_codes.LOST
    (held,) = stage.told(told.GilHeld)
    assert held.seconds > 2.0
    assert len(stage.told(told.Lost)) == 1
    assert stage.notes == ["a", "hold", "lease_lost"]


def test_a_processor_that_cannot_be_imported_fails_with_the_reason(stage):
    stage.start("nowhere:Nothing")

    assert stage.end() == exit_codes.FAILED
    (failed,) = stage.told(told.Failed)
    assert failed.where == "initialize"
    assert "there is no module nowhere" in failed.error
    assert stage.row.owner == ME


def test_a_record_that_cannot_be_processed_halts_and_is_never_passed(stage):
    stage.put("a", "hold", "never")
    stage.start("noting:Raises", every_s=100.0)

    assert stage.end() == exit_codes.FAILED
    (failed,) = stage.told(told.Failed)
    assert "ValueError: cannot take it" in failed.error
    assert stage.notes == ["a", "hold"]
    assert stage.told(told.Checkpointed)[-1].position < failed.position
    assert stage.row.checkpoint == stage.told(told.Checkpointed)[-1].position


def test_a_lock_that_somebody_else_holds_claims_nothing(stage):
    with stage.lock_path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stage.start()
        assert stage.end() == exit_codes.UNCLAIMED

    assert "another manager" in stage.told(told.Unclaimed)[0].reason
    assert stage.row.counter == 5


def test_the_end_of_a_shard_creates_the_children_and_ends_the_lease(stage):
    stage.put("a")
    stage.kinesis.split_shard(
        StreamName=stage.name, ShardToSplit=FIRST, NewStartingHashKey=str(2**127)
    )
    stage.start()

    assert stage.end() == exit_codes.DONE
    children = ["shardId-000000000001", "shardId-000000000002"]
    assert sorted(stage.told(told.ShardEnded)[0].children) == children
    assert stage.row.is_ended
    assert all(stage.table.read(LeaseKey(each)).checkpoint == TRIM_HORIZON for each in children)
    assert stage.notes == ["a", "shard_ended"]
