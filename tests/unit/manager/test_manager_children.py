"""Lease processes as their manager keeps them: started, spoken to, forced, and proven dead."""

import os
import select
import signal

import psutil
import pytest

from kclrun.ipc.channel import NoMessage
from kclrun.ipc.exit_codes import LOST
from kclrun.ipc.messages import Drain, DumpStacks, Exited, FailoverChanged, OthersInSight
from kclrun.leases.commands import StartProcess
from kclrun.leases.events import ProcessExited, ProcessReported, ProcessStarted, StartFailed
from kclrun.manager.forks import LauncherGone
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.protocol import reports
from kclrun.protocol.status import WorkerState
from tests.patience import HUNG_S, until
from tests.support.descriptors import open_descriptors
from tests.unit.manager.children_rig import ChildrenRig

ABRT, KILL = signal.SIGABRT, signal.SIGKILL


@pytest.fixture
def rig(tmp_path):
    made = ChildrenRig(tmp_path)
    made.processes.open()
    yield made
    made.close()


# Starting.


def test_a_start_is_asked_for_and_the_process_gets_its_command_once_it_is_there(rig):
    process = rig.start("s0")

    assert rig.events == [ProcessStarted("s0", process.pid)]
    assert (process.spec.lease_key, process.spec.seen_counter) == ("s0", 7)
    assert isinstance(process.heard(), NoMessage)
    assert len(rig.processes) == 1
    assert rig.processes.pids == {process.pid, rig.launcher.pid}
    assert [child.key for child in rig.processes.living()] == ["s0"]


def test_each_process_has_a_place_and_an_incarnation_of_its_own_and_a_place_is_used_again(rig):
    first, second = rig.start("s0"), rig.start("s1")
    first.die()
    rig.launcher.reap(first)
    rig.turn()
    third = rig.start("s0")

    places = [each.spec.place for each in (first, second, third)]
    assert places == [0, 1, 0]
    assert len({each.spec.incarnation for each in (first, second, third)}) == 3


def test_a_start_without_a_free_place_fails_and_says_so(tmp_path):
    rig = ChildrenRig(tmp_path, places=1)
    rig.processes.open()
    rig.start("s0")

    rig.processes.start(StartProcess("s1", 7, 0.0))

    assert rig.of(StartFailed) == [StartFailed("s1", "all places for lease processes are taken")]
    rig.close()


def test_a_refused_fork_gives_its_place_back_and_its_channel_up(tmp_path):
    rig = ChildrenRig(tmp_path, places=1)
    rig.processes.open()
    rig.launcher.refuses = 1
    before = open_descriptors()
    rig.processes.start(StartProcess("s0", 7, 0.0))
    rig.turn()

    assert rig.events == [StartFailed("s0", "fork: no memory")]
    assert open_descriptors() <= before
    assert not len(rig.processes)
    rig.start("s0")
    assert len(rig.of(ProcessStarted)) == 1
    rig.close()


def test_a_start_for_which_no_channel_can_be_had_fails_and_gives_its_place_back(
    tmp_path, monkeypatch
):
    rig = ChildrenRig(tmp_path, places=1)
    rig.processes.open()

    def no_more():
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("kclrun.ipc.channel.Channel.pair", no_more)
        rig.processes.start(StartProcess("s0", 7, 0.0))
    rig.start("s0")

    reason = "this manager cannot open a channel: Too many open files"
    assert rig.of(StartFailed) == [StartFailed("s0", reason)]
    assert len(rig.of(ProcessStarted)) == 1
    rig.close()


def test_the_lock_that_a_process_has_to_hold_comes_with_its_start_command(tmp_path):
    with (tmp_path / "lock").open("w") as lock:
        rig = ChildrenRig(tmp_path, lock_fd=lock.fileno())
        rig.processes.open()
        rig.processes.start(StartProcess("s0", 7, rig.loop.now() + 10.0))
        rig.turn()

        _, (passed,) = rig.launcher.processes[0].begin()

        assert os.path.sameopenfile(passed, lock.fileno())
        os.close(passed)
        rig.close()


def test_a_trial_is_no_lease_process_and_the_trial_is_told_what_came_of_it(rig):
    reported = []
    rig.launcher.refuses = 1
    rig.processes.try_start(reported.append)
    rig.turn()
    rig.processes.try_start(reported.append)
    rig.turn()

    assert [None if each is None else each.reason for each in reported] == ["fork: no memory", None]
    assert not len(rig.processes)
    assert rig.events == []
    assert rig.launcher.processes[0].sees_its_channel_end(), "it exits without a claim"


