"""Keyed state of a processor on a real Spark and the embedded Kinesis [K21]: counts equal the fold
of the records, whatever was tried again, started again or resharded meanwhile."""

import json
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest

from kclrun.config.processing import StateSettings
from kclrun.config.schema import OnErrorSettings
from kclrun.config.units import Duration
from tests.patience import HUNG_S
from tests.processes.ledger_rig.application import Application
from tests.spark.processor_rig import ProcessorRig

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

    def frame(self, *, source=None, **application):
        source = {"shardListInterval": "1s", **(source or {"startingOffsets": "earliest"})}
        state = StateSettings(store=str(self.folder / "state"))
        name = f"app-{self.stream.name}"
        return super().frame(source=source, state=state, application=name, **application)


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


def is_ended(exported):
    return exported["checkpoint"] == "SHARD_END"
