"""Our share of the work: which leases are taken, asked for, or picked up from offers.

Knows: the loads of the last scan, our requests, the rows on offer. Must not know: what happens to a
lease once it is ours (`held_leases.py`). Every decision here is a conditional write. If another
write came first, it does not apply, and the next scan decides again. A draining manager neither
takes nor asks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.leases.assignment import Action, Decision, LocalHoldings, OwnerLoads, left_unread, plan
from kclrun.leases.commands import Command, FindOffers, Note, TellOthersInSight, WriteRow
from kclrun.leases.events import OffersFound, WriteResolved
from kclrun.leases.held_lease import STRETCH, CapacityWatch
from kclrun.leases.held_leases import HeldLeases
from kclrun.leases.offers import (
    OFFERS_PER_QUERY_MAX,
    ExpiredLeaseOffers,
    OfferWatch,
    Waiting,
    find_every_s,
)
from kclrun.leases.policy import ManagerPolicy, Pace, is_seldom, scan_delay_s
from kclrun.leases.table_view import Observation, TableView
from kclrun.model.lease import ASK_STALE_AFTER_S, OFFERED, Lease, LeaseKey, OwnerId
from kclrun.model.sequence import LATEST
from kclrun.model.stream import stream_of
from kclrun.model.time import Instant, WallTime
from kclrun.protocol.writes import (
    Applied,
    Ask,
    ConditionFailed,
    Decline,
    Offer,
    Outcome,
    OutcomeUnknown,
    Refused,
    Take,
    Withdraw,
)

# A row that was not given away within 30 s has an owner that is stuck in a batch or that refuses.
# For ten times as long we ask for other rows instead. Halts and restarts are over by then.
_LEFT_ALONE_S: Final = 10 * ASK_STALE_AFTER_S


class _Asked(msgspec.Struct):
    """One ask of ours. `since_instant` is when its outcome came; None while it is under way."""

    change: Ask
    since_instant: Instant | None = None


class Asker:
    """The asks that we wrote on other owners' rows, from the sending to the answer [P16].

    One instance for each manager. `wall` gives the wall-clock time that is written with an ask. It
    is for people: no decision uses it.

    Rule: an ask is not the write of an owner and is never repeated; the next scan shows its result.
    It is outstanding until the row is ours, offered, taken by another owner, or 30 s have passed. A
    drain withdraws all asks: an owner that finds our ask later would offer us the lease in vain,
    and the others would leave it to us for seconds. A row that is offered to us already is offered
    on to any owner [P17].
    """

    def __init__(
        self, me: OwnerId, out: list[Command], wall: Callable[[Instant], WallTime]
    ) -> None:
        self._me = me
        self._out = out
        self._wall = wall
        self._asks: dict[LeaseKey, _Asked] = {}
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

    @property
    def has_writes_under_way(self) -> bool:
        return bool(self._ending) or any(map(self.is_writing, self._asks))

    def ask(self, lease: Lease, asked: OwnerId, now: Instant) -> None:
        """Write an ask on this row. It replaces one that stood there for too long, if any."""
        change = Ask(lease.key, self._me, asked, self._wall(now), lease.handoff)
        self._asks[lease.key] = _Asked(change)
        self._out.append(WriteRow(change))

    def resolved(self, change: Ask, outcome: Outcome, now: Instant) -> None:
        """Take in the outcome of the write. An ask that did not apply is planned anew with the next
        scan. An unknown outcome counts as applied until a scan shows otherwise."""
        asked = self._asks.get(change.key)
        if asked is None or asked.change != change or asked.since_instant is not None:
            raise InvariantViolation(f"lease {change.key}: an outcome of no ask under way")
        if isinstance(outcome, Applied | OutcomeUnknown):
            asked.since_instant = now
            if self._is_draining:
                self._withdraw(change.key)
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

    def drain(self) -> None:
        """Withdraw every ask; those under way as soon as their outcome is known."""
        self._is_draining = True
        for key in self._asks:
            if not self.is_writing(key):
                self._withdraw(key)

    def ended(self, change: Withdraw | Decline, outcome: Outcome) -> None:
        """Take in the outcome of a withdrawal or a decline. It is never repeated: if it did not
        arrive, the others wait, as for an owner that died."""
        if change.key not in self._ending:
            raise InvariantViolation(f"lease {change.key}: an outcome of no ask that ends")
        self._ending.discard(change.key)
        if not isinstance(change, Withdraw) or not isinstance(outcome, ConditionFailed):
            return
        row = outcome.row
        if row is not None and row.owner == OFFERED and row.offered_to == self._me:
            self._ending.add(row.key)
            self._out.append(WriteRow(Decline(row.key, self._me, row.counter)))

    def _withdraw(self, key: LeaseKey) -> None:
        self._ending.add(key)
        self._out.append(WriteRow(Withdraw(key, self._me)))

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

    def _stands(self, change: Ask, row: Lease | None) -> bool:
        """Whether the row still carries our ask, or is offered to us."""
        if row is None or row.is_ended:
            return False
        if row.owner == OFFERED:
            return row.offered_to == self._me
        handoff = row.handoff
        is_ours = handoff is not None and handoff.to == self._me
        return row.owner == change.asked and is_ours


class Balancer:
    """Decides our takes and asks, and sends them. One instance for each manager.

    `is_free` says that a row is not held and that no write of it is under way. `children` names the
    children of shards that ended here.

        scan ─► loads ────┬─► plan ─► takes, asks
                          └─► offered rows ─► our turn ─► takes
                                ▲
          every half second ────┘  FindOffers ─► OffersFound
    """

    def __init__(
        self,
        policy: ManagerPolicy,
        out: list[Command],
        held: HeldLeases,
        observation: Observation,
        *,
        chance: Callable[[], float],
        wall: Callable[[Instant], WallTime],
        is_free: Callable[[LeaseKey], bool],
        children: Collection[LeaseKey],
    ) -> None:
        self._policy = policy
        self._out = out
        self._held = held
        self._observation = observation
        self._chance = chance
        self._wall = wall
        self._is_free = is_free
        self._children = children
        self._asker = Asker(policy.me, out, wall)
        self._expired_offers = ExpiredLeaseOffers(out)
        self._offers = OfferWatch(policy.me)
        self._capacity = CapacityWatch(policy, out)
        self._loads: OwnerLoads | None = None
        # The numbers of leases held and asked for at the last look at the offered rows.
        self._holdings_at_look = (0, 0)
        # The offers, with their counters, that caused a scan out of turn.
        self._scanned_for: dict[LeaseKey, int] = {}

    @property
    def has_writes_under_way(self) -> bool:
        return self._asker.has_writes_under_way or self._expired_offers.has_writes_under_way

    def is_writing(self, key: LeaseKey) -> bool:
        """Whether an ask of ours, or an offer in another owner's name, is under way to this row."""
        return self._asker.is_writing(key) or self._expired_offers.is_writing(key)

    def after_scan(
        self, view: TableView, scanned_instant: Instant, gone: frozenset[OwnerId]
    ) -> Pace:
        """Take and ask for our share, as shown by a scan that began at `scanned_instant`."""
        now = view.seen_instant
        self._asker.after_scan(view.rows, scanned_instant, now)
        holdings = self._holdings(gone)
        left = self._loads.leaving if self._loads is not None else frozenset[OwnerId]()
        loads = OwnerLoads(view, self._observation, holdings, me=self._policy.me, left=left)
        if self._loads is None:
            self._offers.find_at(now)
        self._loads = loads
        self._tell_in_sight(loads)
        self._see_offers(loads.offered, now, is_complete=True)
        self._take_offers(now)
        holdings = self._holdings(gone)
        loads.hold(holdings)
        decided = plan(loads, self._observation, self._policy, holdings, self._chance)
        for decision in decided.decisions:
            self._carry_out(decision, now)
        is_busy = self._held.held_leases.__contains__
        unread = left_unread(loads, self._observation, self._policy, is_busy)
        # Work = leases not ended whose parents have ended. A child that waits for a parent that
        # was made again would keep its place for ever where no other owner has a place for that
        # parent [L1].
        if unread and self._held.is_full:
            self._held.give_way(len(unread), loads.is_work, now)
        unclaimed = sum(1 for lease in loads.unclaimed if self._is_free(lease.key))
        self._capacity.after_scan(
            unread,
            unclaimed,
            held=len(self._held.held),
            is_short=self._held.places < self._policy.leases_max,
        )
        return decided.pace

    def on_offers(self, event: OffersFound, now: Instant) -> bool:
        """Take in offered rows of the index. Without an index, the scans alone find them.

        Returns True if they show that the last scan is too old to decide by: scan at once.
        """
        loads = self._loads
        if loads is None or self._held.is_draining:
            return False
        if event.leases is None:
            owners = loads.view.kclrun_owners
            self._offers.find_at(Instant(now + scan_delay_s(self._policy, owners)))
            return False
        self._offers.find_at(Instant(now + find_every_s(len(loads.view.kclrun_owners))))
        offers = [lease for lease in event.leases if self._may_take(lease, loads)]
        loads.note_offers(offers)
        is_complete = len(event.leases) < self._rows_max()
        self._see_offers(offers, now, is_complete=is_complete)
        self._take_offers(now)
        return self._is_scan_too_old(event.leases, loads, now)

    def on_ask(self, change: Ask, event: WriteResolved, now: Instant) -> None:
        self._asker.resolved(change, event.outcome, now)

    def on_ask_ended(self, change: Withdraw | Decline, event: WriteResolved) -> None:
        self._asker.ended(change, event.outcome)

    def on_passed_on(self, change: Offer, event: WriteResolved) -> None:
        self._expired_offers.resolved(change, event.outcome)

    def tick(self, now: Instant) -> None:
        """Take the offered rows whose turn has come; look for more when that is due. A row that we
        left to others is looked at again when we hold or ask for fewer or more leases than at the
        last look."""
        self._held.host_places.tick(now)
        if self._held.is_draining or self._loads is None:
            return
        has_turn = self._offers.is_turn_due(now)
        if has_turn or (self._offers.are_any and self._counts() != self._holdings_at_look):
            self._take_offers(now)
        rows_max = self._rows_max() if self._offers.is_find_due(now) else 0
        if rows_max > 0:
            self._offers.find_at(None)
            self._out.append(FindOffers(rows_max))

    def drain(self) -> None:
        """Take and ask for nothing any more; leave the leases that we asked for to the others."""
        self._offers.forget_all()
        self._asker.drain()
        self._out.append(TellOthersInSight(self._held.are_others_in_sight))

    def deadline(self) -> Instant | None:
        """When the next offered row is due, or the next look at the index."""
        if self._held.is_draining or self._held.is_full:
            return None
        return self._offers.deadline()

    def _holdings(self, gone: frozenset[OwnerId] = frozenset()) -> LocalHoldings:
        return LocalHoldings(
            held=self._held.held,
            asked=self._asker.outstanding,
            unanswered=self._asker.unanswered,
            children=self._children,
            gone=gone,
            is_busy=lambda key: not self._is_free(key),
            places=self._held.places,
        )

    def _counts(self) -> tuple[int, int]:
        return len(self._held.held), len(self._asker.outstanding)

    def _rows_max(self) -> int:
        """Room for offered rows. Those we asked for have their places already."""
        return min(OFFERS_PER_QUERY_MAX, self._held.places - len(self._held.held))

    def _see_offers(self, offers: Collection[Lease], now: Instant, *, is_complete: bool) -> None:
        if self._loads is not None:
            owners, silent = self._loads.kclrun_owners, self._loads.view.silent
            self._offers.see(offers, owners, silent, now, is_complete=is_complete)

    def _take_offers(self, now: Instant) -> None:
        """Take rows meant for us; others up to the target; rows left lying also beyond it."""
        loads = self._loads
        if loads is not None and self._offers.are_any:
            loads.hold(self._holdings())
            self._take_from(loads, now)
        self._holdings_at_look = self._counts()

    def _take_from(self, loads: OwnerLoads, now: Instant) -> None:
        is_below_target = loads.mine < loads.target(self._held.places)
        for waiting in self._offers.due(now, is_below_target=is_below_target):
            if loads.held >= self._places_for(waiting, now):
                continue
            if not self._is_free(waiting.lease.key):
                self._offers.forget(waiting.lease.key)
            elif self._is_ours_to_take(waiting, loads, now):
                self._offers.forget(waiting.lease.key)
                self._take(waiting.lease, now)
                loads.hold(self._holdings())

    def _is_scan_too_old(self, offers: Collection[Lease], loads: OwnerLoads, now: Instant) -> bool:
        """Whether the last scan is too old: a row is on offer that is not work in it, or that is
        above our target and still there after our turn. The owners that it was left to may be gone.

        Once for each such offer. Only frequent scanners do this; the others rely on them [P9].
        """
        lying = {
            lease.key: lease.counter
            for lease in offers
            if self._is_free(lease.key)
            and (not self._may_take(lease, loads) or self._offers.was_left(lease.key, now))
        }
        is_news = any(self._scanned_for.get(key) != counter for key, counter in lying.items())
        self._scanned_for = lying
        return is_news and not is_seldom(self._policy, loads.view.kclrun_owners)

    def _may_take(self, lease: Lease, loads: OwnerLoads) -> bool:
        """Whether we may take this row: it is free, and it is work or unknown to the last scan. A
        child whose parents are being read elsewhere would only fill a place here."""
        is_unknown = lease.key not in loads.view.rows
        return self._is_free(lease.key) and (is_unknown or loads.is_work(lease.key))

    def _is_ours_to_take(self, waiting: Waiting, loads: OwnerLoads, now: Instant) -> bool:
        if waiting.lease.offered_to == self._policy.me or now >= waiting.left_instant:
            return True
        return loads.mine < loads.target(self._held.places)

    def _places_for(self, waiting: Waiting, now: Instant) -> int:
        """Our places; more than our host proves able to run for a row left for three failovers."""
        places = self._held.places
        is_overdue = now >= waiting.left_instant + self._policy.overdue_after_s
        return min(self._policy.leases_max, places + STRETCH) if is_overdue else places

    def _carry_out(self, decision: Decision, now: Instant) -> None:
        if decision.action is Action.ASK and decision.owner is not None:
            self._asker.ask(decision.lease, decision.owner, now)
        elif decision.action is Action.OFFER:
            self._expired_offers.offer(decision.lease)
        else:
            self._take(decision.lease, now, forced=decision.action is Action.FORCE)

    def _take(self, lease: Lease, now: Instant, *, forced: bool = False) -> None:
        self._asker.over(lease.key)
        take = Take(
            key=lease.key,
            owner=self._policy.me,
            seen_owner=lease.owner,
            seen_counter=lease.counter,
            failover_s=self._policy.failover_s,
            start=self._policy.of_stream(stream_of(lease.key)).start_text,
            forced=forced,
            latest_pinned_at=self._wall(now) if _lacks_pin(lease) else None,
            stream_created_at=self._policy.created.get(stream_of(lease.key)),
        )
        self._held.take(take, now)

    def _tell_in_sight(self, loads: OwnerLoads) -> None:
        """Publish whether another kclrun owner lives or joins: it can take our offers."""
        are_others = bool(loads.kclrun_owners - {self._policy.me})
        if are_others != self._held.are_others_in_sight:
            self._held.are_others_in_sight = are_others
            self._out.append(TellOthersInSight(are_others))


def _lacks_pin(lease: Lease) -> bool:
    """Whether a start from this row's LATEST would mean another instant each time and skip the
    records since the last one: a row that a Java worker made [P14]."""
    is_latest = lease.checkpoint.sequence_number == LATEST.sequence_number
    return is_latest and lease.latest_pinned_at is None