# Speaking.


def test_a_drain_is_told_to_the_processes_of_that_lease_with_the_time_it_has(rig):
    one, other = rig.start("s0"), rig.start("s1")

    rig.processes.drain("s0", "SIGTERM", rig.loop.now() + 30.0)

    assert one.heard() == Drain("SIGTERM", 30.0)
    assert isinstance(other.heard(), NoMessage)


@pytest.mark.parametrize("ago_s", [0.0, 5.0])
def test_a_process_whose_patience_has_ended_is_reported_that_it_has_no_time(rig, ago_s):
    drained, stalled = rig.start("s0"), rig.start("s1")
    ended = rig.loop.now() - ago_s

    rig.processes.drain("s0", "SIGTERM", ended)
    rig.processes.end_stalled(rig.child("s1"), "no answer", ended)

    assert drained.heard() == Drain("SIGTERM", 0.0)
    assert [stalled.heard(), stalled.heard()] == [DumpStacks(), Drain("no answer", 0.0)]


def test_a_drain_comes_with_the_time_that_is_left_of_a_patience_that_ends_sooner(rig):
    process = rig.start("s0")
    rig.processes.hurry(rig.loop.now() + 3.0)

    rig.processes.drain("s0", "SIGTERM", rig.loop.now() + 30.0)

    assert process.heard() == Drain("SIGTERM", 3.0)


def test_a_drain_of_a_process_that_is_still_being_forked_follows_its_start_command(rig):
    rig.processes.start(StartProcess("s0", 7, rig.loop.now() + 10.0))
    rig.processes.drain("s0", "SIGTERM", rig.loop.now() + 30.0)
    rig.turn()

    process = rig.launcher.processes[0]
    process.begin()
    assert process.heard() == Drain("SIGTERM", 30.0)
    assert isinstance(process.heard(), NoMessage)


def test_what_is_told_to_all_reaches_those_that_run(rig):
    one, other = rig.start("s0"), rig.start("s1")
    rig.processes.start(StartProcess("s2", 7, rig.loop.now() + 10.0))

    rig.processes.broadcast(OthersInSight(others=True))
    rig.turn()

    assert one.heard() == other.heard() == OthersInSight(others=True)
    third = rig.launcher.processes[2]
    third.begin()
    assert isinstance(third.heard(), NoMessage), "its start command says it"


def fill(rig):
    """Fill the channel of a process that does not read: the failovers that were sent to it."""
    sent = []
    while not rig.child().unsent:
        sent.append(float(len(sent) + 1))
        rig.processes.broadcast(FailoverChanged(sent[-1]))
    return sent


def read(rig, process):
    """All that waits for a process that reads again, and that the manager sends until then."""
    got = []
    while not isinstance(message := process.heard(), NoMessage) or rig.child().unsent:
        if isinstance(message, NoMessage):
            rig.loop.run_to(rig.loop.now() + 0.05)
        else:
            got.append(message)
    return got


def test_the_last_failover_reaches_a_process_that_does_not_read_after_all_earlier_ones(rig):
    process = rig.start("s0")
    sent = fill(rig)
    rig.processes.broadcast(FailoverChanged(2.5))

    got = [message.failover_s for message in read(rig, process)]

    assert got == [*sent[:-1], 2.5]


def test_no_message_passes_an_earlier_one_of_another_kind_that_found_no_room(rig):
    process = rig.start("s0")
    fill(rig)
    process.heard()
    rig.processes.broadcast(OthersInSight(others=True))

    kinds = [type(message) for message in read(rig, process)]

    assert kinds.index(OthersInSight) == len(kinds) - 1


# Hearing.


def test_what_a_process_says_is_an_event_and_what_it_said_before_its_death_comes_before_that(rig):
    process = rig.start("s0")
    process.say(reports.LeaseClaimed(8, TRIM_HORIZON))
    rig.turn()
    assert rig.events[1:] == [ProcessReported("s0", reports.LeaseClaimed(8, TRIM_HORIZON))]

    process.say(reports.LeaseReleased(TRIM_HORIZON))
    process.die()
    rig.launcher.reap(process)
    rig.turn()

    assert rig.kinds()[2:] == [reports.LeaseReleased, ProcessExited]


