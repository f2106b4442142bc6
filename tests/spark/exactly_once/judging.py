"""What the query read, attempt by attempt, against what the producer put."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

_COLUMNS = ["shardId", "sequenceNumber", "partitionKey", "data"]
_COUNTED = ["shardId", "row"]


@dataclass
class Verdict:
    """`faults` is empty if every record came exactly once, in order, and replays were identical."""

    records: int = 0
    batches: int = 0
    replayed: int = 0
    shards: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self):
        return (
            f"{self.records} records of {self.shards} shards in {self.batches} batches,"
            f" {self.replayed} of them read more than once"
        )


def complete_attempts(out: Path, columns=_COLUMNS):
    """Batch id to its complete attempts, each a list of rows in the order of the partitions."""
    found = {}
    for folder in sorted(out.glob("batch-*")):
        attempts = sorted(path.parent for path in folder.glob("attempt-*/COUNTED"))
        if attempts:
            found[int(folder.name.removeprefix("batch-"))] = [
                _rows(each, columns) for each in attempts
            ]
    return found


def _rows(attempt: Path, names):
    rows = []
    for part in sorted(attempt.glob("part-*.parquet")):
        columns = pq.ParquetFile(part).read(columns=names).to_pydict()
        rows += zip(*(columns[name] for name in names), strict=True)
    assert len(rows) == int((attempt / "COUNTED").read_text()), f"two actions disagree: {attempt}"
    return rows


def judge(put, out: Path, parents) -> Verdict:
    """`put`: shard to its (sequence number, key, n); `parents`: shard to its parents' ids."""
    attempts = complete_attempts(out)
    verdict = Verdict(batches=len(attempts))
    for batch_id, several in attempts.items():
        verdict.replayed += len(several) > 1
        if any(sorted(rows) != sorted(several[0]) for rows in several[1:]):
            verdict.faults.append(f"batch {batch_id} was not the same when read again")
    batches = {batch_id: several[-1] for batch_id, several in sorted(attempts.items())}
    _judge_records(verdict, put, batches)
    _judge_keys(verdict, batches)
    _judge_lineage(verdict, batches, parents)
    return verdict


def judge_counts(put, out: Path) -> Verdict:
    """`put` as for `judge`; `out` has the rows of `counting.Counts`: the count of a record, which
    is state, is one more than its number among those of its key."""
    attempts = complete_attempts(out, _COUNTED)
    verdict = Verdict(batches=len(attempts))
    numbers = defaultdict(list)
    shards = set()
    for batch_id, several in sorted(attempts.items()):
        verdict.replayed += len(several) > 1
        if any(sorted(rows) != sorted(several[0]) for rows in several[1:]):
            verdict.faults.append(f"batch {batch_id} was not the same when read again")
        for shard, text in several[-1]:
            row = json.loads(text)
            shards.add(shard)
            numbers[row["key"]].append(row["n"])
            if row["seen"] != row["n"] + 1:
                verdict.faults.append(f"batch {batch_id}: {row}")
    verdict.shards, verdict.records = len(shards), sum(map(len, numbers.values()))
    expected = defaultdict(list)
    for records in put.values():
        for _, key, n in records:
            expected[key].append(n)
    if {key: sorted(of) for key, of in numbers.items()} != {
        key: sorted(of) for key, of in expected.items()
    }:
        verdict.faults.append("records are missing, or twice")
    return verdict


def _judge_records(verdict, put, batches):
    read = defaultdict(list)
    for rows in batches.values():
        for shard, number, _, _ in rows:
            read[shard].append(number)
    verdict.records = sum(map(len, read.values()))
    verdict.shards = len(read)
    for shard in sorted({*put, *read}):
        expected = [number for number, _, _ in put.get(shard, [])]
        if read[shard] == expected:
            continue
        missing = len(set(expected) - set(read[shard]))
        twice = len(read[shard]) - len(set(read[shard]))
        verdict.faults.append(
            f"{shard}: {missing} records lost, {twice} read twice, or out of order"
        )


def _judge_keys(verdict, batches):
    counts = defaultdict(int)
    for batch_id, rows in batches.items():
        for _, _, key, data in rows:
            if json.loads(data)["n"] != counts[key]:
                verdict.faults.append(f"batch {batch_id}: {key} is out of order")
                return
            counts[key] += 1


def _judge_lineage(verdict, batches, parents):
    seen = defaultdict(list)
    for batch_id, rows in batches.items():
        for shard in {row[0] for row in rows}:
            seen[shard].append(batch_id)
    for shard, of in parents.items():
        for parent in of:
            if seen[shard] and seen[parent] and min(seen[shard]) <= max(seen[parent]):
                verdict.faults.append(f"{shard} was read before its parent {parent} was done")
