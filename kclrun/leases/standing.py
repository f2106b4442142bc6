"""Who holds how much of the work, as one view shows it: what all assignment is decided from.

Rule: a lease counts for whoever *will* hold it. One with a fresh ask counts for the asker and an
offered one for the owner it is meant for, so that several managers that plan at once do not ask
for the same share twice; both are owners already, for the target. A giver of offered rows that
are meant for nobody is leaving (a drain) or wants less (`leases release`): it is no owner while
one of them waits, else its leases would be above everybody's target and wait for three failovers.
Look next: `assignment.py` (what is taken and asked for), `group_balance.py` (ties).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Set

import msgspec

from kclrun.leases.observation import Observation
from kclrun.leases.table_view import TableView
from kclrun.model.lease import ANYBODY, OFFERED, OWNER_PREFIX, Lease, LeaseKey, Owner, OwnerId

__all__ = ["Hands", "Standing", "group_of", "is_ours_kind", "target_of"]


class Hands(msgspec.Struct, frozen=True, kw_only=True):
    """What is in our hands. `held` fills places, takes under way included; `asked` are our asks
    under way; `unanswered` rows that were asked for in vain and are left alone for now; `children`
    of shards we just ended; `gone` are owners proven dead; `is_busy` says that a row is held or
    has a write of ours under way.
    """

    held: Collection[LeaseKey] = ()
    asked: Collection[LeaseKey] = ()
    unanswered: Collection[LeaseKey] = ()
    children: Collection[LeaseKey] = ()
    gone: Set[OwnerId] = frozenset()
    is_busy: Callable[[LeaseKey], bool] = lambda _: False


class Standing:
    """The work of one view, counted by owner. `me` is always among the owners.

    `free` is the work of nobody, or of the dead; `offered` what was given away and waits. The
    rest counts in `counts`, but ours: `mine`, the work held, asked for and offered to us, less
    what others ask us for. `held` are the places filled, `on_order` the asks among `mine`.
    """

    def __init__(
        self, view: TableView, observation: Observation, hands: Hands, *, me: OwnerId
    ) -> None:
        self.view = view
        self.me = me
        self.work = len(view.work)
        self.free: list[Lease] = []
        self.offered: list[Lease] = []
        self.counts: Counter[OwnerId] = Counter()
        self._leaving: set[OwnerId] = set()
        self._joining: set[OwnerId] = set()
        self._promised: set[LeaseKey] = set()  # to us, and not ours yet
        self._asked_away: set[LeaseKey] = set()  # ours, and another owner's soon
        self._owned: dict[OwnerId, list[Lease]] | None = None
        expired, counts = view.expired, self.counts
        self._observation = observation
        for lease in view.work:
            owner = lease.owner
            if owner is None or lease.key in expired:
                if self._is_takeable(lease):
                    self.free.append(lease)
            elif owner == OFFERED:
                self.offered.append(lease)
                self._count_offer(lease, lease.offered_to)
            elif lease.handoff is None or self._is_settled(lease):
                counts[owner] += 1
            else:
                self._count_ask(lease, owner, lease.handoff.to)
        self._work_keys = frozenset(lease.key for lease in view.work)
        self._settle_owners()
        self.hold(hands)

    def hold(self, hands: Hands) -> None:
        """Count what is in our hands, which changes between two scans."""
        held = set(hands.held)
        is_mine = self._work_keys.__contains__
        # A row that we hold and the scan did not show was created since: it is work.
        work = {key for key in held if is_mine(key) or key not in self.view.rows}
        incoming = self._promised.union(hands.asked) - held
        self.held = len(held)
        self.on_order = len(incoming)
        self.mine = len(work - self._asked_away) + len(incoming)
        self.counts[self.me] = self.mine

    def note_offers(self, offers: Iterable[Lease]) -> None:
        """Offered rows found since the scan: who gives without naming a taker is leaving."""
        leaving = {
            lease.offered_by
            for lease in offers
            if lease.offered_to is None and lease.offered_by is not None
        }
        if not leaving <= self._leaving:
            self._leaving |= leaving
            self._settle_owners()

    def target(self, leases_max: int) -> int:
        return target_of(self.work, len(self.owners), leases_max)

    def is_work(self, key: LeaseKey) -> bool:
        return key in self._work_keys

    def owned_by(self, owner: OwnerId) -> tuple[Lease, ...]:
        """The work that an owner renews and nobody asks for."""
        if self._owned is None:
            self._owned = {}
            for lease in self.view.work:
                holder, is_dead = lease.owner, lease.key in self.view.expired
                if holder is not None and not is_dead and self._is_settled(lease):
                    self._owned.setdefault(holder, []).append(lease)
        return tuple(self._owned.get(owner, ()))

    @property
    def unclaimed(self) -> tuple[Lease, ...]:
        """Nobody's work: free, or on offer."""
        return (*self.free, *self.offered)

    def fewest_and_most(self) -> tuple[int, int]:
        """The smallest and the largest count of the owners."""
        counts = [self.counts[owner] for owner in self.owners]
        return min(counts), max(counts)

    def _is_settled(self, lease: Lease) -> bool:
        """Whether nobody waits for this row. Java workers do not know of asks, and ignore them."""
        if lease.handoff is None or lease.owner is None or not is_ours_kind(lease.owner):
            return True
        return self._observation.is_ask_stale(lease, self.view.seen_instant)

    def _count_offer(self, lease: Lease, to: OwnerId | None) -> None:
        if to is None or to in self.view.silent:
            if to is None and lease.offered_by is not None:
                self._leaving.add(lease.offered_by)
        elif to == self.me:
            self._promised.add(lease.key)
        else:
            self.counts[to] += 1
            self._joining.add(to)

    def _count_ask(self, lease: Lease, owner: OwnerId, to: OwnerId) -> None:
        """A row on its way. One that the dead or nobody in particular asks for stays for now."""
        if to == ANYBODY or to in self.view.silent:
            self.counts[owner] += 1
            return
        if to == self.me:
            self._promised.add(lease.key)
            return
        self.counts[to] += 1
        self._joining.add(to)
        if owner == self.me:
            self._asked_away.add(lease.key)

    def _is_takeable(self, lease: Lease) -> bool:
        """Not while a KCL 3 hand-off moves it: `checkpointOwner` still works on it [P8, R8]."""
        is_handed_over = lease.owner is None and lease.checkpoint_owner is not None
        return not is_handed_over or self._observation.has_expired(lease, self.view.seen_instant)

    def _settle_owners(self) -> None:
        self.owners = self.view.owners
        if self._joining or self._leaving:
            joining = self._joining - self.view.silent
            self.owners = (self.owners | joining) - (self._leaving - {self.me})

    @property
    def kclrun_owners(self) -> frozenset[OwnerId]:
        if self.owners is self.view.owners:
            return self.view.kclrun_owners  # as nearly always: nobody joins or leaves
        return frozenset(owner for owner in self.owners if is_ours_kind(owner))


def target_of(work: int, owners: int, leases_max: int) -> int:
    """How many leases each owner should hold, so that the owners together hold all the work."""
    return min(-(-work // owners), leases_max)


def is_ours_kind(owner: OwnerId) -> bool:
    """Whether this owner is a kclrun manager, who can be asked; a Java worker cannot."""
    return owner.startswith(OWNER_PREFIX)


@functools.lru_cache(maxsize=4096)
def group_of(owner: OwnerId) -> str:
    """The group of an owner. A Java worker's is its id up to the first dash, as `seeds/001_*`
    names its clusters; a worker with a random id is then a group of its own, which moves nothing.
    """
    parsed = Owner.parse(owner)
    return parsed.group if parsed is not None else owner.partition("-")[0]
