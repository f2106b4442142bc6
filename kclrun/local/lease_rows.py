"""A lease table in memory, with the same conditions as the table in DynamoDB.

For the simulator and the tests: cheap, and linearizable for each row. It has no clock and no
threads; pass a lock if several threads write. One contract suite runs over this table and over
DynamoDB, so a test fails if a condition differs.
"""

from __future__ import annotations

import contextlib
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from msgspec.structs import force_setattr, replace

from kclrun.aws.rows import BrokenRow, Item, columns_of, decode_page, decode_row, encode_row
from kclrun.errors import IndexMissing, InvalidRequest
from kclrun.model.lease import OFFERED, Lease, LeaseKey
from kclrun.ports import ScanPage
from kclrun.protocol import conditions, writes
from kclrun.protocol.conditions import WRITES

# The conditions and effects of `protocol/conditions.py`, compiled once for each kind of write.
_Test = Callable[[Any, Lease], bool]
_COMPARED: Final[Mapping[type[Any], Callable[[Any, Any], bool]]] = {
    conditions.Equals: operator.eq,
    conditions.Differs: operator.ne,
    conditions.StartsWith: str.startswith,
    conditions.AtLeast: operator.ge,
    conditions.Below: operator.lt,
}


def holds(change: writes.RowChange | writes.ParentCondition, row: Lease) -> bool:
    """Whether the condition of a change, or of a parent, holds on a row that exists."""
    return _CONDITIONS[type(change)](change, row)


def change_row(change: writes.RowChange, row: Lease) -> Lease:
    """The row after a change whose condition holds."""
    return _EFFECTS[type(change)](change, row)


def _all_of(parts: Sequence[conditions.Condition]) -> _Test:
    """Plain loops: the simulator tests the conditions of each write that it simulates."""
    equals = [part for part in parts if isinstance(part, conditions.Equals)]
    pairs = [(conditions.reader(equal.field), equal.value.of) for equal in equals]
    tests = [_test(part) for part in parts if not isinstance(part, conditions.Equals)]

    def hold(change: Any, row: Lease) -> bool:
        for read, of in pairs:
            if read(row) != of(change):
                return False
        for test in tests:  # noqa: SIM110
            if not test(change, row):
                return False
        return True

    return hold


def _test(condition: conditions.Condition) -> _Test:
    match condition:
        case conditions.AnyOf(parts=parts):
            tests = [_test(part) for part in parts]
            return lambda change, row: any(test(change, row) for test in tests)
        case conditions.AllOf(parts=parts):
            return _all_of(parts)
        case _:
            read, of = conditions.reader(condition.field), condition.value.of
            compare = _COMPARED[type(condition)]
            return lambda change, row: compare(read(row), of(change))


# Of effects that depend on the value before: the value after.
_MERGED: Final[Mapping[type[Any], Callable[[Any, Any], Any]]] = {
    conditions.Add: operator.add,
    conditions.SetOnce: lambda before, value: value if before is None else before,
}


def _changed(write: conditions.Write) -> Callable[[Any, Lease], Lease]:
    tests = [effect.test for effect in write.effects if isinstance(effect, conditions.When)]
    effects: dict[int, list[Any]] = {}

    def changed(change: Any, row: Lease) -> Lease:
        form = 0  # one bit for each test
        for test in tests:
            form = form << 1 | test(change)
        if form not in effects:
            parts = write.effects_of(change)
            effects[form] = [(part.field, part.value.of, _MERGED.get(type(part))) for part in parts]
        after = replace(row)  # a copy: to `replace` by a dictionary takes twice the time
        for field, of, merged in effects[form]:
            value = of(change)
            force_setattr(after, field, merged(getattr(row, field), value) if merged else value)
        return after

    return changed


_CONDITIONS: Final = {kind: _all_of(write.conditions) for kind, write in WRITES.items()}
_EFFECTS: Final = {kind: _changed(write) for kind, write in WRITES.items()}


_PAGE_ROWS: Final = 1_000
_DELETIONS: Final = (writes.DeleteEnded, writes.DeleteTrimmed, writes.DeleteReset)


