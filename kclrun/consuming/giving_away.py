"""Giving the lease away in good order: who asked for it, and the one last write [P16, P17, R8].

May not know: when user code has come to rest; that is the life's. Look next: `life.py`.
"""

from __future__ import annotations

from kclrun.consuming.agenda import Agenda
from kclrun.consuming.ledger import CheckpointLedger
from kclrun.consuming.own_row import OwnRow
from kclrun.consuming.row_evidence import GivingAway
from kclrun.consuming.states import ANSWERS_ASKS, State
from kclrun.model.changes import HandOver, Offer, Release
from kclrun.model.lease import ANYBODY, ASK_STALE_AFTER_S, Handoff, OwnerId
from kclrun.model.time import Instant

__all__ = ["Farewell", "words_of"]


class Farewell:
    """Watches the asks on the own row, and writes the lease away when all is done.

    The age of an ask is what this process has seen of it: the same one for 30 s by its own clock.
    Its `handoffAt` is another host's wall clock, and one that is off must not stop balancing.
    """

    def __init__(self, own: OwnRow, agenda: Agenda, *, others_in_sight: bool) -> None:
        self.others_in_sight = others_in_sight
        self._own = own
        self._agenda = agenda
        self._seen: Handoff | None = None
        self._seen_since = Instant(0.0)

    def is_asked_for(self, state: State, now: Instant) -> bool:
        """Look at the row as last confirmed: whether to give it up for who asks there.

        An ask seen by the claim is answered at once, before any user code is called. At the end of
        a shard, and where it was halted, an ask is left to grow old.
        """
        found = None if self._own.row is None else self._own.row.handoff
        if found != self._seen:
            self._seen, self._seen_since = found, now
        return found is not None and state in ANSWERS_ASKS and self.asker(now) is not None

    def asker(self, now: Instant) -> OwnerId | None:
        """Who asks for the lease and is to be answered (ANYBODY on an operator's behalf)."""
        ask = self._seen
        return None if ask is None or self.drops_ask(now) else ask.to

    def drops_ask(self, now: Instant) -> bool:
        """Whether the next renewal removes the ask: it is too old, or our own."""
        ask = self._seen
        if ask is None:
            return False
        return ask.to == self._own.me or now - self._seen_since >= ASK_STALE_AFTER_S

    def last_write(self, ledger: CheckpointLedger, now: Instant) -> GivingAway:
        """The final checkpoint and the lease given away, in one write.

        Handed over where a KCL 3 leader has named the next owner; offered where somebody asked, or
        somebody is there to take it; else released: the next to come takes it from a scan.
        """
        own, row = self._own, self._own.confirmed
        position = max(self._agenda.final_position(ledger), row.checkpoint)
        if own.next_owner is not None:
            return HandOver(own.key, own.me, own.next_owner, own.counter, position, row.checkpoint)
        asker = self.asker(now)
        if asker is None and not self.others_in_sight:
            return Release(own.key, own.me, own.counter, position, row.checkpoint)
        to = None if asker == ANYBODY else asker
        return Offer(own.key, own.me, own.counter, position, row.checkpoint, to)


def words_of(change: GivingAway) -> str:
    """To whom it went, for the report."""
    match change:
        case HandOver(next_owner=next_owner):
            return f"handed over to {next_owner}, as a KCL 3 leader asked"
        case Offer(offered_to=str(to)):
            return f"offered to {to}, who asked for it"
        case Offer():
            return "offered to whoever comes first"
        case Release():
            return "released: no other owner is in sight"
