"""Our share of the work: which leases are taken, asked for, or picked up from offers.

Knows: the loads of the last scan, our asks, the rows on offer. Must not know: what happens to a
lease once it is ours (`held_leases.py`). Every decision is a conditional write: if another write
came first, it does not apply, and the next scan decides again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, assert_never

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.leases.assignment import Action, Decision, LocalHoldings, OwnerLoads, left_unread, plan
from kclrun.leases.auditing import Audits
from kclrun.leases.capacity import STRETCH, CapacityWatch
from kclrun.leases.commands import Command, FindOffers, Note, PublishOthersInSight, WriteRow
from kclrun.leases.events import OffersFound
from kclrun.leases.held_leases import HeldLeases
from kclrun.leases.load import LoadBalancer
from kclrun.leases.policy import ManagerPolicy, ScanPace, is_seldom, scan_delay_s
from kclrun.leases.table_view import Observation, TableView
from kclrun.leases.transitions import State
from kclrun.model.lease import ASK_STALE_AFTER_S, OFFERED, Lease, LeaseKey, OwnerId
from kclrun.model.sequence import LATEST
from kclrun.model.stream import stream_of
from kclrun.model.time import Instant
from kclrun.protocol import writes

# A row that was not given away within 30 s has an owner that is stuck in a batch or that refuses.
# For ten times as long we ask for other rows instead. Halts and restarts are over by then.
_LEFT_ALONE_S: Final = 10 * ASK_STALE_AFTER_S


class _PendingAsk(msgspec.Struct):
    """One ask of ours. `since_instant` is when its outcome came; None while it is under way."""

    change: writes.Ask
    since_instant: Instant | None = None


class Asker:
    """The asks that we wrote on other owners' rows, from the sending to the answer [P16].

    One instance for each manager.

    Rule: an ask is not the write of an owner and is never repeated; the next scan shows its result.
    It is outstanding until the row is ours, offered, taken by another owner, or 30 s have passed. A
    drain withdraws all asks: an owner that finds our ask later would offer us the lease in vain,
    and the others would leave it to us for seconds. A row that is offered to us already is offered
    on to any owner [P17].
    """

    def __init__(self, me: OwnerId, observation: Observation) -> None:
        self._me = me
        self._observation = observation
        self._asks: dict[LeaseKey, _PendingAsk] = {}
        self._unanswered: dict[LeaseKey, Instant] = {}  # the value: left alone until then
        self._is_draining = False
        # The rows whose ask is being withdrawn, or whose offer to us is being declined.
        self._ending: set[LeaseKey] = set()
        self._refusal: str | None = None

    @property
    def outstanding(self) -> tuple[LeaseKey, ...]:
        """The rows that may become ours; each fills a place until its ask is over."""
        return tuple(self._asks)

    @property
    def unanswered(self) -> frozenset[LeaseKey]:
        """Rows that were asked for in vain. They are not asked for again for five minutes."""
        return frozenset(self._unanswered)

    def is_writing(self, key: LeaseKey) -> bool:
        """Whether an ask, its withdrawal or a decline is under way to this row."""
        asked = self._asks.get(key)
        return key in self._ending or (asked is not None and asked.since_instant is None)

    def keys_under_way(self) -> frozenset[LeaseKey]:
        """The rows with an ask, its withdrawal or a decline under way."""
        asked = (key for key, ask in self._asks.items() if ask.since_instant is None)
        return frozenset(self._ending).union(asked)

    def ask(self, lease: Lease, asked: OwnerId, now: Instant) -> list[Command]:
        """Write an ask on this row. It replaces one that stood there for too long, if any. The time
        on it is for people: no decision uses it."""
        at = self._observation.wall_time(now)
        change = writes.Ask(lease.key, self._me, asked, at, lease.handoff)
        self._asks[lease.key] = _PendingAsk(change)
        return [WriteRow(change)]

    def resolved(self, change: writes.Ask, outcome: writes.Outcome, now: Instant) -> list[Command]:
        """Take in the outcome of the write. An ask that did not apply is planned anew with the next
        scan. An unknown outcome counts as applied until a scan shows otherwise."""
        asked = self._asks.get(change.key)
        if asked is None or asked.change != change or asked.since_instant is not None:
            raise InvariantViolation(f"lease {change.key}: an outcome of no ask under way")
        commands: list[Command] = []
        if isinstance(outcome, writes.Applied | writes.OutcomeUnknown):
            asked.since_instant = now
            if self._is_draining:
                commands = self._withdraw(change.key)
        else:
            del self._asks[change.key]
        self._refusal, notes = _noted(
            "lease_asked", change.key, change.asked, outcome, self._refusal
        )
        return commands + notes

    def drain(self) -> list[Command]:
        """Withdraw every ask; those under way as soon as their outcome is known."""
        self._is_draining = True
        commands: list[Command] = []
        for key in self._asks:
            if not self.is_writing(key):
                commands += self._withdraw(key)
        return commands

    def ended(
        self, change: writes.Withdraw | writes.Decline, outcome: writes.Outcome
    ) -> list[Command]:
        """Take in the outcome of a withdrawal or a decline. It is never repeated: if it did not
        arrive, the others wait, as for an owner that died."""
        if change.key not in self._ending:
            raise InvariantViolation(f"lease {change.key}: an outcome of no ask that ends")
        self._ending.discard(change.key)
        if isinstance(change, writes.Decline) or not isinstance(outcome, writes.ConditionFailed):
            return []
        row = outcome.row
        if row is not None and row.owner == OFFERED and row.offered_to == self._me:
            self._ending.add(row.key)
            return [WriteRow(writes.Decline(row.key, self._me, row.counter))]
        return []

    def _withdraw(self, key: LeaseKey) -> list[Command]:
        self._ending.add(key)
        return [WriteRow(writes.Withdraw(key, self._me))]

    def over(self, key: LeaseKey) -> None:
        """The row is being taken: the ask is over, whether the take applies or not."""
        asked = self._asks.get(key)
        if asked is not None and asked.since_instant is not None:
            del self._asks[key]

    def after_scan(
        self, rows: Mapping[LeaseKey, Lease], scanned_instant: Instant, now: Instant
    ) -> None:
        """Drop asks that were answered in any way; remember rows that were asked for in vain."""
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

    def _stands(self, change: writes.Ask, row: Lease | None) -> bool:
        """Whether the row still carries our ask, or is offered to us."""
        if row is None or row.is_ended:
            return False
        if row.owner == OFFERED:
            return row.offered_to == self._me
        handoff = row.handoff
        is_ours = handoff is not None and handoff.to == self._me
        return row.owner == change.asked and is_ours


def _noted(
    event: str, key: LeaseKey, owner: OwnerId, outcome: writes.Outcome, refusal: str | None
) -> tuple[str | None, list[Command]]:
    """The line of the log for the outcome of a write to another owner's row. A refusal is logged
    once for each code until a write succeeds: also returns the code that was logged last."""
    if isinstance(outcome, writes.Applied):
        return None, [Note(event, key=key, fields={"row_owner": owner})]
    if isinstance(outcome, writes.Refused) and outcome.code != refusal:
        fields = {"code": outcome.code, "message": outcome.message}
        return outcome.code, [Note("write_refused", "error", key, {**fields})]
    return refusal, []


# One BatchGetItem reads at most 100 rows; further rows wait for the next half second.
OFFERS_PER_QUERY_MAX: Final = 100
_FIND_EVERY_S: Final = 0.5
# The fleet's queries on the one index key of all offers, a second [P17]: 64 owners at 2 each.
_FLEET_QUERIES_PER_S: Final = 128
_SPREAD_S: Final = 0.2
_AFTER_ASKER_S: Final = 1.0
_GIVER_WAITS_S: Final = 2.0
# A row that was left lying for so long after our turn is taken beyond the target, too: its fair
# owner is full, cannot see it, or has ended. An owner that lacks a lease asks an extra one back.
LEFT_LYING_S: Final = 2.0
# Up to so many owners are put in order for a row. With more owners the hash itself spreads them
# enough.
_RANKED_OWNERS_MAX: Final = 64


class WaitingOffer(msgspec.Struct, frozen=True):
    """A known offered row. At `due_instant` we may take it, at `left_instant` any owner may."""

    lease: Lease
    due_instant: Instant
    left_instant: Instant


class OfferWatch:
    """The offered rows known to one manager, and the rhythm of looking for more.

    Rule: each row has one owner that is first in line, so that a fleet does not race for it. The
    others follow a fifth of a second later at most. If the first takers leave a row, any owner with
    room takes it, because a shard must not wait.

    The times are counted from when we first saw the row. The owner that it is meant for may take it
    at once. Others may take it in the order of a hash, within 0.2 s, and 1 s later if it is meant
    for an owner that may be alive. Its giver may take it after 2 s, and a draining manager never.

    Every owner with room looks for offers, also at its target. While four owners are at their
    targets, the leases of a fifth that drains are above every target, until its first offer shows
    that it is leaving.
    """

    def __init__(self, me: OwnerId) -> None:
        self._me = me
        self._waiting: dict[LeaseKey, WaitingOffer] = {}
        self._find_instant: Instant | None = None
        # When the next row's turn comes, as of the last look at all rows.
        self._turn_instant = Instant(math.inf)

    def see(
        self,
        offers: Iterable[Lease],
        owners: Collection[OwnerId],
        silent: Collection[OwnerId],
        now: Instant,
        *,
        is_complete: bool,
    ) -> None:
        """Take in offered rows. `is_complete`: all other rows are not offered any more."""
        before = self._waiting
        seen = {} if is_complete else dict(before)
        for lease in offers:
            if lease.owner != OFFERED or lease.is_ended:
                continue
            known = before.get(lease.key)
            if known is not None and known.lease.counter >= lease.counter:
                seen[lease.key] = known
                continue
            due = Instant(now + delay_s(lease, self._me, owners, silent))
            seen[lease.key] = WaitingOffer(lease, due, Instant(due + LEFT_LYING_S))
        self._waiting = seen
        self._turn_instant = now if seen else Instant(math.inf)

    @property
    def are_any(self) -> bool:
        return bool(self._waiting)

    def was_left(self, key: LeaseKey, now: Instant) -> bool:
        """Whether our turn for this row has come, and we left it to others."""
        known = self._waiting.get(key)
        return known is not None and known.due_instant <= now

    def is_turn_due(self, now: Instant) -> bool:
        """Whether a row's turn, for us or for any owner, has come since the last look at all."""
        return now >= self._turn_instant

    def due(self, now: Instant, *, is_below_target: bool) -> tuple[WaitingOffer, ...]:
        """Look at all rows and return those whose turn for us has come, those meant for us first.
        At our target these are the rows meant for us and the rows left lying."""
        me, ready, turn = self._me, [], math.inf
        for offer in self._waiting.values():
            is_wanted = is_below_target or offer.lease.offered_to == me
            at = offer.due_instant if is_wanted else offer.left_instant
            if at <= now:
                ready.append(offer)
                at = offer.left_instant
            if now < at < turn:
                turn = at
        self._turn_instant = Instant(turn)
        ready.sort(key=lambda offer: (offer.lease.offered_to != me, offer.due_instant))
        return tuple(ready)

    def forget(self, key: LeaseKey) -> None:
        self._waiting.pop(key, None)
        if not self._waiting:
            self._turn_instant = Instant(math.inf)

    def forget_all(self) -> None:
        self._waiting.clear()
        self._turn_instant = Instant(math.inf)
        self._find_instant = None

    def find_at(self, at: Instant | None) -> None:
        """Look for offers next at this instant; None while a query is under way."""
        self._find_instant = at

    def is_find_due(self, now: Instant) -> bool:
        return self._find_instant is not None and now >= self._find_instant

    def deadline(self) -> Instant | None:
        """When something is due next. A row whose turn has come and that we did not want is looked
        at again when it was left lying, and with every scan."""
        found = Instant(math.inf) if self._find_instant is None else self._find_instant
        due = min(found, self._turn_instant)
        return None if due == math.inf else due


