"""A lease table in memory, under the conditions of DynamoDB's: `row_changes.py` has them in Python.

For the simulator and the tests: cheap, and linearizable row by row. Knows no clock and no thread;
give it a lock if several threads write. Rule: one contract suite runs over this table and over
DynamoDB, so a condition that differs is a failing test.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from kclrun.aws.rows import BrokenRow, Item, decode_row, encode_row
from kclrun.errors import InvalidRequest, NotFound
from kclrun.local.row_changes import RowChange, change_row, holds, refuse_unbound
from kclrun.model.changes import (
    Ask,
    CreateChildren,
    CreateLease,
    DeleteEnded,
    DeleteTrimmed,
    End,
    EndedParent,
    HandOver,
    HeldParent,
    LeaseChange,
    Offer,
    ParentCondition,
    Release,
    Renew,
    Take,
)
from kclrun.model.lease import OFFERED, Lease, LeaseKey
from kclrun.model.outcomes import Applied, ConditionFailed, Outcome, Refused
from kclrun.ports import ScanPage

__all__ = ["LeaseRows"]

_PAGE_ROWS: Final = 1_000
_DELETIONS: Final = (DeleteEnded, DeleteTrimmed)


class LeaseRows:
    """Implements `ports.LeaseTable`.

    `page_rows_max` bounds a page of a scan; a scan is no snapshot, as in DynamoDB: rows written
    between two pages show as they are when their page is read. `has_owner_index`: as a table made
    by us has; without it `offered` raises NotFound. `choose`
    picks so many of too many offered rows (`random.Random.sample` does); without it the first.
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
        # The owner index, as far as anybody asks; and the keys in order, until one comes or goes.
        self._offered: set[str] = set()
        self._sorted_keys: list[str] | None = None
        # What a row holds beside the lease; and rows that are no readable lease at all.
        self._unknown: dict[str, dict[str, Mapping[str, Any]]] = {}
        self._unreadable: dict[str, Item] = {}
        self._page_rows_max = page_rows_max
        self._has_owner_index = has_owner_index
        self._choose = choose if choose is not None else _first
        self._lock = lock if lock is not None else contextlib.nullcontext()

    # The port

    def scan(self) -> Iterator[ScanPage]:
        """All rows in the order of their keys, page by page."""
        page, last_key = self.page_after(None)
        yield page
        while last_key is not None:
            page, last_key = self.page_after(last_key)
            yield page

    def page_after(self, key: str | None) -> tuple[ScanPage, str | None]:
        """The page of a scan behind a key, None for the first; and its last key, which is None
        with the last page: as DynamoDB's `ExclusiveStartKey` and `LastEvaluatedKey`."""
        with self._lock:
            if self._sorted_keys is None:
                self._sorted_keys = sorted(self._rows.keys() | self._unreadable.keys())
            keys = self._sorted_keys
            start = 0 if key is None else bisect_right(keys, key)
            end = start + self._page_rows_max
            return self._page(keys[start:end]), keys[end - 1] if end < len(keys) else None

    def read(self, key: LeaseKey) -> Lease | None:
        """One row. Raises: InvalidRequest with code `BrokenRow`, as the DynamoDB table does."""
        if not self._unreadable:
            return self._rows.get(key)  # one look-up needs no lock
        with self._lock:
            item = self._unreadable.get(key)
            if item is not None and _is_broken(item):
                raise InvalidRequest(f"row {key!r} is broken", operation="read", code="BrokenRow")
            return self._rows.get(key)

    def offered(self, rows_max: int) -> tuple[Lease, ...]:
        """Rows that wait for a taker, at most `rows_max`. Raises: NotFound without an index."""
        if not self._has_owner_index:
            raise NotFound("the table has no owner index", operation="Query")
        with self._lock:
            waiting = [self._rows[key] for key in sorted(self._offered)]
        return tuple(waiting if len(waiting) <= rows_max else self._choose(waiting, rows_max))

    @property
    def has_offers(self) -> bool:
        """Whether any row waits for a taker."""
        return bool(self._offered)

    def write(self, change: LeaseChange) -> Outcome:
        """Apply one change if its condition holds."""
        with self._lock:
            return self._write(change)

    # For tests and the simulator

    def plant(self, item: Item) -> None:
        """Put a raw DynamoDB item, readable or not, as somebody else would have written it."""
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
        """Be a table of these rows and no others; they are changed in place from here on."""
        with self._lock:
            self._rows = rows
            self._sorted_keys = None
            self._offered = {key for key, row in rows.items() if row.owner == OFFERED}
            self._unknown.clear()
            self._unreadable.clear()

    def uproot(self, key: str) -> None:
        """Remove a row, as somebody else would have deleted it; nothing if there is none."""
        with self._lock:
            self._forget(key)

    def raw(self, key: str) -> dict[str, Mapping[str, Any]] | None:
        """The row as a DynamoDB item, with what we do not know; None if there is none."""
        with self._lock:
            if key in self._unreadable:
                return dict(self._unreadable[key])
            lease = self._rows.get(key)
            return None if lease is None else {**self._unknown.get(key, {}), **encode_row(lease)}

    # Inside

    def _page(self, keys: list[str]) -> ScanPage:
        leases = tuple(self._rows[key] for key in keys if key in self._rows)
        others = [self._unreadable[key] for key in keys if key in self._unreadable]
        broken = tuple(str(item["leaseKey"]["S"])[:256] for item in others if _is_broken(item))
        return ScanPage(leases, broken, len(others) - len(broken))

    def _write(self, change: LeaseChange) -> Outcome:
        match change:
            case CreateLease(lease=lease):
                return self._create(lease)
            case CreateChildren():
                return self._create_children(change)
            case _:
                return self._change_row(change)

    def _create(self, lease: Lease) -> Outcome:
        if lease.key in self._rows or lease.key in self._unreadable:
            return self._contended(lease.key)
        self._put(lease.key, lease)
        return Applied()

    def _create_children(self, change: CreateChildren) -> Outcome:
        if not all(self._parent_holds(parent) for parent in change.parents):
            return ConditionFailed()
        for child in change.children:
            if child.key not in self._rows and child.key not in self._unreadable:
                self._put(child.key, child)
        return Applied()

    def _parent_holds(self, parent: ParentCondition) -> bool:
        row = self._rows.get(parent.key)
        if row is None:
            return False
        match parent:
            case HeldParent(owner=owner, counter=counter):
                return row.owner == owner and row.counter == counter
            case EndedParent():
                return row.is_ended
            case _:
                return True

    def _change_row(self, change: RowChange) -> Outcome:
        refuse_unbound(change)
        row = self._rows.get(change.key)
        if row is None or not holds(change, row):
            return self._contended(change.key)
        if isinstance(change, _DELETIONS):
            self._forget(change.key)
            return Applied()
        after = change_row(change, row)
        self._put(change.key, after)
        if self._unknown and _sets_handoff(change):
            # The time of an ask without its asker is nothing a lease knows.
            self._unknown.get(change.key, {}).pop("handoffAt", None)
        return Applied(after)

    def _contended(self, key: LeaseKey) -> Outcome:
        item = self._unreadable.get(key)
        if item is not None and _is_broken(item):
            return Refused("BrokenRow", f"row {key!r} is broken")
        return ConditionFailed(self._rows.get(key))

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


def _sets_handoff(change: RowChange) -> bool:
    if isinstance(change, Renew):
        return change.drops_ask
    return isinstance(change, Take | Ask | End | Release | Offer | HandOver)
