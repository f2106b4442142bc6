"""Counts per key over real managers and lease processes: with a kill, a move to another manager, a
split and a merge, every key has counted each of its records once. Single records at the same time
count so too, with calls that raise in between."""

import json
import os
import signal
from collections import Counter

import msgspec
import pytest

from kclrun.state.keyed import LiveEntries, State
from tests.processes.ledger_rig.states import kept_entries, kept_values

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

# Each record carries its number among those of its key.
PROCESSOR = """
import asyncio, json, random
from kclrun import RecordProcessor

class Tasks(RecordProcessor):
    def initialize(self, context):
        self.failed = set()

    async def process_record(self, record, context):
        count = context.counter("n").add(record)
        await asyncio.sleep(random.random() / 50)
        if count % 7 == 0 and record.position not in self.failed:
            self.failed.add(record.position)
            context.counter("n").add(record, 1000)
            raise ValueError("as it is in the test")
        number = json.loads(record.data)["n"]
        context.emit({"key": record.partition_key, "number": number, "count": count})

class Batches(RecordProcessor):
    def initialize(self, context):
        self.context, self.counts = context, context.counter("n")

    def process_records(self, batch, checkpointer):
        for record in batch:
            number = json.loads(record.data)["n"]
            count = self.counts.add(record)
            self.context.emit({"key": record.partition_key, "number": number, "count": count})
"""
TOTAL = 5000


def emitted(folder):
    return [
        json.loads(line)
        for path in folder.rglob("*.jsonl")
        if not path.name.startswith(".")
        for line in path.read_text().splitlines()
    ]


def counts_of(folder, table, stream, rows):
    kept = kept_values(folder, table, stream, rows)
    return {key: msgspec.msgpack.decode(of["n"]) for key, of in kept.items()}


@pytest.mark.parametrize("kind", ["Batches", pytest.param("Tasks", marks=pytest.mark.slow)])
def test_every_key_has_counted_each_of_its_records_once(
    embedded_aws, application, producer, tmp_path, kind
):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "counting.py").write_text(PROCESSOR)
    rows_folder, state_folder = tmp_path / "rows", tmp_path / "kept"
    settings = {
        "processor": f"counting:{kind}",
        **({"concurrency": {"records": 16}} if kind == "Tasks" else {}),
        "on_error": {"backoff": "20ms"},
        "path": str(tmp_path / "code"),
        # Both machines are this one: a copy is used by one process at a time.
        "state": {"store": str(state_folder), "local": str(tmp_path / "local"), "memory": "64MiB"},
        "output": {"path": str(rows_folder), "roll": {"every": "1s"}},
        "leases": {"failover": "4s"},
    }
    stream = embedded_aws.stream(shards=2)
    first = application(stream, machine="a", **settings)
    second = application(stream, machine="b", **settings)
    source = producer(
        stream, TOTAL, seed=77, rate=500, reshards=[(1500, "split", 0), (3500, "merge", 0)]
    )
    first.start()
    first.until(lambda: len(first.of("lease_claimed")) >= 2)
    source.start()

    def with_state():
        rows = embedded_aws.rows(first.table).values()
        return [row for row in rows if "-" in row.get("stateVersion", "")]

    first.until(lambda: len(with_state()) >= 2)
    os.kill(first.lease_pids()[0], signal.SIGKILL)
    first.until(lambda: first.of("process_exited"))
    second.start()
    second.until(lambda: second.of("lease_claimed"))
    assert first.stop() == 0
    source.join()
    second.until(lambda: len(emitted(rows_folder)) >= TOTAL)
    assert second.stop() == 0

    # No two records of one key have the same count, and none is missing: the state was never
    # behind the checkpoint, nor ahead of it.
    rows = emitted(rows_folder)
    assert len(rows) == TOTAL
    assert [row for row in rows if row["count"] != row["number"] + 1] == []
    per_key = Counter(row["key"] for row in rows)
    kept = counts_of(state_folder, first.table, stream, embedded_aws.rows(first.table))
    assert kept == per_key
    verified = second.cli("state", "verify", "--config", str(second.config))
    assert verified.returncode == 0, verified.stderr
    shown = second.cli("state", "show", "--json", "--config", str(second.config))
    by_shard = [json.loads(line) for line in shown.stdout.splitlines()]
    open_shards = [each for each in by_shard if each["checkpoint"] != "SHARD_END"]
    assert sum(each["keys"] for each in open_shards) == len(per_key)

    for path in state_folder.rglob("*.state"):
        path.write_bytes(path.read_bytes()[:-1])
    copies = list((tmp_path / "local").rglob("state.db"))
    assert copies, "the copies stay for the next process"
    damaged = second.cli("state", "verify", "--config", str(second.config))
    assert damaged.returncode == 1
    assert "is damaged (its checksum differs)" in damaged.stderr


