"""Whole lease processes: the real entry, real pipes and shared memory, the embedded AWS."""

import contextlib
import fcntl
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid

import msgspec
import pytest

from kclrun.aws.lease_table import DynamoLeaseTable
from kclrun.aws.rows import encode_row
from kclrun.aws.wire import WireClient
from kclrun.ipc import exit_codes
from kclrun.ipc.board import Segment, StartSpec, boottime
from kclrun.ipc.channel import Channel, Doorbell
from kclrun.ipc.messages import Begin, Drain, OthersInSight, channel_to_worker, decode_report
from kclrun.model.lease import ANYBODY, OFFERED, Lease, LeaseKey
from kclrun.model.policies import CheckpointPolicy, ErrorPolicy, FetchPolicy, LogPolicy
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.protocol import reports
from kclrun.protocol import writes as changes
from kclrun.protocol.status import LeaseStatus, WorkerState
from kclrun.protocol.writes import Applied
from tests.patience import until
from tests.support.clients import ONCE, client_of

FIRST = "shardId-000000000000"
ME = "kclrun::host:a"
OTHER = "kclrun::host:b"
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

class Leaves(Noting):
    def hold(self, record):
        self.context.release()

class Outlasts(Noting):
    def hold(self, record):
        import os, time
        while not os.path.exists(self.context.options["notes"] + ".go"):
            time.sleep(0.01)
