"""Real processes: started by the launcher, proven dead by their pidfds."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from kclrun.ipc.channel import Channel, NoMessage
from kclrun.ipc.exit_codes import BUG, FAILED, HOST, LOST, UNCLAIMED
from kclrun.ipc.messages import Exited, Forked, channel_of_launcher, channel_to_launcher
from kclrun.leases.events import ProcessExited, ProcessStarted, StartFailed
from kclrun.manager.launcher import Outbox
from kclrun.manager.orphans import reap_adopted
from kclrun.protocol.reports import (
    Checkpointed,
    LeaseClaimed,
    LeaseLost,
    LeaseReleased,
    ProcessorFailed,
    StartUnclaimed,
)
from tests.patience import HUNG_S

pytestmark = pytest.mark.slow


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_started_process_claims_drains_and_its_death_is_proven_last(rig):
    rig.start()
    claimed = rig.until_seen(LeaseClaimed)

    rig.processes.drain(claimed.key, "test", rig.loop.now() + 10)
    exited = rig.until_seen(ProcessExited)

    assert claimed.report.counter == 8
    kinds = [kind.__name__ for kind in rig.kinds()]
    assert kinds == ["ProcessStarted", "LeaseClaimed", "LeaseReleased", "ProcessExited"]
    assert exited.reason == "exit code 0 (done)"
    assert not len(rig.processes)


def test_a_start_command_is_as_new_as_its_fork(rig, tmp_path):
    # What was broadcast between the request and the fork reaches nobody but by this.
    rig.start(facts=str(tmp_path / "asked"))
    rig.options_of["shard-1"] = {"facts": str(tmp_path / "forked")}

    rig.until((tmp_path / "forked").exists)

    assert not (tmp_path / "asked").exists()


def test_what_a_killed_process_wrote_to_its_ring_comes_before_its_exit(rig):
    rig.start(behaviour="crash")

    exited = rig.until_seen(ProcessExited)

    assert len(rig.of(Checkpointed)) == 100
    assert rig.events[-1] is exited
    assert "SIGKILL" in exited.reason
    assert rig.departed[0].last_status.records_total == 7


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        ("unclaimed", StartUnclaimed),
        ("silently failed", ProcessorFailed),
        ("silently lost", LeaseLost),
    ],
)
def test_its_status_stands_in_for_a_farewell_that_the_ring_lacks(rig, behaviour, kind):
    rig.start(behaviour=behaviour)

    rig.until_seen(ProcessExited)

    assert len(rig.of(kind)) == 1


@pytest.mark.parametrize("code", [UNCLAIMED, LOST, FAILED, BUG, HOST])
def test_a_code_that_user_code_exits_with_is_a_death_whatever_it_means_to_us(rig, code):
    rig.start(behaviour=f"exits with {code}")

    exited = rig.until_seen(ProcessExited)

    assert [type(event) for event in rig.events] == [ProcessStarted, ProcessExited]
    assert exited.reason == f"exit code {code}"


def test_a_launcher_that_does_not_answer_is_replaced_and_the_next_start_succeeds(rig):
    rig.start()
    rig.until_seen(LeaseClaimed)
    silent = rig.launcher.pid
    rig.processes._forks._answer_wait_s = 0.5
    os.kill(silent, signal.SIGSTOP)

    rig.start("shard-2")
    refused = rig.until_seen(StartFailed)

    assert refused.reason == "the launcher died"
    assert "launcher_silent" in rig.log_path.read_text()
    rig.until(lambda: rig.processes.has_launcher)
    rig.start("shard-2")
    rig.until_seen(LeaseClaimed, 2)
    assert rig.launcher.pid != silent


def test_a_trial_shows_that_processes_can_be_started_and_leaves_none(rig):
    reported = []

    rig.processes.try_start(reported.append)

    rig.until(lambda: reported)
    assert reported == [None]
    assert not len(rig.processes)
    launcher = psutil.Process(rig.launcher.pid)
    rig.until(lambda: not launcher.children())


def test_a_trial_says_why_no_process_can_be_started(rig):
    reported = []
    os.kill(rig.launcher.pid, signal.SIGKILL)

    rig.processes.try_start(reported.append)

    rig.until(lambda: reported)
    assert "launcher" in reported[0].reason


def test_an_exception_of_the_entry_is_exit_code_70_with_a_traceback(rig):
    rig.start(behaviour="raise")

    exited = rig.until_seen(ProcessExited)

    assert exited.reason == "exit code 70"
    assert "a bug of the worker" in rig.log_path.read_text()


def test_a_process_that_writes_nonsense_is_ended(rig):
    rig.start(behaviour="garbage")

    exited = rig.until_seen(ProcessExited)

    assert "SIGKILL" in exited.reason
    assert "process_condemned" in rig.log_path.read_text()


def test_a_drain_of_a_stuck_process_ends_by_force_after_the_grace(rig):
    rig.start(behaviour="stuck")
    claimed = rig.until_seen(LeaseClaimed)

    begun = time.monotonic()
    rig.processes.drain(claimed.key, "test", rig.loop.now() + 0.3)
    exited = rig.until_seen(ProcessExited)

    assert time.monotonic() - begun >= 0.3
    assert "SIGABRT" in exited.reason or "SIGKILL" in exited.reason
    assert rig.processes.has_forced
    assert not rig.of(LeaseReleased)


def test_a_process_that_no_signal_ends_is_written_off_once_its_fence_has_passed(rig, monkeypatch):
    rig.start(behaviour="stuck", expires_s=8.0)
    rig.until_seen(LeaseClaimed)
    begun = rig.loop.now()
    child = rig.child()
    # Its last send, as it noted it; and a kernel that cannot deliver a signal.
    child.slot.note_send(begun - 1.0)
    with monkeypatch.context() as deaf:
        deaf.setattr(signal, "pidfd_send_signal", lambda _pidfd, _number: None)
        rig.processes._forcing.force_from(child, begun)
        exited = rig.until_seen(ProcessExited)

    assert rig.loop.now() - begun >= 10.0 - 1.0
    assert "no signal ends it" in exited.reason
    assert len(rig.processes) == 0
    assert not list(rig.processes.living())
    # Should it die after all, nobody hears of it again, and its place is free.
    child.forced.clear()
    child.send_signal(signal.SIGKILL)
    rig.until(lambda: child.pid not in rig.processes.pids)
    assert len(rig.of(ProcessExited)) == 1
    assert "process_unkillable" in rig.log_path.read_text()


def test_outside_signals_do_not_end_a_lease_process(rig):
    rig.start()
    rig.until_seen(LeaseClaimed)
    pid = rig.child().pid

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    rig.start("shard-2")
    rig.until_seen(LeaseClaimed, count=2)

    assert is_alive(pid)
    assert not rig.of(ProcessExited)


def test_a_lease_process_has_no_descriptor_of_a_sibling_or_of_its_parents(rig, tmp_path):
    rig.start("shard-1")
    rig.until_seen(LeaseClaimed)
    path = tmp_path / "facts"
    rig.start("shard-2", facts=str(path))
    rig.until_seen(LeaseClaimed, count=2)

    facts = json.loads(path.read_text())

    given = {str(fd) for fd in (0, 1, 2, *facts["own_fds"])}
    others = [link for fd, link in facts["fds"].items() if fd not in given]
    # Python's mmap holds the segment by a descriptor of its own.
    assert others == ["/memfd:kclrun (deleted)"]
    assert sum(link.startswith("socket:") for link in facts["fds"].values()) == 1


def test_a_lease_process_has_few_rights_and_a_session_of_its_own(rig, tmp_path):
    path = tmp_path / "facts"
    rig.start(facts=str(path))
    rig.until_seen(LeaseClaimed)

    facts = json.loads(path.read_text())

    assert facts["session"] == facts["pid"]
    assert facts["NoNewPrivs"] == "1"
    assert facts["core"] == "0"
    assert facts["umask"] == "0077"
    assert facts["threads"] == "1"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        assert facts["SigIgn"] >> (number - 1) & 1


def test_the_environment_of_a_lease_process_is_that_of_kclrun(tmp_path, monkeypatch, request):
    """A processor reads its DATABASE_URL as any program does."""
    monkeypatch.setenv("DATABASE_URL", "db://orders")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/not-for-user-code")
    rig = request.getfixturevalue("rig")
    path = tmp_path / "facts"

    rig.start(facts=str(path))
    rig.until_seen(LeaseClaimed)

    environment = json.loads(path.read_text())["environment"]
    assert environment["DATABASE_URL"] == "db://orders"
    assert "NOTIFY_SOCKET" not in environment


def test_leases_run_on_when_the_launcher_is_killed_and_new_ones_start(rig):
    rig.start("shard-1")
    rig.until_seen(LeaseClaimed)
    survivor, former = rig.child().pid, rig.launcher.pid

    os.kill(former, signal.SIGKILL)
    rig.until(lambda: rig.launcher.pid not in (None, former))
    rig.start("shard-2")
    rig.until_seen(LeaseClaimed, count=2)

    assert is_alive(survivor)
    assert not rig.of(ProcessExited)


def test_the_death_of_an_orphan_is_still_noticed_with_its_exit_status(rig):
    rig.start("shard-1")
    rig.until_seen(LeaseClaimed)
    orphan, former = rig.child().pid, rig.launcher.pid
    os.kill(former, signal.SIGKILL)
    rig.until(lambda: rig.launcher.pid not in (None, former))

    os.kill(orphan, signal.SIGKILL)
    exited = rig.until_seen(ProcessExited)

    assert exited.pid == orphan
    assert "SIGKILL" in exited.reason
    assert not psutil.pid_exists(orphan), "a zombie was left"


@pytest.mark.parametrize("has_launcher", [True, False])
def test_what_a_killed_process_started_ends_with_its_session(rig, tmp_path, has_launcher):
    rig.start(starts=str(tmp_path / "programs"))
    rig.until((tmp_path / "programs").exists)
    *members, daemon = json.loads((tmp_path / "programs").read_text())
    rig.until_seen(LeaseClaimed)
    if not has_launcher:
        os.kill(rig.launcher.pid, signal.SIGSTOP)
    launcher = rig.launcher.pid

    rig.child().send_signal(signal.SIGKILL)
    rig.until_seen(ProcessExited)

    rig.until(lambda: not any(map(is_alive, members)))
    assert is_alive(daemon), "what left the session is not ours to end"
    os.kill(daemon, signal.SIGKILL)
    os.kill(launcher, signal.SIGCONT)


def test_the_exit_hooks_of_user_code_run_at_the_end_of_its_lease(rig, tmp_path):
    note = tmp_path / "note"
    rig.start(exit_note=str(note), exit_hook={"returns": True})
    key = rig.until_seen(LeaseClaimed).key
    assert not note.exists()

    rig.processes.drain(key, "test", rig.loop.now() + HUNG_S)
    exited = rig.until_seen(ProcessExited)

    assert note.exists()
    assert exited.reason == "exit code 0 (done)"


def test_an_exit_hook_that_never_returns_keeps_neither_its_process_nor_what_it_started(
    rig, tmp_path
):
    note, programs = tmp_path / "note", tmp_path / "programs"
    rig.start(exit_note=str(note), exit_hook={"returns": False}, starts=str(programs))
    key = rig.until_seen(LeaseClaimed).key
    *members, daemon = json.loads(programs.read_text())

    rig.processes.drain(key, "test", rig.loop.now() + HUNG_S)
    exited = rig.until_seen(ProcessExited)

    assert note.exists()
    # With the code of its own end: nobody had to force it.
    assert exited.reason == "exit code 0 (done)"
    rig.until(lambda: not any(map(is_alive, members)))
    os.kill(daemon, signal.SIGKILL)


def test_a_fork_under_way_when_the_launcher_dies_fails_and_leaves_no_process(rig):
    rig.start("warm")
    rig.until_seen(LeaseClaimed)
    os.kill(rig.launcher.pid, signal.SIGSTOP)
    rig.start("shard-1")

    os.kill(rig.launcher.pid, signal.SIGKILL)
    failed = rig.until_seen(StartFailed)

    assert failed.key == "shard-1"
    assert [child.key for child in rig.processes.living()] == ["warm"]


def test_no_zombie_is_left_after_many_short_lives(rig):
    for number in range(8):
        rig.start(f"shard-{number}", behaviour="unclaimed")
    rig.until_seen(ProcessExited, count=8)

    rig.until(lambda: not zombies(rig.launcher.pid))

    assert len(rig.of(ProcessStarted)) == 8
    assert not zombies(os.getpid())


def zombies(pid):
    children = psutil.Process(pid).children()
    return [child.pid for child in children if child.status() == psutil.STATUS_ZOMBIE]


def test_64_at_once_all_start_and_one_more_finds_a_place_only_after_a_death(rig):
    for number in range(64):
        rig.start(f"shard-{number}")
    rig.start("one-more")

    assert rig.launcher.in_flight == 4, "a burst would overrun the channel"
    assert "places" in rig.until_seen(StartFailed).reason
    rig.until_seen(LeaseClaimed, count=64)
    assert len(rig.of(StartFailed)) == 1
    rig.child("shard-0").send_signal(signal.SIGKILL)
    rig.until_seen(ProcessExited)
    rig.start("one-more")
    rig.until_seen(LeaseClaimed, count=65)


def test_the_answers_to_a_manager_that_stood_still_are_not_lost():
    ours, theirs = Channel.pair()
    manager, outbox = channel_to_launcher(ours), Outbox(channel_of_launcher(theirs.detach()))
    posted = [Exited(pid, 0) for pid in range(1, 2000)]
    read_fd, write_fd = os.pipe()

    for message in posted:
        outbox.post(message)
        if outbox.retry_ms is not None:
            break
    assert outbox.retry_ms is not None, "the channel was never full"
    outbox.post(Forked(7, 8), (os.dup(read_fd),))
    received = []
    while not received or not isinstance(received[-1][0], Forked):
        received += iter(manager.receive_with_fds, NoMessage())
        outbox.flush()

    assert [message.pid for message, _ in received[:-1]] == list(range(1, len(received)))
    (fd,) = received[-1][1]
    os.write(write_fd, b"x")
    assert os.read(fd, 1) == b"x"
    for end in (fd, read_fd, write_fd):
        os.close(end)
    manager.close()
    outbox._channel.close()


def test_an_adopted_dead_stranger_is_reaped_and_a_child_of_the_program_is_not(rig):
    # A stranger: the grandchild of a process that died, in a session of its own.
    ours = os.posix_spawn("/bin/true", ["true"], {})
    read_fd, write_fd = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write_fd, str(os.getpid()).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    stranger = int(os.read(read_fd, 16))
    os.close(read_fd)
    os.close(write_fd)
    rig.until(lambda: not is_alive(stranger) and not is_alive(ours))

    reaped = reap_adopted(rig.processes.pids)

    assert reaped == (stranger,)
    assert os.waitpid(ours, 0)[0] == ours


def test_the_end_of_the_manager_is_seen_by_its_lease_processes(rig):
    rig.start()
    rig.until_seen(LeaseClaimed)
    pid = rig.child().pid

    rig.processes.close()

    rig.until(lambda: not is_alive(pid))
    assert not Path(f"/proc/{pid}").exists() or not is_alive(pid)


def test_from_fork_request_to_entry_takes_a_few_milliseconds(rig):
    rig.start("warm")
    rig.until_seen(LeaseClaimed)
    taken = []
    for number in range(5):
        asked = rig.loop.now()
        rig.start(f"shard-{number}")
        rig.until_seen(LeaseClaimed, count=number + 2)
        taken.append(rig.child(f"shard-{number}").look().last_fetch_instant - asked)

    print("from request to entry, ms:", [round(s * 1000, 1) for s in taken])
    assert min(taken) < 0.2
