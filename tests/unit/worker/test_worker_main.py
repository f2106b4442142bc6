"""A lease process as a whole on a thread: its real parts over a table and a stream in memory."""

import fcntl
import os
import threading

import msgspec
import pytest

from kclrun.aws.wire import HeldCredentials
from kclrun.errors import HostFailed, LeaseLost, SettingsError
from kclrun.ipc import exit_codes
from kclrun.ipc.board import Segment, StartSpec, boottime
from kclrun.ipc.channel import Channel, Doorbell
from kclrun.ipc.messages import Begin, Drain, channel_of_worker, channel_to_worker, decode_report
from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import Lease, OwnerId
from kclrun.model.output import OutputDestination
from kclrun.model.policies import CheckpointPolicy, ErrorPolicy, FetchPolicy, LogPolicy
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.state import StateDestination
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.outputs.emitted_rows import EmittedRows
from kclrun.protocol import reports
from kclrun.protocol import writes as changes
from kclrun.worker import assembly, lease_thread, main
from tests.patience import HUNG_S, until
from tests.support.dated import LATE_WORDS, ROWS, TIMES
from tests.unit.worker.one_shard import FIRST, Shard

ME = OwnerId("kclrun::host:a")
NOWHERE = WireEndpoint("http://127.0.0.1:9", "x", "x")


class Script:
    """What user code does with a batch; what it saw and was told."""

    def __init__(self):
        self.context = None
        self.batches, self.outcomes = [], []
        self.does = lambda batch, checkpointer: None
        self.drained = False

    def process(self, batch, checkpointer):
        self.batches.append([record.data for record in batch])
        try:
            self.does(batch, checkpointer)
        except (LeaseLost, SettingsError) as error:
            self.outcomes.append(error)
        else:
            self.outcomes.append(None)


class Stage:
    """One lease at `TRIM_HORIZON`, taken for this process, and what its manager holds."""

    def __init__(self, tmp_path):
        self.shard, self.script = Shard(), Script()
        self.table = LeaseRows(lock=threading.Lock())
        self.table.write(
            changes.CreateLease(Lease(key=FIRST, checkpoint=TRIM_HORIZON, owner=ME, counter=5))
        )
        self.lock_path = tmp_path / "lock"
        self.lock_path.touch()
        self.spec = StartSpec(
            application="test",
            stream_name="s",
            lease_key=FIRST,
            shard_id=FIRST,
            owner=ME,
            seen_counter=5,
            place=0,
            incarnation=3,
            expires_instant=boottime() + HUNG_S,
            failover_s=30.0,
            processor="tests.unit.worker.directed:Directed",
            options={"script": self.script},
            fetch=FetchPolicy(
                idle_s=0.01,
                floor_s=0.005,
                buffer_bytes=1000,
                batch_max=10,
                kpl_range="keep",
            ),
            checkpoint=CheckpointPolicy(mode="manual", every_s=10.0, uncheckpointed_max=100),
            on_error=ErrorPolicy(retries=0, backoff_s=0.01),
            table_name="t",
            kinesis=NOWHERE,
            dynamodb=NOWHERE,
            credentials=WireCredentials("AKIAEXAMPLEEXAMPLE", "s"),
            lock_path=str(self.lock_path),
            log=LogPolicy(level="info", json=True),
        )
        self.segment, self.doorbell = Segment.create(1), Doorbell.create()
        self.ring = self.segment.ring(0)
        mine, its = Channel.pair()
        self.manager = channel_to_worker(mine)
        self.channel = channel_of_worker(its.detach())
        self.transitions = []
        self.codes = []
        self.locks = []
        self.thread = None

    def services(self, spec):
        return assembly.Services(
            reader=self.shard,
            admin=self.shard,
            table=self.table,
            credentials=HeldCredentials(spec.credentials),
        )

    def process(self, **changed):
        spec = msgspec.structs.replace(self.spec, **changed)
        return main.LeaseProcess(
            spec, self.segment, self.segment.ring(0), self.doorbell, self.channel
        )

    def start(self, **changed):
        """The process serves, on a thread; what it returns is added to `codes`."""
        process = self.process(**changed)
        serve = lambda: self.codes.append(process.serve(str(self.lock_path)))  # noqa: E731
        self.thread = threading.Thread(target=serve, daemon=True)
        self.thread.start()
        return process

    def drain(self):
        self.manager.send(Drain("the test is over", 5.0))
        self.thread.join(HUNG_S)
        assert not self.thread.is_alive()
        return self.codes[-1]

    def reported(self, kind):
        self.transitions += [decode_report(each) for each in self.ring.drain()]
        return [each for each in self.transitions if isinstance(each, kind)]

    def status(self):
        return self.segment.slot(0).read()

    def close(self):
        if self.thread is not None and self.thread.is_alive():
            self.drain()
        self.manager.close()
        self.channel.close()
        self.doorbell.close()
        self.segment.close()