def find_every_s(owners: int) -> float:
    """The time between two queries of one manager, so that the fleet makes at most 128 a second."""
    return max(_FIND_EVERY_S, owners / _FLEET_QUERIES_PER_S)


def delay_s(
    lease: Lease, me: OwnerId, owners: Collection[OwnerId], silent: Collection[OwnerId]
) -> float:
    """How long we leave this row to others. `owners`: the living kclrun owners; `silent`: the
    owners that have only expired leases left. An asker that owns nothing yet counts as alive."""
    if lease.offered_to == me:
        return 0.0
    if lease.offered_by == me:
        return _GIVER_WAITS_S
    is_for_another = lease.offered_to is not None and lease.offered_to not in silent
    return _SPREAD_S * _place(lease, me, owners) + (_AFTER_ASKER_S if is_for_another else 0.0)


def delay_words(lease: Lease, me: OwnerId) -> str:
    """Why a row waits for us as long as it does, in words."""
    giver = lease.offered_by or "its last owner"
    if lease.offered_to == me:
        return f"{giver} offers it to us"
    meant_for = f" to {lease.offered_to}" if lease.offered_to is not None else ""
    return "we offer it" + meant_for if giver == me else f"{giver} offers it{meant_for}"


def _place(lease: Lease, me: OwnerId, owners: Collection[OwnerId]) -> float:
    """Our place in the line for this row, from 0 (first) to just below 1."""
    mine = _digest(me, lease.key)
    if len(owners) - len({me, lease.offered_by}.intersection(owners)) >= _RANKED_OWNERS_MAX:
        return int.from_bytes(mine, "big") / 2.0 ** (8 * len(mine))
    others = [owner for owner in owners if owner not in (me, lease.offered_by)]
    before = sum(1 for owner in others if _digest(owner, lease.key) < mine)
    return before / (len(others) + 1)


