"""Planned stops of a whole application, real signals and all: no duplicate, nothing lost."""

import os
import random
import signal

import psutil
import pytest

from tests.patience import HUNG_S
from tests.processes.ledger_rig.application import wait_for_ends

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)


@pytest.mark.slow
def test_five_stops_and_restarts_in_the_stream_make_no_duplicate(
    embedded_aws, application, producer
):
    seed = 3
    print(f"seed {seed}")
    rng = random.Random(seed)
    stream = embedded_aws.stream(shards=3)
    app = application(stream)
    # Far more than five runs need, on a slow machine, too.
    source = producer(stream, 10**6, seed=seed, rate=1200, reshards=[(3_000, "split", 1)]).start()

    for _ in range(5):
        app.start()
        more = len(app.ledger.read().delivered) + rng.randrange(300, 800)
        app.until(lambda more=more: len(app.ledger.delivered) >= more)
        assert app.stop() == 0
        assert app.lease_pids() == []
    app.start()
    app.until(lambda: source.total_put > 9_000)
    verdict = app.finish(source)
    assert verdict.records > 9_000


@pytest.mark.long
def test_ctrl_c_reaches_the_whole_group_and_drains_once(embedded_aws, application, producer):
    stream = embedded_aws.stream(shards=2)
    app = application(stream).start()
    source = producer(stream, 3_000, seed=4, rate=1500).start()
    app.until_delivered(500)
    everyone = [psutil.Process(pid) for pid in (*app.lease_pids(), *app.launcher_pids())]
    assert len(everyone) == 3

    os.killpg(app.process.pid, signal.SIGINT)

    assert app.process.wait(HUNG_S) == 0
    assert not any(each.is_running() for each in everyone)
    assert len(app.of("draining")) == 1
    assert all("leaseOwner" not in row for row in embedded_aws.rows(app.table).values())
    app.start()
    app.until_all_delivered(source)
    assert app.stop() == 0
    app.judged(source)


@pytest.mark.parametrize(
    "how", [pytest.param("a second SIGTERM", marks=pytest.mark.slow), "SIGQUIT"]
)
def test_a_stop_in_a_hurry_ends_stuck_user_code_and_its_records_come_again(
    embedded_aws, application, producer, how
):
    stream = embedded_aws.stream(shards=2)
    app = application(stream, options={"hang": "key-7:3"}, shutdown={"grace": "1h"})
    source = producer(stream, 4_000, seed=5).start()
    source.join()
    stuck = next(
        shard for shard, put in source.put.items() if any(p[1:] == ("key-7", 3) for p in put)
    )
    app.start()
    app.until(
        lambda: (
            sum(len(put) for put in source.put.values() if put) and _others_done(app, source, stuck)
        )
    )
    pids = {shard: app.ledger.pid_of(shard) for shard in source.put}
    pidfds = [os.pidfd_open(pid) for pid in (*app.lease_pids(), *app.launcher_pids())]

    if how == "SIGQUIT":
        app.process.send_signal(signal.SIGQUIT)
    else:
        app.process.send_signal(signal.SIGTERM)
        app.until(lambda: app.of("draining"))
        app.process.send_signal(signal.SIGTERM)

    # The grace is an hour: a stop that waited for it would never come.
    assert app.process.wait(HUNG_S) == 75
    assert None not in wait_for_ends(pidfds, HUNG_S)
    if how == "SIGQUIT":
        assert not app.of("lease_released"), "their rows are left to the next start"
    else:
        assert app.of("process_killed")
    app.cure.touch()
    app.start()
    app.until_all_delivered(source)
    assert app.stop() == 0
    app.judged(source, killed=pids.values(), cap=2000)


def _others_done(app, source, stuck):
    """Whether every other shard was delivered, and the stuck one has come as far as it will."""
    others = {number for shard, put in source.put.items() if shard != stuck for number, _, _ in put}
    return others <= app.ledger.delivered and app.ledger.pid_of(stuck) is not None


def test_after_a_stop_that_was_cut_short_the_next_manager_takes_its_rows_at_once(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=2)
    app = application(stream)
    source = producer(stream, 6_000, seed=6, rate=1500).start()
    app.start()
    app.until(lambda: len(app.ledger.pids) >= 2 and len(app.ledger.delivered) >= 500)
    former = app.ledger.pids
    assert app.stop(signal.SIGQUIT) == 75

    app.start()

    app.until(lambda: len(app.ledger.pids - former) >= 2)
    # By the lock file of the former owner, not by expiry.
    assert [line["count"] for line in app.of("former_owners_gone")] == [1]
    app.until_all_delivered(source)
    # The former owner's file goes once a whole scan has found no row of its.
    app.until(lambda: len(list((app.state / app.table).glob("*.lock"))) == 1)
    assert app.stop() == 0
    assert not list((app.state / app.table).glob("*.lock")), "a lock file was left"
    app.judged(source, killed=former, cap=2000)