@pytest.fixture
def stage(tmp_path, monkeypatch):
    stage = Stage(tmp_path)
    monkeypatch.setattr(assembly, "services", stage.services)
    monkeypatch.setattr(lease_thread, "LOOK_S", 0.02)  # what is shown is fresh that soon
    # A process keeps its own to its end; these end with the test.
    monkeypatch.setattr(main, "keep_from_children", stage.locks.append)
    yield stage
    stage.close()
    for fd in stage.locks:
        os.close(fd)


def test_a_lease_is_read_and_checkpointed_and_drained_and_its_process_ends_as_done(stage):
    last = [stage.shard.put(b"a"), stage.shard.put(b"b")][-1]
    stage.script.does = lambda batch, checkpointer: checkpointer.checkpoint()

    stage.start()
    until(lambda: sum(map(len, stage.script.batches)) == 2 and len(stage.script.outcomes) > 0)
    row = until(lambda: (row := stage.table.read(FIRST)).checkpoint.sequence_number == last and row)
    code = stage.drain()

    assert code == exit_codes.DONE
    assert [data for batch in stage.script.batches for data in batch] == [b"a", b"b"]
    assert set(stage.script.outcomes) == {None}
    assert row.owner == ME
    assert stage.script.drained
    assert stage.table.read(FIRST).owner != ME
    assert stage.reported(reports.LeaseClaimed)[0].position == TRIM_HORIZON
    assert stage.reported(reports.LeaseReleased)[-1].position == ExtendedSequenceNumber(last)


def test_user_code_learns_which_lease_it_serves_and_with_which_fencing_token(stage):
    stage.start()
    context = until(lambda: stage.script.context)
    stage.drain()

    assert (context.application, context.stream, context.lease_key) == ("test", "s", FIRST)
    assert context.position == TRIM_HORIZON
    assert context.fencing_token == 6, "the counter of the claim, one above the take's"
    assert (context.checkpoint_every, context.uncheckpointed_max) == ("manual", 100)


@pytest.mark.seconds
def test_the_status_slot_shows_what_was_read_processed_and_checkpointed(stage):
    last = ExtendedSequenceNumber(stage.shard.put(b"abc"))
    stage.script.does = lambda batch, checkpointer: checkpointer.checkpoint()

    stage.start()
    until(lambda: stage.script.outcomes)
    status = until(lambda: (now := stage.status()).at_tip and now.checkpointed == last and now)
    stage.drain()

    assert (status.pid, status.incarnation) == (os.getpid(), 3)
    assert (status.fetched, status.processed, status.first_delivered) == (last, last, last)
    assert (status.records_total, status.bytes_total, status.batches_total) == (1, 3, 1)
    assert status.millis_behind_latest == 0
    assert status.fence_instant > boottime()
    assert 0.0 < status.last_batch_instant <= boottime()
    assert 0.0 < status.processing_s_total < status.last_batch_instant
    assert 0.0 < status.last_fetch_instant <= boottime()
    assert (status.processing_since_instant, status.unprocessed_since) == (0.0, 0.0)
    assert not status.has_undone


def test_while_a_batch_is_in_user_code_the_slot_says_since_when_and_that_it_is_not_done(stage):
    go, began = threading.Event(), threading.Event()
    stage.script.does = lambda batch, checkpointer: began.set() or go.wait(HUNG_S)
    last = ExtendedSequenceNumber(stage.shard.put(b"abc"))

    stage.start()
    assert began.wait(HUNG_S)
    # The batch is with user code before the lease thread and the fetch thread say so.
    busy = until(lambda: (now := stage.status()).has_undone and now.fetched == last and now)
    go.set()
    stage.drain()

    assert 0.0 < busy.processing_since_instant <= boottime()
    assert (busy.records_total, busy.processed, busy.at_tip) == (0, None, False)


