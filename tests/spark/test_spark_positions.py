"""An application moves from the fleet to Spark and back, over a stream that is resharded."""

import json
import signal
import threading
import uuid
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest
from pyspark.errors import StreamingQueryException

from kclrun.spark.positions import PositionKind, parse_position
from tests.patience import HUNG_S
from tests.processes.ledger_rig.application import Application
from tests.spark.source_rig import REGION, in_order_of_each_key

pytestmark = pytest.mark.slow

PROCESSOR = """
import json
import os
import time

from kclrun import RecordProcessor


class Writes(RecordProcessor):
    def initialize(self, context):
        self.options = context.options
        self.aggregated = 0
        self.file = os.open(self.options["written"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def process_records(self, batch, checkpointer):
        lines = [json.dumps([each.partition_key, each.data.decode()]) + "\\n" for each in batch]
        os.write(self.file, "".join(lines).encode())
        self.aggregated += sum(each.partition_key == "key-a" for each in batch)
        if os.path.exists(self.options["hold"]) and self.aggregated > 60:
            # The application is stopped here, and the second aggregate of fifty is begun.
            open(self.options["held"], "w").close()
            while os.path.exists(self.options["hold"]):
                time.sleep(0.05)
"""
# It divides no aggregate, so a stop comes in the middle of one.
BATCH_MAX = 7


class Fleet:
    """A kclrun manager on this stream, in processes of its own; what its processor has written."""

    def __init__(self, folder, embedded, stream):
        (folder / "writes.py").write_text(PROCESSOR)
        self.written = folder / "written"
        self.hold, self.held = folder / "hold", folder / "held"
        self.application = Application(
            folder,
            SimpleNamespace(embedded=embedded),
            stream.name,
            processor="writes:Writes",
            path=str(folder),
            options={
                "written": str(self.written),
                "hold": str(self.hold),
                "held": str(self.held),
            },
            fetch={"batch_max": BATCH_MAX},
            leases={"failover": "2s"},
        )

    @property
    def rows(self):
        if not self.written.exists():
            return []
        # The processor may be in the middle of its last line.
        whole, _, _ = self.written.read_text().rpartition("\n")
        pairs = (json.loads(line) for line in whole.splitlines())
        return [(key, data.encode()) for key, data in pairs]

    def run_until(self, count):
        """Run it until so many records were processed in all, then stop it in good order."""
        self.application.start()
        self.application.until(lambda: len(self.rows) >= count)
        assert self.application.stop(timeout_s=HUNG_S) == 0

    def run_until_held(self):
        """Run it until a batch ends within an aggregate, and stop it there in good order."""
        self.hold.touch()
        self.application.start()
        self.application.until(self.held.exists)
        self.application.process.send_signal(signal.SIGTERM)
        self.application.until(lambda: self.application.of("draining"))
        self.hold.unlink()
        assert self.application.process.wait(HUNG_S) == 0

    def cli(self, *arguments):
        done = self.application.cli(*arguments, "--config", str(self.application.config))
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def fleet_on(tmp_path, embedded):
    made = []

    def make(stream):
        made.append(Fleet(tmp_path, embedded, stream))
        return made[-1]

    yield make
    for each in made:
        each.application.close()


def dynamodb_of(embedded):
    return boto3.client("dynamodb", endpoint_url=embedded.dynamodb_endpoint, region_name=REGION)


def table_of(embedded, fleet):
    items = dynamodb_of(embedded).scan(TableName=fleet.application.table)["Items"]
    return {item["leaseKey"]["S"]: item for item in items}


def a_stop_at_batch(run, wanted):
    """The query ends before that batch is in the sink: planned, and not committed."""
    taken = run._take

    def take(frame, number):
        if number >= wanted:
            raise RuntimeError("stopped here")
        taken(frame, number)

    run._take = take
    query = run.start()
    with pytest.raises(StreamingQueryException, match="stopped here"):
        query.awaitTermination(HUNG_S)


def committed_positions(run):
    last = max(int(each.name) for each in Path(run.checkpoint, "commits").glob("[0-9]*"))
    text = Path(run.checkpoint, "offsets", str(last)).read_text().splitlines()[-1]
    return {
        shard_id: parse_position(place) for shard_id, place in json.loads(text)["shards"].items()
    }


