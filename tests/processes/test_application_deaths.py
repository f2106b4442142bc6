"""What dies and how the rest goes on: manager, launcher, lease processes, each by SIGKILL.

How soon it goes on: `bin/bench crash`, and enough rounds to speak of a p99 in
`ledger_rig/measure.py`.
"""

import contextlib
import os
import random
import signal
import time

import psutil
import pytest

from tests.patience import HUNG_S
from tests.processes.ledger_rig.application import wait_for_ends
from tests.processes.ledger_rig.deliveries import judge
from tests.processes.ledger_rig.rounds import lease_kill_rounds, manager_kill_rounds, reported

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

CAP = 2000
FAILOVER_S = 10.0


def test_a_killed_manager_takes_its_processes_along_and_is_back_at_once(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=4)
    app = application(stream)
    source = producer(stream, 10**7, seed=6, rate=1000).start()

    ends_s, back_s = manager_kill_rounds(app, 2)

    # They see the end of their channel, drain and go: nobody is cut off, so nothing comes twice.
    app.finish(source)
    print(reported("manager killed: the others end", ends_s))
    print(reported("manager killed: exec to new batch", back_s))
    # How soon: `bin/bench crash`. Here: by the lock files of those gone, not by expiry.
    assert None not in ends_s
    assert len(app.of("former_owners_gone")) == 2


@pytest.mark.long
def test_a_killed_lease_process_is_back_at_once(embedded_aws, application, producer):
    stream = embedded_aws.stream(shards=4)
    app = application(stream)
    source = producer(stream, 10**7, seed=7, rate=1000).start()

    killed, back_s = lease_kill_rounds(app, 3, random.Random(7))

    app.finish(source, killed=killed, cap=CAP)
    print(reported("lease process killed: kill to new batch", back_s))


@pytest.mark.slow
def test_a_manager_started_while_former_processes_still_finish_a_batch_waits_for_no_scan(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=2)
    app = application(stream, options={"batch_s": 2.5}, fetch={"batch_max": 100})
    source = producer(stream, 1_000, seed=10).start()
    source.join()
    app.start()
    app.until(lambda: len({m["pid"] for m in app.ledger.marks if m["what"] == "at work"}) >= 2)
    former = app.ledger.pids
    pidfds = [os.pidfd_open(pid) for pid in app.lease_pids()]

    app.process.kill()
    app.process.wait()
    app.start()

    ends = wait_for_ends(pidfds, HUNG_S)
    gone_at = time.monotonic()
    assert None not in ends
    assert min(ends) > 1.0, "they were to be in the middle of a batch"
    app.until(lambda: len({m["shard"] for m in app.ledger.marks if m["pid"] not in former}) >= 2)
    took_s = max(m["at"] for m in app.ledger.marks if m["pid"] not in former) - gone_at
    print(f"former processes gone to the successors' claim: {took_s:.2f} s")
    # By the locks, not by expiry. How soon: `bin/bench crash`.
    assert app.of("former_owners_gone")
    assert app.stop() == 0
    verdict = judge(source.put, app.ledger.read())
    assert [fault for fault in verdict.faults if "never delivered" not in fault] == []
    assert verdict.duplicates == 0


@pytest.mark.long
def test_leases_go_on_without_their_launcher_and_a_later_crash_is_repaired(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=2)
    app = application(stream).start()
    source = producer(stream, 10**7, seed=8, rate=1000).start()
    app.until_delivered(500)
    app.until(lambda: len(app.lease_pids()) == 2)
    leases = app.lease_pids()
    (launcher,) = app.launcher_pids()
    pidfd = os.pidfd_open(launcher)

    os.kill(launcher, signal.SIGKILL)

    assert None not in wait_for_ends([pidfd], HUNG_S)
    app.until_delivered(len(app.ledger.read().delivered) + 500)
    assert app.lease_pids() == leases, "a lease process died with its launcher"
    app.until(lambda: app.launcher_pids() not in ([], [launcher]))
    victim = leases[0]
    os.kill(victim, signal.SIGKILL)
    app.until(lambda: len(app.lease_pids()) == 2 and victim not in app.lease_pids())
    app.finish(source, killed={victim}, cap=CAP)
    assert len(app.of("launcher_died")) == 1


