"""Several leases in one process, as their manager keeps them: who joins, who leaves, who died."""

import os
import select
import signal

import psutil
import pytest

from kclrun.ipc.channel import NoMessage
from kclrun.ipc.exit_codes import DONE, LOST, UNCLAIMED
from kclrun.ipc.messages import (
    Admit,
    Begin,
    Drain,
    DumpStacks,
    Left,
    Restart,
    channel_of_worker,
    encode_report,
)
from kclrun.leases.commands import StartProcess
from kclrun.leases.events import ProcessExited, ProcessStarted, StartFailed
from kclrun.protocol import reports
from kclrun.protocol.status import LeaseStatus, WorkerState
from tests.patience import HUNG_S, until
from tests.unit.manager.children_rig import ChildrenRig


class Hosted:
    """One lease in a shared process of the rig, spoken for by the test."""

    def __init__(self, process, fd):
        self.process = process
        self.channel = channel_of_worker(fd)
        begin = self.heard()
        assert isinstance(begin, Begin)
        self.spec = begin.spec

    def heard(self):
        return self.channel.receive()

    def ring(self):
        return self.process._segment.ring(self.spec.place)

    def say(self, report):
        self.ring().put(encode_report(report))
        self.process._doorbell.press()

    def leave(self, code=DONE, remains=""):
        self.channel.send(Left(code, remains))
        self.channel.close()

    def publish(self, **fields):
        status = {
            "pid": self.process.pid,
            "incarnation": self.spec.incarnation,
            "state": WorkerState.PROCESSING,
        }
        self.process._segment.slot(self.spec.place).publish(LeaseStatus(**status, **fields))


class SharedRig(ChildrenRig):
    def __init__(self, tmp_path, **more):
        self.leases = []
        super().__init__(tmp_path, **more)

    def close(self):
        for lease in self.leases:
            lease.channel.close()
        super().close()

    def begin(self, *keys, is_alone=False):
        for key in keys:
            start = StartProcess(key, 7, self.loop.now() + 10.0, is_alone=is_alone)
            self.processes.start(start)
        self.turn()

    def admitted(self, number=0):
        """The leases that the process has been given since the last call, by key."""
        process, found = self.launcher.processes[number], {}
        while isinstance(got := process.channel.receive_with_fds(), tuple):
            assert isinstance(got[0], Admit)
            lease = Hosted(process, *got[1])
            self.leases.append(lease)
            found[lease.spec.lease_key] = lease
        return found

    def die(self, number=0, by=signal.SIGKILL):
        process = self.launcher.processes[number]
        process.die(by)
        self.launcher.reap(process)
        self.turn()


@pytest.fixture
def rig(tmp_path):
    made = SharedRig(tmp_path, places=16, per_process=2)
    made.processes.open()
    yield made
    made.close()


def test_leases_of_a_stream_join_a_process_while_it_has_room_and_others_get_another(rig):
    rig.begin("s0", "s1", "s2")
    rig.begin("1:other:5:s0")
    rig.begin("s3", is_alone=True)

    own = rig.launcher.processes
    assert len(own) == 4
    assert list(rig.admitted(0)) == ["s0", "s1"]
    assert list(rig.admitted(1)) == ["s2"]
    assert list(rig.admitted(2)) == ["1:other:5:s0"]
    assert own[3].begin()[0].lease_key == "s3"
    assert rig.of(ProcessStarted)[0] == ProcessStarted("s0", own[0].pid)
    assert len(rig.processes) == 5


def test_a_burst_of_starts_waits_for_a_process_that_does_not_read_yet(tmp_path):
    rig = SharedRig(tmp_path, places=64, per_process=64)
    rig.processes.open()
    keys = [f"s{number}" for number in range(40)]
    rig.begin(*keys)
    found = {}
    for _ in range(10):
        found |= rig.admitted(0)
        rig.loop.run_to(rig.loop.now() + 0.1)

    assert sorted(found) == sorted(keys)
    rig.close()


def test_a_lease_that_left_is_proven_ended_and_its_neighbours_and_their_process_go_on(rig):
    rig.begin("s0", "s1")
    first, second = rig.admitted().values()
    first.say(reports.ShardEnded(("c",)))
    first.leave()
    rig.turn()

    (exited,) = rig.of(ProcessExited)
    assert (exited.key, exited.is_shared) == ("s0", False)
    assert exited.reason == "exit code 0 (done)"
    assert [child.key for child in rig.processes.living()] == ["s1"]
    rig.begin("s2")
    assert list(rig.admitted()) == ["s2"], "there is room again"
    assert second.heard() == NoMessage()


def test_the_last_lease_that_leaves_ends_the_process_which_is_waited_for(rig):
    rig.begin("s0")
    (lease,) = rig.admitted().values()
    lease.leave(UNCLAIMED)
    rig.turn()

    assert rig.launcher.processes[0].sees_its_channel_end()
    assert len(rig.processes) == 1
    rig.begin("s1")
    assert len(rig.launcher.processes) == 2, "a closed process is joined no more"
    rig.die(0)
    assert len(rig.processes) == 1