def test_a_checkpoint_of_a_lease_that_is_over_is_answered_with_lease_lost(stage):
    go, began = threading.Event(), threading.Event()

    def outlast(batch, checkpointer):
        began.set()
        go.wait(HUNG_S)
        checkpointer.checkpoint()

    stage.script.does = outlast
    stage.shard.put(b"a")
    process = stage.start()
    assert began.wait(HUNG_S)
    process._user_code_returned.set()  # or the end would take this whole test along
    process._lease_thread.break_off(HostFailed("the test ends it"))
    process._lease_thread.join(HUNG_S)
    go.set()
    stage.thread.join(HUNG_S)

    assert isinstance(stage.script.outcomes[0], LeaseLost)
    assert "the process ends" in str(stage.script.outcomes[0])
    assert stage.codes == [exit_codes.HOST]
    assert stage.reported(reports.ProcessBroke)[0].reason == "HostFailed: the test ends it"


def test_release_gives_the_lease_away_after_the_batch_at_hand_and_no_other_begins(stage):
    def leave(batch, checkpointer):
        stage.script.context.release()

    stage.script.does = leave
    first = stage.shard.put(b"a")
    stage.start()
    until(lambda: stage.script.batches)
    stage.shard.put(b"b")
    stage.thread.join(HUNG_S)

    assert stage.codes == [exit_codes.DONE]
    assert stage.script.batches == [[b"a"]]
    assert stage.table.read(FIRST).owner != ME
    assert stage.reported(reports.LeaseReleased)[0].position in (
        ExtendedSequenceNumber(first),
        TRIM_HORIZON,
    )


def test_rows_need_a_place_and_the_error_names_the_setting(stage):
    stage.script.does = lambda batch, checkpointer: stage.script.context.emit({"n": 1})
    stage.shard.put(b"a")

    stage.start()
    (error,) = until(lambda: stage.script.outcomes)
    stage.drain()

    assert isinstance(error, SettingsError)
    assert "output.path" in str(error)


def test_emitted_rows_are_kept_before_the_checkpoint_that_covers_them(stage, tmp_path):
    written = []

    def emit(batch, checkpointer):
        stage.script.context.emit({"n": 1})
        checkpointer.checkpoint()
        written.append((tmp_path / "rows" / f"{FIRST}.jsonl").read_text())

    stage.script.does = emit
    stage.shard.put(b"a")

    stage.start(outputs=(OutputDestination(name="output", path=str(tmp_path / "rows")),))
    until(lambda: stage.script.outcomes)
    process_rows = until(lambda: written)
    assert stage.drain() == exit_codes.DONE

    assert stage.script.outcomes == [None]
    assert [text.strip().replace(" ", "") for text in process_rows] == ['{"n":1}']


def test_the_rows_of_a_process_that_ended_may_be_opened_by_its_successor(stage, tmp_path):
    stage.start(outputs=(OutputDestination(name="output", path=str(tmp_path / "rows")),))
    until((tmp_path / "rows" / f"{FIRST}.jsonl").exists)
    stage.drain()

    again = EmittedRows.open(tmp_path / "rows", FIRST, TRIM_HORIZON, lock_wait_s=0.0)
    again.close()

    assert again.length == 0


def test_user_code_that_fails_for_good_ends_the_process_as_failed(stage):
    def refuse(batch, checkpointer):
        raise ValueError("cannot take it")

    stage.script.does = refuse
    stage.shard.put(b"a")
    stage.start()
    stage.thread.join(HUNG_S)

    assert stage.codes == [exit_codes.FAILED]
    assert stage.reported(reports.ProcessorFailed)[0].error == "ValueError: cannot take it"


def test_a_bug_ends_the_process_as_one_and_is_told_to_the_manager(stage, capsys):
    process = stage.start()
    until(lambda: stage.script.context)
    process._lease_thread.break_off(ZeroDivisionError("in the fetch thread"))
    stage.thread.join(HUNG_S)

    assert stage.codes == [exit_codes.BUG]
    (broke,) = stage.reported(reports.ProcessBroke)
    assert broke.reason == "a bug in kclrun: ZeroDivisionError: in the fetch thread"
    assert stage.doorbell.answer()
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_process_whose_lock_is_anothers_reads_nothing_and_closes_what_it_was_passed(stage):
    with stage.lock_path.open() as anothers:
        fcntl.flock(anothers, fcntl.LOCK_EX)
        passed = os.dup(anothers.fileno())

        code = stage.process().serve(str(stage.lock_path), (passed,))

    assert code == exit_codes.UNCLAIMED
    assert "holds its lock" in stage.reported(reports.StartUnclaimed)[0].reason
    assert stage.table.read(FIRST).counter == 5
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(passed)


