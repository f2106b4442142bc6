"""The writes of the rows of held leases, and what became of each [P5, P6].

Knows: one lease and its one change in flight at a time. Must not know: why a row is written, what
the state of a lease asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from kclrun.errors import InvariantViolation
from kclrun.leases import events
from kclrun.leases.commands import Command, Note, WriteRow
from kclrun.leases.held_lease import HeldLease, Transition
from kclrun.leases.policy import TAKE_ATTEMPTS_MAX, UNREADABLE_PAUSE_S, ManagerPolicy
from kclrun.model.lease import Lease
from kclrun.model.time import Instant, backoff_s
from kclrun.protocol import writes


class RowWrites:
    """Sends changes, and sends them again until they are settled.

    Rule: only three things settle a write: a success reply, a row whose counter has moved, or a
    refusal that came before anything was sent [P6].
    """

    def __init__(self, policy: ManagerPolicy, chance: Callable[[], float]) -> None:
        self._policy = policy
        self._chance = chance
        self._refusals: set[str] = set()

    def begin(self, held_lease: HeldLease, change: writes.Change, now: Instant) -> WriteRow:
        """Send a first attempt; after failed ones slower and slower."""
        not_before = None
        if held_lease.misses > 1:
            not_before = Instant(now + backoff_s(held_lease.misses - 2, self._chance()))
        return held_lease.begin_write(change, now, not_before)

    def on_outcome(
        self,
        held_lease: HeldLease,
        event: events.WriteResolved,
        now: Instant,
        *,
        is_draining: bool,
    ) -> list[Command]:
        """Take in the outcome of a send. Raises: InvariantViolation if none was under way."""
        change, outcome = held_lease.in_flight.change, event.outcome
        if change is None or change != event.change:
            raise InvariantViolation(f"lease {held_lease.key}: an outcome of no write under way")
        match outcome:
            case writes.Applied(row):
                if isinstance(change, writes.CreateLease):
                    row = change.lease
                if row is None:
                    raise InvariantViolation(f"lease {held_lease.key}: a success without the row")
                self._refusals.clear()
                every_s = self._policy.renew_every_s
                return held_lease.on_applied(change, row, now, every_s, by_reply=True)
            case writes.ConditionFailed(row):
                return self._judge(held_lease, row, now)
            case writes.OutcomeUnknown():
                return [held_lease.read_back()]
            case writes.Throttled() | writes.Unavailable():
                pause_s = self._pause_s(held_lease)
                return self._again(held_lease, now, pause_s, is_draining=is_draining)
            case writes.Refused(code) if code == writes.BROKEN_ROW:
                notes = self._note_refusal(outcome)
                if is_draining:  # a drain does not wait until the row is repaired
                    held_lease.abandon()
                    return notes
                return notes + self._again(held_lease, now, UNREADABLE_PAUSE_S, is_draining=False)
            case writes.Refused():
                notes, pause_s = self._note_refusal(outcome), self._policy.refused_pause_s
                return notes + self._again(held_lease, now, pause_s, is_draining=is_draining)
            case _:
                assert_never(outcome)

    def on_read_back(
        self, held_lease: HeldLease, row: Lease | None, now: Instant, *, is_draining: bool
    ) -> list[Command]:
        """Take in the row, which was read because the outcome of the change was unknown."""
        if self._fate(held_lease, row) is writes.Fate.UNMOVED:
            pause_s = self._pause_s(held_lease)
            return self._again(held_lease, now, pause_s, is_draining=is_draining)
        return self._judge(held_lease, row, now)

    def _pause_s(self, held_lease: HeldLease) -> float:
        return backoff_s(held_lease.attempts - 1, self._chance())

    def _again(
        self, held_lease: HeldLease, now: Instant, pause_s: float, *, is_draining: bool
    ) -> list[Command]:
        """Send the same change with the same expected counter, or give up a take unsent."""
        change = held_lease.in_flight.required()
        is_late = is_draining or held_lease.attempts >= TAKE_ATTEMPTS_MAX
        if isinstance(change, writes.Take) and is_late and held_lease.in_flight.withdraw():
            held_lease.step(Transition.NOT_OURS)
            return []
        return [held_lease.send_again(Instant(now + pause_s))]

    def _note_refusal(self, refused: writes.Refused) -> list[Command]:
        """Log once for each code until a write succeeds: a missing permission fails all writes."""
        if refused.code in self._refusals:
            return []
        self._refusals.add(refused.code)
        fields = {"code": refused.code, "message": refused.message}
        return [Note("write_refused", "error", fields={**fields})]

    def _fate(self, held_lease: HeldLease, row: Lease | None) -> writes.Fate:
        """What the row says about the change in flight."""
        flight = held_lease.in_flight
        if row is None:
            is_creation = isinstance(flight.required(), writes.CreateLease)
            return writes.Fate.UNMOVED if is_creation else writes.Fate.LOST
        seen_counter = held_lease.row.counter if held_lease.row is not None else 0
        return flight.judge(row, self._policy.me, seen_counter)

    def _judge(self, held_lease: HeldLease, row: Lease | None, now: Instant) -> list[Command]:
        """Decide from the row what became of the change. A failed condition returned the row, so
        the last send did not apply; or the row was read back, and shows whether one applied."""
        change, fate = held_lease.in_flight.required(), self._fate(held_lease, row)
        # A late write of our ended process renewed the row as well [P5].
        is_renewed = fate is writes.Fate.OTHER_WRITER and isinstance(change, writes.Renew)
        if row is not None and (fate is writes.Fate.APPLIED or is_renewed):
            every_s = self._policy.renew_every_s
            return held_lease.on_applied(change, row, now, every_s, by_reply=False)
        held_lease.in_flight.end()
        if row is None and held_lease.may_be_restored(now, self._policy.failover_s):
            vanished = held_lease.note("row_vanished", "error")
            return [vanished, self.begin(held_lease, held_lease.restore(), now)]
        if row is None or fate is writes.Fate.LOST or isinstance(change, writes.Take):
            return held_lease.lose(row)
        held_lease.on_not_applied(row)
        return []
