"""What the leases of a shared process have together: their wake-ups, their CPU, their threads."""

import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from kclrun.ipc import exit_codes
from kclrun.ipc.channel import Channel, NotSent
from kclrun.ipc.messages import Admit, Left, channel_of_worker, channel_to_worker
from kclrun.worker import sharing
from kclrun.worker.sharing import LEASE_THREAD, SharedLease, SharedProcess, shard_here
from tests.patience import HUNG_S, until


@pytest.fixture
def channels():
    """The manager's end and the process's end."""
    mine, its = Channel.pair()
    manager, process = channel_to_worker(mine), channel_of_worker(its.detach())
    yield manager, process
    manager.close()
    process.close()


def test_idle_threads_wake_together_keep_their_period_and_never_poll_too_soon(channels):
    shared = SharedProcess(channels[1], lambda *_: 0)
    for pause_s in (1.0, 1.5, 10.0):
        wakes = set()
        for late_s in (0.0, 0.003, 0.31, 0.7, 0.99):
            at = 1000.0 + late_s
            first_s = shared.rest_s(at, pause_s)
            assert 0.2 <= first_s < pause_s + 0.2
            at += first_s + 0.004  # the wake-up is late, and shifts none after it
            second_s = shared.rest_s(at, pause_s)
            assert second_s == pytest.approx(pause_s - 0.004)
            wakes.add(round((at + second_s) % pause_s, 6))
        assert len(wakes) == 1
    assert shared.rest_s(1000.0, 0.2) == 0.2, "a shard that is behind is read at its own pace"


def test_cpu_and_name_of_a_lease_are_those_of_its_own_threads(channels):
    shared = SharedProcess(channels[1], lambda *_: 0)
    busy, idle = SharedLease(shared), SharedLease(shared)
    busy.shard, idle.shard = "shard-1", "shard-2"
    seen, may_end = [], threading.Event()

    def work():
        while time.thread_time() < 0.1:
            pass
        seen.append(shard_here())
        may_end.wait(HUNG_S)

    threads = [busy.make_thread(work, LEASE_THREAD), idle.make_thread(may_end.wait, "fetch")]
    for thread in threads:
        thread.start()
    until(lambda: seen)
    assert seen == ["shard-1"]
    assert shard_here() == ""
    assert busy.cpu_s() >= 0.1
    assert busy.cpu_s() > 10 * idle.cpu_s() > 0
    assert (busy.may_write, idle.may_write) == (True, False)
    may_end.set()
    for thread in threads:
        thread.join()
    assert busy.cpu_s() > 0, "what it used counts after its end, too"
    assert not busy.may_write


def test_the_clock_of_an_ended_thread_is_not_read_for_it_is_another_s_by_then(monkeypatch):
    shared = SharedProcess(None, None)
    lease = SharedLease(shared)
    thread = lease.make_thread(lambda: sum(range(10**5)), "kclrun-ended")
    thread.start()
    thread.join()
    used = lease.cpu_s()
    monkeypatch.setattr("kclrun.worker.sharing.time.clock_gettime", lambda _: 1e9)

    assert lease.cpu_s() == used > 0


@pytest.mark.parametrize("leaves", [False, True])
def test_the_end_of_a_lease_is_said_once_with_what_its_user_code_left_running(channels, leaves):
    manager, its = channels
    may_end = threading.Event()
    left = threading.Thread(target=may_end.wait, name="poller", daemon=True)

    def serve(_, lease):
        lease.process.modules_loaded()
        if leaves:
            left.start()
        return 4

    mine, theirs = Channel.pair()
    lease = channel_to_worker(mine)
    manager.send(Admit(), (theirs.fileno(),))
    theirs.close()
    _, fds = its.receive_with_fds(HUNG_S)
    shared = SharedProcess(its, serve)
    serving = threading.Thread(target=shared.serve, args=(fds,))
    shared.own(serving)
    serving.start()

    said = lease.receive(HUNG_S)

    assert isinstance(said, Left)
    assert (said.code, "poller" in said.remains) == (4, leaves)
    manager.close()
    serving.join(HUNG_S)
    assert not serving.is_alive()
    may_end.set()
    lease.close()


@pytest.mark.seconds
def test_the_threads_of_a_lease_that_ends_are_counted_while_another_lease_begins(channels):
    shared = SharedProcess(channels[1], lambda *_: 0)
    begun, errors = threading.Event(), []

    def begin_leases():
        lease = SharedLease(shared)
        begun.set()
        for _ in range(20_000):
            lease.make_thread(lambda: None, "fetch")

    def end_leases():
        begun.wait(HUNG_S)
        try:
            while beginning.is_alive():
                shared._others()
        except RuntimeError as error:
            errors.append(error)

    beginning, ending = (threading.Thread(target=each) for each in (begin_leases, end_leases))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        beginning.start()
        ending.start()
        beginning.join()
        ending.join()
    finally:
        sys.setswitchinterval(interval)

    assert errors == []


class _Exits(Exception):
    """The process ends."""


def test_a_process_that_cannot_say_that_a_lease_has_ended_ends_itself(channels, monkeypatch):
    shared = SharedProcess(channels[1], lambda *_: 0)
    channel = SimpleNamespace(send=lambda _: NotSent(), close=lambda: None)

    def exits(code):
        raise _Exits(code)

    monkeypatch.setattr(os, "_exit", exits)
    with pytest.raises(_Exits, match=str(exit_codes.BUG)):
        shared._run(SharedLease(shared), channel)


def test_a_lease_that_gets_no_thread_leaves_and_the_other_leases_of_the_process_go_on(
    channels, monkeypatch
):
    class NoThread(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(
        sharing, "daemon_thread", lambda target, name: NoThread(target=target, name=name)
    )
    mine, theirs = Channel.pair()
    lease = channel_to_worker(mine)

    SharedProcess(channels[1], lambda *_: 0)._admit((theirs.detach(),))

    assert lease.receive(HUNG_S) == Left(exit_codes.HOST)
    lease.close()