def _digest(owner: OwnerId, key: LeaseKey) -> bytes:
    return hashlib.blake2b(f"{owner} {key}".encode(), digest_size=8).digest()


class ExpiredLeaseOffers:
    """Offers expired leases that we have no place for, in the name of their owners.

    One instance for each manager; it holds the offers that are under way.

    In a large fleet few managers scan often enough to see expired leases [P9], and each takes only
    up to its target. They offer the remaining ones in the name of the expired owner, to any owner:
    an index hit that every manager with a free place looks at each half second [P17]. So a lease
    waits only for the first manager that sees it expired, not for one that lacks a lease.

    Why it is safe: the write is an `Offer` with the condition of a take of an expired lease: the
    owner and the counter as seen, and the position as it stands. Only a manager that has itself
    seen the counter stand still for a failover may send it [P9]. The taker then need not wait, as
    after any offer. If the owner lives after all, either its renewal came first and this write
    fails, or its fence has passed and its own next write fails [P2, P7]. Rule: the write is never
    repeated; the next scan or the index shows its result.
    """

    def __init__(self) -> None:
        self.under_way: set[LeaseKey] = set()
        self._refusal: str | None = None

    def offer(self, lease: Lease) -> list[Command]:
        """Offer an expired lease in its owner's name. Raises: InvariantViolation without one."""
        if lease.owner is None:
            raise InvariantViolation(f"lease {lease.key}: no owner in whose name to offer it")
        at = lease.checkpoint
        self.under_way.add(lease.key)
        return [WriteRow(writes.Offer(lease.key, lease.owner, lease.counter, at, at))]

    def resolved(self, change: writes.Offer, outcome: writes.Outcome) -> list[Command]:
        """Take in any outcome of the write. The table shows the rest."""
        if change.key not in self.under_way:
            raise InvariantViolation(f"lease {change.key}: an outcome of no offer under way")
        self.under_way.discard(change.key)
        self._refusal, notes = _noted(
            "lease_passed_on", change.key, change.owner, outcome, self._refusal
        )
        return notes


