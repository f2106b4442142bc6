"""The watchdog's judgement over looks, and the one line that tells a stall."""

import json
import os
import signal
from pathlib import Path

import pytest

from kclrun.manager.watchdog import Watchdog
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.observe.logs import EventLog, LineSink
from kclrun.protocol.status import LeaseStatus, WorkerState
from tests.shortage import no_more_descriptors

STALL_S = 60.0


class Process:
    """A lease process as far as the watchdog knows it: this test's own."""

    def __init__(self, **status):
        self.key = "shard-1"
        self.incarnation = 1
        self.pid = os.getpid()
        self.status = None
        self.force_instant = None
        self.forced = []
        self.last_status = LeaseStatus(
            pid=self.pid,
            incarnation=1,
            state=WorkerState.PROCESSING,
            processed=ExtendedSequenceNumber("7"),
            checkpointed=TRIM_HORIZON,
            **status,
        )

    def look(self):
        return self.last_status


class Processes:
    def __init__(self):
        self.ended = []

    def end_stalled(self, child, stall, force_instant):
        self.ended.append((stall, force_instant))
        child.force_instant = force_instant


@pytest.fixture
def processes():
    return Processes()


@pytest.fixture
def log_path(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def watchdog(processes, log_path):
    fd = os.open(log_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    sink = LineSink(fd)
    log = EventLog(sink, app="a", owner="o")
    yield Watchdog(processes, log=log, stall_s=STALL_S, failover_s=lambda: 10.0)
    sink.close()
    os.close(fd)


def lines(path: Path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_stall_is_ended_once_and_told_once_the_process_is_dead(watchdog, processes, log_path):
    child = Process(processing_since_instant=40.0)

    watchdog.look([child], 99.9)
    assert processes.ended == []
    for now in (100.4, 100.9, 101.4):
        watchdog.look([child], now)
    assert processes.ended == [("user code has not returned, for 60 s", 102.4)]
    assert lines(log_path) == []

    child.forced = [signal.SIGABRT]
    child.status = int(signal.SIGABRT)
    watchdog.exited(child)

    (story,) = lines(log_path)
    assert story["event"] == "process_stalled"
    assert story["reason"] == "user code has not returned"
    assert story["waited_s"] == 60.4
    assert story["action"] == "asked for its stacks (on stderr) and to leave, then SIGABRT"
    assert story["status"] == "killed by SIGABRT"
    assert (story["position"], story["checkpoint"]) == ("7", "TRIM_HORIZON")


def test_what_looks_old_after_a_gap_between_two_looks_is_given_time_to_show_that_it_lives(
    watchdog, processes
):
    child = Process(published_instant=9.0)
    watchdog.look([child], 10.0)

    # The host slept for an hour, or we were stopped: the slot is an hour old, and so is our look.
    watchdog.look([child], 3610.0)
    watchdog.look([child], 3610.5)
    assert processes.ended == []
    child.last_status = LeaseStatus(
        pid=child.pid, incarnation=1, state=WorkerState.PROCESSING, published_instant=3611.0
    )
    for step in range(10):
        watchdog.look([child], 3611.0 + step / 2)
    assert processes.ended == []


def test_a_process_that_stays_old_after_a_gap_is_ended(watchdog, processes):
    child = Process(published_instant=9.0)
    watchdog.look([child], 10.0)

    for step in range(10):
        watchdog.look([child], 3610.0 + step / 2)

    assert len(processes.ended) == 1
    assert "the process publishes nothing" in processes.ended[0][0]


def test_one_that_says_nothing_is_ended_where_no_descriptor_is_left_to_look_at_it(
    watchdog, processes
):
    child = Process(published_instant=9.0)
    watchdog.look([child], 10.0)

    with no_more_descriptors():
        for step in range(10):
            watchdog.look([child], 3610.0 + step / 2)

    ((stall, _),) = processes.ended
    assert "this host does not show its state now (Too many open files)" in stall


def test_one_that_is_drained_already_is_left_to_its_patience(watchdog, processes):
    child = Process(processing_since_instant=1.0)
    child.force_instant = 500.0

    watchdog.look([child], 100.0)

    assert processes.ended == []


def test_one_that_no_signal_ends_is_reported_while_it_lives_and_not_again(
    watchdog, processes, log_path
):
    child = Process(processing_since_instant=1.0)
    watchdog.look([child], 100.0)
    child.forced = [signal.SIGABRT, signal.SIGKILL]

    for step in range(20):
        watchdog.look([child], 100.5 + step / 2)
    watchdog.exited(child)

    (story,) = lines(log_path)
    assert "not even KILL" in story["status"]
    assert story["action"].endswith("SIGABRT, SIGKILL")


def test_a_death_without_a_stall_has_no_story(watchdog, log_path):
    child = Process()
    watchdog.look([child], 100.0)

    watchdog.exited(child)

    assert lines(log_path) == []
