"""Keyed state of a processor on a real Spark and the embedded Kinesis [K21]: counts equal the fold
of the records, whatever was tried again, started again or resharded meanwhile."""

import itertools
import json
import threading
from collections import Counter, defaultdict
from types import SimpleNamespace

import msgspec
import pytest

from kclrun.config.processing import StateSettings
from kclrun.config.schema import AwsSettings, OnErrorSettings
from kclrun.config.units import Duration
from kclrun.spark.keyed.names import decode_claim, is_claim
from kclrun.state.chain import read_chain
from tests.patience import HUNG_S
from tests.processes.ledger_rig.application import Application
from tests.spark.processor_rig import ProcessorRig
from tests.spark.s3_door import Door
from tests.spark.source_rig import until
from tests.support.clients import client_of

pytestmark = pytest.mark.slow

COUNTS = """
from pathlib import Path
from kclrun import RecordProcessor

class Counts(RecordProcessor):
    def initialize(self, context):
        self.context, self.seen = context, context.counter("seen")

    def process_records(self, batch, checkpointer):
        for record in batch:
            number = self.seen.add(record)
            self.context.emit({"key": record.partition_key, "number": number})
            self.fail_once(int(record.data.decode().rstrip(".")))

    def fail_once(self, at):
        marker = self.context.options.get("fail_at", {}).get(str(at))
        if marker and not Path(marker).exists():
            Path(marker).touch()
            raise ValueError("after its change of the state")

    def shard_ended(self, checkpointer):
        for key in self.context.state:
            self.context.emit({"ended": key, "number": self.seen[key]})
"""


class Rig(ProcessorRig):
    """Queries that count the records of a stream by key."""

    code, name = COUNTS, "Counts"

    def __init__(self, spark, stream, folder):
        super().__init__(spark, stream, folder)
        self.store, self.aws = str(folder / "state"), AwsSettings()

    def frame(self, *, source=None, **application):
        source = {"shardListInterval": "1s", **(source or {"startingOffsets": "earliest"})}
        name, state = f"app-{self.stream.name}", StateSettings(store=self.store)
        return super().frame(
            source=source, state=state, aws=self.aws, application=name, **application
        )

    def forget_last_batch(self):
        """As if neither the query nor its sink had committed it. Returns: its number."""
        commits = self.folder / "checkpoint" / "commits"
        last = max(int(each.name) for each in commits.iterdir() if each.name.isdigit())
        for folder in (commits, self.folder / "rows" / "_spark_metadata"):
            for name in (f"{last}", f".{last}.crc"):
                (folder / name).unlink(missing_ok=True)
        return last


class Fleet:
    """A manager that runs the same processor over the same stream, with the same store."""

    def __init__(self, rig, embedded):
        self.application = Application(
            rig.folder,
            SimpleNamespace(embedded=embedded),
            rig.stream.name,
            processor=f"{rig.module}:Counts",
            path=str(rig.folder),
            output={"path": "rows"},
            state={"store": str(rig.folder / "state")},
            leases={"failover": "2s"},
        )
        self.folder = self.application.folder / "rows"

    def rows(self):
        found = []
        for file in sorted(self.folder.rglob("*.jsonl")):
            whole, _, _ = file.read_text().rpartition("\n")  # it may write its last line now
            found += map(json.loads, whole.splitlines())
        return found

    def counted(self):
        return sum("key" in row for row in self.rows())

    def until_counted(self, count):
        self.application.until(lambda: self.counted() >= count)

    def cli(self, *arguments):
        done = self.application.cli(*arguments, "--config", str(self.application.config))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def fleet_of(embedded):
    """Makes the fleet of a rig."""
    made = []

    def make(rig):
        made.append(Fleet(rig, embedded))
        return made[-1]

    yield make
    for each in made:
        each.application.close()


def assert_is_fold(rows, put):
    """Each key counts from one to the number of its records: no record is missing or twice."""
    numbers = defaultdict(list)
    for row in rows:
        if "key" in row:
            numbers[row["key"]].append(row["number"])
    expected = {key: [*range(1, count + 1)] for key, count in Counter(k for k, _ in put).items()}
    assert {key: sorted(of) for key, of in numbers.items()} == expected


def test_state_is_the_fold_over_batches_failed_tasks_restarts_splits_and_merges(rig_of, tmp_path):
    rig = rig_of(1)
    stream = rig.stream
    query = rig.start()
    for count in (30, 60):  # two batches: the second reads what the first has claimed
        stream.put(30)
        rig.until_committed(query, count)
    (shard,) = stream.open_shards()
    stream.split(shard)
    stream.put(40)
    rig.until_committed(query, 100)
    query.stop()

    stream.put(40)
    marker = tmp_path / "failed"
    # A call that raises leaves no change: it is given again, and counts once.
    again = OnErrorSettings(retries=2, backoff=Duration(0))
    query = rig.start(options={"fail_at": {"120": str(marker)}}, on_error=again)
    rig.until_committed(query, 40)
    assert marker.exists()
    stream.merge(*stream.open_shards())
    stream.put(40)
    rig.until_committed(query, 80)
    query.stop()

    rows = rig.emitted()
    assert_is_fold(rows, stream.put_records)
    ended = [row for row in rows if "ended" in row]
    # Every key, at the end of the first shard and of one of its children: none is in both of these.
    assert Counter(row["ended"] for row in ended) == dict.fromkeys(
        (f"key-{number}" for number in range(7)), 2
    )