class Balancer:
    """Decides our takes and asks, and sends them. One instance for each manager.

    A draining manager neither takes nor asks. `children` names the children of shards that ended
    here.

        scan ─► loads ────┬─► plan ─► takes, asks
                          └─► offered rows ─► our turn ─► takes
                                ▲
          every half second ────┘  FindOffers ─► OffersFound
    """

    def __init__(
        self,
        policy: ManagerPolicy,
        chance: Callable[[], float],
        held: HeldLeases,
        audits: Audits,
        observation: Observation,
        *,
        children: Collection[LeaseKey],
    ) -> None:
        self._policy = policy
        self._chance = chance
        self._held = held
        self._audits = audits
        self._observation = observation
        self._children = children
        self._asker = Asker(policy.me, observation)
        self._expired_offers = ExpiredLeaseOffers()
        self._load = LoadBalancer(policy, observation)
        self._offers = OfferWatch(policy.me)
        self._capacity = CapacityWatch(policy.leases_max)
        self._loads: OwnerLoads | None = None
        # The numbers of leases held and asked for at the last look at the offered rows.
        self._holdings_at_look = (0, 0)
        # The offers, with their counters, that caused a scan out of turn.
        self._scanned_for: dict[LeaseKey, int] = {}

    @property
    def has_writes_under_way(self) -> bool:
        under_way = self._asker.keys_under_way() or self._expired_offers.under_way
        return bool(under_way) or self._load.is_writing

    def is_free(self, key: LeaseKey) -> bool:
        """Whether the row is not held, not being written, and of a stream that we read. The owner
        index covers the whole table."""
        if key in self._held.held_leases or not self._audits.is_ours(key):
            return False
        is_ours_under_way = self._asker.is_writing(key) or key in self._expired_offers.under_way
        return not (is_ours_under_way or self._audits.is_writing(key))

    def after_scan(
        self, view: TableView, scanned_instant: Instant, gone: frozenset[OwnerId]
    ) -> tuple[list[Command], ScanPace]:
        """Take and ask for our share, as shown by a scan that began at `scanned_instant`."""
        now = view.seen_instant
        self._asker.after_scan(view.rows, scanned_instant, now)
        if self._load.steps:
            self._load.after_scan(view.rows, scanned_instant, now)
        left = self._loads.leaving if self._loads is not None else frozenset[OwnerId]()
        if self._loads is None:
            self._offers.find_at(now)
        loads = self._loads = OwnerLoads(
            view, self._observation, self._holdings(gone), me=self._policy.me, left=left
        )
        commands = self._publish_in_sight(loads)
        self._see_offers(loads.offered, now, is_complete=True)
        commands += self._take_offers(now)
        holdings = self._holdings(gone, self._busy())
        loads.hold(holdings)
        decided = plan(loads, self._observation, self._policy, holdings, self._chance)
        for decision in decided.decisions:
            commands += self._carry_out(decision, now)
        if decided.decisions or loads.on_order or loads.free:
            self._load.watched = None
        else:
            commands += self._exchange(loads, now)
        held_leases = self._held.held_leases
        unread = left_unread(loads, self._observation, self._policy, held_leases)
        # Work = leases not ended whose parents have ended. A child that waits for a parent that
        # was made again would keep its place for ever where no other owner has a place for that
        # parent [L1].
        if unread and self._held.is_full:
            commands += self._held.give_way(len(unread), loads.is_work, now)
        unclaimed = sum(1 for lease in (*loads.free, *loads.offered) if self.is_free(lease.key))
        is_short = self._held.places < self._policy.leases_max
        commands += self._capacity.after_scan(
            unread, unclaimed, held=len(self._held.held), is_short=is_short
        )
        is_exchanging = decided.pace is ScanPace.REST and self._load.steps
        return commands, ScanPace.MOVE if is_exchanging else decided.pace

    def _exchange(self, loads: OwnerLoads, now: Instant) -> list[Command]:
        """Begin an exchange for the loads' sake, if one is due."""
        held_leases, busy = self._held.held_leases, self._asker.keys_under_way()
        unanswered = self._asker.unanswered

        def may_move(key: LeaseKey) -> bool:
            held_lease = held_leases.get(key)
            is_running = held_lease is None or held_lease.state is State.RUNNING
            return is_running and key not in busy and key not in unanswered

        exchange = self._load.look(loads, self._held.places, may_move)
        if exchange is None:
            return []
        return self._load.begin(exchange, loads.view.rows, self._observation.wall_time(now))

    def on_offers(self, event: OffersFound, now: Instant) -> tuple[list[Command], bool]:
        """Take in offered rows of the index. Without an index, the scans alone find them.

        Also returns True if they show that the last scan is too old to decide by: scan at once.
        """
        loads = self._loads
        if loads is None or self._held.is_draining:
            return [], False
        if event.leases is None:
            owners = loads.view.kclrun_owners
            self._offers.find_at(Instant(now + scan_delay_s(self._policy, owners)))
            return [], False
        self._offers.find_at(Instant(now + find_every_s(len(loads.view.kclrun_owners))))
        offers = [lease for lease in event.leases if self._may_take(lease, loads)]
        loads.note_offers(offers)
        is_complete = len(event.leases) < self._rows_max()
        self._see_offers(offers, now, is_complete=is_complete)
        commands = self._take_offers(now)
        return commands, self._note_lying_offers(event.leases, loads, now)

    def on_write(
        self,
        change: writes.Ask | writes.Withdraw | writes.Decline | writes.Offer,
        outcome: writes.Outcome,
        now: Instant,
    ) -> list[Command]:
        """Take in the outcome of an ask, of its end, or of an offer in another owner's name."""
        match change:
            case writes.Ask() if change.owner != self._policy.me:
                commands, wanted = self._load.resolved(change, outcome, now)
                if wanted is not None and not self._held.is_draining:
                    commands += self._asker.ask(wanted, change.owner, now)
                return commands
            case writes.Ask():
                return self._asker.resolved(change, outcome, now)
            case writes.Offer():
                return self._expired_offers.resolved(change, outcome)
            case writes.Withdraw() | writes.Decline():
                return self._asker.ended(change, outcome)
            case _:
                assert_never(change)

    def tick(self, now: Instant) -> list[Command]:
        """Take the offered rows whose turn has come; look for more when that is due. A row that we
        left to others is looked at again when we hold or ask for fewer or more leases than at the
        last look."""
        commands: list[Command] = []
        if self._held.host_capacity.is_short:
            commands += self._held.host_capacity.tick(now)
        if self._held.is_draining or self._loads is None:
            return commands
        has_turn = self._offers.is_turn_due(now)
        if has_turn or (self._offers.are_any and self._counts() != self._holdings_at_look):
            commands += self._take_offers(now)
        rows_max = self._rows_max() if self._offers.is_find_due(now) else 0
        if rows_max > 0:
            self._offers.find_at(None)
            commands.append(FindOffers(rows_max))
        return commands

    def drain(self) -> list[Command]:
        """Take and ask for nothing any more; leave the leases that we asked for to the others."""
        self._offers.forget_all()
        return [*self._asker.drain(), PublishOthersInSight(self._held.are_others_in_sight)]

    def deadline(self) -> Instant | None:
        """When the next offered row is due, or the next look at the index."""
        if self._held.is_draining or self._held.is_full:
            return None
        return self._offers.deadline()

    def _holdings(
        self, gone: frozenset[OwnerId] = frozenset(), busy: Collection[LeaseKey] = ()
    ) -> LocalHoldings:
        return LocalHoldings(
            held=self._held.held,
            asked=(*self._asker.outstanding, *self._load.expected),
            unanswered=self._asker.unanswered,
            children=self._children,
            gone=gone,
            busy=busy,
            places=self._held.places,
        )

    def _busy(self) -> frozenset[LeaseKey]:
        """The rows that we hold, or that have a write of ours under way."""
        asked, offered = self._asker.keys_under_way(), self._expired_offers.under_way
        return asked.union(self._held.held_leases, self._audits.keys_under_way(), offered)

    def _counts(self) -> tuple[int, int]:
        return len(self._held.held), len(self._asker.outstanding)

    def _rows_max(self) -> int:
        """Room for offered rows. Those we asked for have their places already."""
        return min(OFFERS_PER_QUERY_MAX, self._held.places - len(self._held.held))

    def _see_offers(self, offers: Collection[Lease], now: Instant, *, is_complete: bool) -> None:
        if self._loads is not None:
            owners, silent = self._loads.kclrun_owners, self._loads.view.silent
            self._offers.see(offers, owners, silent, now, is_complete=is_complete)

    def _take_offers(self, now: Instant) -> list[Command]:
        """Take rows meant for us; others up to the target; rows left lying also beyond it."""
        loads = self._loads
        commands: list[Command] = []
        if loads is not None and self._offers.are_any:
            loads.hold(self._holdings())
            is_below_target = loads.mine < loads.target(self._held.places)
            for waiting in self._offers.due(now, is_below_target=is_below_target):
                if loads.held >= self._places_for(waiting, now):
                    continue
                if not self.is_free(waiting.lease.key):
                    self._offers.forget(waiting.lease.key)
                elif self._is_ours_to_take(waiting, loads, now):
                    self._offers.forget(waiting.lease.key)
                    commands += self._take(waiting.lease, now)
                    loads.hold(self._holdings())
        self._holdings_at_look = self._counts()
        return commands

    def _note_lying_offers(
        self, offers: Collection[Lease], loads: OwnerLoads, now: Instant
    ) -> bool:
        """Note the offers that no owner takes. Returns: whether the last scan is too old. A row is
        on offer that is not work in it, or that is above our target and still there after our turn.
        The owners that it was left to may be gone.

        Once for each such offer. Only frequent scanners do this; the others rely on them [P9].
        """
        lying = {
            lease.key: lease.counter
            for lease in offers
            if self.is_free(lease.key)
            and (not self._may_take(lease, loads) or self._offers.was_left(lease.key, now))
        }
        is_news = any(self._scanned_for.get(key) != counter for key, counter in lying.items())
        self._scanned_for = lying
        return is_news and not is_seldom(self._policy, loads.view.kclrun_owners)

    def _may_take(self, lease: Lease, loads: OwnerLoads) -> bool:
        """Whether we may take this row: it is free, and it is work or unknown to the last scan. A
        child whose parents are being read elsewhere would only fill a place here."""
        is_unknown = lease.key not in loads.view.rows
        return self.is_free(lease.key) and (is_unknown or loads.is_work(lease.key))

    def _is_ours_to_take(self, waiting: WaitingOffer, loads: OwnerLoads, now: Instant) -> bool:
        if waiting.lease.offered_to == self._policy.me or now >= waiting.left_instant:
            return True
        return loads.mine < loads.target(self._held.places)

    def _places_for(self, waiting: WaitingOffer, now: Instant) -> int:
        """Our places; more than our host proves able to run for a row left for three failovers."""
        places = self._held.places
        is_overdue = now >= waiting.left_instant + self._policy.overdue_after_s
        return min(self._policy.leases_max, places + STRETCH) if is_overdue else places

    def _carry_out(self, decision: Decision, now: Instant) -> list[Command]:
        if decision.action is Action.ASK and decision.owner is not None:
            return self._asker.ask(decision.lease, decision.owner, now)
        if decision.action is Action.OFFER:
            return self._expired_offers.offer(decision.lease)
        return self._take(decision.lease, now, forced=decision.action is Action.FORCE)

    def _take(self, lease: Lease, now: Instant, *, forced: bool = False) -> list[Command]:
        self._asker.over(lease.key)
        pinned_at = self._observation.wall_time(now) if _lacks_pin(lease) else None
        take = writes.Take(
            key=lease.key,
            owner=self._policy.me,
            seen_owner=lease.owner,
            seen_counter=lease.counter,
            failover_s=self._policy.failover_s,
            start=self._policy.of_stream(stream_of(lease.key)).start_text,
            forced=forced,
            latest_pinned_at=pinned_at,
            stream_created_at=self._policy.created.get(stream_of(lease.key)),
            endpoint=self._held.endpoint,
        )
        return self._held.take(take, now)

    def _publish_in_sight(self, loads: OwnerLoads) -> list[Command]:
        """Publish whether another kclrun owner lives or joins: it can take our offers."""
        owners = loads.kclrun_owners
        are_others = len(owners) > (self._policy.me in owners)
        if are_others == self._held.are_others_in_sight:
            return []
        self._held.are_others_in_sight = are_others
        return [PublishOthersInSight(are_others)]


def _lacks_pin(lease: Lease) -> bool:
    """Whether a start from this row's LATEST would mean another instant each time and skip the
    records since the last one: a row that a Java worker made [P14]."""
    is_latest = lease.checkpoint.sequence_number == LATEST.sequence_number
    return is_latest and lease.latest_pinned_at is None
