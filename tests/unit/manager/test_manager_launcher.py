"""The launcher and what asks it: forks in their turn, its silence, its death, outside signals."""

import atexit
import errno
import os
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from pathlib import Path

import psutil
import pytest

from kclrun.ipc.messages import Exited
from kclrun.manager.forks import ForkRefused, Forks, Launcher, LauncherGone, ProcessForked
from kclrun.manager.lease_session import missing_hooks, run_exit_hooks
from kclrun.manager.orphans import reap_adopted
from kclrun.model.wire import WireEndpoint
from kclrun.observe.logs import EventLog, LineSink
from tests.foreground import heeding_signals
from tests.patience import HUNG_S, until
from tests.shortage import no_more_descriptors
from tests.support.certificates import certificate_for
from tests.unit.manager.children_rig import StandIn
from tests.unit.manager.manager_rig import QuickLoop

# Told a number on its channel, it exits with it; asked about the collector, with 1 if all that the
# launcher loaded is out of its reach; asked about trust, with the number of its TLS contexts. Told
# to, it first starts a program and answers with its pid.
ENTRY = """
import gc, socket, subprocess, sys

def run(segment_fd, doorbell_fd, channel_fd):
    channel = socket.socket(fileno=channel_fd)
    told = channel.recv(16)
    if told == b"program":
        program = subprocess.Popen(["sleep", "600"])
        channel.send(b"%d" % program.pid)
        told = channel.recv(16)
    if told == b"collector":
        return not any(each is sys.modules for each in gc.get_objects())
    if told == b"trust":
        from kclrun.aws import trust
        return len(trust._made)
    return int(told)
"""


def await_readable(fd):
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert poller.poll(HUNG_S * 1000), "nothing comes"


# What came with something else that was waited for, by launcher.
_UNREAD = weakref.WeakKeyDictionary()


def heard_until(launcher, kind):
    """The next report of this kind; what comes before or with it is kept for the next call."""
    reports = _UNREAD.setdefault(launcher, [])
    deadline = time.monotonic() + HUNG_S
    while not any(isinstance(report, kind) for report in reports):
        assert time.monotonic() < deadline
        await_readable(launcher.fileno())
        reports += launcher.receive()
    found = next(report for report in reports if isinstance(report, kind))
    reports.remove(found)
    return found


# A real one.


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    (tmp_path / "entry_of_a_test.py").write_text(ENTRY)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    made = Launcher("entry_of_a_test:run")
    with heeding_signals():
        made.start()
    yield made
    made.stop()


def forked(launcher, request_id):
    ours, theirs = socket.socketpair()
    with theirs:
        assert launcher.fork(request_id, (theirs.fileno(),) * 3)
    return ours, heard_until(launcher, ProcessForked)


def await_its_name(pid):
    """What it does for itself at its start is done then."""
    until(lambda: Path(f"/proc/{pid}/comm").read_text() == "kclrun-lease\n")


@pytest.mark.seconds
@pytest.mark.parametrize(("scheme", "contexts"), [("https", 1), ("http", 0)])
def test_the_tls_context_of_lease_processes_is_made_before_the_fork(
    launcher, tmp_path, scheme, contexts
):
    certificate = str(certificate_for("127.0.0.1", tmp_path))
    urls = (f"{scheme}://kinesis.test", f"{scheme}://dynamodb.test")
    launcher.trust([WireEndpoint(url, "r", "r", ca_bundle=certificate) for url in urls])

    for request_id in (1, 2):
        ours, child = forked(launcher, request_id)
        with ours:
            ours.send(b"trust")
            exited = heard_until(launcher, Exited)
        os.close(child.pidfd)
        assert os.waitstatus_to_exitcode(exited.status) == contexts

    launcher.stop()
    with heeding_signals():
        launcher.start()
    ours, child = forked(launcher, 3)
    with ours:
        ours.send(b"trust")
        exited = heard_until(launcher, Exited)
    os.close(child.pidfd)
    assert os.waitstatus_to_exitcode(exited.status) == contexts, "also by the next launcher"


@pytest.mark.parametrize(("module", "name"), [(threading, "_shutdown"), (atexit, "_run_exitfuncs")])
def test_a_python_without_an_exit_hook_is_noticed_and_the_other_hook_still_runs(
    monkeypatch, module, name
):
    assert missing_hooks() == ()
    ran = []
    for each, hook in ((threading, "_shutdown"), (atexit, "_run_exitfuncs")):
        monkeypatch.setattr(each, hook, lambda hook=hook: ran.append(hook))
    monkeypatch.delattr(module, name)

    run_exit_hooks(HUNG_S, lambda: ran.append("late"))

    assert missing_hooks() == (f"{module.__name__}.{name}",)
    assert len(ran) == 1
    assert name not in ran