def test_a_process_that_said_its_farewell_and_stays_is_forced_once_its_patience_is_over(rig):
    process = rig.start("s0")
    process.say(reports.LeaseReleased(TRIM_HORIZON))
    rig.turn()

    assert rig.child().force_instant == pytest.approx(rig.loop.now() + 20.0)
    rig.loop.run_to(rig.loop.now() + 20.1)
    process.await_death()
    rig.launcher.reap(process)
    rig.turn()

    assert "SIGABRT" in rig.of(ProcessExited)[0].reason
    assert not rig.processes.has_forced, "it was not asked to drain"


def test_a_farewell_does_not_lengthen_the_patience_of_a_drain(rig):
    process = rig.start("s0")
    rig.processes.drain("s0", "SIGTERM", rig.loop.now() + 5.0)
    process.say(reports.LeaseReleased(TRIM_HORIZON))
    rig.turn()

    assert rig.child().force_instant == pytest.approx(rig.loop.now() + 5.0)


def test_a_process_that_writes_nonsense_is_killed_and_its_words_go_no_further(rig):
    process, child = rig.start("s0"), rig.child()

    process.say(b"\xff no transition")
    rig.loop.turn(rig.loop.now())
    process.await_death()

    assert len(rig.lines("process_condemned")) == 1
    assert child.forced == [KILL]
    assert len(rig.events) == 1


# Force.


def test_force_is_abrt_and_a_second_later_kill_and_is_reported_each_time(rig):
    process = rig.start("s0")
    os.kill(process.pid, signal.SIGSTOP)  # so that ABRT does not end it
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    end = rig.loop.now() + 5.0
    rig.processes.drain("s0", "SIGTERM", end)

    rig.loop.run_to(end - 0.1)
    assert not rig.processes.has_forced
    child = rig.child()
    rig.loop.run_to(end + 0.9)
    assert child.forced == [ABRT]
    rig.loop.run_to(end + 1.1)

    assert child.forced == [ABRT, KILL]
    assert [line["signal"] for line in rig.lines("process_killed")] == ["SIGABRT", "SIGKILL"]
    assert rig.processes.has_forced


def test_hurry_brings_the_end_forward_for_all_and_never_puts_it_off(rig):
    rig.start("s0"), rig.start("s1")
    now = rig.loop.now()
    rig.processes.drain("s0", "SIGTERM", now + 1.0)

    rig.processes.hurry(now + 2.0)

    assert (rig.child("s0").force_instant, rig.child("s1").force_instant) == (now + 1.0, now + 2.0)


def test_one_that_is_forced_without_having_been_asked_to_drain_leaves_the_stop_in_order(rig):
    process = rig.start("s0")
    rig.processes.hurry(rig.loop.now())
    rig.turn()
    process.await_death()

    assert not rig.processes.has_forced


def test_kill_all_ends_every_process_and_what_was_forked_meanwhile_gets_no_command(rig):
    one, other = rig.start("s0"), rig.start("s1")
    rig.processes.start(StartProcess("s2", 7, rig.loop.now() + 10.0))

    rig.processes.kill_all()
    one.await_death()
    other.await_death()
    for process in (one, other):
        rig.launcher.reap(process)
    rig.turn()

    assert {event.reason for event in rig.of(ProcessExited)} == {"killed by SIGKILL"}
    assert len(rig.of(ProcessStarted)) == 2
    rig.launcher.processes[2].await_death()
    rig.turn()
    assert rig.launcher.processes[2].sees_its_channel_end(), "and hears nothing before"


@pytest.mark.parametrize("per_process", [1, 4])
def test_what_is_forked_after_all_were_to_end_ends_too_and_is_not_counted_any_more(
    tmp_path, per_process
):
    rig = ChildrenRig(tmp_path, places=4, per_process=per_process)
    try:
        rig.processes.open()
        rig.processes.start(StartProcess("s2", 7, rig.loop.now() + 10.0))
        rig.processes.kill_all()
        rig.turn()
        (forked,) = rig.launcher.processes
        forked.await_death()
        rig.turn()

        assert len(rig.processes) == 0
        assert [event.key for event in rig.of(StartFailed)] == ["s2"]
        assert rig.of(ProcessStarted) == []
    finally:
        rig.close()


