"""Sends the writes of held rows, one at a time, and finds out the outcome of each [P6].

Knows: the outcome types. Must not know: why a row is written, or which step comes next
(`held_leases.py`). Rule: only three things settle a write: a success reply, a row whose counter has
moved, or a refusal that came before anything was sent.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.leases.commands import Command, Note, ReadRow, WriteRow
from kclrun.leases.held_lease import Fate, HeldLease, HeldLeaseChange, UnresolvedWrite, judge
from kclrun.leases.policy import (
    TAKE_ATTEMPTS_MAX,
    UNREADABLE_PAUSE_S,
    ManagerPolicy,
    write_pause_s,
)
from kclrun.model.lease import Lease
from kclrun.model.time import Instant
from kclrun.protocol.writes import (
    BROKEN_ROW,
    Applied,
    ConditionFailed,
    CreateLease,
    Outcome,
    OutcomeUnknown,
    Refused,
    Take,
    Throttled,
    Unavailable,
)


class WriteApplied(msgspec.Struct, frozen=True):
    """The write applied, known by a success reply or (`by_reply` False) from the row."""

    change: HeldLeaseChange
    row: Lease
    sent_instant: Instant
    by_reply: bool


class WriteStale(msgspec.Struct, frozen=True):
    """The write did not apply and never will, but the row is ours: decide again from this row."""

    row: Lease


class RowLost(msgspec.Struct, frozen=True):
    """The row belongs to another owner, to no owner, or (None) is not there."""

    row: Lease | None


class TakeAbandoned(msgspec.Struct, frozen=True):
    """Left to the next scan: a take that never reached the table or, in a drain, a broken row."""


Settled = WriteApplied | WriteStale | RowLost | TakeAbandoned


class RowWriter:
    """Sends the writes. One instance for each manager. A `HeldLease` holds its unresolved write."""

    def __init__(
        self, policy: ManagerPolicy, chance: Callable[[], float], out: list[Command]
    ) -> None:
        self._policy = policy
        self._chance = chance
        self._out = out
        self._refusals: set[str] = set()
        self.is_draining = False

    def send(self, held_lease: HeldLease, change: HeldLeaseChange, now: Instant) -> None:
        """Send a first attempt; after failed ones slower and slower."""
        if held_lease.unresolved is not None or held_lease.is_reading or held_lease.has_process:
            raise InvariantViolation(
                f"lease {held_lease.key}: a second writer, {held_lease.state.value}"
            )
        not_before = None
        if held_lease.misses > 1:
            not_before = Instant(now + write_pause_s(held_lease.misses, self._chance()))
        held_lease.unresolved = UnresolvedWrite(change, not_before or now)
        self._out.append(WriteRow(change, not_before))

    def resolve(self, held_lease: HeldLease, outcome: Outcome, now: Instant) -> Settled | None:
        """Take in an outcome. None: not settled yet; the next read or send is requested."""
        write = _unresolved(held_lease)
        match outcome:
            case Applied(row):
                if isinstance(write.change, CreateLease):
                    row = write.change.lease
                if row is None:
                    raise InvariantViolation(f"lease {held_lease.key}: a success without the row")
                self._refusals.clear()
                return self._landed(held_lease, write, row, by_reply=True)
            case ConditionFailed(row):
                return self._judged(held_lease, write, row)
            case OutcomeUnknown():
                write.may_have_applied = True
                held_lease.is_reading = True
                self._out.append(ReadRow(held_lease.key))
                return None
            case Throttled() | Unavailable():
                return self._again(held_lease, write, now, pause_s=self._pause_s(write))
            case Refused(code, message) if code == BROKEN_ROW:
                self._note_refusal(code, message)
                if self.is_draining:  # a drain does not wait until the row is repaired
                    held_lease.unresolved = None
                    return TakeAbandoned()
                return self._again(held_lease, write, now, pause_s=UNREADABLE_PAUSE_S)
            case Refused(code, message):
                self._note_refusal(code, message)
                return self._again(held_lease, write, now, pause_s=self._policy.refused_pause_s)

    def read_back(self, held_lease: HeldLease, row: Lease | None, now: Instant) -> Settled | None:
        """Take in the row, read consistently after an unknown outcome."""
        write = _unresolved(held_lease)
        if row is None:
            is_unmoved = isinstance(write.change, CreateLease)
        else:
            is_unmoved = judge(write.change, row, self._policy.me) is Fate.UNMOVED
        if is_unmoved:
            return self._again(held_lease, write, now, pause_s=self._pause_s(write))
        return self._judged(held_lease, write, row)

    def _judged(self, held_lease: HeldLease, write: UnresolvedWrite, row: Lease | None) -> Settled:
        """The write can no longer apply, or has applied: decide which, from the row."""
        verdict = Fate.LOST if row is None else judge(write.change, row, self._policy.me)
        if row is None or verdict is Fate.LOST:
            held_lease.unresolved = None
            return RowLost(row)
        if verdict is Fate.APPLIED:
            return self._landed(held_lease, write, row, by_reply=False)
        held_lease.unresolved = None
        if isinstance(write.change, Take):
            return RowLost(row)
        held_lease.misses += 1
        return WriteStale(row)

    def _landed(
        self, held_lease: HeldLease, write: UnresolvedWrite, row: Lease, *, by_reply: bool
    ) -> WriteApplied:
        held_lease.unresolved = None
        held_lease.misses = 0 if by_reply else held_lease.misses + 1
        return WriteApplied(write.change, row, write.sent_instant, by_reply)

    def _again(
        self, held_lease: HeldLease, write: UnresolvedWrite, now: Instant, *, pause_s: float
    ) -> Settled | None:
        """Send the same change with the same expected counter, or give up a take unsent."""
        is_unsent_take = isinstance(write.change, Take) and not write.may_have_applied
        if is_unsent_take and (self.is_draining or write.attempts >= TAKE_ATTEMPTS_MAX):
            held_lease.unresolved = None
            return TakeAbandoned()
        not_before = Instant(now + pause_s)
        if not write.may_have_applied:
            write.sent_instant = not_before
        write.attempts += 1
        self._out.append(WriteRow(write.change, not_before))
        return None

    def _pause_s(self, write: UnresolvedWrite) -> float:
        return write_pause_s(write.attempts + 1, self._chance())

    def _note_refusal(self, code: str, message: str) -> None:
        """Log once for each code until a write succeeds: a missing permission fails all writes."""
        if code not in self._refusals:
            self._refusals.add(code)
            self._out.append(
                Note("write_refused", "error", fields={"code": code, "message": message})
            )


def _unresolved(held_lease: HeldLease) -> UnresolvedWrite:
    if held_lease.unresolved is None:
        raise InvariantViolation(f"lease {held_lease.key}: an outcome, and no write under way")
    return held_lease.unresolved
