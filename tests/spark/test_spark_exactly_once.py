"""Rows in are rows out: drivers killed within a batch, tasks failing, shards split and merged."""

import os
import random
import time
import uuid

import pytest

from tests.patience import HUNG_S, TEST_S, until
from tests.processes.ledger_rig.aws import Aws
from tests.processes.ledger_rig.producing import Producer
from tests.seeds import seed_of
from tests.spark.exactly_once.driving import Driver
from tests.spark.exactly_once.judging import judge, judge_counts

pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture(scope="module")
def aws():
    one = Aws()
    yield one
    one.close()


def parents_of(aws, stream):
    shards = aws.kinesis.list_shards(StreamName=stream)["Shards"]
    return {
        shard["ShardId"]: [
            shard[name] for name in ("ParentShardId", "AdjacentParentShardId") if name in shard
        ]
        for shard in shards
    }


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
            "linger_s": 0.0,
        } | order
        self._folder = tmp_path

    def start(self, *, available_now=False, **more):
        order = self._order | {
            "run": self.runs,
            "available_now": available_now,
            "hold": str(self._folder / f"hold-{self.runs}"),
            "held": str(self._folder / f"held-{self.runs}"),
        }
        self.runs += 1
        self.driver = Driver(order, self.log, **more)
        return self.driver

    def written(self):
        return sum(1 for _ in self.out.glob("batch-*/attempt-*/COUNTED"))

    def until_written(self, count):
        """Until so many attempts are complete, from a query that has started."""
        self._until(self._has_started, "the query is started")
        self._until(lambda: self.written() >= count, f"{count} batches written")

    def _has_started(self):
        """Each driver says so once; a JVM and its executors take long enough by themselves."""
        return self.log.read_text(errors="replace").splitlines().count("started") == self.runs

    def hold_next_batch(self, moment):
        """The next batch to begin is never committed: it stops at this moment of it."""
        asked = self._folder / f"hold-{self.runs - 1}"
        # Whole or not there at all.
        (self._folder / "hold-new").write_text(moment)
        (self._folder / "hold-new").rename(asked)

    def until_held(self):
        self._until((self._folder / f"held-{self.runs - 1}").exists, "a batch is held")

    def _until(self, condition, what):
        """Until it holds, or the driver has died by itself: then its log."""

        def is_there():
            assert self.driver.is_running, self.log.read_text()[-4000:]
            return condition()

        until(is_there, why=lambda: f"{what}; {self.log}")

    def finish(self):
        """Read what is left with AvailableNow, which must end by itself."""
        # A whole query: half a minute on a quiet machine.
        code = self.start(available_now=True).wait(TEST_S)
        assert code == 0, self.log.read_text()[-4000:]


# These kills are the same every day. KCLRUN_EXACTLY_ONCE_KILLS=20 adds others, at random moments.
HELD_AT = ("written", "read")
KILLS = max(len(HELD_AT), int(os.environ.get("KCLRUN_EXACTLY_ONCE_KILLS", "0")))
# To each kill its share, and one to what is read after the last.
SHARE = 8_000
RECORDS = SHARE * (KILLS + 1)
RESHARDS = tuple(
    (int(part * RECORDS), how, index)
    for part, how, index in (
        (0.08, "split", 0),
        (0.16, "merge", 1),
        (0.30, "split", 0),
        (0.30, "split", 0),  # at once: a grandchild before anybody has read the child
        (0.50, "merge", 2),
        (0.70, "split", 3),
        (0.85, "merge", 0),
    )
)


BY_FAN_OUT = {"consumerMode": "fan-out", "consumerName": "exactly-once"}


@pytest.mark.timeout(3 * TEST_S + KILLS * HUNG_S)
@pytest.mark.parametrize(
    "source", [pytest.param({}, id="polling"), pytest.param(BY_FAN_OUT, id="fan-out")]
)
def test_drivers_killed_again_and_again_read_every_record_exactly_once(aws, tmp_path, source):
    rig, producer = killed_drivers(aws, tmp_path, source=source)
    verdict = judge(producer.put, rig.out, parents_of(aws, rig.stream))
    print(f"{rig.runs} drivers; {verdict}")
    assert verdict.faults == []
    assert verdict.records == RECORDS
    assert verdict.replayed > 0, "the batch that was held when it was written"


@pytest.mark.timeout(3 * TEST_S + KILLS * HUNG_S)
def test_counts_in_keyed_state_are_right_whichever_drivers_and_tasks_were_killed(aws, tmp_path):
    # Each batch is read twice by each driver, and some of its tasks fail once: a version is
    # written by several attempts, and the next batch reads one of them.
    rig, producer = killed_drivers(aws, tmp_path, state=str(tmp_path / "state"))
    verdict = judge_counts(producer.put, rig.out)
    print(f"{rig.runs} drivers; {verdict}")
    assert verdict.faults == []
    assert verdict.records == RECORDS
    assert verdict.replayed > 0, "the batch that was held when it was written"


def killed_drivers(aws, tmp_path, **order):
    """Drivers read what a producer puts into a stream that is resharded, and are killed."""
    seed = seed_of(20261)
    rng = random.Random(seed)
    linger_s = 0.4 if len(HELD_AT) < KILLS else 0.0
    rig = Rig(aws, tmp_path, seed, linger_s=linger_s, **order)
    pauses = [int((kill + 0.5) * SHARE) for kill in range(KILLS)]
    producer = Producer(
        aws.kinesis, rig.stream, RECORDS, seed=seed, rate=2_000, reshards=RESHARDS, pauses=pauses
    ).start()
    try:
        for kill in range(KILLS):
            # However long drivers take to start, there is always something left to read for each.
            until(lambda: producer.is_paused)
            before = rig.written()
            driver = rig.start()
            rig.until_written(before + 1)
            kill_within_a_batch(rig, driver, producer, kill, rng)
        producer.join(HUNG_S)
        rig.finish()
    finally:
        producer.stop()
        rig.driver.kill()
    return rig, producer


def kill_within_a_batch(rig, driver, producer, kill, rng):
    """Records and reshards go on; the batch that holds the first of them is never committed."""
    if kill < len(HELD_AT):
        rig.hold_next_batch(HELD_AT[kill])
        producer.resume()
        rig.until_held()
    else:
        producer.resume()
        # A random moment: in a batch, between batches, between the offset log and the commit.
        time.sleep(rng.uniform(0.0, 2.0))
    driver.kill()


@pytest.mark.timeout(3 * TEST_S)
def test_an_executor_killed_on_a_cluster_leaves_every_record_read_exactly_once(aws, tmp_path):
    seed = seed_of(20262)
    rig = Rig(aws, tmp_path, seed, master="local-cluster[2,1,1024]")
    # It goes on for as long as executors are killed, however long they take to come back.
    producer = Producer(
        aws.kinesis, rig.stream, 1_000_000, seed=seed, rate=500, reshards=((2_000, "split", 0),)
    ).start()
    try:
        driver = rig.start()
        rig.until_written(1)
        until(driver.executors)[0].kill()
        rig.until_written(rig.written() + 1)
        until(lambda: producer.total_put > 2_000)
        producer.stop()
        driver.kill()
        rig.finish()
    finally:
        producer.stop()
        rig.driver.kill()
    verdict = judge(producer.put, rig.out, parents_of(aws, rig.stream))
    print(verdict)
    assert verdict.faults == []
    assert verdict.records == producer.total_put
    assert verdict.shards == 6, "the split's children were read too"
