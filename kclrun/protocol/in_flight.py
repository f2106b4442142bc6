"""The one write of a row that is in flight: what a row that was read says about it, and how it is
sent again [P5, P6].

Must not know: pauses, clocks, why a row is written.
"""

from __future__ import annotations

import enum
from typing import assert_never

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.model.lease import Lease, OwnerId
from kclrun.model.time import Instant
from kclrun.protocol.writes import (
    Change,
    Checkpoint,
    Claim,
    CreateChildren,
    CreateLease,
    End,
    HaltLease,
    HandOver,
    NameChildren,
    Offer,
    Release,
    Renew,
    Take,
    keys_of,
)


class Fate(enum.Enum):
    """What a row that was read after a send says about the change in flight [P6].

    An unchanged counter means *still unknown*, because a send may yet arrive. The change can no
    longer apply only once the counter has moved. So a resend keeps its expected counter, and the
    change applies at most once.
    """

    APPLIED = "the row holds the change"
    UNMOVED = "the row is as it was: a send may still arrive"
    MISSING = "a write of ours moved the row, and the change is not on it: send it from this row"
    OTHER_WRITER = "the row names us, but another process of this owner wrote it"
    LOST = "the row belongs to another owner, or to no owner"


class InFlight:
    """At most one change of one row under way [P5]. Its owner decides what follows an outcome.

    `change` is None if there is none. `unresolved` holds the send instants whose outcome is not
    known: each of these sends may have applied, or may still arrive.
    """

    def __init__(self) -> None:
        self.change: Change | None = None
        self.unresolved: list[Instant] = []

    def begin(self, change: Change) -> None:
        """Make this the one change in flight. Raises: InvariantViolation if there is one [P5]."""
        if self.change is not None:
            raise InvariantViolation(f"lease {keys_of(change)[0]}: two writes at once [P5]")
        self.change = change

    def end(self) -> None:
        """The change is settled, or given up: a late outcome has no effect."""
        self.change = None
        self.unresolved.clear()

    def withdraw(self) -> bool:
        """Give up a change that surely did not apply, so that another may go first.

        Returns False if an earlier send of it may still arrive: then it stays in flight [P5].
        """
        if self.unresolved:
            return False
        self.change = None
        return True

    def earliest(self, sent: Instant) -> Instant:
        """The earliest send that may have applied, with the one at `sent`. A permission counts from
        it: any attempt may be the one that applied [P7]."""
        return min([*self.unresolved, sent])

    def required(self) -> Change:
        """The change in flight. Raises: InvariantViolation if there is none."""
        if self.change is None:
            raise InvariantViolation("an outcome without a write under way")
        return self.change

    def judge(self, row: Lease, me: OwnerId, seen_counter: int) -> Fate:
        """Compare the row, read consistently or returned by a failed condition, with the change.

        `seen_counter` is the counter that was last confirmed. Only an unresolved write can have
        moved it; without one, the writer is another process of this owner (trace N3). A claim may
        follow a write of that process, and so may its manager, once that process has ended [P5].
        """
        change = self.required()
        if isinstance(change, Take):
            return _judge_take(change, row, me)
        if isinstance(change, CreateLease):
            return _judge_creation(change, row, me)
        if has_ended_ownership(change, row, seen_counter):
            return Fate.APPLIED
        if row.owner != me:
            return Fate.LOST
        if row.counter == seen_counter:
            return Fate.UNMOVED
        is_next = row.counter == seen_counter + 1
        if not is_next or not (self.unresolved or isinstance(change, Claim)):
            return Fate.OTHER_WRITER
        return Fate.APPLIED if was_applied(change, row) else Fate.MISSING

    def rebase(self, row: Lease) -> Change:
        """Put the same change for the current row in flight, and return it: with the row's counter,
        never to a lower position [P2, N1]."""
        self.change = rebased(self.required(), row)
        return self.change


def _judge_take(change: Take, row: Lease, me: OwnerId) -> Fate:
    if row.owner == me:
        return Fate.APPLIED
    is_as_seen = row.owner == change.seen_owner and row.counter == change.seen_counter
    return Fate.UNMOVED if is_as_seen else Fate.LOST


def _judge_creation(change: CreateLease, row: Lease, me: OwnerId) -> Fate:
    """Any row that is there makes a later arrival fail, so a creation is settled by it."""
    if row.owner != me:
        return Fate.LOST
    return Fate.APPLIED if row.counter == change.lease.counter else Fate.OTHER_WRITER


def was_applied(change: Change, row: Lease) -> bool:
    """Whether the row, which is still ours, holds the result of the change."""
    match change:
        case Renew():
            return True
        case Checkpoint(position=position):
            return row.checkpoint >= position
        case NameChildren(children=children):
            return children <= row.children
        case HaltLease(halt=halt):
            # Only a lease without a halt is halted. The row keeps its times in milliseconds.
            return row.halt is not None and row.halt.reason == halt.reason
        case End():
            return row.is_ended
        case _:
            return False


def has_ended_ownership(change: Change, row: Lease, seen_counter: int) -> bool:
    """Whether a change that ends our ownership has applied, by the state of the row.

    The row is offered, unowned, or owned by the next owner already. Then the counter is further on,
    and only the applied write can have moved the position to ours. If the position was not to move,
    the row may also have been taken first: it makes no difference then.
    """
    if row.counter <= seen_counter:
        return False
    match change:
        case End():
            return row.is_ended
        case Release(position=position, owner=me) | Offer(position=position, owner=me):
            return row.owner != me and row.checkpoint >= position
        case HandOver(position=position, owner=me):
            return me not in {row.owner, row.checkpoint_owner} and row.checkpoint >= position
        case _:
            return False


def rebased(change: Change, row: Lease) -> Change:
    """The same change for the current row: with its counter, never to a lower position [P2, N1].

    A take and a creation stand for the row as it was seen, so they stay as they are.
    """
    match change:
        case Checkpoint() | Release() | Offer() | HandOver() | End():
            if not isinstance(change, End):
                position = max(change.position, row.checkpoint)
                change = msgspec.structs.replace(change, position=position)
            if isinstance(change, HandOver):
                next_owner = row.owner or change.next_owner
                change = msgspec.structs.replace(change, next_owner=next_owner)
            return msgspec.structs.replace(change, seen_counter=row.counter, last=row.checkpoint)
        case Renew() | NameChildren() | Claim() | HaltLease():
            return msgspec.structs.replace(change, seen_counter=row.counter)
        case Take() | CreateChildren() | CreateLease():
            return change
        case _:
            assert_never(change)
