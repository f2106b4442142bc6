"""Sends the writes of rows in our hands, one at a time, and finds out what became of each [P6].

Knows: the outcome types. May not know: why a row is written, or what comes next (`keeping.py`).
Rule: a write is settled by a success reply, by a row whose counter has moved, or by a refusal that
came before anything was sent; nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.leases.commands import Command, Note, ReadRow, WriteRow
from kclrun.leases.custody import Custody
from kclrun.leases.policy import TAKE_ATTEMPTS_MAX, ManagerPolicy, write_pause_s
from kclrun.leases.unresolved import CustodyChange, UnresolvedWrite, Verdict, judge
from kclrun.model.changes import CreateLease, Take
from kclrun.model.lease import Lease
from kclrun.model.outcomes import (
    Applied,
    ConditionFailed,
    Outcome,
    OutcomeUnknown,
    Refused,
    Throttled,
    Unavailable,
)
from kclrun.model.time import Instant

__all__ = ["Forgone", "Landed", "Lost", "RowWriter", "Settled", "Stale"]


class Landed(msgspec.Struct, frozen=True):
    """It applied, by a success reply or (`by_reply` False) by what the row says."""

    change: CustodyChange
    row: Lease
    sent_instant: Instant
    by_reply: bool


class Stale(msgspec.Struct, frozen=True):
    """It did not apply and never will, but the row is ours: decide again from this row."""

    row: Lease


class Lost(msgspec.Struct, frozen=True):
    """The row is somebody else's, or (None) not there."""

    row: Lease | None


class Forgone(msgspec.Struct, frozen=True):
    """A take that never reached the table and is left to the next scan."""


Settled = Landed | Stale | Lost | Forgone


class RowWriter:
    """One instance a manager. What is still unresolved stands in each `Custody`."""

    def __init__(
        self, policy: ManagerPolicy, chance: Callable[[], float], out: list[Command]
    ) -> None:
        self._policy = policy
        self._chance = chance
        self._out = out
        self._refusals: set[str] = set()
        self.is_draining = False

    def send(self, custody: Custody, change: CustodyChange, now: Instant) -> None:
        """Send a first attempt; slower and slower where the last ones found a changed row."""
        if custody.unresolved is not None or custody.is_reading or custody.has_process:
            raise InvariantViolation(f"lease {custody.key}: a second writer, {custody.state.value}")
        not_before = None
        if custody.misses > 1:
            not_before = Instant(now + write_pause_s(custody.misses, self._chance()))
        custody.unresolved = UnresolvedWrite(change, not_before or now)
        self._out.append(WriteRow(change, not_before))

    def resolve(self, custody: Custody, outcome: Outcome, now: Instant) -> Settled | None:
        """Take in an outcome. None: not settled yet, and what is needed was asked for."""
        write = _unresolved(custody)
        match outcome:
            case Applied(row):
                if isinstance(write.change, CreateLease):
                    row = write.change.lease
                if row is None:
                    raise InvariantViolation(f"lease {custody.key}: a success without the row")
                self._refusals.clear()
                return self._landed(custody, write, row, by_reply=True)
            case ConditionFailed(row):
                return self._judged(custody, write, row)
            case OutcomeUnknown():
                write.may_have_applied = True
                custody.is_reading = True
                self._out.append(ReadRow(custody.key))
                return None
            case Throttled() | Unavailable():
                return self._again(custody, write, now, pause_s=self._pause_s(write))
            case Refused(code, message):
                self._note_refusal(code, message)
                return self._again(custody, write, now, pause_s=self._policy.refused_pause_s)

    def read_back(self, custody: Custody, row: Lease | None, now: Instant) -> Settled | None:
        """Take in the row, read consistently after an unknown outcome."""
        write = _unresolved(custody)
        if row is None:
            is_unmoved = isinstance(write.change, CreateLease)
        else:
            is_unmoved = judge(write.change, row, self._policy.me) is Verdict.UNMOVED
        if is_unmoved:
            return self._again(custody, write, now, pause_s=self._pause_s(write))
        return self._judged(custody, write, row)

    def _judged(self, custody: Custody, write: UnresolvedWrite, row: Lease | None) -> Settled:
        """The write can no longer apply (or has): say which, from the row."""
        verdict = Verdict.LOST if row is None else judge(write.change, row, self._policy.me)
        if row is None or verdict is Verdict.LOST:
            custody.unresolved = None
            return Lost(row)
        if verdict is Verdict.APPLIED:
            return self._landed(custody, write, row, by_reply=False)
        custody.unresolved = None
        if isinstance(write.change, Take):
            return Lost(row)
        custody.misses += 1
        return Stale(row)

    def _landed(
        self, custody: Custody, write: UnresolvedWrite, row: Lease, *, by_reply: bool
    ) -> Landed:
        custody.unresolved = None
        custody.misses = 0 if by_reply else custody.misses + 1
        return Landed(write.change, row, write.sent_instant, by_reply)

    def _again(
        self, custody: Custody, write: UnresolvedWrite, now: Instant, *, pause_s: float
    ) -> Settled | None:
        """Send the same change with the same expected counter, or give up a take unsent."""
        is_unsent_take = isinstance(write.change, Take) and not write.may_have_applied
        if is_unsent_take and (self.is_draining or write.attempts >= TAKE_ATTEMPTS_MAX):
            custody.unresolved = None
            return Forgone()
        not_before = Instant(now + pause_s)
        if not write.may_have_applied:
            write.sent_instant = not_before
        write.attempts += 1
        self._out.append(WriteRow(write.change, not_before))
        return None

    def _pause_s(self, write: UnresolvedWrite) -> float:
        return write_pause_s(write.attempts + 1, self._chance())

    def _note_refusal(self, code: str, message: str) -> None:
        """Once per code until a write succeeds: a missing permission fails them all alike."""
        if code not in self._refusals:
            self._refusals.add(code)
            self._out.append(
                Note("write_refused", "error", fields={"code": code, "message": message})
            )


def _unresolved(custody: Custody) -> UnresolvedWrite:
    if custody.unresolved is None:
        raise InvariantViolation(f"lease {custody.key}: an outcome, and no write under way")
    return custody.unresolved