"""


class Stage:
    """One stream, one table, one lease; processes started on it one after the other."""

    def __init__(self, shared_aws, tmp_path):
        self.name = f"s{uuid.uuid4().hex[:8]}"
        self.tmp_path = tmp_path
        self.credentials = WireCredentials("AKIAEXAMPLEEXAMPLE", "secret")
        self.kinesis = self._boto("kinesis", shared_aws.kinesis_endpoint)
        self.kinesis.create_stream(StreamName=self.name, ShardCount=1)
        self.dynamodb = self._boto("dynamodb", shared_aws.dynamodb_endpoint)
        self.dynamodb.create_table(
            TableName=self.name,
            KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "leaseKey", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )
        self.endpoints = {
            service: WireEndpoint(url=url, region="us-east-1", signing_region="us-east-1")
            for service, url in (
                ("kinesis", shared_aws.kinesis_endpoint),
                ("dynamodb", shared_aws.dynamodb_endpoint),
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
        return client_of(service, endpoint, config=ONCE)

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
            others_in_sight=settings.get("others_in_sight", False),
            has_waited=settings.get("has_waited", False),
            processor=processor,
            import_paths=(str(self.tmp_path),),
            options={"notes": str(self.notes_path)},
            fetch=FetchPolicy(
                idle_s=0.05,
                floor_s=0.02,
                buffer_bytes=2**20,
                batch_max=1,
                kpl_range="keep",
            ),
            checkpoint=CheckpointPolicy(
                mode=settings.get("mode", "auto"),
                every_s=settings.get("every_s", 0.2),
                uncheckpointed_max=100,
            ),
            on_error=ErrorPolicy(retries=0, backoff_s=0.01),
            table_name=self.name,
            kinesis=settings.get("kinesis", self.endpoints["kinesis"]),
            dynamodb=self.endpoints["dynamodb"],
            credentials=self.credentials,
            lock_path=str(self.lock_path),
            log=LogPolicy(level="info", json=True),
        )
        mine, its = Channel.pair()
        fds = (self.segment.fd, self.doorbell.write_fd, its.fileno())
        with (self.tmp_path / "stderr").open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", ENTRY, *map(str, fds)], pass_fds=fds, stderr=stderr
            )
        its.close()
        self.channel = channel_to_worker(mine)
        self.channel.send(Begin(spec), settings.get("fds", ()))

    def reported(self, kind):
        self.transitions += [decode_report(each) for each in self.ring.drain()]
        return [each for each in self.transitions if isinstance(each, kind)]

    def drain(self):
        self.channel.send(Drain("the test is over", 10.0))

    def end(self, most_s=15.0):
        code = self.process.wait(most_s)
        self.reported(reports.Report)
        return code

    def take_away(self, owner):
        """By force, as nobody should: whether it came between two renewals."""
        row = self.row
        take = changes.Take(row.key, owner, row.owner, row.counter, FAILOVER_S, "LATEST")
        return isinstance(self.table.write(take), Applied)

    def lead_away(self, next_owner):
        """A KCL 3 leader initiates a graceful hand-over (`initiateGracefulLeaseHandoff`)."""
        self.dynamodb.update_item(
            TableName=self.name,
            Key={"leaseKey": {"S": FIRST}},
            UpdateExpression="SET leaseOwner = :next, checkpointOwner = :me",
            ConditionExpression="leaseOwner = :me",
            ExpressionAttributeValues={":next": {"S": next_owner}, ":me": {"S": ME}},
        )

    def plant(self, **fields):
        """The row as somebody else left it."""
        item = encode_row(msgspec.structs.replace(self.row, **fields))
        self.dynamodb.put_item(TableName=self.name, Item=item)

    def has_noticed(self):
        """Whether the process has seen that it lost the lease: nothing renews it any more."""
        status = self.segment.slot(0).read()
        return isinstance(status, LeaseStatus) and status.state is WorkerState.LOST

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
def stage(shared_aws, tmp_path):
    stage = Stage(shared_aws, tmp_path)
    yield stage
    stage.close()


def test_it_processes_checkpoints_and_is_drained_without_a_trace(stage):
    stage.put("a", "b", "c")
    stage.start()
    until(lambda: stage.reported(reports.Checkpointed))
    until(lambda: len(stage.notes) >= 3)
    stage.put("d")
    until(lambda: len(stage.notes) >= 4)

    stage.drain()

    assert stage.end() == exit_codes.DONE
    assert stage.notes == ["a", "b", "c", "d", "shutdown_requested"]
    assert stage.row.owner is None
    (released,) = stage.reported(reports.LeaseReleased)
    assert stage.row.checkpoint == released.position
    assert type(stage.transitions[0]) is reports.LeaseClaimed


def test_killed_its_row_stays_owned_and_a_restart_goes_on_from_the_checkpoint(stage):
    stage.put("a", "b")
    stage.start(mode="batch")
    until(lambda: len(stage.reported(reports.Checkpointed)) >= 2)

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

    stage.channel.close()

    assert stage.end() == exit_codes.DONE
    # It writes nothing as owner past its fence: the row was given back within it.
    assert stage.row.owner is None
    assert stage.row.checkpoint > TRIM_HORIZON


def test_a_call_that_holds_the_gil_past_the_fence_ends_the_lease_and_is_named(stage):
    stage.put("a", "hold", "never")
    stage.start("noting:HoldsGil", every_s=100.0)

    assert stage.end() == exit_codes.LOST
    (held,) = stage.reported(reports.GilHeld)
    assert held.seconds > 2.0
    assert len(stage.reported(reports.LeaseLost)) == 1
    assert stage.notes == ["a", "hold", "lease_lost"]


def test_a_processor_that_cannot_be_imported_fails_with_the_reason(stage):
    stage.start("nowhere:Nothing")

    assert stage.end() == exit_codes.FAILED
    (failed,) = stage.reported(reports.ProcessorFailed)
    assert failed.where == "initialize"
    assert "there is no module nowhere" in failed.error
    assert stage.row.owner == ME


def test_a_lock_that_somebody_else_holds_claims_nothing(stage):
    with stage.lock_path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stage.start()
        assert stage.end() == exit_codes.UNCLAIMED

    assert "another manager" in stage.reported(reports.StartUnclaimed)[0].reason
    assert stage.row.counter == 5


def test_a_lock_file_that_somebody_removed_is_still_held_by_whoever_its_manager_starts(stage):
    with stage.lock_path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        stage.lock_path.unlink()

        stage.start(fds=(lock.fileno(),))

        until(lambda: stage.reported(reports.LeaseClaimed))
        fcntl.flock(lock, fcntl.LOCK_UN)
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stage.drain()
        assert stage.end() == exit_codes.DONE


def test_a_lock_file_that_cannot_be_opened_is_the_hosts_fault_and_says_so(stage):
    stage.lock_path.unlink()

    stage.start()

    assert stage.end() == exit_codes.HOST
    assert "lock file" in stage.reported(reports.ProcessBroke)[0].reason


# Moving


def test_with_others_in_sight_a_drained_lease_is_offered_to_whoever_comes(stage):
    stage.put("a")
    stage.start(every_s=100.0)
    until(lambda: stage.notes)
    stage.channel.send(OthersInSight(True))

    stage.drain()

    assert stage.end() == exit_codes.DONE
    row = stage.row
    assert (row.owner, row.offered_by, row.offered_to) == (OFFERED, ME, None)
    assert row.checkpoint == stage.reported(reports.LeaseReleased)[0].position > TRIM_HORIZON


@pytest.mark.parametrize("asker", [OTHER, ANYBODY])
def test_who_asks_for_the_lease_is_offered_it_with_all_that_was_processed(stage, asker):
    stage.put("a", "b")
    stage.start(every_s=100.0)
    until(lambda: len(stage.notes) >= 2)

    stage.table.write(changes.Ask(LeaseKey(FIRST), asker, ME, time.time()))

    assert stage.end() == exit_codes.DONE
    row = stage.row
    assert (row.owner, row.handoff) == (OFFERED, None)
    assert row.offered_to == (None if asker == ANYBODY else asker)
    assert row.checkpoint == stage.reported(reports.LeaseReleased)[0].position > TRIM_HORIZON
    assert stage.notes == ["a", "b", "shutdown_requested"]


def test_a_processor_that_lets_go_ends_its_batch_and_the_lease_is_offered(stage):
    stage.put("a", "hold", "never")
    stage.start("noting:Leaves", every_s=100.0, others_in_sight=True)

    assert stage.end() == exit_codes.DONE
    assert stage.notes == ["a", "hold", "shutdown_requested"]
    assert stage.row.owner == OFFERED
    stage.channel.close()
    row = stage.row
    stage.table.write(changes.Take(row.key, ME, OFFERED, row.counter, FAILOVER_S, "LATEST"))
    stage.start()
    until(lambda: stage.notes[-1:] == ["never"])


@pytest.mark.long
def test_what_a_lost_lease_had_processed_is_there_for_the_next_owner(stage):
    stage.put("a", "hold")
    stage.start("noting:Outlasts", every_s=100.0)
    until(lambda: stage.notes == ["a", "hold"])
    until(lambda: stage.take_away(OTHER))
    counter = stage.row.counter
    until(stage.has_noticed)

    (stage.tmp_path / "notes.go").touch()

    assert stage.end() == exit_codes.LOST
    assert "checkpointed late" in stage.reported(reports.LeaseLost)[0].reason
    row = stage.row
    assert (row.owner, row.counter) == (OTHER, counter)
    assert row.checkpoint > TRIM_HORIZON
    assert stage.notes == ["a", "hold", "lease_lost"]


def test_a_row_taken_by_force_is_begun_only_by_who_has_waited(stage):
    stage.plant(taken_from="java-worker")
    stage.put("a")
    stage.start()
    assert stage.end() == exit_codes.UNCLAIMED
    assert "java-worker" in stage.reported(reports.StartUnclaimed)[0].reason
    stage.channel.close()

    stage.start(has_waited=True)

    until(lambda: stage.notes == ["a"])
    assert stage.row.taken_from is None


@pytest.mark.long
def test_a_kcl_3_leader_gets_its_hand_over(stage):
    stage.put("a")
    stage.start(every_s=100.0)
    until(lambda: stage.notes)

    stage.lead_away("java-worker")

    assert stage.end() == exit_codes.DONE
    row = stage.row
    assert (row.owner, row.checkpoint_owner) == ("java-worker", None)
    assert row.checkpoint == stage.reported(reports.LeaseReleased)[0].position > TRIM_HORIZON


# What breaks under it


def test_a_row_that_vanished_is_written_again_and_the_lease_goes_on(stage):
    stage.put("a")
    stage.start()
    until(lambda: stage.reported(reports.Checkpointed))
    position = stage.row.checkpoint
    stage.dynamodb.delete_item(TableName=stage.name, Key={"leaseKey": {"S": FIRST}})

    until(
        lambda: any("had vanished" in each.detail for each in stage.reported(reports.ProcessWarned))
    )

    assert (stage.row.owner, stage.row.checkpoint) == (ME, position)
    stage.put("b")
    until(lambda: stage.notes == ["a", "b"])
    stage.drain()
    assert stage.end() == exit_codes.DONE


def test_a_read_that_neither_ends_nor_fails_ends_the_process_and_keeps_the_lease(stage):
    with trickling() as url:
        slow = WireEndpoint(url, "us-east-1", "us-east-1", connect_timeout_s=0.1)
        stage.start(kinesis=msgspec.structs.replace(slow, read_timeout_s=0.2))

        assert stage.end() == exit_codes.BUG

    (warned,) = stage.reported(reports.ProcessWarned)
    assert "has not come back" in warned.detail
    assert stage.row.owner == ME


@contextlib.contextmanager
def trickling():
    """A server whose answers never end, though a byte comes before every time-out."""
    is_over = threading.Event()

    def serve(listener):
        connections = []
        while not is_over.is_set():
            with contextlib.suppress(TimeoutError):
                connection = listener.accept()[0]
                connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                connections.append(connection)
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.sendall(b"x")
        for connection in connections:
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            is_over.set()
            thread.join()