@pytest.fixture
def in_the_background():
    """As a shell without job control starts a job, or `nohup` a program."""
    numbers = (signal.SIGINT, signal.SIGHUP)
    former = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_these_tests_start_heeds_signals_though_they_run_in_the_background(
    in_the_background, number
):
    with heeding_signals():
        program = subprocess.Popen(["sleep", "600"])

    program.send_signal(number)

    assert program.wait(HUNG_S) == -number
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_ctrl_c_to_all_of_the_terminal_ends_neither_the_launcher_nor_what_it_forked(launcher):
    ours, first = forked(launcher, 1)
    assert launcher.is_ready
    await_its_name(first.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(first.pid, number)
        if number is not signal.SIGHUP:  # which is sent to a session's own terminal only
            os.kill(launcher.pid, number)

    theirs, second = forked(launcher, 2)
    ours.send(b"7")
    exited = heard_until(launcher, Exited)

    assert (first.request_id, second.request_id, launcher.in_flight) == (1, 2, 0)
    assert (exited.pid, os.waitstatus_to_exitcode(exited.status)) == (first.pid, 7)
    await_readable(first.pidfd)
    theirs.send(b"0")
    assert heard_until(launcher, Exited).pid == second.pid
    for fd in (first.pidfd, second.pidfd):
        os.close(fd)
    ours.close()
    theirs.close()


def test_a_lease_process_leads_a_session_and_has_no_right_to_gain_any(launcher):
    ours, process = forked(launcher, 1)
    folder = Path(f"/proc/{process.pid}")
    await_its_name(process.pid)

    status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines())
    limits = (folder / "limits").read_text().splitlines()

    assert os.getsid(process.pid) == process.pid
    assert os.getsid(launcher.pid) == launcher.pid
    assert (status["NoNewPrivs"], status["Umask"]) == ("1", "0077")
    assert next(line for line in limits if "core" in line).split()[4:6] == ["0", "0"]
    assert Path(f"/proc/{launcher.pid}/comm").read_text() == "kclrun-launcher\n"[:15] + "\n"
    ours.send(b"0")
    heard_until(launcher, Exited)
    os.close(process.pidfd)
    ours.close()


# As under a profile of seccomp, or where a service may not have another session.
CONFINED = """
import errno, os
def refuse():
    raise OSError(errno.{number}, os.strerror(errno.{number}))
def die():
    os.kill(os.getpid(), 9)
os.setsid = {instead}
"""


@pytest.mark.parametrize(
    ("number", "instead", "words"),
    [
        ("EPERM", "refuse", "a session of its own: Operation not permitted"),
        ("ENOMEM", "refuse", "a session of its own: Cannot allocate memory"),
        ("EPERM", "die", "it ended before it had set itself up"),
    ],
)
def test_what_a_host_does_not_let_be_a_lease_process_is_a_fork_that_failed(
    tmp_path, request, number, instead, words
):
    confined = CONFINED.format(number=number, instead=instead)
    (tmp_path / "sitecustomize.py").write_text(confined)
    launcher = request.getfixturevalue("launcher")
    ours, theirs = socket.socketpair()

    with theirs:
        assert launcher.fork(1, (theirs.fileno(),) * 3)
    refused = heard_until(launcher, ForkRefused)

    assert (refused.request_id, launcher.in_flight) == (1, 0)
    assert refused.reason == f"as a lease process: {words}"
    assert refused.errno == (getattr(errno, number) if instead == "refuse" else 0)
    ours.settimeout(HUNG_S)
    assert ours.recv(1) == b"", "no process has the other end"
    heard_until(launcher, Exited)
    assert psutil.Process(launcher.pid).children() == []
    ours.close()


def test_the_collector_of_a_lease_process_leaves_alone_what_the_launcher_loaded(
    launcher,
):
    ours, process = forked(launcher, 1)

    ours.send(b"collector")
    exited = heard_until(launcher, Exited)

    assert os.waitstatus_to_exitcode(exited.status) == 1
    os.close(process.pidfd)
    ours.close()


@pytest.mark.parametrize("dead", ["lease process", "launcher"])
def test_a_program_of_user_code_ends_with_its_lease_process_though_no_manager_ends_it(
    launcher, dead
):
    """By the launcher before it reaps the process; without a launcher by the process itself."""
    ours, process = forked(launcher, 1)
    ours.send(b"program")
    program = os.pidfd_open(int(ours.recv(16)))

    if dead == "launcher":
        os.kill(launcher.pid, signal.SIGKILL)
        heard_until(launcher, LauncherGone)
        ours.send(b"0")
    else:
        os.kill(process.pid, signal.SIGKILL)

    await_readable(program)
    ours.close()
    os.close(program)
    os.close(process.pidfd)


