"""What the servers noted, read as it grows: takes, asks, give-aways, first reads, and counts."""

import json
import re
from collections import Counter
from dataclasses import dataclass

from kclrun.aws.expressions import bind
from kclrun.protocol.conditions import WRITES
from tests.support.growing_files import lines_behind
from tests.support.lease_writes import CHANGES

# A claim is a renewal to the table: both are "renew" here.
_TEXTS = ((bind(change).expression, WRITES[type(change)].name) for change in CHANGES)
_NAMES = {(texts.update or None, texts.condition): name for texts, name in _TEXTS}
# Another version of kclrun beside this one says the same with other attributes: what each of its
# writes does to the owner.
_OF_OTHER_VERSIONS = (
    (re.compile(r"leaseOwner = :offered\b"), "offer by another version"),
    (re.compile(r"leaseOwner = :me\b"), "take by another version"),
    (re.compile(r"REMOVE\b.*\bleaseOwner\b"), "release by another version"),
    (re.compile(r"handoffTo = :me\b"), "ask by another version"),
)


def _kind_of(update, condition):
    if named := _NAMES.get((update, condition)):
        return named
    seen = (kind for pattern, kind in _OF_OTHER_VERSIONS if pattern.search(update))
    return next(seen, "unknown update")


@dataclass(frozen=True)
class Note:
    """One request. `at` is monotonic; `kind` what it was; `owner` who sent it, where it says so."""

    at: float
    kind: str
    key: str | None = None
    owner: str | None = None
    is_applied: bool = True

    @property
    def is_take(self):
        return self.is_applied and self.kind.startswith("take")

    @property
    def is_ask(self):
        return self.is_applied and self.kind.startswith("ask")

    @property
    def is_offer(self):
        return self.is_applied and "offer" in self.kind.split()

    @property
    def is_given(self):
        return self.is_offer or (self.is_applied and "release" in self.kind.split())


class Notes:
    """The notes about one table and its stream."""

    def __init__(self, path, table, stream):
        self.all = []
        self._path = path
        self._table = table
        self._stream = stream
        self._offset = 0

    def read(self):
        """Take in what was appended since; returns itself."""
        lines, self._offset = lines_behind(self._path, self._offset)
        for line in lines:
            self._take(json.loads(line))
        return self

    def _take(self, noted):
        if noted["what"] == "dynamodb" and noted["table"] == self._table:
            kind = noted["operation"]
            if kind == "UpdateItem":
                kind = _kind_of(noted["update"], noted["condition"])
            is_applied = noted["status"] == 200
            self.all.append(Note(noted["at"], kind, noted["key"], noted["me"], is_applied))
        elif noted["what"] == "first_read" and noted["stream"] == self._stream:
            self.all.append(Note(noted["at"], "first read", noted["shard"]))

    def since(self, instant):
        return [note for note in self.read().all if note.at >= instant]

    def moves_since(self, instant):
        """Everything that moves a lease, or is about to."""
        return [n for n in self.since(instant) if n.is_take or n.is_ask or n.is_given]

    def requests_between(self, begin, end):
        """Requests to DynamoDB by kind."""
        noted = (note for note in self.read().all if begin <= note.at < end)
        return Counter(note.kind for note in noted if note.kind != "first read")