def test_one_that_stands_still_is_asked_for_its_stacks_and_told_to_leave_before_it_is_forced(rig):
    process = rig.start("s0")
    now = rig.loop.now()

    rig.processes.end_stalled(rig.child(), "user code has not returned, for 9 s", now + 2.0)

    assert process.heard() == DumpStacks()
    assert process.heard() == Drain("user code has not returned, for 9 s", 2.0)
    rig.loop.run_to(now + 2.1)
    process.await_death()
    rig.launcher.reap(process)
    rig.turn()

    words = "user code has not returned, for 9 s, so its manager ended it; killed by SIGABRT"
    assert rig.of(ProcessExited)[0].reason == words
    assert rig.lines("process_killed") == [], "the watchdog tells it"
    assert not rig.processes.has_forced


# One that no signal ends.


@pytest.fixture
def unkillable(rig, monkeypatch):
    """A process that signals do not reach, as one inside a system call that never comes back."""
    process = rig.start("s0", expires_s=12.0)
    monkeypatch.setattr("kclrun.manager.ring_reader.signal.pidfd_send_signal", lambda *_: None)
    return process


@pytest.mark.parametrize(
    ("claim", "sent_s", "written_off_s"),
    [
        ("it has sent nothing: its start command expires", None, 12.0),
        ("a write was granted it a failover", 3.0, 13.0),
        ("its fence has passed long ago", -30.0, 12.0),
    ],
)
def test_what_no_signal_ends_is_reported_once_its_latest_fence_has_passed_and_not_before(
    rig, unkillable, claim, sent_s, written_off_s
):
    now = rig.loop.now()
    if sent_s is not None:
        unkillable.slot.note_send(now + sent_s)
    rig.processes.drain("s0", "SIGTERM", now)

    rig.loop.run_to(now + written_off_s - 0.1)
    assert rig.of(ProcessExited) == []
    assert len(rig.processes) == 1
    rig.loop.run_to(now + written_off_s + 0.1)

    (exited,) = rig.of(ProcessExited)
    assert exited.reason == "no signal ends it, and its fence has passed"
    assert len(rig.lines("process_unkillable")) == 1
    assert (len(rig.processes), list(rig.processes.living())) == (0, [])


def test_what_dies_after_it_was_written_off_is_not_reported_again(rig, unkillable):
    now = rig.loop.now()
    rig.processes.drain("s0", "SIGTERM", now)
    rig.loop.run_to(now + 15.0)
    before = list(rig.events)

    unkillable.say(reports.LeaseReleased(TRIM_HORIZON))
    rig.turn()
    assert rig.events == before
    os.kill(unkillable.pid, KILL)
    unkillable.await_death()
    rig.launcher.reap(unkillable)
    rig.turn()

    assert rig.events == before, "its lease is another process's by now"
    assert len(rig.departed) == 1
    assert len(rig.lines("process_exited")) == 1
    assert rig.start("s1").spec.place == 0


def test_one_that_dies_of_kill_is_not_written_off_later(rig):
    process = rig.start("s0")
    rig.processes.drain("s0", "SIGTERM", rig.loop.now())
    rig.turn()
    process.await_death()
    rig.launcher.reap(process)
    rig.turn()

    rig.loop.run_to(rig.loop.now() + 30.0)

    assert rig.lines("process_unkillable") == []
    assert len(rig.of(ProcessExited)) == 1


# Dying.


@pytest.mark.parametrize("status_first", [True, False])
def test_a_death_is_reported_once_with_its_status_whichever_word_comes_first(rig, status_first):
    process = rig.start("s0")
    process.publish(records_total=9)
    child = rig.child()
    if status_first:
        os.kill(process.pid, KILL)
        process.await_death()
        rig.launcher.reap(process)
    else:
        os.kill(process.pid, KILL)
        process.await_death()
    rig.turn()

    rig.loop.run_to(rig.loop.now() + 1.0)

    (exited,) = rig.of(ProcessExited)
    assert exited.reason == "killed by SIGKILL; out of memory? see the kernel's log"
    assert (exited.key, exited.pid) == ("s0", process.pid)
    assert [one.last_status.records_total for one in rig.departed] == [9]
    (line,) = rig.lines("process_exited")
    assert (line["shard"], line["process"]) == ("s0", process.pid)
    assert child.pidfd is None
    assert not len(rig.processes)