class Producer:
    """Puts records all the while, so that the tip of a shard is never seen."""

    def __init__(self, stream):
        self._stream = stream
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()

    def _run(self):
        while not self._is_over.wait(0.05):
            self._stream.put(10)


def lease_table(embedded, **checkpoints):
    """A table as the KCL makes it, with a lease for each of these shards; its name."""
    name = f"leases-{uuid.uuid4().hex[:12]}"
    client = dynamodb_of(embedded)
    client.create_table(
        TableName=name,
        KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "leaseKey", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    for shard_id, (number, sub) in checkpoints.items():
        item = {
            "leaseKey": {"S": shard_id},
            "checkpoint": {"S": number},
            "checkpointSubSequenceNumber": {"N": str(sub)},
            "leaseCounter": {"N": "7"},
            "ownerSwitchesSinceCheckpoint": {"N": "0"},
        }
        client.put_item(TableName=name, Item=item)
    return name


def at_leases(run, table):
    del run.options["startingOffsets"]
    run.options["startingLeases"] = table
    return run


def test_a_query_begins_inside_an_aggregate_where_its_lease_stands(collected, stream, embedded):
    stream.put_aggregate(10)
    stream.put(5)
    (shard_id,) = stream.open_shards()
    token = stream.kinesis.get_shard_iterator(
        StreamName=stream.name, ShardId=shard_id, ShardIteratorType="TRIM_HORIZON"
    )["ShardIterator"]
    number = stream.kinesis.get_records(ShardIterator=token)["Records"][0]["SequenceNumber"]
    table = lease_table(embedded, **{shard_id: (number, 3)})
    run = at_leases(collected(stream), table)

    run.run_until(11)
    # From now on Spark's checkpoint alone counts.
    dynamodb_of(embedded).delete_table(TableName=table)
    stream.put(4)
    run.run_until(15)

    pairs = [(row.partitionKey, bytes(row.data)) for row in run.rows]
    assert in_order_of_each_key(pairs) == in_order_of_each_key(stream.put_records[4:])
    first = json.loads(Path(run.checkpoint, "offsets", "0").read_text().splitlines()[-1])
    assert first["from"] == {shard_id: f"{number}/3"}


def test_a_lease_table_that_is_not_there_is_reported_by_name(collected, stream):
    query = at_leases(collected(stream), "nobody").start()

    with pytest.raises(StreamingQueryException, match="there is no lease table nobody"):
        query.awaitTermination(HUNG_S)


def test_fleet_to_spark_to_fleet_loses_and_doubles_nothing_over_reshards(
    collected, stream_of, fleet_on, embedded
):
    stream = stream_of(2)
    fleet = fleet_on(stream)
    stream.put(40)
    for _ in range(6):
        stream.put_aggregate(50)
    stream.split(stream.open_shards()[0])
    stream.put(200)

    fleet.run_until_held()

    by_fleet = fleet.rows
    rows = table_of(embedded, fleet)
    subs = [int(each["checkpointSubSequenceNumber"]["N"]) for each in rows.values()]
    assert any(0 < sub < 49 for sub in subs), "no checkpoint inside an aggregate"
    assert len(by_fleet) < len(stream.put_records), "nothing is left for the query"

    stream.merge(*stream.open_shards()[:2])
    stream.put(60)
    run = at_leases(collected(stream, maxRecordsPerTrigger="100"), fleet.application.table)
    with Producer(stream):
        a_stop_at_batch(run, 5)
    by_spark = [(row.partitionKey, bytes(row.data)) for row in run.rows]
    positions = committed_positions(run)
    print(positions)
    assert any(each.kind is PositionKind.RECORD and each.is_before for each in positions.values())

    stream.split(stream.open_shards()[-1])
    stream.put(60)
    stream.put_aggregate(50)
    imported = ("migrate", "spark", run.checkpoint)
    plan = fleet.cli(*imported)
    assert "Nothing was changed" in plan
    assert table_of(embedded, fleet) == rows
    print(fleet.cli(*imported, "--yes"))

    fleet.run_until(len(stream.put_records) - len(by_spark))

    everything = by_fleet + by_spark + fleet.rows[len(by_fleet) :]
    assert Counter(everything) == Counter(stream.put_records)
    assert in_order_of_each_key(everything) == in_order_of_each_key(stream.put_records)
    assert "Nothing to do" in fleet.cli(*imported)
