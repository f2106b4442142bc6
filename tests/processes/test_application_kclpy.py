"""Applications of amazon_kclpy under kclrun: their table, their checkpoints, their scripts as they
are; real processes, on the embedded AWS."""

import itertools
from pathlib import Path

import pytest

from kclrun.codec.aggregator import build_aggregate
from kclrun.model.lease import OFFERED
from kclrun.testing import run_processor
from processors.flights import DelayByCarrier, demo_records
from tests.processes.kclpy_rig.java_table import WORKER, JavaTable
from tests.processes.kclpy_rig.java_worker import JavaWorker
from tests.processes.kclpy_rig.notes import Notes

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

SCRIPTS = Path(__file__).parent / "kclpy_rig" / "scripts"
FIRST, SECOND = "shardId-000000000000", "shardId-000000000001"
LEFT, RIGHT = "shardId-000000000002", "shardId-000000000003"
FLIGHTS = 2000
# What the Java KCL 2.x reads of a row, by type; the rest of ours it leaves alone.
JAVA_TYPES = {
    "leaseKey": "S",
    "leaseCounter": "N",
    "ownerSwitchesSinceCheckpoint": "N",
    "checkpoint": "S",
    "checkpointSubSequenceNumber": "N",
    "startingHashKey": "S",
    "endingHashKey": "S",
}


