"""Counts per key over real managers and lease processes: with a kill, a move to another manager, a
split and a merge, every key has counted each of its records once."""

import json
import os
import signal
from collections import Counter

import msgspec
import pytest

from kclrun.sinks.state_files import StateFiles
from kclrun.state.chain import read_chain

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

# Each record carries its number among those of its key.
PROCESSOR = """
import json
from kclrun import RecordProcessor

class Count(RecordProcessor):
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
    """What the versions hold that the open shards' rows name."""
    store = StateFiles(folder, f"{table}/{stream}")
    counts = {}
    for shard, row in rows.items():
        if row["checkpoint"] != "SHARD_END":
            entries, _, _ = read_chain(
                row["stateVersion"], shard, lambda name, of=shard: store.read(of, name)
            )
            assert not counts.keys() & entries.keys()
            counts |= {key: msgspec.msgpack.decode(of["n"]) for key, of in entries.items()}
    return counts


@pytest.mark.slow
def test_every_key_has_counted_each_of_its_records_once(
    embedded_aws, application, producer, tmp_path
):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "counting.py").write_text(PROCESSOR)
    rows_folder, state_folder = tmp_path / "rows", tmp_path / "kept"
    settings = {
        "processor": "counting:Count",
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