def test_the_death_of_a_launcher_answers_what_it_was_asked_for_and_another_can_be_started(launcher):
    pid = launcher.pid
    os.kill(pid, signal.SIGSTOP)
    with socket.socket() as any_descriptor:
        launcher.fork(5, (any_descriptor.fileno(),) * 3)
        launcher.fork(6, (any_descriptor.fileno(),) * 3)
    assert launcher.in_flight == 2

    launcher.kill()
    reports = []
    while not reports:  # what it had sent before it was stopped comes first
        await_readable(launcher.fileno())
        reports = launcher.receive()

    assert reports == [
        LauncherGone(-9),
        ForkRefused(5, "the launcher died"),
        ForkRefused(6, "the launcher died"),
    ]
    assert (launcher.fileno(), launcher.pid, launcher.in_flight) == (-1, None, 0)
    assert not launcher.is_ready
    assert launcher.receive() == []
    assert not launcher.fork(7, ())
    assert not psutil.pid_exists(pid)


# What asks it.


class Asked:
    """Forks over a stand-in; the answers, in order."""

    def __init__(self, tmp_path):
        self.path = tmp_path / "log"
        self._fd = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._sink = LineSink(self._fd)
        self.loop = QuickLoop()
        self.launcher = StandIn()
        self.answers = []
        self.on_refusal = lambda: None
        self.forks = self.another(10.0)

    def another(self, answer_wait_s):
        return Forks(
            self.launcher,
            loop=self.loop,
            log=EventLog(self._sink, app="a", owner="o", level="debug"),
            forked=self.answers.append,
            refused=self._refused,
            exited=self.answers.append,
            answer_wait_s=answer_wait_s,
        )

    def _refused(self, answer):
        self.answers.append(answer)
        self.on_refusal()

    def ask(self, *numbers):
        for number in numbers:
            ours, theirs = socket.socketpair()
            ours.close()
            self.forks.request(number, (0, 1), theirs)

    def turn(self):
        for _ in range(4):
            self.loop.turn(self.loop.now())

    def reported(self, event):
        return self.path.read_text().count(f'"{event}"')

    def close(self):
        self.forks.close()
        self.launcher.close()
        self.loop.close()
        self._sink.close()
        os.close(self._fd)


@pytest.fixture
def asked(tmp_path):
    made = Asked(tmp_path)
    yield made
    made.close()


def test_four_forks_are_asked_for_at_a_time_and_each_is_answered_once(asked):
    asked.forks.open()
    asked.launcher.ignores = True
    asked.ask(1, 2, 3, 4, 5, 6)
    assert asked.launcher.asked == [1, 2, 3, 4]

    for number in (1, 2):
        asked.launcher.report(ForkRefused(number, "fork: no memory"))
    asked.turn()

    assert asked.launcher.asked == [1, 2, 3, 4, 5, 6]
    assert [answer.request_id for answer in asked.answers] == [1, 2]


def test_a_request_that_cannot_be_sent_is_refused_and_the_next_is_sent(asked):
    asked.forks.open()
    asked.launcher.unsent = 1
    asked.launcher.refuses = 1

    asked.ask(1, 2)
    asked.turn()

    reasons = [answer.reason for answer in asked.answers]
    assert reasons == ["the launcher is not there or does not answer", "fork: no memory"]


def test_a_launcher_that_is_silent_for_a_failover_is_killed_and_is_none_to_start_with(asked):
    asked.forks.open()
    asked.launcher.ignores = True
    began = asked.loop.now()
    asked.ask(1)
    assert asked.forks.has_launcher

    asked.loop.run_to(began + 9.9)
    assert asked.launcher.kills == 0
    asked.loop.run_to(began + 10.1)

    assert (asked.launcher.kills, asked.forks.has_launcher) == (1, False)
    assert asked.reported("launcher_silent") == 1
    asked.launcher.report(LauncherGone(-9))
    asked.launcher.report(ForkRefused(1, "the launcher died"))
    asked.turn()
    assert asked.forks.has_launcher, "the next one"
    assert (len(asked.launcher.starts), asked.reported("launcher_died")) == (2, 1)
    asked.loop.run_to(asked.loop.now() + 60.0)
    assert asked.launcher.kills == 1, "nothing is awaited of it"