def test_state_travels_from_a_fleet_to_spark_and_back_with_the_positions(rig_of, fleet_of):
    rig = rig_of(2)
    stream, fleet = rig.stream, fleet_of(rig)
    stream.put(40)
    fleet.application.start()
    fleet.until_counted(40)
    stream.split(stream.open_shards()[0])
    stream.put(40)
    fleet.until_counted(80)
    assert fleet.application.stop(timeout_s=HUNG_S) == 0

    # While the fleet is stopped the stream goes on, so that Spark reads across a merge.
    stream.merge(*stream.open_shards()[1:])
    stream.put(60)
    query = rig.start(source={"startingLeases": fleet.application.table})
    rig.until_committed(query, 60)
    stream.split(stream.open_shards()[1])
    stream.put(60)
    rig.until_committed(query, 120)
    query.stop()

    stream.put(60)
    migrate = ("migrate", "spark", str(rig.folder / "checkpoint"))
    assert "state" in fleet.cli(*migrate)
    fleet.cli(*migrate, "--yes")
    assert "Nothing to do" in fleet.cli(*migrate, "--yes")
    fleet.cli("state", "verify")
    fleet.application.start()
    fleet.until_counted(140)
    assert fleet.application.stop(timeout_s=HUNG_S) == 0

    assert_is_fold(rig.emitted() + fleet.rows(), stream.put_records)
    kept = [json.loads(line) for line in fleet.cli("state", "export").splitlines()]
    open_ones = {each["key"]: each["values"]["seen"] for each in kept if not is_ended(each)}
    assert open_ones == Counter(key for key, _ in stream.put_records)


class InS3:
    """The state of a rig in a bucket of the embedded AWS, behind a `Door`."""

    def __init__(self, rig, endpoint):
        self.door = Door(endpoint)
        threading.Thread(target=self.door.serve_forever, daemon=True).start()
        self.client = client_of("s3", endpoint)
        self.bucket = rig.stream.name
        rig.store, rig.aws = (
            f"s3://{self.bucket}/kept",
            AwsSettings(endpoints={"s3": self.door.url}),
        )

    def close(self):
        self.door.shutdown()
        self.door.server_close()
        self.client.close()

    def counts(self):
        """What each claim says: (shard, position) -> run -> the count of each key."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        keys = [each["Key"] for page in pages for each in page["Contents"]]
        found = defaultdict(dict)
        for key in keys:
            folder, _, name = key.removesuffix(".state").rpartition("/")
            if is_claim(name):
                shard, (position, run) = folder.rpartition("/")[2], name.split(".")
                newest = decode_claim(name, self.read(key)).newest
                found[shard, position][run] = self.count_of(folder, shard, newest)
        return found

    def count_of(self, folder, shard, newest):
        if newest is None:
            return {}
        entries, _, _ = read_chain(newest, shard, lambda of: self.read(f"{folder}/{of}.state"))
        return {key: msgspec.msgpack.decode(of["seen"]) for key, of in entries.items()}

    def read(self, key):
        return self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()


@pytest.fixture
def in_s3(embedded):
    """Puts the state of a rig into S3."""
    made = []

    def make(rig):
        made.append(InS3(rig, embedded.endpoint))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_state_in_s3_is_the_fold_over_lost_answers_restarts_and_a_batch_that_comes_again(
    rig_of, in_s3
):
    rig = rig_of(2)
    stream, s3 = rig.stream, in_s3(rig)
    s3.client.create_bucket(Bucket=s3.bucket)
    query = rig.start()
    for count in (30, 60):
        stream.put(30)
        rig.until_committed(query, count)
    # Versions and claims arrive, and are put again: their names are taken by what is the same.
    s3.door.loses = True
    stream.put(30)
    rig.until_committed(query, 90)
    query.stop()
    assert s3.door.lost
    assert set(s3.door.lost) <= set(s3.door.taken)

    query = rig.start()
    stream.put(40)
    rig.until_committed(query, 40)
    query.stop()

    # The driver stopped before the last batch was committed: it comes again, in another run.
    last = rig.forget_last_batch()
    query = rig.start()
    stream.put(30)
    total = len(stream.put_records)
    until(lambda: len(rig.emitted()) == total, "every row is there", query)
    query.stop()

    assert_is_fold(rig.emitted(), stream.put_records)
    counts = s3.counts()
    again = [runs for runs in counts.values() if len(runs) > 1]
    assert again, f"batch {last} came again"
    for runs in again:
        first, *others = runs.values()
        assert others == [first] * len(others)
    ends = {}
    for (shard, _), runs in counts.items():
        ends[shard] = max([ends.get(shard, {}), *runs.values()], key=lambda of: sum(of.values()))
    assert dict(itertools.chain(*(each.items() for each in ends.values()))) == Counter(
        key for key, _ in stream.put_records
    )


@pytest.mark.parametrize(
    ("is_made", "denies", "words"),
    [
        (False, set(), "does not exist: create the bucket, or correct its name"),
        (True, {"PUT"}, "Allow s3:PutObject on"),
        (True, {"GET"}, "Allow s3:GetObject on"),
    ],
)
def test_a_bucket_that_is_missing_or_denied_ends_the_query_in_words(
    rig_of, in_s3, is_made, denies, words
):
    rig = rig_of(1)
    s3 = in_s3(rig)
    if is_made:
        s3.client.create_bucket(Bucket=s3.bucket)
    s3.door.denies = denies
    query = rig.start()
    rig.stream.put(10)

    until(lambda: query.exception() is not None, "the query has failed")
    assert words in str(query.exception())


def is_ended(exported):
    return exported["checkpoint"] == "SHARD_END"
