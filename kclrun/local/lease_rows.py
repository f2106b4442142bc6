"""A lease table in memory: the conditions of `aws/expressions.py` in plain Python.

For the simulator and the tests: cheap, and linearizable row by row. Knows no clock and no thread;
give it a lock if several threads write. Rule: one contract suite runs over this table and over
DynamoDB, so a condition that differs is a failing test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import msgspec

from kclrun.aws.rows import BrokenRow, Item, decode_row, encode_row
from kclrun.errors import InvalidRequest, InvariantViolation
from kclrun.model.changes import (
    Checkpoint,
    Claim,
    CreateChildren,
    CreateLease,
    DeleteEnded,
    DeleteTrimmed,
    End,
    EndedParent,
    HaltLease,
    HeldParent,
    LeaseChange,
    NameChildren,
    ParentCondition,
    Release,
    Renew,
    ResumeLease,
    Take,
)
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.outcomes import Applied, ConditionFailed, Outcome, Refused
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.ports import ScanPage

__all__ = ["LeaseRows"]

# Attributes of hand-offs, which `Lease` does not model: they travel with what we do not know.
_HANDOFF: Final = ("handoffTo", "handoffAt", "offeredTo")
_PAGE_ROWS: Final = 1_000

OwnersWrite = Claim | Renew | Checkpoint | NameChildren | End | Release | HaltLease


class LeaseRows:
    """Implements `ports.LeaseTable`.

    `page_rows_max` bounds a page of a scan; a scan is no snapshot, as in DynamoDB: rows written
    between two pages show as they are when their page is read.
    """

    def __init__(
        self,
        *,
        page_rows_max: int = _PAGE_ROWS,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._rows: dict[str, Lease] = {}
        # What a row holds beside the lease; and rows that are no readable lease at all.
        self._unknown: dict[str, dict[str, Mapping[str, Any]]] = {}
        self._unreadable: dict[str, Item] = {}
        self._page_rows_max = page_rows_max
        self._lock = lock if lock is not None else contextlib.nullcontext()

    # The port

    def scan(self) -> Iterator[ScanPage]:
        """All rows in the order of their keys, page by page."""
        with self._lock:
            keys = sorted(self._rows.keys() | self._unreadable.keys())
        if not keys:
            yield ScanPage(())
        for start in range(0, len(keys), self._page_rows_max):
            with self._lock:
                page = self._page(keys[start : start + self._page_rows_max])
            yield page

    def read(self, key: LeaseKey) -> Lease | None:
        """One row. Raises: InvalidRequest with code `BrokenRow`, as the DynamoDB table does."""
        with self._lock:
            item = self._unreadable.get(key)
            if item is not None and _is_broken(item):
                raise InvalidRequest(f"row {key!r} is broken", operation="read", code="BrokenRow")
            return self._rows.get(key)

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
            self._rows[key] = lease
            known = encode_row(lease)
            self._unknown[key] = {name: item[name] for name in item if name not in known}

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
        self._rows[lease.key] = lease
        return Applied()

    def _create_children(self, change: CreateChildren) -> Outcome:
        if not all(self._parent_holds(parent) for parent in change.parents):
            return ConditionFailed()
        for child in change.children:
            if child.key not in self._rows and child.key not in self._unreadable:
                self._rows[child.key] = child
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

    def _change_row(
        self, change: Take | OwnersWrite | ResumeLease | DeleteEnded | DeleteTrimmed
    ) -> Outcome:
        row = self._rows.get(change.key)
        if row is None or not _holds(change, row):
            return self._contended(change.key)
        if isinstance(change, DeleteEnded | DeleteTrimmed):
            self._forget(change.key)
            return Applied()
        after = _after(change, row)
        self._rows[change.key] = after
        if isinstance(change, Take | End | Release):
            for name in _HANDOFF:
                self._unknown.get(change.key, {}).pop(name, None)
        return Applied(after)

    def _contended(self, key: LeaseKey) -> Outcome:
        item = self._unreadable.get(key)
        if item is not None and _is_broken(item):
            return Refused("BrokenRow", f"row {key!r} is broken")
        return ConditionFailed(self._rows.get(key))

    def _forget(self, key: str) -> None:
        self._rows.pop(key, None)
        self._unknown.pop(key, None)
        self._unreadable.pop(key, None)


def _is_broken(item: Item) -> bool:
    try:
        return decode_row(item) is not None
    except BrokenRow:
        return True


def _holds(
    change: Take | OwnersWrite | ResumeLease | DeleteEnded | DeleteTrimmed, row: Lease
) -> bool:
    """The conditions of P1, P2 and P13, given that the row exists."""
    match change:
        case Take() | DeleteTrimmed():
            return row.counter == change.seen_counter and row.owner == change.seen_owner
        case ResumeLease():
            return True
        case DeleteEnded():
            return row.is_ended
        case Checkpoint(last=last) | End(last=last) | Release(last=last):
            return _is_held(change, row) and row.checkpoint == last
        case _:
            return _is_held(change, row)


def _is_held(change: OwnersWrite, row: Lease) -> bool:
    return row.owner == change.owner and row.counter == change.seen_counter


def _after(change: Take | OwnersWrite | ResumeLease, row: Lease) -> Lease:
    if isinstance(change, ResumeLease):
        return msgspec.structs.replace(row, halt=None)
    return _AFTER[type(change)](change, msgspec.structs.replace(row, counter=row.counter + 1))


def _taken(change: Take, row: Lease) -> Lease:
    from_other = change.seen_owner not in {None, change.owner}
    return msgspec.structs.replace(
        row,
        owner=change.owner,
        checkpoint_owner=None,
        failover_s=round(change.failover_s * 1000) / 1000,
        start=change.start,
        owner_switches=row.owner_switches + from_other,
    )


def _renewed(change: Renew, row: Lease) -> Lease:
    if change.throughput_kbps is None:
        return row
    return msgspec.structs.replace(row, throughput_kbps=change.throughput_kbps)


def _moved(row: Lease, position: ExtendedSequenceNumber, owner: OwnerId | None) -> Lease:
    return msgspec.structs.replace(
        row, checkpoint=position, owner_switches=0, pending=None, owner=owner
    )


def _released(change: Release, row: Lease) -> Lease:
    if change.position == change.last:
        return msgspec.structs.replace(row, owner=None)
    return _moved(row, change.position, None)


def _named(change: NameChildren, row: Lease) -> Lease:
    if not change.children:
        raise InvariantViolation("no expression for NameChildren without children")
    return msgspec.structs.replace(row, children=change.children)


_AFTER: Final[Mapping[type[Any], Callable[[Any, Lease], Lease]]] = {
    Take: _taken,
    Claim: lambda _, row: row,
    Renew: _renewed,
    Checkpoint: lambda change, row: _moved(row, change.position, row.owner),
    NameChildren: _named,
    End: lambda _, row: _moved(row, SHARD_END, row.owner),
    Release: _released,
    HaltLease: lambda change, row: msgspec.structs.replace(row, halt=change.halt),
}
