"""With an outbox, three real outputs and the state have the rows of one execution of a processor
that draws lots, although its process is killed around each of its writes, again and again (K12)."""

import json
import sqlite3
from collections import Counter

import msgspec
import pytest

from kclrun.state.chain import read_chain
from kclrun.state.stores.state_files import StateFiles
from tests.processes.ledger_rig.application import Application
from tests.processes.ledger_rig.aws import MOTO, Aws
from tests.processes.ledger_rig.producing import Producer
from tests.support.clients import client_of

# More than are put: the producer stops once enough processes died.
TOTAL = 50_000
BUCKET = "rows-of-the-outbox"
# Each commit of an output may be the last act of its process, or the last but the commit.
PROCESSOR = """
import json, os, pathlib, random, signal
from kclrun import RecordProcessor
from kclrun.outputs.commits import Commits

class Lots(RecordProcessor):
    def initialize(self, context):
        self.context = context

    def process_records(self, batch, checkpointer):
        for record in batch:
            number, lot = json.loads(record.data)["n"], random.randrange(2**40)
            row = {"key": record.partition_key, "number": number, "lot": lot}
            for name in random.choice([["output"], ["b", "c"], ["output", "b", "c"], []]):
                self.context.emit(row, to=name)
            values = self.context.state[record]
            values["lots"] = [*values.get("lots", []), lot]

CURE = pathlib.Path(__file__).with_name("cure")
commit = Commits.commit

def die():
    if random.random() < 0.08 and not CURE.exists():
        os.kill(os.getpid(), signal.SIGKILL)

def deadly(self, lane):
    die()
    commit(self, lane)
    die()

Commits.commit = deadly
"""
SCHEMA = "key string, number long, lot long"


@pytest.fixture
def with_s3():
    """An embedded AWS with all services, and a bucket."""
    aws = Aws(dynamodb=MOTO)
    client = client_of("s3", aws.embedded.dynamodb_endpoint)
    client.create_bucket(Bucket=BUCKET)
    yield aws, client
    client.close()
    aws.close()


def rows_in_sql(database):
    with sqlite3.connect(database) as connection:
        found = connection.execute("SELECT key, number, lot FROM lots").fetchall()
    connection.close()
    return found


def rows_in_s3(client):
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="rows/")
    keys = [found["Key"] for page in pages for found in page.get("Contents", ())]
    lines = [
        line
        for key in keys
        if key.endswith(".jsonl")
        for line in client.get_object(Bucket=BUCKET, Key=key)["Body"].read().splitlines()
    ]
    return [tuple(json.loads(line).values()) for line in lines]


def rows_in_files(folder):
    return [
        tuple(json.loads(line).values())
        for path in folder.rglob("*.jsonl")
        if not path.name.startswith(".")
        for line in path.read_text().splitlines()
    ]


def lots_by_key(folder, table, stream, rows):
    store = StateFiles(folder, f"{table}/{stream}")
    found = {}
    for shard, row in rows.items():
        entries, _, _ = read_chain(
            row["stateVersion"], shard, lambda name, of=shard: store.read(of, name)
        )
        found |= {key: msgspec.msgpack.decode(of["lots"]) for key, of in entries.items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("first", ["sql", "s3", "path"])
def test_three_outputs_and_the_state_agree_after_kills_around_each_write(with_s3, tmp_path, first):
    aws, client = with_s3
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "lots.py").write_text(PROCESSOR)
    places = {
        "sql": {
            "sql": f"sqlite:///{tmp_path}/rows.db",
            "table": "lots",
            "create": True,
            "schema": SCHEMA,
        },
        "s3": {"s3": f"s3://{BUCKET}/rows", "roll": {"every": "1s"}},
        "path": {"path": str(tmp_path / "rows"), "roll": {"every": "1s"}},
    }
    others = [name for name in places if name != first]
    stream = aws.stream(shards=2)
    settings = {
        "processor": "lots:Lots",
        "path": str(tmp_path / "code"),
        "state": {"store": str(tmp_path / "kept"), "outbox": True},
        "output": places[first],
        "outputs": dict(zip("bc", (places[name] for name in others), strict=True)),
        "aws": {"endpoints": {"s3": aws.embedded.dynamodb_endpoint}},
        "leases": {"failover": "4s"},
    }
    app = Application(tmp_path, aws, stream, **settings)
    source = Producer(aws.kinesis, stream, TOTAL, seed=9, rate=150)

    def lots():
        rows = aws.rows(app.table)
        if len(rows) < 2 or not all("-" in row.get("stateVersion", "") for row in rows.values()):
            return {}
        return lots_by_key(tmp_path / "kept", app.table, stream, rows)

    try:
        app.start()
        source.start()
        app.until(lambda: len(app.of("process_exited")) >= 6)
        (tmp_path / "code" / "cure").touch()
        source.stop()
        total = sum(map(len, source.put.values()))
        app.until(lambda: sum(map(len, lots().values())) >= total)
        assert app.stop() == 0
    finally:
        source.stop()
        app.close()
    kept = lots()
    assert sum(map(len, kept.values())) == total
    found = {
        "sql": rows_in_sql(tmp_path / "rows.db"),
        "s3": rows_in_s3(client),
        "path": rows_in_files(tmp_path / "rows"),
    }
    for name, rows in found.items():
        assert rows, name
        assert len(set(rows)) == len(rows), f"{name} has a row twice"
        strange = [row for row in rows if kept[row[0]][row[1]] != row[2]]
        assert not strange, f"{name} has rows of an execution that the state is not of"
    b, c = (found[name] for name in others)
    assert sorted(b) == sorted(c), "what b has of a record, c has"


