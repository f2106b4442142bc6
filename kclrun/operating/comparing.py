"""The comparison of the rows that two versions of a processor emitted over the same records. Pure.

Rows are matched by the cursor of their record, the output, and their number among the rows of that
record there. Must not know: where the rows are kept.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from kclrun.model.output import Cursor


class ComparedRow(msgspec.Struct, frozen=True):
    """A row as `outputs.emitted_rows.CursorRows` keeps it: `at` is the cursor of its record, `to`
    its output."""

    at: str
    ordinal: int
    to: str
    row: dict[str, Any]


class Difference(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows that differ: `a` or `b` is None where that version emitted none; `changed` names the
    fields that differ where both did."""

    shard: str
    at: str
    to: str
    ordinal: int
    a: dict[str, Any] | None = None
    b: dict[str, Any] | None = None
    changed: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        if self.b is None:
            return "only in A"
        return "only in B" if self.a is None else "changed"


class Comparison(msgspec.Struct):
    """The counts of a comparison; `equal` counts pairs of equal rows."""

    equal: int = 0
    only_a: int = 0
    only_b: int = 0
    changed: int = 0

    @property
    def is_same(self) -> bool:
        return not (self.only_a or self.only_b or self.changed)

    def take(self, difference: Difference) -> None:
        """Count one more difference."""
        if difference.b is None:
            self.only_a += 1
        elif difference.a is None:
            self.only_b += 1
        else:
            self.changed += 1


def differences(
    shard: str, a: Iterable[ComparedRow], b: Iterable[ComparedRow], counts: Comparison
) -> Iterator[Difference]:
    """The differences of the rows of one shard, each in the order of its records; `counts` is
    complete once all were taken. Memory is bounded by the rows of one record."""
    for difference in _merged(shard, _by_record(a, 0), _by_record(b, 1), counts):
        counts.take(difference)
        yield difference


class _RowsOfRecord(NamedTuple):
    """The rows of one record on one side: 0 for `a`, 1 for `b`."""

    at: Cursor
    side: int
    rows: list[ComparedRow]


def _by_record(rows: Iterable[ComparedRow], side: int) -> Iterator[_RowsOfRecord]:
    """The rows of each record, in the order of the shard."""
    for at, of_record in itertools.groupby(rows, lambda row: row.at):
        yield _RowsOfRecord(Cursor.parse(at), side, list(of_record))


def _merged(
    shard: str, a: Iterator[_RowsOfRecord], b: Iterator[_RowsOfRecord], counts: Comparison
) -> Iterator[Difference]:
    merged = heapq.merge(a, b, key=lambda record: record.at)
    for _, records in itertools.groupby(merged, lambda record: record.at):
        sides: tuple[dict[tuple[str, int], ComparedRow], ...] = ({}, {})
        for record in records:
            sides[record.side].update(_by_output(record.rows))
        for key in sorted(sides[0].keys() | sides[1].keys()):
            one, other = sides[0].get(key), sides[1].get(key)
            difference = _difference(shard, one, other)
            if difference is None:
                counts.equal += 1
            else:
                yield difference


def _by_output(lines: Iterable[ComparedRow]) -> Iterator[tuple[tuple[str, int], ComparedRow]]:
    """Each row by its output and its number there: a row more for one output does not shift the
    rows of the others."""
    seen: dict[str, int] = {}
    for line in lines:
        number = seen[line.to] = seen.get(line.to, -1) + 1
        yield (line.to, number), line


def _difference(shard: str, a: ComparedRow | None, b: ComparedRow | None) -> Difference | None:
    some = a or b
    assert some is not None, "a key is of one of them"
    if a is None or b is None:
        return Difference(
            shard,
            some.at,
            some.to,
            some.ordinal,
            a=None if a is None else a.row,
            b=None if b is None else b.row,
        )
    names = dict.fromkeys((*a.row, *b.row))
    changed = tuple(name for name in names if _field(a, name) != _field(b, name))
    if not changed:
        return None
    return Difference(shard, a.at, a.to, a.ordinal, a=a.row, b=b.row, changed=changed)


def _field(line: ComparedRow, name: str) -> tuple[bool, Any]:
    """The value, and whether the row has it: a field that is null is not one that is missing."""
    return name in line.row, line.row.get(name)
