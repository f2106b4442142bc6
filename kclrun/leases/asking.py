"""The asks we wrote on other owners' rows, from the sending to the answer [P16].

Knows: which rows we asked for, and what the scans after it showed. May not know: why we asked.
Rule: an ask is no owner's write and is never repeated: what came of it, the next scan shows. It
is outstanding until the row is ours, offered, gone to somebody else, or 30 s have passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.leases.commands import Command, Note, WriteRow
from kclrun.model.changes import Ask
from kclrun.model.lease import ASK_STALE_AFTER_S, OFFERED, Lease, LeaseKey, OwnerId
from kclrun.model.outcomes import Applied, Outcome, OutcomeUnknown, Refused
from kclrun.model.time import Instant, WallTime

__all__ = ["Asker"]

# A row that was not given away within 30 s has an owner that is stuck in a batch, or that will
# not: ten times as long we ask for others instead. Halts and restarts are over by then.
_LEFT_ALONE_S: Final = 10 * ASK_STALE_AFTER_S


class _Asked(msgspec.Struct):
    """One ask of ours. `since_instant` is when its outcome came; None while it is under way."""

    change: Ask
    since_instant: Instant | None = None


class Asker:
    """One instance a manager. `wall` dates an ask, for people: nobody computes with that time."""

    def __init__(
        self, me: OwnerId, out: list[Command], wall: Callable[[Instant], WallTime]
    ) -> None:
        self._me = me
        self._out = out
        self._wall = wall
        self._asks: dict[LeaseKey, _Asked] = {}
        self._unanswered: dict[LeaseKey, Instant] = {}  # and until when
        self._refusal: str | None = None

    @property
    def outstanding(self) -> tuple[LeaseKey, ...]:
        """The rows that may become ours; each fills a place until its ask is over."""
        return tuple(self._asks)

    @property
    def unanswered(self) -> frozenset[LeaseKey]:
        """Rows that were asked for in vain, and are left alone for five minutes."""
        return frozenset(self._unanswered)

    def is_writing(self, key: LeaseKey) -> bool:
        """Whether an ask is on its way to this row."""
        asked = self._asks.get(key)
        return asked is not None and asked.since_instant is None

    @property
    def has_writes_under_way(self) -> bool:
        return any(map(self.is_writing, self._asks))

    def ask(self, lease: Lease, asked: OwnerId, now: Instant) -> None:
        """Write an ask on this row, in the place of one that stood there for too long, if any."""
        change = Ask(lease.key, self._me, asked, self._wall(now), lease.handoff)
        self._asks[lease.key] = _Asked(change)
        self._out.append(WriteRow(change))

    def resolved(self, change: Ask, outcome: Outcome, now: Instant) -> None:
        """Take in what became of the write. What did not apply is planned anew with the next scan;
        an unknown outcome counts as applied until a scan shows otherwise."""
        asked = self._asks.get(change.key)
        if asked is None or asked.change != change or asked.since_instant is not None:
            raise InvariantViolation(f"lease {change.key}: an outcome of no ask under way")
        if isinstance(outcome, Applied | OutcomeUnknown):
            asked.since_instant = now
        else:
            del self._asks[change.key]
        if isinstance(outcome, Applied):
            self._refusal = None
            fields: dict[str, str | int | float | bool | None] = {"row_owner": change.asked}
            self._out.append(Note("lease_asked", key=change.key, fields=fields))
        elif isinstance(outcome, Refused) and outcome.code != self._refusal:
            self._refusal = outcome.code
            fields = {"code": outcome.code, "message": outcome.message}
            self._out.append(Note("write_refused", "error", change.key, fields))

    def over(self, key: LeaseKey) -> None:
        """The row is being taken: whatever comes of that, the ask has had its answer."""
        asked = self._asks.get(key)
        if asked is not None and asked.since_instant is not None:
            del self._asks[key]

    def after_scan(
        self, rows: Mapping[LeaseKey, Lease], scanned_instant: Instant, now: Instant
    ) -> None:
        """Drop what was answered, in one way or another; remember what was not."""
        self._unanswered = {key: until for key, until in self._unanswered.items() if now < until}
        for key, asked in tuple(self._asks.items()):
            since = asked.since_instant
            if since is None:
                continue
            if now - since >= ASK_STALE_AFTER_S:
                self._unanswered[key] = Instant(now + _LEFT_ALONE_S)
                del self._asks[key]
            elif scanned_instant > since and not self._stands(asked.change, rows.get(key)):
                del self._asks[key]

    def _stands(self, change: Ask, row: Lease | None) -> bool:
        """Whether the row still carries our ask, or is offered to us."""
        if row is None or row.is_ended:
            return False
        if row.owner == OFFERED:
            return row.offered_to == self._me
        handoff = row.handoff
        is_ours = handoff is not None and handoff.to == self._me
        return row.owner == change.asked and is_ours
