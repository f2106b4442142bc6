"""A lease table in memory, with the same conditions as the table in DynamoDB.

For the simulator and the tests: cheap, and linearizable for each row. It has no clock and no
threads; pass a lock if several threads write. One contract suite runs over this table and over
DynamoDB, so a test fails if a condition differs.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import msgspec

from kclrun.aws.rows import BrokenRow, Item, decode_page, decode_row, encode_row
from kclrun.errors import InvalidRequest, InvariantViolation, NotFound
from kclrun.model.lease import OFFERED, OWNER_PREFIX, DiedOn, Handoff, Lease, LeaseKey
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.ports import ScanPage
from kclrun.protocol.writes import (
    BROKEN_ROW,
    Amend,
    Applied,
    Ask,
    Checkpoint,
    Claim,
    ConditionFailed,
    CreateChildren,
    CreateLease,
    Decline,
    DeleteEnded,
    DeleteTrimmed,
    End,
    EndedParent,
    HaltLease,
    HandOver,
    HeldParent,
    LateCheckpoint,
    LeaseChange,
    NameChildren,
    Offer,
    Outcome,
    ParentCondition,
    Refused,
    Release,
    Renew,
    ResumeLease,
    Take,
    Withdraw,
)

# The conditions and the updates of a change to a row: `aws/clauses.py` in plain Python. They are
# the same as those sent to DynamoDB, one by one; the contract suite of the lease tables compares
# them. Pure.
_OwnersWrite = Claim | Renew | Checkpoint | NameChildren | End | Release | Offer | Amend | HaltLease
RowUpdate = Take | Ask | Withdraw | Decline | _OwnersWrite | HandOver | LateCheckpoint | ResumeLease
RowChange = RowUpdate | DeleteEnded | DeleteTrimmed

# These are not writes of an owner, so the counter does not change.
_WITHOUT_COUNTER: Final = (Ask, Withdraw, LateCheckpoint, ResumeLease)


def holds(change: RowChange, row: Lease) -> bool:
    """Whether the condition of a change holds on a row that exists [P1, P2, P13, P16, P19]."""
    match change:
        case Renew() | Claim():
            return _is_held(change, row)
        case Take() | DeleteTrimmed():
            return row.counter == change.seen_counter and row.owner == change.seen_owner
        case ResumeLease():
            return True
        case DeleteEnded():
            return row.is_ended
        case Ask(asked=asked, seen=seen):
            return row.owner == asked and not row.is_ended and _stored(row.handoff) == _stored(seen)
        case Withdraw():
            return row.handoff is not None and row.handoff.to == change.owner
        case Decline():
            is_as_seen = row.owner == OFFERED and row.counter == change.seen_counter
            return is_as_seen and row.offered_to == change.owner
        case HandOver():
            return (
                row.owner == change.next_owner
                and row.checkpoint_owner == change.owner
                and row.counter == change.seen_counter
                and row.checkpoint == change.last
            )
        case LateCheckpoint():
            return _is_ours_now(change, row) and change.last <= row.checkpoint < change.position
        case Checkpoint(last=last) | End(last=last) | Release(last=last) | Offer(last=last):
            return _is_held(change, row) and row.checkpoint == last
        case _:
            return _is_held(change, row)


def change_row(change: RowUpdate, row: Lease) -> Lease:
    """The row after a change whose condition holds."""
    grows = 0 if isinstance(change, _WITHOUT_COUNTER) else 1
    after = msgspec.structs.replace(row, counter=row.counter + grows)
    return _CHANGED[type(change)](change, after)


def refuse_never_sent(change: RowChange) -> None:
    """Refuse a change that is never sent to DynamoDB, with or without a row.

    Raises: InvariantViolation.
    """
    match change:
        case Renew() | Checkpoint():
            pass
        case NameChildren(children=children) if not children:
            raise InvariantViolation("no expression for NameChildren without children")
        case Take(forced=True, seen_owner=seen):
            if seen is None or seen.startswith(OWNER_PREFIX):
                raise InvariantViolation(
                    f"{change.key}: only a Java owner is taken from by force, not {seen}"
                )
        case Offer(died_on=DiedOn()) if (
            change.position != change.last or change.offered_to is not None
        ):
            raise InvariantViolation(
                f"{change.key}: an offer after deaths has no position or receiver"
            )
        case LateCheckpoint(position=position) if position.is_sentinel:
            raise InvariantViolation(f"{change.key}: a late checkpoint is never {position}")
        case _:
            pass


def _is_held(change: _OwnersWrite, row: Lease) -> bool:
    return row.owner == change.owner and row.counter == change.seen_counter


def _is_ours_now(change: LateCheckpoint, row: Lease) -> bool:
    if row.owner is None:
        return True
    return row.owner.startswith(OWNER_PREFIX) and row.owner != change.former


def _stored(handoff: Handoff | None) -> Handoff | None:
    """The handoff request with its time in whole milliseconds, as the table keeps it."""
    if handoff is None:
        return None
    return Handoff(handoff.to, WallTime(round(handoff.asked_at * 1000) / 1000))


def _without_handoff(row: Lease) -> Lease:
    return msgspec.structs.replace(row, handoff=None, offered_to=None, offered_by=None)


def _moved(row: Lease, position: ExtendedSequenceNumber) -> Lease:
    return msgspec.structs.replace(
        row, checkpoint=position, owner_switches=0, pending=None, died_on=None
    )


def _moved_if_elsewhere(change: Release | Offer | HandOver, row: Lease) -> Lease:
    return row if change.position == change.last else _moved(row, change.position)


def _in_ms(at: WallTime | None) -> WallTime | None:
    """The time as a row keeps it; 0 stands for an unknown time."""
    return WallTime(round(at * 1000) / 1000) if at else None


def _taken(change: Take, row: Lease) -> Lease:
    from_other = change.seen_owner not in {None, change.owner}
    pinned_at = row.latest_pinned_at
    if pinned_at is None and change.latest_pinned_at is not None:
        pinned_at = WallTime(round(change.latest_pinned_at * 1000) / 1000)
    return msgspec.structs.replace(
        _without_handoff(row),
        owner=change.owner,
        checkpoint_owner=None,
        failover_s=round(change.failover_s * 1000) / 1000,
        start=change.start,
        stream_created_at=_in_ms(change.stream_created_at),
        owner_switches=row.owner_switches + from_other,
        taken_from=change.seen_owner if change.forced else row.taken_from,
        latest_pinned_at=pinned_at,
    )


def _asked(change: Ask, row: Lease) -> Lease:
    return msgspec.structs.replace(row, handoff=_stored(Handoff(change.owner, change.asked_at)))


def _withdrawn(_: Withdraw, row: Lease) -> Lease:
    return msgspec.structs.replace(row, handoff=None)


def _declined(change: Decline, row: Lease) -> Lease:
    return msgspec.structs.replace(row, offered_to=None, offered_by=change.owner)


def _claimed(change: Claim, row: Lease) -> Lease:
    return msgspec.structs.replace(row, taken_from=None) if change.has_waited else row


def _renewed(change: Renew, row: Lease) -> Lease:
    if change.throughput_kbps is not None:
        row = msgspec.structs.replace(row, throughput_kbps=change.throughput_kbps)
    return msgspec.structs.replace(row, handoff=None) if change.drops_ask else row


def _ended(_: End, row: Lease) -> Lease:
    return _without_handoff(_moved(row, SHARD_END))


def _released(change: Release, row: Lease) -> Lease:
    gone = _without_handoff(_moved_if_elsewhere(change, row))
    return msgspec.structs.replace(gone, owner=None)


def _offered(change: Offer, row: Lease) -> Lease:
    return msgspec.structs.replace(
        _moved_if_elsewhere(change, row),
        owner=OFFERED,
        handoff=None,
        offered_to=change.offered_to,
        offered_by=change.owner,
        died_on=change.died_on if change.died_on is not None else row.died_on,
    )


def _handed_over(change: HandOver, row: Lease) -> Lease:
    stays = change.position == change.last
    gone = _without_handoff(_moved_if_elsewhere(change, row))
    return msgspec.structs.replace(
        gone, checkpoint_owner=None, owner_switches=gone.owner_switches + stays
    )


def _amended(change: Amend, row: Lease) -> Lease:
    right = msgspec.structs.replace(row, parents=change.parents, hash_range=change.hash_range)
    if change.latest_pinned_at is None:
        return right
    return msgspec.structs.replace(right, latest_pinned_at=change.latest_pinned_at)


_CHANGED: Final[Mapping[type[Any], Callable[[Any, Lease], Lease]]] = {
    Take: _taken,
    Ask: _asked,
    Withdraw: _withdrawn,
    Decline: _declined,
    Claim: _claimed,
    Renew: _renewed,
    Checkpoint: lambda change, row: _moved(row, change.position),
    NameChildren: lambda change, row: msgspec.structs.replace(row, children=change.children),
    End: _ended,
    Release: _released,
    Offer: _offered,
    HandOver: _handed_over,
    LateCheckpoint: lambda change, row: _moved(row, change.position),
    Amend: _amended,
    HaltLease: lambda change, row: msgspec.structs.replace(row, halt=change.halt),
    ResumeLease: lambda _, row: msgspec.structs.replace(row, halt=None, died_on=None),
}


_PAGE_ROWS: Final = 1_000
_DELETIONS: Final = (DeleteEnded, DeleteTrimmed)


class LeaseRows:
    """Implements `ports.LeaseTable`.

    `page_rows_max` bounds a page of a scan. As in DynamoDB, a scan is not a snapshot: a page has
    the rows as they are when the page is read. `has_owner_index`: a table that kclrun creates has
    the index; without it `offered` raises NotFound. `choose` selects from too many offered rows
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

    def scan(self, *, consistent: bool = True) -> Iterator[ScanPage]:  # noqa: ARG002 - the port
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
                raise InvalidRequest(f"row {key!r} is broken", operation="read", code=BROKEN_ROW)
            return self._rows.get(key)

    def offered(self, rows_max: int) -> tuple[Lease, ...]:
        """At most `rows_max` offered rows. Raises: NotFound without an index."""
        if not self._has_owner_index:
            raise NotFound("the table has no owner index", operation="Query")
        with self._lock:
            waiting = [self._rows[key] for key in sorted(self._offered)]
        return tuple(waiting if len(waiting) <= rows_max else self._choose(waiting, rows_max))

    @property
    def has_offers(self) -> bool:
        """Whether any row is offered."""
        return bool(self._offered)

    def write(self, change: LeaseChange) -> Outcome:
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
        leases = tuple(self._rows[key] for key in keys if key in self._rows)
        others = [self._unreadable[key] for key in keys if key in self._unreadable]
        page = decode_page(others)
        return ScanPage(leases, page.broken, page.foreign, page.kcl3_mode)

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
            return self._not_applied(lease.key)
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
        refuse_never_sent(change)
        row = self._rows.get(change.key)
        if row is None or not holds(change, row):
            return self._not_applied(change.key)
        if isinstance(change, _DELETIONS):
            self._forget(change.key)
            return Applied()
        after = change_row(change, row)
        self._put(change.key, after)
        if self._unknown and _sets_handoff(change):
            # A lease does not contain the time of a handoff request without a requester.
            self._unknown.get(change.key, {}).pop("handoffAt", None)
        return Applied(after)

    def _not_applied(self, key: LeaseKey) -> Outcome:
        item = self._unreadable.get(key)
        if item is not None and _is_broken(item):
            return Refused(BROKEN_ROW, f"row {key!r} is broken")
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
    return isinstance(change, Take | Ask | Withdraw | End | Release | Offer | HandOver)
