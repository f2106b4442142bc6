"""The ledger run: shards split and merge while lease processes are killed; nothing may be lost.

Over six reshards, and with every other blow: `test_ledger_storm.py`.
"""

import json
import os
import random
import signal
import time

import pytest

from tests.processes.ledger_rig.deliveries import judge
from tests.seeds import seed_of

# As fast as two cores put records and start processes: beside another test nobody would be killed
# between two checkpoints.
pytestmark = pytest.mark.alone

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

CAP = 2000


def kill_one(app, rng, killed):
    pids = app.lease_pids()
    if pids:
        victim = rng.choice(pids)
        killed.append(victim)
        os.kill(victim, signal.SIGKILL)


def run_under_kills(app, producer, rng, *, every_s, kills_max, timeout_s):
    """Start both, kill a lease process now and then, and stop once everything was delivered."""
    killed = []
    app.start()
    app.until(lambda: app.of("lease_claimed"))
    producer.start()
    next_kill = time.monotonic() + every_s

    def is_done():
        nonlocal next_kill
        if time.monotonic() >= next_kill and len(killed) < kills_max:
            kill_one(app, rng, killed)
            next_kill += every_s
        return producer.is_done and len(app.ledger.delivered) >= producer.total_put

    app.until(is_done, timeout_s)
    # A process whose death is seen during the drain has left work undone: the stop then gives 75.
    app.until(lambda: set(killed) <= {ended["process"] for ended in app.of("process_exited")})
    assert app.stop() == 0
    return killed


def reported(verdict, killed):
    print(f"{len(killed)} kills; {verdict}; cap {CAP}")
    return verdict


def test_lease_processes_killed_while_shards_split_and_merge_lose_nothing(
    embedded_aws, application, producer
):
    seed = seed_of(1)
    stream = embedded_aws.stream(shards=4)
    app = application(stream)
    source = producer(
        stream,
        20_000,
        seed=seed,
        rate=4000,
        reshards=[(6_000, "split", 0), (12_000, "merge", 2)],
    )

    killed = run_under_kills(
        app, source, random.Random(seed), every_s=1.0, kills_max=3, timeout_s=45
    )

    verdict = reported(judge(source.put, app.ledger.read(), killed=killed, cap=CAP), killed)
    assert verdict.faults == []
    assert verdict.records == 20_000
    assert len(source.put) == 7
    assert len(killed) == 3


def test_emitted_rows_stand_exactly_once_in_the_files_after_kills(
    embedded_aws, application, producer, tmp_path
):
    seed = seed_of(2)
    stream = embedded_aws.stream(shards=2)
    app = application(stream, output={"path": str(tmp_path / "out")}, options={"emits": True})
    source = producer(stream, 9_000, seed=seed, rate=3000, reshards=[(4_000, "split", 1)])

    killed = run_under_kills(
        app, source, random.Random(seed), every_s=0.6, kills_max=4, timeout_s=45
    )

    verdict = reported(judge(source.put, app.ledger.read(), killed=killed, cap=CAP), killed)
    assert verdict.faults == []
    assert len(killed) == 4
    for shard, put in source.put.items():
        lines = [
            line
            for path in (tmp_path / "out").glob(f"*{shard}*.jsonl")
            for line in path.read_text().splitlines()
        ]
        rows = [json.loads(line) for line in lines]
        assert [row["sequence_number"] for row in rows] == [number for number, _, _ in put], shard
    written = sum(len(path.read_text().splitlines()) for path in (tmp_path / "out").glob("*.jsonl"))
    assert written == 9_000
