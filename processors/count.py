"""Counting records and bytes by key: the smallest processor that is safe to replay.

Rule: each batch emits its partial counts, and `merge` adds them up.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from kclrun import Checkpointer, Context, Record, RecordBatch, RecordProcessor

__all__ = ["KEYS_MAX", "ByKey", "Count", "merge"]

# At some 200 bytes a key, 2 MB: so much may a batch hold before it emits its counts.
KEYS_MAX: Final = 10_000


class Count(NamedTuple):
    records: int = 0
    bytes: int = 0


class ByKey(RecordProcessor):
    """Counts records and bytes per partition key, or per a field of JSON data.

    Options: `field`, the name of a field of JSON objects (default: the partition key);
    `keys_max`, the number of different keys after which a batch emits its counts (default 10,000).
    Rows: `{key, records, bytes}`; `key` is null for data without the field.

    >>> from kclrun.testing import run_processor
    >>> run_processor(ByKey, [("a", "xx"), ("b", ""), ("a", "y")]).rows
    [{'key': 'a', 'records': 2, 'bytes': 3}, {'key': 'b', 'records': 1, 'bytes': 0}]
    """

    def initialize(self, context: Context) -> None:
        self._context = context
        self._field: str | None = context.options.get("field")
        self._keys_max = int(context.options.get("keys_max", KEYS_MAX))
        if self._keys_max < 1:
            raise ValueError(f"options.keys_max: at least 1, got {self._keys_max}")

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        counts: defaultdict[str | None, Count] = defaultdict(Count)
        for record in batch:
            key = self._key(record)
            if len(counts) >= self._keys_max and key not in counts:
                self._emit(counts)
            former = counts[key]
            counts[key] = Count(former.records + 1, former.bytes + len(record.data))
        self._emit(counts)

    def _emit(self, counts: dict[str | None, Count]) -> None:
        for key, count in counts.items():
            self._context.emit({"key": key, **count._asdict()})
        counts.clear()

    def _key(self, record: Record) -> str | None:
        if self._field is None:
            return record.partition_key
        try:
            value = json.loads(record.data)[self._field]
        except (ValueError, TypeError, LookupError, RecursionError):
            return None
        if value is None:
            return None
        text = value if isinstance(value, str) else json.dumps(value)
        # JSON may have half of a surrogate pair, which a row cannot hold.
        return text.encode(errors="backslashreplace").decode()


def merge(rows: Iterable[Mapping[str, Any]]) -> dict[str | None, Count]:
    """The partial counts of all shards added up, per key."""
    totals: defaultdict[str | None, Count] = defaultdict(Count)
    for row in rows:
        former = totals[row["key"]]
        totals[row["key"]] = Count(former.records + row["records"], former.bytes + row["bytes"])
    return dict(totals)