class Stream:
    """Puts into chosen shards, plain or aggregated."""

    def __init__(self, aws, name):
        self.kinesis = aws.kinesis
        self.name = name

    def put(self, shard_id, *texts):
        """One record a text; their sequence numbers."""
        return [self._put(shard_id, text.encode()) for text in texts]

    def put_aggregate(self, shard_id, *texts):
        """All texts in one KPL aggregate; its sequence number."""
        return self._put(shard_id, build_aggregate((text, text.encode(), None) for text in texts))

    def split(self, shard_id):
        hash_range = self.shard(shard_id)["HashKeyRange"]
        first, last = int(hash_range["StartingHashKey"]), int(hash_range["EndingHashKey"])
        self.kinesis.split_shard(
            StreamName=self.name,
            ShardToSplit=shard_id,
            NewStartingHashKey=str((first + last) // 2 + 1),
        )
        self.kinesis.get_waiter("stream_exists").wait(
            StreamName=self.name, WaiterConfig={"Delay": 1, "MaxAttempts": 20}
        )

    def shard(self, shard_id):
        shards = self.kinesis.list_shards(StreamName=self.name)["Shards"]
        return next(shard for shard in shards if shard["ShardId"] == shard_id)

    def _put(self, shard_id, data):
        put = self.kinesis.put_record(
            StreamName=self.name,
            PartitionKey="any",
            Data=data,
            ExplicitHashKey=self.shard(shard_id)["HashKeyRange"]["StartingHashKey"],
        )
        assert put["ShardId"] == shard_id
        return put["SequenceNumber"]


@pytest.fixture
def stream(embedded_aws):
    return Stream(embedded_aws, embedded_aws.stream(shards=2))


@pytest.fixture
def table(embedded_aws, stream):
    return JavaTable(embedded_aws.dynamodb, embedded_aws.kinesis, f"app-{stream.name}", stream.name)


@pytest.fixture
def java_worker(embedded_aws, table, stream):
    worker = JavaWorker(embedded_aws.dynamodb, f"app-{stream.name}", WORKER, every_s=0.5)
    yield worker
    worker.die()


@pytest.fixture
def notes(tmp_path):
    return Notes(tmp_path / "notes")


@pytest.fixture
def prepared(application, stream, notes):
    """Makes the application of a script, not started."""

    def prepare(script, *arguments, machine="a", failover="2s", **settings):
        return application(
            stream.name,
            machine=machine,
            processor=f"kclpy:{script}",
            path=str(SCRIPTS),
            options={"arguments": [str(notes.path), *arguments]},
            leases={"failover": failover},
            checkpoint={"every": "manual", "uncheckpointed_max": 10_000_000},
            **settings,
        )

    return prepare


@pytest.fixture
def consumer(prepared):
    """Starts a script as the processor of one manager."""
    return lambda script, *arguments, **settings: prepared(script, *arguments, **settings).start()


def position(table, shard_id):
    item = table.item(shard_id)
    return item["checkpoint"]["S"], int(item["checkpointSubSequenceNumber"]["N"])


@pytest.mark.slow
def test_the_checkpoints_of_the_java_worker_go_on_over_all_three_interfaces(
    embedded_aws, stream, consumer, notes
):
    stream.put(FIRST, "done before")
    aggregate = stream.put_aggregate(SECOND, "a0", "a1", "a2", "a3", "a4")
    stream.put(SECOND, "p0")
    stream.split(FIRST)
    stream.put(LEFT, "x0", "x1")
    numbers = stream.put(RIGHT, "y0", "y1", "y2")
    table = JavaTable(
        embedded_aws.dynamodb, embedded_aws.kinesis, f"app-{stream.name}", stream.name
    )
    table.put(FIRST, "SHARD_END", children=(LEFT, RIGHT))
    table.put(SECOND, aggregate, 2, counter=5210)
    table.put(LEFT, "TRIM_HORIZON", owner=None)
    table.put(RIGHT, numbers[0])

    # Interface 3, its checkpoint once an hour: only the drain saves what it did.
    first = consumer("consumer_v3.py", "3600")
    notes.until(
        lambda seen: (
            [seen.delivered(each) for each in (SECOND, LEFT, RIGHT)]
            == [["a3", "a4", "p0"], ["x0", "x1"], ["y1", "y2"]]
        ),
        first.last_words,
    )
    begun = {each["shard"]: each["at"] for each in notes.of("initialize")}
    assert first.stop() == 0
    assert begun == {SECOND: [aggregate, 2], LEFT: ["TRIM_HORIZON", 0], RIGHT: [numbers[0], 0]}
    assert position(table, RIGHT) == (numbers[2], 0)
    assert {each["shard"] for each in notes.of("shutdown_requested")} == {SECOND, LEFT, RIGHT}

    # Interface 2 goes on behind it, until its machine dies.
    last = stream.put_aggregate(SECOND, "b0", "b1", "b2")
    (newest,) = stream.put(LEFT, "x2")
    second = consumer("consumer_v2.py", machine="b", fetch={"batch_max": 2})
    notes.until(
        lambda seen: [position(table, SECOND), position(table, LEFT)] == [(last, 2), (newest, 0)],
        second.last_words,
    )
    second.lose_power()

    # Interface 1 takes over once the leases have expired.
    stream.put(SECOND, "p1")
    stream.put(LEFT, "x3")
    stream.put(RIGHT, "y3")
    third = consumer("consumer_v1.py", machine="c")
    notes.until(
        lambda seen: (
            [seen.delivered(each) for each in (SECOND, LEFT, RIGHT)]
            == [
                ["a3", "a4", "p0", "b0", "b1", "b2", "p1"],
                ["x0", "x1", "x2", "x3"],
                ["y1", "y2", "y3"],
            ]
        ),
        third.last_words,
    )
    assert third.stop() == 0
    assert notes.delivered(FIRST) == []
    for shard_id in (SECOND, LEFT, RIGHT):
        item = table.item(shard_id)
        assert {name: next(iter(item[name])) for name in JAVA_TYPES} == JAVA_TYPES
        # Offered where the dead machine still counts as one that may take it, else released.
        assert item.get("leaseOwner") in (None, {"S": OFFERED})
    assert table.item(LEFT)["parentShardId"] == {"SS": [FIRST]}
    assert int(table.item(SECOND)["leaseCounter"]["N"]) > 5210


def test_the_sample_consumer_goes_on_with_the_flights_and_counts_each_once(
    stream, table, consumer, notes
):
    put = {FIRST: [], SECOND: []}
    flights = [line.decode() for _, line in itertools.islice(demo_records(), FLIGHTS)]
    for number, start in enumerate(range(0, FLIGHTS, 10)):
        shard_id, some = (FIRST, SECOND)[number % 2], flights[start : start + 10]
        put[shard_id].append((stream.put_aggregate(shard_id, *some), some))
    # The Java worker was at the fifth flight of an aggregate of the first shard.
    at, half_done = put[FIRST][20]
    table.put(FIRST, at, 4)
    table.put(SECOND, "TRIM_HORIZON", owner=None)
    expected = {
        FIRST: half_done[5:] + [each for _, some in put[FIRST][21:] for each in some],
        SECOND: [each for _, some in put[SECOND] for each in some],
    }

    app = consumer("consumer_v3.py", "0.2", fetch={"batch_max": 7})
    notes.until(lambda seen: len(seen.of("process_records")) > 20, app.last_words)
    assert app.stop() == 0
    app.start()
    notes.until(
        lambda seen: all(len(seen.delivered(each)) >= len(expected[each]) for each in expected),
        app.last_words,
    )
    assert app.stop() == 0

    delivered = {shard_id: notes.delivered(shard_id) for shard_id in expected}
    assert delivered == expected
    counted = run_processor(DelayByCarrier, [line for each in delivered.values() for line in each])
    assert sum(row["flights"] for row in counted.rows) == FLIGHTS - 20 * 10 - 5
    assert len({row["carrier"] for row in counted.rows}) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "reported"),
    [
        ("consumer_v3.py", ("0",), ("shard_ended", None)),
        ("consumer_v2.py", (), ("shutdown", "TERMINATE")),
        ("consumer_v1.py", (), ("shutdown", "TERMINATE")),
    ],
)
def test_a_shard_ends_with_the_processors_own_checkpoint_and_its_children_begin(
    stream, table, consumer, notes, script, arguments, reported
):
    table.put(FIRST, "TRIM_HORIZON", owner=None)
    table.put(SECOND, "TRIM_HORIZON", owner=None)
    app = consumer(script, *arguments)
    stream.put(FIRST, "before")
    notes.until(lambda seen: seen.delivered(FIRST) == ["before"], app.last_words)

    stream.split(FIRST)
    stream.put(LEFT, "left")
    stream.put(RIGHT, "right")

    notes.until(
        lambda seen: seen.delivered(LEFT) == ["left"] and seen.delivered(RIGHT) == ["right"],
        app.last_words,
    )
    assert [(each["shard"], each.get("reason")) for each in notes.of(reported[0])] == [
        (FIRST, reported[1])
    ]
    assert app.stop() == 0
    assert position(table, FIRST) == ("SHARD_END", 0)
    assert set(table.item(FIRST)["childShardIds"]["SS"]) == {LEFT, RIGHT}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "reported"),
    [
        ("consumer_v3.py", ("0",), {"call": "lease_lost"}),
        ("consumer_v2.py", (), {"call": "shutdown", "reason": "ZOMBIE"}),
    ],
)
def test_a_lease_that_a_java_worker_steals_is_reported_as_lost(
    stream, table, consumer, notes, script, arguments, reported
):
    table.put(FIRST, "TRIM_HORIZON", owner=None)
    table.put(SECOND, "TRIM_HORIZON", owner=None)
    app = consumer(script, *arguments)
    stream.put(FIRST, "one")
    notes.until(lambda seen: seen.delivered(FIRST) == ["one"], app.last_words)

    table.steal(FIRST)

    notes.until(
        lambda seen: any(reported.items() <= each.items() for each in seen.calls), app.last_words
    )
    assert [each["shard"] for each in notes.of(reported["call"])] == [FIRST]