# What each record adds is flushed by the clock, and counted in windows of its arrival.
TIMED = """
import asyncio, operator, random
from kclrun import RecordProcessor
from kclrun.windows import Tumbling, Windows

class Timed(RecordProcessor):
    def initialize(self, context):
        self.context, self.counts = context, context.counter("n")
        self.windows = Windows(context, "w", Tumbling(1.0), int, operator.add)

    def process_records(self, batch, checkpointer):
        for record in batch:
            if self.counts.add(record) == 1:
                at = record.approximate_arrival_timestamp + 0.7
                self.context.set_timer(record, at, "flush", clock="wall")
            if not self.windows.add(record, 1):
                self.context.emit({"key": record.partition_key, "windowed": 1, "late": True})
            self.context.emit({"key": record.partition_key, "records": 1})

    def on_timer(self, timer, checkpointer):
        for window in self.windows.closed(timer):
            self.context.emit({"key": window.key, "windowed": window.value})
        if timer.name == "flush":
            self.context.emit({"key": timer.key, "flushed": self.counts[timer.key]})
            self.counts[timer.key] = 0

class TimedTasks(Timed):
    process_records = RecordProcessor.process_records

    async def process_record(self, record, context):
        if context.counter("n").add(record) == 1:
            at = record.approximate_arrival_timestamp + 0.7
            context.set_timer(record, at, "flush", clock="wall")
        await asyncio.sleep(random.random() / 50)
        if not self.windows.add(record, 1, context):
            context.emit({"key": record.partition_key, "windowed": 1, "late": True})
        context.emit({"key": record.partition_key, "records": 1})
        if random.random() < 0.02:
            raise ValueError("as it is in the test")
"""


def sums(rows, column):
    found = Counter()
    for row in rows:
        found[row["key"]] += row.get(column, 0)
    return +found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "idle"), [("Timed", {}), ("TimedTasks", {"idle": "2s"})])
