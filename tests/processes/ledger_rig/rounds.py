"""Kill, and measure until user code is given records again."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from tests.patience import HUNG_S
from tests.processes.ledger_rig.application import wait_for_ends

# A process that dies before its successor's first checkpoint is started again after a pause: two
# checkpoints' time between two kills of one lease keeps the rounds apart.
_SETTLED_S = 1.2


def percentile(values, share):
    """The smallest value that `share` percent of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]


def reported(what, values):
    return (
        f"{what}: {len(values)} rounds, p50 {percentile(values, 50):.2f} s,"
        f" p99 {percentile(values, 99):.2f} s, max {max(values):.2f} s"
    )


def lease_kill_rounds(app, rounds, rng):
    """SIGKILL a lease process `rounds` times; (their pids, seconds to the first new batch)."""
    app.start()
    killed, taken = [], []
    while len(taken) < rounds:
        shard, victim = app.until(lambda: _settled_lease(app, rng))
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        killed.append(victim)
        seen = len(app.ledger.batches)
        at = app.until(
            lambda seen=seen, shard=shard, victim=victim: _first_batch_of_another(
                app.ledger.batches[seen:], shard, victim
            )
        )
        taken.append(at - began)
    return killed, taken


def manager_kill_rounds(app, rounds):
    """SIGKILL the manager and start it again; (how long its processes lived on, seconds from
    exec to the first new batch), one each a round."""
    app.start()
    lived_on, taken = [], []
    with ThreadPoolExecutor(max_workers=1) as watching:
        for _ in range(rounds):
            app.until(lambda: _is_settled(app))
            pidfds = [os.pidfd_open(pid) for pid in (*app.lease_pids(), *app.launcher_pids())]
            former = app.ledger.read().pids
            app.process.kill()
            ends = watching.submit(wait_for_ends, pidfds, HUNG_S)
            app.process.wait()
            began = time.monotonic()
            app.start()
            taken.append(app.until(lambda former=former: _first_batch_after(app, former)) - began)
            assert None not in ends.result(), "a process outlived its manager"
            lived_on.append(max(ends.result()))
    return lived_on, taken


def _settled_lease(app, rng):
    """A shard and the pid that has read it for a while, or None."""
    living = set(app.lease_pids())
    began = {mark["pid"]: mark for mark in app.ledger.marks if mark["what"] == "began"}
    old = [
        (began[pid]["shard"], pid)
        for pid in sorted(living & began.keys())
        if time.monotonic() - began[pid]["at"] >= _SETTLED_S
    ]
    return rng.choice(old) if old else None


def _is_settled(app):
    """All leases are read, and have been for a while."""
    living = app.lease_pids()
    began = {mark["pid"]: mark["at"] for mark in app.ledger.marks if mark["what"] == "began"}
    return len(living) == 4 and all(
        time.monotonic() - began.get(pid, time.monotonic()) >= _SETTLED_S for pid in living
    )


def _first_batch_of_another(batches, shard, pid):
    return next((b.at for b in batches if b.shard == shard and b.pid != pid), None)


def _first_batch_after(app, former):
    return next((b.at for b in app.ledger.batches if b.pid not in former), None)