class LeaseRows:
    """Implements `ports.LeaseTable`.

    `page_rows_max` bounds a page of a scan. As in DynamoDB, a scan is not a snapshot: a page has
    the rows as they are when the page is read. `has_owner_index`: a table that kclrun creates has
    the index; without it `offered` raises IndexMissing. `choose` selects from too many offered rows
    (for example `random.Random.sample`); without it the first ones are returned.
    """

    def __init__(
        self,
        *,
        page_rows_max: int = _PAGE_ROWS,
        lock: AbstractContextManager[Any] | None = None,
        has_owner_index: bool = True,
        choose: Callable[[Sequence[Lease], int], Sequence[Lease]] | None = None,
    ) -> None:
        self._rows: dict[str, Lease] = {}
        # The part of the owner index that is queried: the offered rows. And the keys in order,
        # cached until a row is created or deleted.
        self._offered: set[str] = set()
        self._sorted_keys: list[str] | None = None
        # Attributes of a row that are not part of the lease; and rows that cannot be read as one.
        self._unknown: dict[str, dict[str, Mapping[str, Any]]] = {}
        self._unreadable: dict[str, Item] = {}
        self._page_rows_max = page_rows_max
        self._has_owner_index = has_owner_index
        self._choose = choose if choose is not None else _first
        self._lock = lock if lock is not None else contextlib.nullcontext()

    # The port

    def scan(self, *, consistent: bool = True) -> Iterator[ScanPage]:
        """All rows in the order of their keys, page by page, always up to date."""
        page, last_key = self.page_after(None)
        yield page
        while last_key is not None:
            page, last_key = self.page_after(last_key)
            yield page

    def page_after(self, key: str | None) -> tuple[ScanPage, str | None]:
        """The page of a scan after `key` (None: the first page), and its last key (None with the
        last page). They are DynamoDB's `ExclusiveStartKey` and `LastEvaluatedKey`."""
        with self._lock:
            if self._sorted_keys is None:
                self._sorted_keys = sorted(self._rows.keys() | self._unreadable.keys())
            keys = self._sorted_keys
            start = 0 if key is None else bisect_right(keys, key)
            end = start + self._page_rows_max
            return self._page(keys[start:end]), keys[end - 1] if end < len(keys) else None

    def read(self, key: LeaseKey) -> Lease | None:
        """One row. Raises: InvalidRequest with code `BROKEN_ROW`, as the DynamoDB table does."""
        if not self._unreadable:
            return self._rows.get(key)  # one look-up needs no lock
        with self._lock:
            item = self._unreadable.get(key)
            if item is not None and _is_broken(item):
                raise InvalidRequest(
                    f"row {key!r} is broken", operation="read", code=writes.BROKEN_ROW
                )
            return self._rows.get(key)

    def offered(self, rows_max: int) -> tuple[Lease, ...]:
        """At most `rows_max` offered rows. Raises: IndexMissing without an index."""
        if not self._has_owner_index:
            raise IndexMissing("the table has no owner index", operation="Query")
        with self._lock:
            waiting = [self._rows[key] for key in sorted(self._offered)]
        return tuple(waiting if len(waiting) <= rows_max else self._choose(waiting, rows_max))

    @property
    def has_offers(self) -> bool:
        """Whether any row is offered."""
        return bool(self._offered)

    def write(self, change: writes.LeaseChange) -> writes.Outcome:
        """Apply one change if its condition holds."""
        with self._lock:
            return self._write(change)

    # For tests and the simulator

    def plant(self, item: Item) -> None:
        """Put a raw DynamoDB item, readable or not, as another program would write it."""
        key = str(item["leaseKey"]["S"])
        with self._lock:
            self._forget(key)
            try:
                lease = decode_row(item)
            except BrokenRow:
                lease = None
            if lease is None:
                self._unreadable[key] = item
                return
            self._put(key, lease)
            known = encode_row(lease)
            self._unknown[key] = {name: item[name] for name in item if name not in known}

    def hold(self, rows: dict[str, Lease]) -> None:
        """Become a table of exactly these rows. From now on `rows` is changed in place."""
        with self._lock:
            self._rows = rows
            self._sorted_keys = None
            self._offered = {key for key, row in rows.items() if row.owner == OFFERED}
            self._unknown.clear()
            self._unreadable.clear()

    def uproot(self, key: str) -> None:
        """Remove a row, as another program would delete it. A missing row is ignored."""
        with self._lock:
            self._forget(key)

    def raw(self, key: str) -> dict[str, Mapping[str, Any]] | None:
        """The row as a DynamoDB item with its unknown attributes; None if it does not exist."""
        with self._lock:
            if key in self._unreadable:
                return dict(self._unreadable[key])
            lease = self._rows.get(key)
            return None if lease is None else {**self._unknown.get(key, {}), **encode_row(lease)}

    # Inside

    def _page(self, keys: list[str]) -> ScanPage:
        rows, unreadable = self._rows, self._unreadable
        leases = tuple(filter(None, map(rows.get, keys)))
        others = [unreadable[key] for key in keys if key in unreadable] if unreadable else []
        page = decode_page(others)
        return ScanPage(leases, page.broken, page.foreign, page.kcl3_mode, page.reasons)

    def _write(self, change: writes.LeaseChange) -> writes.Outcome:
        match change:
            case writes.CreateLease(lease=lease):
                return self._create(lease)
            case writes.CreateChildren():
                return self._create_children(change)
            case _:
                return self._change_row(change)

    def _create(self, lease: Lease) -> writes.Outcome:
        if lease.key in self._rows or lease.key in self._unreadable:
            return self._not_applied(lease.key)
        self._put(lease.key, lease)
        return writes.Applied()

    def _create_children(self, change: writes.CreateChildren) -> writes.Outcome:
        if not all(self._parent_holds(parent) for parent in change.parents):
            return writes.ConditionFailed()
        for child in change.children:
            if child.key not in self._rows and child.key not in self._unreadable:
                self._put(child.key, child)
        return writes.Applied()

    def _parent_holds(self, parent: writes.ParentCondition) -> bool:
        row = self._rows.get(parent.key)
        return row is not None and holds(parent, row)

    def _change_row(self, change: writes.RowChange) -> writes.Outcome:
        write = WRITES[type(change)]
        if write.mistake is not None:
            write.refuse_mistake(change)
        row = self._rows.get(change.key)
        if row is None or not holds(change, row):
            return self._not_applied(change.key)
        if isinstance(change, _DELETIONS):
            self._forget(change.key)
            return writes.Applied()
        after = change_row(change, row)
        self._put(change.key, after)
        if self._unknown:
            self._forget_unread(change)
        return writes.Applied(after)

    def _forget_unread(self, change: writes.RowChange) -> None:
        """A changed field has none of its former attributes, those included that could not be read,
        such as the time of a handoff request without a requester."""
        unknown = self._unknown.get(change.key, {})
        for effect in WRITES[type(change)].effects_of(change):
            for column, _ in columns_of(effect.field):
                unknown.pop(column.name, None)

    def _not_applied(self, key: LeaseKey) -> writes.Outcome:
        item = self._unreadable.get(key)
        if item is not None and _is_broken(item):
            return writes.Refused(writes.BROKEN_ROW, f"row {key!r} is broken")
        return writes.ConditionFailed(self._rows.get(key))

    def _put(self, key: str, lease: Lease) -> None:
        if key not in self._rows:
            self._sorted_keys = None
        self._rows[key] = lease
        if lease.owner == OFFERED:
            self._offered.add(key)
        else:
            self._offered.discard(key)

    def _forget(self, key: str) -> None:
        self._sorted_keys = None
        self._offered.discard(key)
        self._rows.pop(key, None)
        self._unknown.pop(key, None)
        self._unreadable.pop(key, None)


def _is_broken(item: Item) -> bool:
    try:
        return decode_row(item) is not None
    except BrokenRow:
        return True


def _first(rows: Sequence[Lease], most: int) -> Sequence[Lease]:
    return rows[:most]