@pytest.mark.slow
def test_a_table_of_the_kcl_3_is_refused_until_its_mode_is_removed_and_then_goes_on(
    stream, table, prepared, notes
):
    first, _ = stream.put(FIRST, "one", "two")
    table.put(FIRST, first)
    table.put(SECOND, "TRIM_HORIZON")
    table.run_by_kcl_3()
    app = prepared("consumer_v3.py", "0")

    refused = app.cli("check", "--config", "app.yaml")
    assert refused.returncode == 78
    assert "belongs to a KCL 3 fleet in its own mode (CLIENT_VERSION_3X)" in refused.stderr

    table.forget_the_mode()
    assert app.cli("check", "--config", "app.yaml").returncode == 0
    app.start()
    notes.until(lambda seen: seen.delivered(FIRST) == ["two"], app.last_words)
    assert app.stop() == 0
    assert table.item("Leader")["entityType"] == {"S": "LEADER"}


@pytest.mark.long
@pytest.mark.parametrize("outbox", [False, True])
def test_a_run_with_state_is_refused_beside_a_java_worker_that_lives(
    stream, table, java_worker, application, tmp_path, outbox
):
    at = stream.put(FIRST, "zero")
    table.put(FIRST, at[0], counter=10)
    table.put(SECOND, "TRIM_HORIZON", counter=20, owner=None)
    java_worker.start({FIRST: 10})
    settings = {
        "processor": "kclrun.samples.hello:Hello",
        "state": {"store": str(tmp_path / "kept"), "begin": "empty", "outbox": outbox},
        "output": {"path": str(tmp_path / "rows"), "roll": {}},
        "leases": {"failover": "3s"},
    }
    app = application(stream.name, **settings)
    refused = app.cli("run", "--config", "app.yaml")
    assert (refused.returncode, java_worker.holds) == (78, [FIRST]), refused.stderr
    assert f"1 leases of app-{stream.name} are renewed by Java workers, {WORKER}" in refused.stderr
    assert "stateVersion" not in table.item(FIRST)

    # Its leases are taken once it is gone.
    java_worker.die()
    app.start()
    app.until(lambda: len(app.of("lease_claimed")) == 2)
    assert app.stop() == 0


@pytest.mark.slow
def test_a_fleet_moves_machine_by_machine_beside_a_java_worker_that_lives(
    stream, table, java_worker, consumer, notes
):
    at = {shard_id: stream.put(shard_id, "zero") for shard_id in (FIRST, SECOND)}
    table.put(FIRST, at[FIRST][0], counter=10)
    table.put(SECOND, at[SECOND][0], counter=20)
    java_worker.start({FIRST: 10, SECOND: 20})

    # The first machine with kclrun takes its share, and leaves the rest where it is.
    app = consumer("consumer_v3.py", "0", failover="5s")
    notes.until(lambda seen: len(seen.of("initialize")) >= 1, app.last_words)
    (kept,) = java_worker.holds
    moved = SECOND if kept == FIRST else FIRST
    stream.put(moved, "one")
    notes.until(lambda seen: seen.delivered(moved) == ["one"], app.last_words)
    assert not java_worker.checkpoint(moved, at[moved][0])
    (one,) = stream.put(kept, "one")
    assert java_worker.checkpoint(kept, one)
    assert notes.delivered(kept) == []

    # The last daemon is stopped; its lease expires, and goes on behind its checkpoint.
    java_worker.die()
    stream.put(kept, "two")
    notes.until(lambda seen: seen.delivered(kept) == ["two"], app.last_words)
    assert app.stop() == 0
    assert notes.delivered(moved) == ["one"]