def test_the_lock_is_held_to_the_end_and_kept_from_what_user_code_forks(stage):
    stage.start()
    until(lambda: stage.script.context)

    (kept,) = stage.locks
    assert os.path.samestat(os.fstat(kept), stage.lock_path.stat())
    with stage.lock_path.open() as managers, pytest.raises(BlockingIOError):
        fcntl.flock(managers, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_file_that_is_not_there_is_a_fault_of_the_host(stage, tmp_path):
    with pytest.raises(HostFailed, match="the lock file of its manager"):
        stage.process().serve(str(tmp_path / "none"))


# From the first line


class Door:
    """The three descriptors that a forked child is given."""

    def __init__(self, stage):
        self.segment_fd = stage.segment.fd
        self.doorbell_fd = os.dup(stage.doorbell.write_fd)
        mine, its = Channel.pair()
        self.manager = channel_to_worker(mine)
        self.channel_fd = its.detach()

    def run(self):
        return main.run(self.segment_fd, self.doorbell_fd, self.channel_fd)


@pytest.fixture
def door(stage, monkeypatch):
    monkeypatch.setattr(main, "configure_lease_logging", lambda log, levels: None)
    opened = []

    def of_worker(fd):  # what the end of a process closes, the end of the test does
        opened.append(channel_of_worker(fd))
        return opened[-1]

    monkeypatch.setattr(main.messages, "channel_of_worker", of_worker)
    door = Door(stage)
    yield door
    for channel in [door.manager, *opened]:
        channel.close()
    os.close(door.doorbell_fd)


def test_a_manager_that_is_gone_before_its_start_command_leaves_the_lease_unclaimed(door):
    door.manager.close()

    assert door.run() == exit_codes.UNCLAIMED


def test_no_start_command_in_time_leaves_the_lease_unclaimed(door, monkeypatch):
    monkeypatch.setattr(main, "BEGIN_WAIT_S", 0.01)

    assert door.run() == exit_codes.UNCLAIMED


def test_another_message_than_the_start_command_leaves_the_lease_unclaimed(door):
    door.manager.send(Drain("too early", 5.0))

    assert door.run() == exit_codes.UNCLAIMED


def test_the_lock_is_the_one_its_manager_passed_whatever_its_path_is_by_now(stage, door):
    with stage.lock_path.open() as anothers:
        fcntl.flock(anothers, fcntl.LOCK_EX)
        stage.lock_path.unlink()
        stage.lock_path.touch()
        spec = msgspec.structs.replace(stage.spec, options={})
        door.manager.send(Begin(spec), [anothers.fileno()])

        assert door.run() == exit_codes.UNCLAIMED


def test_a_fault_of_the_host_at_the_start_is_reported_and_is_not_called_a_bug(
    stage, door, tmp_path
):
    missing = str(tmp_path / "none")
    door.manager.send(Begin(msgspec.structs.replace(stage.spec, options={}, lock_path=missing)))

    assert door.run() == exit_codes.HOST
    (broke,) = stage.reported(reports.ProcessBroke)
    assert missing in broke.reason
    assert not broke.reason.startswith("a bug")


@pytest.mark.parametrize("kind", ["Dated", "DatedSingly"])
def test_windows_of_old_records_close_by_event_time_and_a_late_one_is_in_the_log(
    stage, tmp_path, kind
):
    for at in TIMES:
        stage.shard.put(str(at).encode())

    stage.start(
        processor=f"tests.support.dated:{kind}",
        checkpoint=msgspec.structs.replace(stage.spec.checkpoint, mode="auto"),
        outputs=(OutputDestination(name="output", path=str(tmp_path / "rows")),),
        state=StateDestination(path=str(tmp_path / "state")),
    )
    until(lambda: getattr(stage.status(), "records_total", 0) == len(TIMES))
    assert stage.drain() == exit_codes.DONE

    file = tmp_path / "rows" / f"{FIRST}.jsonl"
    assert [msgspec.json.decode(line) for line in file.read_bytes().splitlines()] == ROWS
    (warned,) = stage.reported(reports.ProcessWarned)
    assert LATE_WORDS in warned.detail