@pytest.mark.slow
def test_a_launcher_and_a_lease_process_killed_together_are_both_replaced(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=2)
    app = application(stream).start()
    source = producer(stream, 10**7, seed=9, rate=1000).start()
    app.until_delivered(500)
    app.until(lambda: len(app.lease_pids()) == 2)
    victims = app.lease_pids()

    os.kill(app.launcher_pids()[0], signal.SIGKILL)
    for victim in victims:
        os.kill(victim, signal.SIGKILL)

    app.until(lambda: len(set(app.lease_pids()) - set(victims)) == 2)
    app.finish(source, killed=victims, cap=CAP)


def survivors(app):
    """What user code started and nobody ended: pids and command lines, dead ones not counted."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_of_app = process.environ().get("KCLRUN_STATE_DIR") == str(app.state)
            if is_of_app and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.pid, process.name(), *process.cmdline()[:2]))
    return found


def rows_in(folder):
    return sum(len(path.read_bytes().splitlines()) for path in folder.glob("*.jsonl"))


@pytest.mark.slow
def test_what_user_code_starts_ends_with_its_lease_and_holds_no_lock_of_it(
    embedded_aws, application, producer
):
    """A pool of forked workers and a program: after a kill, a clean stop and a second start."""
    stream = embedded_aws.stream(shards=2)
    app = application(stream, processor="pooling_processor:Pooling", output={"path": "out"}).start()
    rows = app.folder / "out"
    source = producer(stream, 200, seed=14).start()
    source.join()
    app.until(lambda: rows.is_dir() and rows_in(rows) >= 200)
    former = set(app.lease_pids())
    assert len(former) == 2 + 2, "the workers of the pools carry the name of their parents"
    victim = min(pid for pid in former if os.getsid(pid) == pid)

    os.kill(victim, signal.SIGKILL)

    app.until(lambda: len(app.of("lease_claimed")) >= 3)
    app.until(lambda: len(app.lease_pids()) == 4)
    assert app.stop() == 0
    assert survivors(app) == []

    again = producer(stream, 200, seed=15).start()
    again.join()
    app.start()
    app.until(lambda: rows_in(rows) >= 400)
    assert app.stop() == 0
    assert survivors(app) == []
    assert not app.of("lease_halted")
    assert not app.warned()


# As under an old seccomp profile: each is a call that a start of a lease process needs.
REFUSED = """
import errno, os
def refused(*arguments):
    raise OSError(errno.{number}, os.strerror(errno.{number}))
os.{call} = refused
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "number", "words"),
    [
        ("pidfd_open", "ENOSYS", "pidfd_open: Function not implemented"),
        ("setsid", "EPERM", "a session of its own: Operation not permitted"),
    ],
)
def test_a_host_that_can_start_no_lease_process_takes_no_lease_and_says_so(
    embedded_aws, application, call, number, words
):
    """The trial before the first take fails."""
    stream = embedded_aws.stream(shards=2)
    app = application(stream, log={"level": "debug"})
    (app.folder / "sitecustomize.py").write_text(REFUSED.format(call=call, number=number))
    app.more_environment = {"PYTHONPATH": f"{app.folder}:{app.environment['PYTHONPATH']}"}

    code = app.start().process.wait(HUNG_S)

    assert code == 78
    assert not app.of("lease_taken")
    assert words in app.log_path.read_text()


@pytest.mark.slow
def test_a_lock_file_that_somebody_removed_stops_no_start(embedded_aws, application, producer):
    stream = embedded_aws.stream(shards=2)
    app = application(stream).start()
    source = producer(stream, 500, seed=16).start()
    source.join()
    app.until_all_delivered(source)
    for path in app.state.rglob("*.lock"):
        path.unlink()
    app.until(lambda: app.of("lock_file_removed"))

    os.kill(app.lease_pids()[0], signal.SIGKILL)

    app.until(lambda: len(app.of("lease_claimed")) >= 3)
    assert len(app.of("process_died")) == 1
    assert app.stop() == 0