# A process dies once, when the first output has decided the commit of the shard's end.
ENDING = """
import json, os, pathlib, random, signal
from kclrun import RecordProcessor
from kclrun.model.sequence import SHARD_END
from kclrun.outputs.commits import Commits

DIED = pathlib.Path(__file__).with_name("died")

class Ends(RecordProcessor):
    def initialize(self, context):
        self.context = context

    def process_records(self, batch, checkpointer):
        for record in batch:
            self.emit(record.partition_key, json.loads(record.data)["n"])

    def emit(self, key, number):
        lot = random.randrange(2**40)
        for name in ("output", "b"):
            self.context.emit({"key": key, "number": number, "lot": lot}, to=name)
        values = self.context.state[key]
        values["lots"] = [*values.get("lots", []), lot]

    def shard_ended(self, checkpointer):
        for key in list(self.context.state):
            self.emit(key, -1)
        checkpointer.checkpoint()

commit = Commits.commit

def deadly(self, lane):
    commit(self, lane)
    if lane.name == "output" and lane.committed.position == SHARD_END and not DIED.exists():
        DIED.touch()
        os.kill(os.getpid(), signal.SIGKILL)

Commits.commit = deadly
"""


@pytest.mark.long
@pytest.mark.seconds
@pytest.mark.parametrize("first", ["sql", "path"])
def test_an_end_of_a_shard_that_the_first_output_decided_is_finished_by_the_next_process(
    tmp_path, first
):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "ending.py").write_text(ENDING)
    database = f"sqlite:///{tmp_path}/rows.db"
    places = {
        "sql": {"sql": database, "table": "lots", "create": True, "schema": SCHEMA},
        "path": {"path": str(tmp_path / "rows"), "roll": {"every": "1s"}},
    }
    (other,) = places.keys() - {first}
    aws = Aws()
    stream = aws.stream(shards=1)
    settings = {
        "processor": "ending:Ends",
        "path": str(tmp_path / "code"),
        "state": {"store": str(tmp_path / "kept"), "outbox": True},
        "output": places[first],
        "outputs": {"b": places[other]},
        "leases": {"failover": "2s"},
    }
    app = Application(tmp_path, aws, stream, **settings)
    source = Producer(aws.kinesis, stream, 200, seed=9, rate=400, reshards=[(100, "split", 0)])

    def numbers():
        return [row for row in rows_in_sql(tmp_path / "rows.db") if row[1] >= 0]

    try:
        app.start()
        source.start()
        app.until((tmp_path / "code" / "died").exists)
        app.until(lambda: source.is_done and len(numbers()) == 200)
        assert app.stop() == 0
        rows = aws.rows(app.table)
    finally:
        source.stop()
        app.close()
        aws.close()
    (parent,) = (shard for shard, row in rows.items() if row["checkpoint"] == "SHARD_END")
    at_end = lots_by_key(tmp_path / "kept", app.table, stream, {parent: rows.pop(parent)})
    kept = lots_by_key(tmp_path / "kept", app.table, stream, rows)
    assert all(kept[key][: len(lots)] == lots for key, lots in at_end.items())
    found = {"sql": rows_in_sql(tmp_path / "rows.db"), "path": rows_in_files(tmp_path / "rows")}
    assert sorted(found["sql"]) == sorted(found["path"])
    assert sum(number == -1 for _, number, _ in found["sql"]) == len(at_end)
    assert Counter((key, lot) for key, _, lot in found["sql"]) == Counter(
        (key, lot) for key, lots in kept.items() for lot in lots
    )
