"""Our share of the work: what is taken, asked for, and picked up where others give it away.

Knows: the last standing, our asks, the rows on offer. May not know: what happens to a lease that
is ours (`keeping.py`). Rule: whatever is decided here is a conditional write; one that comes second
is no news, and the next scan decides again. A draining manager takes and asks for nothing.

    scan ─► standing ─┬─► plan ─► takes, asks
                      └─► offered rows ─► our turn ─► takes
                            ▲
      every half second ────┘  FindOffers ─► OffersFound
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kclrun.leases.asking import Asker
from kclrun.leases.assignment import Action, Decision, left_unread, plan
from kclrun.leases.capacity import CapacityWatch
from kclrun.leases.commands import Command, FindOffers, TellOthersInSight
from kclrun.leases.events import OffersFound, WriteResolved
from kclrun.leases.keeping import Keeper
from kclrun.leases.observation import Observation
from kclrun.leases.offers import OFFERS_PER_QUERY_MAX, OfferWatch, Waiting, find_every_s
from kclrun.leases.pacing import Pace, scan_delay_s
from kclrun.leases.passing_on import PassingOn
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.standing import Hands, Standing
from kclrun.leases.table_view import TableView
from kclrun.model.changes import Ask, Offer, Take
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.stream_key import stream_of
from kclrun.model.time import Instant, WallTime

__all__ = ["Balancer"]


class Balancer:
    """One instance a manager. `is_free` says that a row is not held and no write of it is under
    way; `children` names those of shards that ended here."""

    def __init__(
        self,
        policy: ManagerPolicy,
        out: list[Command],
        keeper: Keeper,
        observation: Observation,
        *,
        chance: Callable[[], float],
        wall: Callable[[Instant], WallTime],
        is_free: Callable[[LeaseKey], bool],
        children: Collection[LeaseKey],
    ) -> None:
        self._policy = policy
        self._out = out
        self._keeper = keeper
        self._observation = observation
        self._chance = chance
        self._is_free = is_free
        self._children = children
        self._asker = Asker(policy.me, out, wall)
        self._passing_on = PassingOn(out)
        self._offers = OfferWatch(policy.me)
        self._capacity = CapacityWatch(policy, out)
        self._standing: Standing | None = None
        # What was in our hands and asked for at the last look at the offered rows.
        self._hands_at_look = (0, 0)

    @property
    def has_writes_under_way(self) -> bool:
        return self._asker.has_writes_under_way or self._passing_on.has_writes_under_way

    def is_writing(self, key: LeaseKey) -> bool:
        """Whether an ask of ours, or an offer in another's name, is on its way to this row."""
        return self._asker.is_writing(key) or self._passing_on.is_writing(key)

    def after_scan(
        self, view: TableView, scanned_instant: Instant, gone: frozenset[OwnerId]
    ) -> Pace:
        """Take and ask for what a scan, begun at `scanned_instant`, shows to be ours to have."""
        now = view.seen_instant
        self._asker.after_scan(view.rows, scanned_instant, now)
        hands = self._hands(gone)
        standing = Standing(view, self._observation, hands, me=self._policy.me)
        if self._standing is None:
            self._offers.find_at(now)
        self._standing = standing
        self._tell_in_sight(standing)
        self._see_offers(standing.offered, now, is_complete=True)
        self._take_offers(now)
        hands = self._hands(gone)
        standing.hold(hands)
        decided = plan(standing, self._observation, self._policy, hands, self._chance)
        for decision in decided.decisions:
            self._carry_out(decision, now)
        is_busy = self._keeper.custodies.__contains__
        unread = left_unread(standing, self._observation, self._policy, is_busy)
        unclaimed = sum(1 for lease in standing.unclaimed if self._is_free(lease.key))
        self._capacity.after_scan(unread, unclaimed, held=len(self._keeper.held))
        return decided.pace

    def on_offers(self, event: OffersFound, now: Instant) -> None:
        """Offered rows of the index. Where there is no index, the scans alone find them."""
        standing = self._standing
        if standing is None or self._keeper.is_draining:
            return
        if event.leases is None:
            owners = standing.view.kclrun_owners
            self._offers.find_at(Instant(now + scan_delay_s(self._policy, owners)))
            return
        self._offers.find_at(Instant(now + find_every_s(len(standing.view.kclrun_owners))))
        offers = [lease for lease in event.leases if self._may_take(lease, standing)]
        standing.note_offers(offers)
        is_complete = len(event.leases) < self._rows_max()
        self._see_offers(offers, now, is_complete=is_complete)
        self._take_offers(now)

    def on_ask(self, change: Ask, event: WriteResolved, now: Instant) -> None:
        self._asker.resolved(change, event.outcome, now)

    def on_passed_on(self, change: Offer, event: WriteResolved) -> None:
        self._passing_on.resolved(change, event.outcome)

    def tick(self, now: Instant) -> None:
        """Take the offered rows whose turn has come; look for more when that is due. A row that we
        left to others is looked at again when our hands are emptier, or fuller, than they were."""
        if self._keeper.is_draining or self._standing is None:
            return
        has_turn = self._offers.is_turn_due(now)
        if has_turn or (self._offers.are_any and self._counts() != self._hands_at_look):
            self._take_offers(now)
        rows_max = self._rows_max() if self._offers.is_find_due(now) else 0
        if rows_max > 0:
            self._offers.find_at(None)
            self._out.append(FindOffers(rows_max))

    def drain(self) -> None:
        """Nothing is taken or asked for any more. Asks that stand on rows will go stale."""
        self._offers.forget_all()
        self._out.append(TellOthersInSight(self._keeper.are_others_in_sight))

    def deadline(self) -> Instant | None:
        """When the next offered row is due, or the next look at the index."""
        if self._keeper.is_draining or self._keeper.is_full:
            return None
        return self._offers.deadline()

    def _hands(self, gone: frozenset[OwnerId] = frozenset()) -> Hands:
        return Hands(
            held=self._keeper.held,
            asked=self._asker.outstanding,
            unanswered=self._asker.unanswered,
            children=self._children,
            gone=gone,
            is_busy=lambda key: not self._is_free(key),
        )

    def _counts(self) -> tuple[int, int]:
        return len(self._keeper.held), len(self._asker.outstanding)

    def _rows_max(self) -> int:
        """Room for offered rows. Those we asked for have their places already."""
        return min(OFFERS_PER_QUERY_MAX, self._policy.leases_max - len(self._keeper.held))

    def _see_offers(self, offers: Collection[Lease], now: Instant, *, is_complete: bool) -> None:
        if self._standing is not None:
            owners, silent = self._standing.kclrun_owners, self._standing.view.silent
            self._offers.see(offers, owners, silent, now, is_complete=is_complete)

    def _take_offers(self, now: Instant) -> None:
        """What is meant for us always; the rest up to the target, and beyond it what was left."""
        standing = self._standing
        if standing is not None and self._offers.are_any:
            standing.hold(self._hands())
            self._take_from(standing, now)
        self._hands_at_look = self._counts()

    def _take_from(self, standing: Standing, now: Instant) -> None:
        is_below_target = standing.mine < standing.target(self._policy.leases_max)
        for waiting in self._offers.due(now, is_below_target=is_below_target):
            if standing.held >= self._policy.leases_max:
                return
            if not self._is_free(waiting.lease.key):
                self._offers.forget(waiting.lease.key)
            elif self._is_ours_to_take(waiting, standing, now):
                self._offers.forget(waiting.lease.key)
                self._take(waiting.lease, now)
                standing.hold(self._hands())

    def _may_take(self, lease: Lease, standing: Standing) -> bool:
        """Not in our hands; and work, as far as the last scan knows the row: a child whose parents
        are being read elsewhere would only fill a place here."""
        is_unknown = lease.key not in standing.view.rows
        return self._is_free(lease.key) and (is_unknown or standing.is_work(lease.key))

    def _is_ours_to_take(self, waiting: Waiting, standing: Standing, now: Instant) -> bool:
        if waiting.lease.offered_to == self._policy.me or now >= waiting.left_instant:
            return True
        return standing.mine < standing.target(self._policy.leases_max)

    def _carry_out(self, decision: Decision, now: Instant) -> None:
        if decision.action is Action.ASK and decision.owner is not None:
            self._asker.ask(decision.lease, decision.owner, now)
        elif decision.action is Action.OFFER:
            self._passing_on.offer(decision.lease)
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
        )
        self._keeper.take(take, now)

    def _tell_in_sight(self, standing: Standing) -> None:
        """Another kclrun owner, alive or about to own its first lease, takes what is offered."""
        are_others = bool(standing.kclrun_owners - {self._policy.me})
        if are_others != self._keeper.are_others_in_sight:
            self._keeper.are_others_in_sight = are_others
            self._out.append(TellOthersInSight(are_others))
