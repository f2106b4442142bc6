"""The ledger read back, and judged against what was put.

Each incarnation of a lease process must have been given one unbroken run of its shard's records,
from the first one above its checkpoint. Then nothing is lost if each successor's checkpoint is
within what was delivered before, order is that of the shard, and each duplicate has one culprit.
"""

import json
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.growing_files import lines_behind

_SENTINELS_OF_A_BEGINNING = {"TRIM_HORIZON": -1, "LATEST": -1, "AT_TIMESTAMP": -1}


@dataclass(frozen=True)
class Batch:
    """What one call of `process_records` was given."""

    at: float
    pid: int
    manager: str
    shard: str
    token: int
    records: tuple[tuple[str, str, int], ...]


class LedgerFile:
    """The ledger, read as it grows. `batches` and `began` are in the order of time."""

    def __init__(self, path: Path):
        self.path = path
        self.path.touch()
        self.batches = []
        self.marks = []
        self.torn = 0
        self.delivered = set()
        self._offset = 0

    def read(self):
        """Take in what was appended since; returns itself."""
        lines, self._offset = lines_behind(self.path, self._offset)
        for line in lines:
            self._take(line)
        return self

    def _take(self, line):
        crc, _, body = line.partition(b" ")
        if len(crc) != 8 or int(crc, 16) != zlib.crc32(body):
            self.torn += 1
            return
        entry = json.loads(body)
        if entry["what"] != "batch":
            self.marks.append(entry)
            return
        records = tuple((number, key, n) for number, key, n in entry["records"])
        place = (entry["at"], entry["pid"], entry["manager"], entry["shard"], entry["token"])
        self.batches.append(Batch(*place, records))
        self.delivered.update(number for number, _, _ in records)

    @property
    def pids(self):
        return {mark["pid"] for mark in self.marks}

    def pid_of(self, shard):
        """The process that began last on a shard."""
        return next(
            (
                mark["pid"]
                for mark in reversed(self.marks)
                if mark["shard"] == shard and mark["what"] == "began"
            ),
            None,
        )


@dataclass
class Verdict:
    """`faults` is empty if all that was promised was kept. `duplicates_of` counts by the pid that
    had the record before."""

    records: int = 0
    delivered: int = 0
    duplicates: int = 0
    duplicates_after_one_kill_max: int = 0
    incarnations: int = 0
    torn: int = 0
    duplicates_of: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __str__(self):
        return (
            f"{self.records} records, {self.delivered} deliveries by {self.incarnations}"
            f" processes, {self.duplicates} duplicates, at most"
            f" {self.duplicates_after_one_kill_max} of them in one life, {self.torn} torn lines"
        )


def judge(put, ledger, *, killed=frozenset(), cap=0, expired=frozenset()) -> Verdict:
    """Compare. `killed` are the pids that died by force: only their records may come again.
    `expired` are the records that were gone before anybody could read them."""
    verdict = Verdict(torn=ledger.torn)
    verdict.records = sum(len(records) for records in put.values())
    lives = _lives(ledger)
    verdict.incarnations = len(lives)
    by_shard = defaultdict(list)
    for (shard, token, pid), life in lives.items():
        by_shard[shard].append((token, pid, life))
    for shard, several in sorted(by_shard.items()):
        _judge_shard(verdict, shard, put.get(shard, []), several, killed, cap)
    for shard in sorted(put):
        missing = sum(
            number not in ledger.delivered and number not in expired for number, _, _ in put[shard]
        )
        if missing:
            verdict.faults.append(f"{shard}: {missing} records were never delivered [I1]")
    _judge_keys(verdict, put, ledger, expired)
    return verdict


def _lives(ledger):
    """(shard, token, pid) to the checkpoint it began from and what it was given."""
    lives = {}
    for mark in ledger.marks:
        if mark["what"] == "began":
            life = (mark["shard"], mark["token"], mark["pid"])
            lives[life] = (mark["position"], [])
    for batch in ledger.batches:
        lives[batch.shard, batch.token, batch.pid][1].extend(batch.records)
    return lives


def _judge_shard(verdict, shard, put, lives, killed, cap):
    places = {number: place for place, (number, _, _) in enumerate(put)}
    given_by = {}
    former_start = -1
    whole = 0  # so many from the beginning on were delivered
    for token, pid, (position, given) in sorted(lives, key=lambda life: life[0]):
        name = f"{shard}, process {pid}, token {token}"
        start = _place_after(position, places)
        if start is None:
            verdict.faults.append(f"{name}: begins at {position}, where no record was put")
            continue
        if start < former_start:
            verdict.faults.append(f"{name}: the checkpoint moved back [I2]")
        former_start = start
        while whole < len(put) and put[whole][0] in given_by:
            whole += 1
        if whole < start:
            verdict.faults.append(f"{name}: begins above what was delivered before [I1]")
        if tuple(given) != tuple(put[start : start + len(given)]):
            verdict.faults.append(f"{name}: was not given the shard's records in order [I6]")
        again = [number for number, _, _ in given if number in given_by]
        verdict.delivered += len(given)
        verdict.duplicates += len(again)
        verdict.duplicates_of.update(given_by[number] for number in again)
        verdict.duplicates_after_one_kill_max = max(
            verdict.duplicates_after_one_kill_max, len(again)
        )
        if len(again) > cap:
            verdict.faults.append(f"{name}: {len(again)} duplicates; the cap is {cap} [I7]")
        innocent = {given_by[number] for number in again} - set(killed)
        if innocent:
            verdict.faults.append(
                f"{name}: was given again what {sorted(innocent)} had, and nobody killed those [I8]"
            )
        given_by.update((number, pid) for number, _, _ in given)


def _place_after(position, places):
    """Where in what was put a process that begins at `position` must begin."""
    if position in _SENTINELS_OF_A_BEGINNING:
        return 0
    return places[position] + 1 if position in places else None


def _judge_keys(verdict, put, ledger, expired):
    """No record of a key before its predecessor, over all shards a key lived in [I3, I6]."""
    following = defaultdict(int)
    gone = {(key, n) for records in put.values() for number, key, n in records if number in expired}
    for batch in ledger.batches:
        for _, key, n in batch.records:
            while n > following[key] and (key, following[key]) in gone:
                following[key] += 1
            if n > following[key]:
                verdict.faults.append(
                    f"{batch.shard}: {key} number {n} came before number {following[key]} [I3]"
                )
                return
            following[key] = max(following[key], n + 1)