@pytest.mark.parametrize(("failover_s", "wait_s"), [(1.0, 5.0), (5.5, 5.5)])
def test_a_busy_host_has_five_seconds_for_a_fork_however_short_the_failover(
    asked, failover_s, wait_s
):
    asked.forks._answer_wait_s = asked.another(failover_s)._answer_wait_s
    asked.forks.open()
    asked.launcher.ignores = True
    began = asked.loop.now()
    asked.ask(1)

    asked.loop.run_to(began + wait_s - 0.05)
    assert asked.launcher.kills == 0
    asked.loop.run_to(began + wait_s + 0.05)

    assert asked.launcher.kills == 1
    assert f'"waited_s":{wait_s}' in asked.path.read_text()


def test_one_that_loads_for_longer_than_a_minute_is_killed(asked):
    asked.launcher.is_ready = False
    asked.forks.open()
    asked.launcher.ignores = True
    began = asked.loop.now()
    asked.ask(1)

    asked.loop.run_to(began + 60.1)

    assert asked.launcher.kills == 1


def test_one_that_loads_has_a_minute_and_each_answer_begins_the_wait_anew(asked):
    asked.launcher.is_ready = False
    asked.forks.open()
    asked.launcher.ignores = True
    began = asked.loop.now()
    asked.ask(1, 2)
    asked.loop.run_to(began + 59.9)
    assert asked.launcher.kills == 0

    asked.launcher.is_ready = True
    asked.launcher.report(ForkRefused(1, "fork: no memory"))
    asked.turn()
    answered = asked.loop.now()
    asked.loop.run_to(answered + 9.5)
    assert asked.launcher.kills == 0
    asked.loop.run_to(answered + 10.5)

    assert asked.launcher.kills == 1


def test_a_launcher_that_cannot_be_started_is_tried_again_ever_more_slowly(asked):
    asked.launcher.fails_to_start = 9
    began = asked.loop.now()

    asked.forks.open()
    assert not asked.forks.has_launcher
    tries = []
    start = asked.launcher.start

    def counted():
        tries.append(round(asked.loop.now() - began, 2))
        start()

    asked.launcher.start = counted
    asked.loop.run_to(began + 100.0)

    assert tries == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5, 61.5, 91.5]
    assert asked.forks.has_launcher
    assert (asked.reported("launcher_not_started"), asked.reported("launcher_started")) == (9, 1)


def test_after_its_close_nothing_is_started_again(asked):
    asked.forks.open()
    asked.launcher.ignores = True
    asked.ask(1, 2, 3, 4, 5)
    asked.forks.close()

    asked.loop.run_to(asked.loop.now() + 30.0)

    assert asked.launcher.is_stopped
    assert (asked.launcher.kills, len(asked.launcher.starts)) == (0, 1)


def test_closed_by_what_an_answer_leads_to_it_asks_for_nothing_more(asked):
    asked.forks.open()
    asked.launcher.ignores = True
    asked.ask(1, 2, 3, 4, 5)
    asked.on_refusal = asked.forks.close

    asked.launcher.report(ForkRefused(1, "fork: no memory"))
    asked.turn()

    assert [answer.request_id for answer in asked.answers] == [1]
    assert asked.launcher.asked == [1, 2, 3, 4]


class Held:
    """A process that the kernel holds: KILL does not end it yet."""

    ends = False

    def wait(self, timeout):
        raise subprocess.TimeoutExpired("launcher", timeout)

    def kill(self):
        self.is_killed = True

    def poll(self):
        return 0 if self.ends else None


def test_a_killed_launcher_that_the_kernel_holds_does_not_stop_the_manager():
    launcher, held = Launcher("m:f"), Held()
    launcher._process = held

    assert launcher._reap(kill_after_s=0.0) is None
    assert held.is_killed
    assert launcher._unreaped == [held]

    Held.ends, launcher._process = True, Held()
    launcher._reap(kill_after_s=0.0)
    assert held not in launcher._unreaped, "it is reaped with the next one"


# What nobody reaps.


def test_only_dead_children_of_another_session_are_reaped_and_those_spared_are_not():
    own = subprocess.Popen(["true"])
    adopted, spared = (subprocess.Popen(["true"], start_new_session=True) for _ in range(2))
    living = subprocess.Popen(["sleep", "600"], start_new_session=True)
    for process in (own, adopted, spared):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    reaped = reap_adopted({spared.pid})

    assert reaped == (adopted.pid,)
    assert (own.wait(), spared.wait(), living.poll()) == (0, 0, None)
    living.kill()
    living.wait()
    adopted.wait()


def test_the_dead_wait_to_be_reaped_until_there_is_a_descriptor_to_look_for_them():
    adopted = subprocess.Popen(["true"], start_new_session=True)
    os.waitid(os.P_PID, adopted.pid, os.WEXITED | os.WNOWAIT)

    with no_more_descriptors():
        assert reap_adopted(frozenset()) is None

    assert reap_adopted(frozenset()) == (adopted.pid,)
    adopted.wait()
