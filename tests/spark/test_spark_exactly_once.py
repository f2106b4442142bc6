"""Rows in are rows out: drivers killed at random, tasks failing, shards splitting and merging."""

import os
import random
import time
import uuid

import pytest

from tests.processes.ledger_rig.aws import Aws
from tests.processes.ledger_rig.producing import Producer
from tests.spark.exactly_once.driving import Driver
from tests.spark.exactly_once.judging import judge

pytestmark = [pytest.mark.slow, pytest.mark.alone]

# A start of the JVM and the query takes 6 s on a quiet machine; busy ones have taken 40.
_START_MAX_S = 240


@pytest.fixture(scope="module")
def aws():
    one = Aws()
    yield one
    one.close()


def seed_of(default):
    seed = int(os.environ.get("KCLRUN_EXACTLY_ONCE_SEED", default))
    print(f"seed {seed}; replay with KCLRUN_EXACTLY_ONCE_SEED={seed}")
    return seed


def parents_of(aws, stream):
    shards = aws.kinesis.list_shards(StreamName=stream)["Shards"]
    return {
        shard["ShardId"]: [
            shard[name] for name in ("ParentShardId", "AdjacentParentShardId") if name in shard
        ]
        for shard in shards
    }


def until(condition, timeout_s, what):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
    return value


class Rig:
    """One stream, one checkpoint, and drivers over them, one after the other."""

    def __init__(self, aws, tmp_path, seed, **order):
        self.aws = aws
        self.out = tmp_path / "attempts"
        self.log = tmp_path / "driver.log"
        self.stream = aws.stream(4)
        self.runs = 0
        self.driver = None
        self._order = {
            "master": "local[2]",
            "stream": self.stream,
            "endpoint": aws.embedded.kinesis_endpoint,
            "out": str(self.out),
            "checkpoint": str(tmp_path / f"checkpoint-{uuid.uuid4().hex[:6]}"),
            "seed": seed,
        } | order

    def start(self, *, available_now=False, **more):
        order = self._order | {"run": self.runs, "available_now": available_now}
        self.runs += 1
        self.driver = Driver(order, self.log, **more)
        return self.driver

    def written(self):
        return sum(1 for _ in self.out.glob("batch-*/attempt-*/COUNTED"))

    def until_written(self, count):
        """Until so many attempts are complete, or a driver has died by itself: then its log."""

        def is_there():
            assert self.driver.is_running, self.log.read_text()[-4000:]
            return self.written() >= count

        until(is_there, _START_MAX_S, f"{count} batches written; {self.log}")

    def finish(self):
        """Read what is left with AvailableNow, which must end by itself."""
        code = self.start(available_now=True).wait(300)
        assert code == 0, self.log.read_text()[-4000:]


# What CI can spend; KCLRUN_EXACTLY_ONCE_KILLS=20 is the long form.
KILLS = int(os.environ.get("KCLRUN_EXACTLY_ONCE_KILLS", "4"))
RECORDS = 100_000
# What the producer may have put by each kill.
SHARE = RECORDS / (KILLS + 1)
RESHARDS = (
    (8_000, "split", 0),
    (16_000, "merge", 1),
    (30_000, "split", 0),
    (30_000, "split", 0),  # at once: a grandchild before anybody has read the child
    (50_000, "merge", 2),
    (70_000, "split", 3),
    (85_000, "merge", 0),
)


@pytest.mark.timeout(1500)
def test_drivers_killed_again_and_again_read_every_record_exactly_once(aws, tmp_path):
    seed = seed_of(20261)
    rng = random.Random(seed)
    rig = Rig(aws, tmp_path, seed)
    producer = Producer(
        aws.kinesis, rig.stream, RECORDS, seed=seed, rate=2_000, reshards=RESHARDS
    ).start()
    try:
        for kill in range(KILLS):
            before = rig.written()
            driver = rig.start()
            # However long drivers take to start, there is always something left to read for each.
            until(lambda: producer.total_put >= (kill + 0.5) * SHARE, 60, "records put")  # noqa: B023
            producer.pause()
            rig.until_written(before + 1)
            producer.resume()
            # A random moment: in a batch, between batches, between the offset log and the commit.
            time.sleep(rng.uniform(0.0, 2.0))
            driver.kill()
        producer.resume()
        producer.join(300)
        rig.finish()
    finally:
        producer.stop()
        rig.driver.kill()
    verdict = judge(producer.put, rig.out, parents_of(aws, rig.stream))
    print(f"{rig.runs} drivers; {verdict}")
    assert verdict.faults == []
    assert verdict.records == RECORDS
    assert verdict.replayed > 0


@pytest.mark.timeout(600)
def test_executors_killed_on_a_cluster_read_every_record_exactly_once(aws, tmp_path):
    seed = seed_of(20262)
    rig = Rig(aws, tmp_path, seed, master="local-cluster[2,1,1024]")
    # It goes on for as long as executors are killed, however long they take to come back.
    producer = Producer(
        aws.kinesis, rig.stream, 1_000_000, seed=seed, rate=500, reshards=((2_000, "split", 0),)
    ).start()
    killed = 0
    try:
        driver = rig.start()
        for _ in range(2):
            rig.until_written(rig.written() + 1)
            victim = until(driver.executors, _START_MAX_S, "an executor")[0]
            victim.kill()
            killed += 1
        rig.until_written(rig.written() + 1)
        producer.stop()
        driver.kill()
        rig.finish()
    finally:
        producer.stop()
        rig.driver.kill()
    verdict = judge(producer.put, rig.out, parents_of(aws, rig.stream))
    print(f"{killed} executors killed; {verdict}")
    assert verdict.faults == []
    assert verdict.records == producer.total_put
    assert verdict.shards == 6, "the split's children were read too"