def test_a_channel_that_ends_without_a_word_proves_nothing(rig):
    rig.begin("s0", "s1")
    first, _ = rig.admitted().values()
    manager_end = rig.child("s0").channel.fileno()
    first.channel.close()
    # A program holds copies of descriptors for a moment after its start.
    assert select.select([manager_end], [], [], HUNG_S)[0]
    rig.turn()

    assert not rig.of(ProcessExited)
    rig.die()
    assert {event.key for event in rig.of(ProcessExited)} == {"s0", "s1"}


def test_a_lease_that_says_what_is_not_a_message_condemns_its_process_once(rig):
    rig.begin("s0", "s1")
    first, _ = rig.admitted().values()
    for _ in range(3):
        os.write(first.channel.fileno(), b"\xff user code wrote over our memory")
    for _ in range(3):
        rig.turn()

    (line,) = rig.lines("process_condemned")
    assert line["shard"] == "s0"
    assert "user code" not in line["error"]
    rig.launcher.processes[0].await_death()


def test_a_process_that_has_died_is_watched_no_more(rig):
    """Its descriptors are closed, and their numbers are soon those of other files."""
    before = set(rig.loop._selector.get_map())
    rig.begin("s0", "s1")
    rig.admitted()
    assert set(rig.loop._selector.get_map()) > before

    rig.die()

    assert set(rig.loop._selector.get_map()) <= before


def test_a_death_is_reported_for_each_lease_as_one_that_may_be_anothers_fault(rig):
    rig.begin("s0", "s1")
    rig.begin("s9", is_alone=True)
    rig.launcher.processes[1].begin()
    first, _ = rig.admitted().values()
    first.say(reports.LeaseLost("another owner"))
    rig.die(0)
    rig.die(1)

    shared = {event.key: event.is_shared for event in rig.of(ProcessExited)}
    assert shared == {"s0": True, "s1": True, "s9": False}
    assert reports.LeaseLost in rig.kinds()
    assert len(rig.processes) == 0


def test_a_fork_that_is_refused_starts_none_of_the_leases_that_wait_for_it(rig):
    rig.launcher.refuses = 1
    rig.begin("s0", "s1")

    assert {event.key for event in rig.of(StartFailed)} == {"s0", "s1"}
    assert len(rig.processes) == 0
    rig.begin("s0")
    assert list(rig.admitted(0)) == ["s0"]


def test_a_stalled_lease_ends_its_process_and_its_neighbours_say_for_whom(rig):
    rig.begin("s0", "s1")
    first, second = rig.admitted().values()
    child = rig.child("s0")

    rig.processes.end_stalled(child, "user code has not returned, for 9 s", rig.loop.now() + 2.0)
    assert [type(first.heard()) for _ in range(2)] == [DumpStacks, Drain]
    assert second.heard() == NoMessage(), "a neighbour is not drained"
    rig.die(by=signal.SIGABRT)

    reasons = {event.key: event.reason for event in rig.of(ProcessExited)}
    assert reasons["s0"].startswith("user code has not returned")
    assert reasons["s1"].startswith("it shared its process with s0: user code has not returned")


@pytest.mark.parametrize(
    ("what", "code", "patience_s"), [("a thread", DONE, 20.0), ("a program", LOST, 2.0)]
)
def test_what_an_ended_lease_leaves_running_ends_its_process_after_the_batches_of_the_others(
    rig, what, code, patience_s
):
    rig.launcher.program = (
        ["sh", "-c", "sleep 600 & wait"] if what == "a program" else ["sleep", "600"]
    )
    rig.begin("s0", "s1")
    first, second = rig.admitted().values()
    if what == "a program":
        until(psutil.Process(rig.launcher.processes[0].pid).children)
    first.leave(code, remains="threads (poller)" if what == "a thread" else "")
    rig.turn()

    assert second.heard() == Restart()
    (line,) = rig.lines("shared_process_ended")
    assert ("threads (poller)" in line["reason"]) == (what == "a thread")
    assert ("processes (" in line["reason"]) == (what == "a program")
    rig.begin("s2")
    assert len(rig.launcher.processes) == 2
    rig.loop.run_to(rig.loop.now() + patience_s - 0.5)
    assert len(list(rig.processes.living())) == 2
    rig.loop.run_to(rig.loop.now() + 0.6)
    rig.launcher.processes[0].await_death()


def test_a_busy_lease_is_asked_to_leave_after_a_whole_window_and_one_alone_is_not(rig):
    rig.begin("s0", "s1", "s2")
    busy, quiet = rig.admitted(0).values()
    (alone,) = rig.admitted(1).values()
    for second in range(12):
        busy.publish(processing_s_total=second * 0.3)
        quiet.publish(processing_s_total=second * 0.2)
        alone.publish(processing_s_total=second * 0.9)
        rig.loop.run_to(rig.loop.now() + 1.0)

    assert busy.heard() == Restart()
    assert [line["shard"] for line in rig.lines("lease_too_busy")] == ["s0"]
    assert quiet.heard() == NoMessage()
    assert alone.heard() == NoMessage()
    rig.begin("s3")
    assert len(rig.launcher.processes) == 3, "a busy lease keeps its process for itself"
