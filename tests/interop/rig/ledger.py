"""The common ledger read back and judged: what was put, what each worker was given, and in which
order. Lines of all workers stand in the order of time (one write each, with O_APPEND)."""

import json
from collections import Counter
from dataclasses import dataclass, field

from tests.support.growing_files import lines_behind


class Ledger:
    """The file as it grows. `given` are (who, shard, (sequence, sub), record), in order."""

    def __init__(self, path):
        self.path = path
        path.touch()
        self.given = []
        self.marks = []
        self.records = set()
        self._offset = 0

    def read(self):
        """Take in what was appended since; returns itself."""
        lines, self._offset = lines_behind(self.path, self._offset)
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # Torn by SIGKILL.
            if entry["what"] == "batch":
                for sequence, sub, record in entry["records"]:
                    place = (int(sequence), sub)
                    self.given.append((entry["who"], entry["shard"], place, record))
                    self.records.add(record)
            else:
                self.marks.append(entry)
        return self

    def given_to(self, who, since=0):
        """What a worker was given, from the `since`th delivery of all on."""
        return [each for each in self.given[since:] if each[0] == who]

    def of(self, what, who=None):
        return [mark for mark in self.marks if mark["what"] == what and who in (None, mark["who"])]


@dataclass
class Verdict:
    """`faults` is empty if nothing was lost, invented, out of order or before its parents."""

    put: int
    duplicates: int = 0
    duplicates_by: Counter = field(default_factory=Counter)
    faults: list = field(default_factory=list)

    def __str__(self):
        pairs = ", ".join(f"{a}->{b} {count}" for (a, b), count in self.duplicates_by.items())
        return f"{self.put} put and got, {self.duplicates} twice" + (f" ({pairs})" if pairs else "")


def judge(put, parents, ledger):
    """`put`: record to (shard, (sequence, sub)); `parents`: shard to those of its parents."""
    verdict = Verdict(len(put))
    if missing := put.keys() - ledger.records:
        verdict.faults.append(f"{len(missing)} records were given to no worker: {_some(missing)}")
    if invented := ledger.records - put.keys():
        verdict.faults.append(f"{len(invented)} records were never put: {_some(invented)}")
    left = Counter(shard for shard, _ in put.values())
    newest, had_by = {}, {}
    for who, shard, place, record in ledger.given:
        if put.get(record) != (shard, place):
            verdict.faults.append(f"{record} was put elsewhere than at {shard}, {place}")
        elif record in had_by:
            verdict.duplicates += 1
            verdict.duplicates_by[had_by[record], who] += 1
        else:
            had_by[record] = who
            left[shard] -= 1
            if place <= newest.get(shard, (-1, -1)):
                verdict.faults.append(f"{record} of {shard} came after a later one")
            newest[shard] = place
            if any(left[parent] for parent in parents.get(shard, ())):
                verdict.faults.append(f"{record} of {shard} came before all of its parents")
    del verdict.faults[20:]
    return verdict


def _some(records):
    return ", ".join(sorted(records)[:5])
