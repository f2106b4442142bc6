"""A write under way, and what a row says about its fate [P6].

Rule: a counter unchanged means *still unknown*, for the write may yet arrive; it is dead only once
the counter has moved. So a resend keeps its expected counter, and applies at most once.
"""

from __future__ import annotations

import enum

import msgspec

from kclrun.leases.observation import is_nobody
from kclrun.model.changes import (
    CreateLease,
    HaltLease,
    Offer,
    Release,
    Renew,
    Take,
)
from kclrun.model.lease import OFFERED, Lease, OwnerId
from kclrun.model.time import Instant

__all__ = ["CustodyChange", "UnresolvedWrite", "Verdict", "judge"]

# The writes of a manager to a row in its hands. All name an owner and the counter seen, but the
# creation: that one writes a row again that vanished under our hands.
CustodyChange = Take | Renew | HaltLease | Release | Offer | CreateLease


class Verdict(enum.Enum):
    """What a row, read after a write, says about it."""

    APPLIED = "it applied"
    UNMOVED = "the row is as it was: the write may still arrive"
    MISSING = "the row is ours, but what we wrote is not on it: issue it again, from this row"
    LOST = "the row belongs to somebody else, or to nobody"


class UnresolvedWrite(msgspec.Struct):
    """One change that was sent and not settled.

    `sent_instant` is that of the *earliest* attempt: any of them may be the one that applies, and
    a permission counted from a later one would be too long [P7].
    """

    change: CustodyChange
    sent_instant: Instant
    attempts: int = 1
    may_have_applied: bool = False


def judge(change: CustodyChange, row: Lease, me: OwnerId) -> Verdict:
    """Compare a row, read consistently, with a change whose outcome is not known."""
    if isinstance(change, Take):
        return _judge_take(change, row, me)
    if isinstance(change, CreateLease):
        return _judge_creation(change, row, me)
    if row.owner != me:
        return Verdict.APPLIED if _was_given(change, row, me) else Verdict.LOST
    if row.counter == change.seen_counter:
        return Verdict.UNMOVED
    if isinstance(change, Renew):
        return Verdict.APPLIED
    has_contents = isinstance(change, HaltLease) and row.halt == change.halt
    return Verdict.APPLIED if has_contents else Verdict.MISSING


def _judge_take(change: Take, row: Lease, me: OwnerId) -> Verdict:
    if row.owner == me:
        return Verdict.APPLIED
    is_as_seen = row.owner == change.seen_owner and row.counter == change.seen_counter
    return Verdict.UNMOVED if is_as_seen else Verdict.LOST


def _judge_creation(change: CreateLease, row: Lease, me: OwnerId) -> Verdict:
    """Any row that stands there makes a later arrival fail: the creation is settled."""
    if row.owner != me:
        return Verdict.LOST
    return Verdict.APPLIED if row.counter == change.lease.counter else Verdict.MISSING


def _was_given(change: CustodyChange, row: Lease, me: OwnerId) -> bool:
    """Whether the row is nobody's by this very release or offer."""
    if isinstance(change, Offer):
        return row.owner == OFFERED and row.offered_by == me
    return isinstance(change, Release) and is_nobody(row.owner)