def test_what_timers_emit_is_there_once_with_kills_a_move_a_split_and_a_merge(
    embedded_aws, application, producer, tmp_path, kind, idle
):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "timed.py").write_text(TIMED)
    rows_folder, state_folder = tmp_path / "rows", tmp_path / "kept"
    settings = {
        "processor": f"timed:{kind}",
        **({"concurrency": {"records": 16}} if kind == "TimedTasks" else {}),
        "on_error": {"backoff": "20ms"},
        "path": str(tmp_path / "code"),
        "state": {"store": str(state_folder)},
        "watermark": {"lateness": "1s", **idle},
        "output": {"path": str(rows_folder), "roll": {"every": "1s"}},
        "checkpoint": {"every": "1s"},
        "leases": {"failover": "4s"},
    }
    stream = embedded_aws.stream(shards=2)
    first = application(stream, machine="a", **settings)
    second = application(stream, machine="b", **settings)
    source = producer(
        stream, TOTAL, seed=78, rate=500, reshards=[(1500, "split", 0), (3500, "merge", 0)]
    )

    def flushed():
        return [row for row in emitted(rows_folder) if "flushed" in row]

    def kill_one(machine):
        rounds, exits = len(flushed()), len(machine.of("process_exited"))
        # On a slow machine all records were put and flushed before.
        machine.until(lambda: len(flushed()) > rounds or source.is_done)
        os.kill(machine.lease_pids()[0], signal.SIGKILL)
        machine.until(lambda: len(machine.of("process_exited")) > exits)

    first.start()
    first.until(lambda: len(first.of("lease_claimed")) >= 2)
    source.start()
    for _ in range(2):
        kill_one(first)
    second.start()
    second.until(lambda: second.of("lease_claimed"))
    assert first.stop() == 0
    kill_one(second)
    source.join()
    # No record comes any more: the clock alone brings the last ones.
    second.until(lambda: sums(emitted(rows_folder), "flushed").total() >= TOTAL)
    if idle:
        second.until(lambda: sums(emitted(rows_folder), "windowed").total() >= TOTAL)
    assert second.stop() == 0

    rows = emitted(rows_folder)
    per_key = sums(rows, "records")
    assert per_key.total() == TOTAL
    assert sums(rows, "flushed") == per_key
    # The last windows are open, unless they close on an idle shard: nothing comes to close them.
    kept, timers = windows_of(state_folder, first.table, stream, embedded_aws.rows(first.table))
    assert sums(rows, "windowed") + kept == per_key
    assert bool(kept) == (not idle)
    shown = second.cli("state", "show", "--json", "--config", str(second.config))
    by_shard = [json.loads(line) for line in shown.stdout.splitlines()]
    open_shards = [each for each in by_shard if each["checkpoint"] != "SHARD_END"]
    assert sum(each["timers"] for each in open_shards) == timers
    assert bool(timers) == (not idle)


def windows_of(folder, table, stream, rows):
    """The open windows of the open shards, summed up by key, and how many timers are pending."""
    kept, timers = Counter(), 0
    for entries in kept_entries(folder, table, stream, rows):
        live = LiveEntries(entries, lambda *_: None, None, 2**30)
        timers += len(live.reserved)
        for key in State(live):
            open_windows = msgspec.msgpack.decode(live.values_of(key).get("w", b"\x90"))
            kept[key] += sum(value for _, _, value in open_windows)
    return +kept, timers


LARGE = """
from kclrun import RecordProcessor

class Large(RecordProcessor):
    def initialize(self, context):
        self.context = context

    def process_records(self, batch, checkpointer):
        for record in batch:
            self.context.state[record]["text"] = "x" * 50_000
            self.context.counter("n").add(record)
"""


@pytest.mark.slow
def test_the_state_of_a_lease_is_copied_here_while_its_owner_still_works(
    embedded_aws, application, producer, tmp_path
):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "large.py").write_text(LARGE)
    stream = embedded_aws.stream(shards=2)
    settings = {
        "processor": "large:Large",
        "path": str(tmp_path / "code"),
        "state": {"store": str(tmp_path / "kept"), "memory": "64MiB"},
        "leases": {"failover": "4s"},
    }

    def machine(name):
        state = {**settings["state"], "local": str(tmp_path / f"local-{name}")}
        return application(stream, machine=name, **{**settings, "state": state})

    first, second = machine("a"), machine("b")
    source = producer(stream, 600, seed=3, rate=100)
    first.start()
    first.until(lambda: len(first.of("lease_claimed")) == 2)
    source.start()

    def shards_with_state():
        rows = embedded_aws.rows(first.table).values()
        return [row for row in rows if "-" in row.get("stateVersion", "")]

    first.until(lambda: len(shards_with_state()) == 2)
    second.start()
    second.until(lambda: second.of("lease_claimed"))
    [copied] = second.of("state_prefetched")
    [claimed] = second.of("lease_claimed")
    assert copied["shard"] == claimed["shard"]
    assert copied["ts"] < claimed["ts"]
    source.join()

    def counted():
        rows = embedded_aws.rows(first.table)
        return counts_of(tmp_path / "kept", first.table, stream, rows)

    second.until(lambda: sum(counted().values()) == 600)
    copies = list((tmp_path / "local-b").rglob("state.db"))
    assert len(copies) == 1, "the lease process goes on with the copy"
    assert second.stop() == 0
    assert first.stop() == 0
