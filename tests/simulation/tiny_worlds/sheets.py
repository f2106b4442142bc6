"""Rows, writes, requests and answers as plain tuples, with what is relative kept apart."""

from kclrun.protocol.writes import (
    Ask,
    CreateChildren,
    CreateLease,
    DeleteEnded,
    LateCheckpoint,
    NameChildren,
    Take,
    Withdraw,
)
from tests.simulation.tiny_worlds.worlds import FAILOVER_S, TICK_S

# How far back an instant is told from older ones: not at all, but up to the tick it is due at; by
# what is fresh for a failover; by expiry and what is long overdue; by the age of an ask.
DUE, FRESH, AGE, ASK_AGE = 0.0, FAILOVER_S + TICK_S, 3 * FAILOVER_S, 31.0
ASKED = "asked at"


class Sheet:
    """One shape in the making: instants and counters are kept apart, for they are relative."""

    __slots__ = ("counters", "instants", "names")

    def __init__(self, names) -> None:
        self.names = names
        self.instants = []
        self.counters = []

    def at(self, instant, clip=DUE) -> None:
        if instant is not None:
            self.instants.append((instant, clip))

    def lease(self, row):
        if row is None:
            return None
        self.counters.append((row.key, row.counter))
        names, handoff = self.names, row.handoff
        return (
            row.key,
            row.checkpoint.sequence_number,
            names[row.owner],
            handoff and self.handoff(handoff),
            names[row.offered_to],
            names[row.offered_by],
            len(row.children),
            row.failover_s is None,
            row.halt is None,
            row.taken_from,
        )

    def handoff(self, handoff):
        self.counters.append((ASKED, handoff.asked_at))
        return self.names[handoff.to]

    def change(self, change):
        """A write: its kind and all that it names."""
        names, kind = self.names, type(change)
        if kind is CreateLease:
            return ("create", self.lease(change.lease))
        if kind is CreateChildren:
            for parent in change.parents:
                self.counters.append((parent.key, getattr(parent, "counter", -1)))
            kinds = tuple((each.key, type(each).__name__) for each in change.parents)
            return ("children", kinds, tuple(child.key for child in change.children))
        if kind is Ask:
            self.counters.append((ASKED, change.asked_at))
            seen = change.seen and self.handoff(change.seen)
            return ("ask", change.key, names[change.owner], names[change.asked], seen)
        if kind is Withdraw:
            return ("withdraw", change.key, names[change.owner])
        if kind is DeleteEnded:
            return ("delete", change.key)
        if kind is LateCheckpoint:
            at = (change.last.sequence_number, change.position.sequence_number)
            return ("late", change.key, names[change.former], at)
        self.counters.append((change.key, change.seen_counter))
        owner = getattr(change, "owner", None) or change.seen_owner
        moved = getattr(change, "position", None)
        last = getattr(change, "last", None)
        return (
            kind.__name__,
            change.key,
            names[owner],
            names[change.seen_owner] if kind is Take else None,
            moved and moved.sequence_number,
            last and last.sequence_number,
            names[getattr(change, "offered_to", None)],
            getattr(change, "drops_ask", None),
            getattr(change, "has_waited", None),
            kind is NameChildren and len(change.children),
        )

    def event(self, event):
        """An answer that was not heard yet, or an event that waits."""
        outcome = getattr(event, "outcome", None)
        row = getattr(outcome, "row", None) if outcome is not None else getattr(event, "row", None)
        rows = getattr(event, "leases", ())
        return (
            type(event).__name__,
            type(outcome).__name__,
            self.lease(row),
            tuple(map(self.lease, rows)) if rows is not None else None,
            str(getattr(event, "last", "")),
        )

    def request(self, request):
        if request is None:
            return None
        kind, what = request.kind, request.what
        self.at(request.sent, FRESH)
        asked = self.change(what) if kind == "write" else what
        answer = request.answer
        return (kind, asked, answer and self.event(answer), request.waits)
