"""What the leases of a shared process have together: their wake-ups, their CPU, their threads."""

import threading

import pytest

from kclrun.ipc.channel import Channel
from kclrun.ipc.messages import Admit, Left, channel_of_worker, channel_to_worker
from kclrun.worker.sharing import LEASE_THREAD, SharedLease, SharedProcess, shard_here
from tests.patience import HUNG_S


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
        sum(range(10**6))
        seen.append(shard_here())
        may_end.wait(HUNG_S)

    threads = [busy.make_thread(work, LEASE_THREAD), idle.make_thread(may_end.wait, "fetch")]
    for thread in threads:
        thread.start()
    while not seen:
        pass
    assert seen == ["shard-1"]
    assert shard_here() == ""
    assert busy.cpu_s() > 10 * idle.cpu_s() > 0
    assert (busy.may_write, idle.may_write) == (True, False)
    may_end.set()
    for thread in threads:
        thread.join()
    assert busy.cpu_s() > 0, "what it used counts after its end, too"
    assert not busy.may_write


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
    shared.own_threads.add(serving)
    serving.start()

    said = lease.receive(HUNG_S)

    assert isinstance(said, Left)
    assert (said.code, "poller" in said.remains) == (4, leaves)
    manager.close()
    serving.join(HUNG_S)
    assert not serving.is_alive()
    may_end.set()
    lease.close()