@pytest.mark.parametrize(("has_launcher", "after_s"), [(True, 1.0), (False, 0.1)])
def test_a_death_whose_status_went_to_nobody_is_reported_all_the_same(rig, has_launcher, after_s):
    process = rig.start("s0")
    if not has_launcher:
        rig.launcher.fails_to_start = 9
        rig.launcher.report(LauncherGone(0))
        rig.turn()
    process.die()
    os.waitpid(process.pid, 0)
    rig.turn()
    assert rig.of(ProcessExited) == [], "the launcher may still tell"
    assert list(rig.processes.living()) == []

    rig.loop.run_to(rig.loop.now() + after_s / 2)
    assert rig.of(ProcessExited) == []
    rig.loop.run_to(rig.loop.now() + after_s)

    assert rig.of(ProcessExited)[0].reason == "ended, and its exit status was lost"


def test_a_status_that_comes_after_the_pidfd_and_before_the_patience_ends_is_reported(rig):
    process = rig.start("s0")
    process.die()
    _, status = os.waitpid(process.pid, 0)
    rig.turn()

    rig.launcher.report(Exited(process.pid, status))
    rig.turn()
    rig.loop.run_to(rig.loop.now() + 1.0)

    assert [event.reason for event in rig.of(ProcessExited)] == ["killed by SIGTERM"]
    assert len(rig.departed) == 1


def test_the_exit_status_of_another_process_is_nobody_s(rig):
    process = rig.start("s0")
    rig.launcher.report(Exited(process.pid + 1, 0))
    rig.turn()

    assert rig.child().status is None


def test_a_code_that_its_status_vouches_for_is_the_farewell_that_its_ring_lacks(rig):
    process = rig.start("s0")
    process.publish(state=WorkerState.LOST)
    process.die()
    os.waitpid(process.pid, 0)
    rig.launcher.report(Exited(process.pid, LOST << 8))
    rig.turn()

    assert rig.kinds()[1:] == [reports.LeaseLost, ProcessExited]


def test_a_former_process_of_the_place_is_not_taken_for_the_one_that_is_there(rig):
    process = rig.start("s0")
    child = rig.child()
    process.publish(incarnation=child.incarnation + 1, records_total=5)
    assert child.look() is None
    process.publish(records_total=6)
    assert child.look().records_total == 6
    process.publish(incarnation=child.incarnation + 1, records_total=5)
    assert child.look().records_total == 6, "what it said last"


def test_a_dead_process_is_sent_nothing_and_no_signal_counts_as_sent(rig):
    process = rig.start("s0")
    child = rig.child()
    process.die()
    child.send_signal(signal.SIGTERM)
    assert child.forced == [signal.SIGTERM], "not reaped, it can be sent one still"
    os.waitpid(process.pid, 0)
    child.send_signal(KILL)
    assert child.forced == [signal.SIGTERM], "there was nobody"
    rig.turn()
    rig.processes.broadcast(OthersInSight(others=True))

    assert isinstance(process.heard(), NoMessage)


def test_a_dead_process_takes_along_what_user_code_left_in_its_session(rig):
    # Where no launcher reaps it: its manager is the one to end the session.
    rig.launcher.program = ["sh", "-c", "sleep 600 & exec sleep 600"]
    process = rig.start("s0")
    leader = psutil.Process(process.pid)
    (left,) = until(leader.children)
    pidfd = os.pidfd_open(left.pid)

    process.die()
    rig.turn()

    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(HUNG_S * 1000), "it was killed"
    os.close(pidfd)
    assert len(rig.of(ProcessExited)) == 1


# Closing, and a launcher that dies.


def test_closing_lets_go_of_all_and_what_lives_sees_the_end_of_its_channel(rig):
    process = rig.start("s0")
    child = rig.child()

    rig.close_processes()

    assert process.sees_its_channel_end()
    assert rig.launcher.is_stopped
    assert child.channel.fileno() == -1
    rig.turn()


def test_lease_processes_live_on_when_the_launcher_dies_and_starts_fail_until_the_next(rig):
    process = rig.start("s0")
    rig.launcher.report(LauncherGone(9))
    rig.loop.turn(rig.loop.now())

    assert [child.key for child in rig.processes.living()] == ["s0"]
    rig.turn()
    assert rig.processes.has_launcher
    process.die()
    rig.launcher.reap(process)
    rig.turn()
    assert len(rig.of(ProcessExited)) == 1
