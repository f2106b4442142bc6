"""Balance by load, after the counts: which heavy lease of ours goes to a lighter owner, and which
light lease of that owner we ask for in return [P16, P17].

Knows: the loads on the rows of one scan, and our exchange under way. Must not know: how leases are
counted (`assignment.py`), how an ask is answered (`balancing.py`), clocks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Final

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.leases.assignment import OwnerLoads, group_of
from kclrun.leases.commands import Command, Note, WriteRow
from kclrun.leases.policy import MOVES_PER_CYCLE, ManagerPolicy
from kclrun.leases.table_view import STEADY_AFTER_S, Observation
from kclrun.model.lease import ASK_STALE_AFTER_S, Lease, LeaseKey, OwnerId
from kclrun.model.time import Instant, WallTime
from kclrun.protocol.writes import Applied, Ask, Outcome, OutcomeUnknown

# An owner gives leases away for their load only above this share of the mean owner's. The leader of
# the KCL 3 uses the same 10 % (`reBalanceThresholdPercentage`).
HEAVY_ABOVE: Final = 1.10
# An exchange must lower the larger of the two owners' loads by this share of it: half of the
# margin above, so that an owner just above it is worth one exchange, and noise is not.
GAIN_MIN: Final = 0.05
# Each swap of an exchange lowers it by at least this share. There are at most as many as asks under
# way.
_SWAP_GAIN_MIN: Final = 0.01
# So many owners are tried in one look: with a thousand, it costs a heavy one three milliseconds.
_TRIED_MAX: Final = 64
# Two handoffs cost about a second of CPU and half a second without reading. The surplus that they
# remove must be worth that: a twentieth of a core saves a second of CPU in 20 s. 64 KiB/s is a
# sixteenth of what a shard takes in.
_WORTH_CPU: Final = 0.05
_WORTH_KBPS: Final = 64.0
# An exchange is chosen by one scan, and then must pay in the mean of the scans of a minute, and by
# the last of them. Figures that are off by 20 % at random choose exchanges that would not pay. The
# scan that chose one has the luckiest errors of all, so it does not count.
WATCHED_S: Final = 60.0
# After an exchange in which our process did not give its lease, we begin no other one for ten times
# as long as an ask lasts, and after further ones up to a day: its batches are longer than an ask.
_LEFT_ALONE_S: Final = 10 * ASK_STALE_AFTER_S
_LEFT_ALONE_MAX_S: Final = 86_400.0


class Swap(msgspec.Struct, frozen=True):
    """Lease `give` of ours goes to the other owner, and we ask for its lease `take`; None: nothing,
    because we hold one more lease."""

    give: LeaseKey
    take: LeaseKey | None


class LeaseExchange(msgspec.Struct, frozen=True):
    """The swaps between us and `other`. `loads`: our load and that of `other` before them; 1.0 is
    the mean owner's load."""

    swaps: tuple[Swap, ...]
    other: OwnerId
    loads: tuple[float, float]

    @property
    def because(self) -> str:
        mine, other = self.loads
        return f"our load is {mine:.2f} of an owner's mean, its load {other:.2f}"


class _Sums(msgspec.Struct):
    """The leases of an owner, the sums of their measured loads, and the leases without a load."""

    leases: list[Lease] = []
    unmeasured: list[Lease] = []
    kbps: float = 0.0
    cpu: float = 0.0

    @classmethod
    def of(cls, leases: list[Lease]) -> _Sums:
        """The sums over these leases of one owner."""
        kbps = cpu = 0.0
        unmeasured: list[Lease] = []
        for lease in leases:
            load = lease.load
            if load is None:
                unmeasured.append(lease)
            else:
                kbps += load.kbps
                cpu += load.cpu
        return cls(leases, unmeasured, kbps, cpu)

    def add(self, other: _Sums) -> None:
        """Add the sums of another owner."""
        self.leases += other.leases
        self.unmeasured += other.unmeasured
        self.kbps += other.kbps
        self.cpu += other.cpu

    def mean_lease(self) -> tuple[float, float]:
        """The mean KiB/s and CPU of the leases that have these figures."""
        measured = len(self.leases) - len(self.unmeasured)
        others = [kbps for kbps in map(_kbps_of, self.unmeasured) if kbps is not None]
        kbps = (self.kbps + sum(others)) / max(1, measured + len(others))
        return kbps, self.cpu / max(1, measured)


class FleetLoad:
    """The load of every kclrun owner, as one scan shows it. 1.0 is the mean owner's load.

    A lease has two figures, KiB/s and a share of a core. Which of them is scarce on a host is not
    known, so they weigh the same: each is divided by the mean lease's, and the load is the mean of
    the two quotients. This load has no unit, and it adds up: an owner's load is the sum over its
    leases, and an exchange moves exactly the difference of two leases. A row with only
    `throughputKBps` (of an earlier version) counts by KiB/s alone, and a row without a figure as
    the mean lease: it changes no owner's place among the others.

    Java workers are neither heavy nor light: their rows do not count here.

    `moving` are the owners with a lease that is asked for or on offer, to or by them: their loads
    are about to change. `unsteady` are those that got a lease a short time ago [`STEADY_AFTER_S`].
    """

    def __init__(
        self, loads: OwnerLoads, observation: Observation, *, all_steady: bool = False
    ) -> None:
        self.owners = loads.kclrun_owners
        self.moving: set[OwnerId] = set()
        self._view = view = loads.view
        unsettled = (lease for lease in view.asked if not loads.is_settled(lease))
        for lease in (*loads.offered, *unsettled):
            self._note_move(lease)
        at_work, rows, expired = view.work_keys, view.rows, view.expired
        self.unsteady = {
            rows[key].owner
            for key in (() if all_steady else observation.moved)
            if key in at_work and key not in expired
        }

    @cached_property
    def _sums(self) -> dict[OwnerId, _Sums]:
        """One pass over all rows of the fleet, in each scan of each manager that takes part."""
        work, expired = self._view.work, self._view.expired
        leases: dict[OwnerId | None, list[Lease]] = {owner: [] for owner in self.owners}
        others: list[Lease] = []
        unexpired = [lease for lease in work if lease.key not in expired] if expired else work
        for lease in unexpired:
            leases.get(lease.owner, others).append(lease)
        return {owner: _Sums.of(leases[owner]) for owner in self.owners}

    @cached_property
    def _total(self) -> _Sums:
        total = _Sums()
        for sums in self._sums.values():
            total.add(sums)
        return total

    @cached_property
    def _leases_mean(self) -> float:
        return len(self._total.leases) / len(self.owners)

    @cached_property
    def _mean_lease(self) -> tuple[float, float]:
        return self._total.mean_lease()

    def _note_move(self, lease: Lease) -> None:
        to = None if lease.handoff is None else lease.handoff.to
        named = (lease.owner, to, lease.offered_to, lease.offered_by)
        self.moving.update(owner for owner in named if owner is not None)

    @property
    def is_known(self) -> bool:
        """Whether any lease has a figure above zero."""
        mean_kbps, mean_cpu = self._mean_lease
        return mean_kbps > 0 or mean_cpu > 0

    def of_lease(self, lease: Lease) -> float:
        """The load of a lease, in mean owners' loads."""
        if lease.load is not None:
            return self._relative(lease.load.kbps, lease.load.cpu)
        kbps, mean_kbps = _kbps_of(lease), self._mean_lease[0]
        in_mean_leases = kbps / mean_kbps if kbps is not None and mean_kbps > 0 else 1.0
        return in_mean_leases / self._leases_mean

    def of_owner(self, owner: OwnerId) -> float:
        """The sum over its leases."""
        sums = self._sums[owner]
        return self._relative(sums.kbps, sums.cpu) + sum(map(self.of_lease, sums.unmeasured))

    def _relative(self, kbps: float, cpu: float) -> float:
        """Figures in mean owners' loads. Where the whole fleet's are zero, one figure is left."""
        mean_kbps, mean_cpu = self._mean_lease
        if mean_cpu <= 0:
            in_mean_leases = kbps / mean_kbps
        elif mean_kbps <= 0:
            in_mean_leases = cpu / mean_cpu
        else:
            in_mean_leases = (kbps / mean_kbps + cpu / mean_cpu) / 2
        return in_mean_leases / self._leases_mean

    def leases_of(self, owner: OwnerId) -> Sequence[Lease]:
        return self._sums[owner].leases

    def takes_part(self, owner: OwnerId) -> bool:
        """Whether this owner's leases stand still, and its load is known to last."""
        return owner not in self.moving and owner not in self.unsteady

    def is_worth_it(self, owner: OwnerId) -> bool:
        """Whether this owner has so much above the mean owner that handoffs pay."""
        sums, (mean_kbps, mean_cpu) = self._sums[owner], self._mean_lease
        kbps = sums.kbps + sum(_kbps_of(lease) or 0.0 for lease in sums.unmeasured)
        return (
            kbps - mean_kbps * self._leases_mean >= _WORTH_KBPS
            or sums.cpu - mean_cpu * self._leases_mean >= _WORTH_CPU
        )


def _kbps_of(lease: Lease) -> float | None:
    kbps = lease.load.kbps if lease.load is not None else lease.throughput_kbps
    return kbps if kbps is not None and math.isfinite(kbps) else None


class Pairing:
    """The exchanges that the counts allow between us and other owners, by one scan.

    Counts go first, and an exchange leaves them as they are: with equal counts, or one more or one
    less, a lease goes and a lease comes. Where we have one more, a lease may also go alone, within
    our group: then the two have changed places. An owner may get its lease before it has given the
    other, so it needs a place more; beside Java workers it must be below the target, because they
    take from an owner above it. `places`: how many leases we may hold.

    An owner whose one lease is more than a fair share ends with the lightest leases beside it, and
    then nothing pays.
    """

    def __init__(
        self,
        loads: OwnerLoads,
        fleet: FleetLoad,
        places: int,
        may_move: Callable[[LeaseKey], bool],
        swaps_max: int = MOVES_PER_CYCLE,
    ) -> None:
        self._swaps_max = swaps_max
        self._me = loads.me
        self._counts = loads.counts
        self._fleet = fleet
        self._may_move = may_move
        self._count_max = places
        if len(loads.kclrun_owners) < len(loads.owners):
            self._count_max = loads.target(places)

    def best(self, turn: int = 0) -> LeaseExchange | None:
        """The exchange to watch, or None: we are not heavy, or no exchange with any owner pays. At
        most `_TRIED_MAX` owners are tried, others in each `turn`."""
        fleet, me = self._fleet, self._me
        mine = fleet.of_owner(me) if fleet.takes_part(me) and fleet.is_known else 0.0
        if mine <= HEAVY_ABOVE or not fleet.is_worth_it(me):
            return None
        for load, owner in self._lighter(mine, turn):
            exchange = self._best_with(owner, mine, load)
            if exchange is not None:
                return exchange
        return None

    def _lighter(self, mine: float, turn: int) -> list[tuple[float, OwnerId]]:
        """The owners to try, with their loads. The heaviest owner begins with the lightest, the
        second with the second and so on, so that heavy owners that look at the same time choose
        different ones."""
        fleet, me = self._fleet, self._me
        loads = [
            (fleet.of_owner(owner), owner) for owner in fleet.owners if fleet.takes_part(owner)
        ]
        first = sum(1 for pair in loads if pair > (mine, me))
        # Half of the difference is the most that an exchange can gain.
        light = sorted(
            (load, owner)
            for load, owner in loads
            if (mine - load) / 2 > GAIN_MIN * mine and self._may_pair(owner)
        )
        if len(light) > _TRIED_MAX:
            first += turn * _TRIED_MAX
        first %= max(1, len(light))
        return [*light[first:], *light[:first]][:_TRIED_MAX]

    def margins(self, exchange: LeaseExchange) -> tuple[float, float] | None:
        """By how much we are too heavy, and by how much the exchange gains more than the least;
        negative where it does not. None: it cannot be done any more."""
        fleet, other = self._fleet, exchange.other
        if not (fleet.takes_part(self._me) and fleet.takes_part(other)):
            return None
        if not (fleet.is_known and other in fleet.owners and self._may_pair(other)):
            return None
        ours, theirs = dict(self._movable(self._me)), dict(self._movable(other))
        moved = 0.0
        for swap in exchange.swaps:
            if swap.take is None and not self._may_go_alone(other):
                return None
            returned = 0.0 if swap.take is None else theirs.get(swap.take, math.nan)
            moved += ours.get(swap.give, math.nan) - returned
        if math.isnan(moved):
            return None
        mine = fleet.of_owner(self._me)
        gain = min(moved, mine - fleet.of_owner(other) - moved)
        return mine - HEAVY_ABOVE, gain - GAIN_MIN * mine

    def _best_with(self, other: OwnerId, mine: float, others: float) -> LeaseExchange | None:
        """Swaps that bring the two loads together, each the best that is left; None: too little."""
        ours = self._movable(self._me)
        theirs = sorted(self._movable(other), key=lambda lease: lease[1])
        places = self._count_max - max(self._counts[self._me], self._counts[other])
        swaps: list[Swap] = []
        half, moved = (mine - others) / 2, 0.0
        may_go_alone = self._may_go_alone(other)
        while len(swaps) < min(places, self._swaps_max) or (may_go_alone and not swaps):
            best = _nearest(
                ours, theirs if places > 0 else [], half - moved, may_go_alone=may_go_alone
            )
            if (
                best is None
                or half - abs(half - moved - best.load) - moved <= _SWAP_GAIN_MIN * mine
            ):
                break
            swaps.append(Swap(best.give, best.take))
            moved += best.load
            ours = [lease for lease in ours if lease[0] != best.give]
            theirs = [lease for lease in theirs if lease[0] != best.take]
            may_go_alone = False
        gain = half - abs(half - moved)
        return (
            LeaseExchange(tuple(swaps), other, (mine, others)) if gain > GAIN_MIN * mine else None
        )

    def _may_pair(self, other: OwnerId) -> bool:
        count, mine = self._counts[other], self._counts[self._me]
        is_even = other != self._me and abs(count - mine) <= 1
        return (
            is_even
            and count < self._count_max
            and (mine < self._count_max or self._may_go_alone(other))
        )

    def _may_go_alone(self, other: OwnerId) -> bool:
        has_one_more = self._counts[self._me] == self._counts[other] + 1
        return has_one_more and group_of(other) == group_of(self._me)

    def _movable(self, owner: OwnerId) -> list[tuple[LeaseKey, float]]:
        """The leases with a figure that may move, and their loads. Halted ones stay, and those
        whose processes died: another host tries them for that reason."""
        return [
            (lease.key, self._fleet.of_lease(lease))
            for lease in self._fleet.leases_of(owner)
            if lease.load is not None
            and lease.handoff is None
            and lease.halt is None
            and lease.checkpoint_owner is None
            and lease.died_on is None
            and self._may_move(lease.key)
        ]


class _Candidate(msgspec.Struct, frozen=True):
    """A swap, and the load that it moves."""

    load: float
    give: LeaseKey
    take: LeaseKey | None


def _nearest(
    ours: Sequence[tuple[LeaseKey, float]],
    theirs: Sequence[tuple[LeaseKey, float]],
    wanted: float,
    *,
    may_go_alone: bool,
) -> _Candidate | None:
    """The swap that moves a load as near as possible to `wanted`. `theirs` is sorted by load."""
    best: _Candidate | None = None
    for give, load in ours:
        place = bisect_left(theirs, load - wanted, key=lambda lease: lease[1])
        returns: list[tuple[LeaseKey | None, float]] = [*theirs[max(0, place - 1) : place + 1]]
        if may_go_alone:
            returns.append((None, 0.0))
        for take, returned in returns:
            moved = load - returned
            if best is None or abs(moved - wanted) < abs(best.load - wanted):
                best = _Candidate(moved, give, take)
    return best


class Watched(msgspec.Struct):
    """An exchange that was chosen, and the sums of its margins in the looks since."""

    exchange: LeaseExchange
    since_instant: Instant
    excess: float = 0.0
    gain: float = 0.0


class _PendingSwap(msgspec.Struct):
    """A swap under way. `wanted` is the row to ask for once the outcome of `change` is known;
    `since_instant`: when that was."""

    change: Ask
    wanted: Lease | None
    since_instant: Instant | None = None


class LoadBalancer:
    """Our exchanges, one at a time. One instance for each manager.

        a scan in which nothing is to be counted ─► a candidate ─► watched for a minute
            ─► 1. an ask on our own row, in the other's name, as `leases move` writes it
            ─► 2. as soon as it has applied: our ask for the light lease

    An exchange may be several such swaps at once. Both steps are asks, so each is a conditional
    write, and a lease counts for its future owner from the ask on. Between the two writes, for
    milliseconds, the other owner seems to hold one lease more and we one less; afterwards no other
    owner sees a reason to ask for anything. If one of the two leases is not given, or we die
    between the writes, the counts differ by two and ask again.

    The heavy owner begins, so an owner that answers no ask moves nothing for long: if our own
    process does not give its lease, we begin no exchange for a while, each time twice as long as
    before.

    Rule: an exchange needs two owners without a lease in motion, which got none for
    `STEADY_AFTER_S`. So a lease does not move again before its new owner has measured it, two
    heavy owners do not give to the same light one, and an exchange always knows its loads. Each
    exchange lowers the sum of the squared loads, so exchanges come to an end.
    """

    def __init__(self, policy: ManagerPolicy, observation: Observation) -> None:
        self._policy = policy
        self._observation = observation
        # The exchange that is watched; None while the counts move leases.
        self.watched: Watched | None = None
        # The exchange under way, by the leases that we give.
        self.steps: dict[LeaseKey, _PendingSwap] = {}
        # The leases that we shall ask for in a moment: they count as asked for.
        self.expected: tuple[LeaseKey, ...] = ()
        self._exchange: LeaseExchange | None = None
        self._looks = 0
        self._has_failed = False  # a lease of the exchange was not given
        self._failures = 0
        self._rests_until = Instant(-math.inf)

    @property
    def is_writing(self) -> bool:
        """Whether the write of a first step is under way."""
        return any(step.since_instant is None for step in self.steps.values())

    def look(
        self, loads: OwnerLoads, places: int, may_move: Callable[[LeaseKey], bool]
    ) -> LeaseExchange | None:
        """Look at a scan by which the counts move nothing, and return the exchange to begin now.
        `places`: how many leases we may hold. `may_move`: whether no write of ours to the row is
        under way and, for a lease of ours, its process runs."""
        now = loads.view.seen_instant
        is_ours = loads.me in loads.kclrun_owners and self._policy.balance == "load"
        if not is_ours or self.steps or now < self._rests_until:
            self.watched = None
            return None
        fleet = FleetLoad(loads, self._observation)
        swaps_max = self._policy.moves_per_cycle
        return self._watch(Pairing(loads, fleet, places, may_move, swaps_max), now)

    def _watch(self, pairing: Pairing, now: Instant) -> LeaseExchange | None:
        """Choose an exchange, or take in one more look at the chosen one."""
        watched = self.watched
        margins = pairing.margins(watched.exchange) if watched is not None else None
        if watched is None or margins is None:
            self._looks += 1
            best = pairing.best(self._looks)
            self.watched = Watched(best, now) if best is not None else None
            return None
        watched.excess += margins[0]
        watched.gain += margins[1]
        if now - watched.since_instant < WATCHED_S:
            return None
        self.watched = None
        pays = min(watched.excess, watched.gain, *margins) > 0
        return watched.exchange if pays else None

    def begin(
        self, exchange: LeaseExchange, rows: Mapping[LeaseKey, Lease], at: WallTime
    ) -> list[Command]:
        """Ask our own lease processes for the leases, in the name of the other owner."""
        self._exchange, self._has_failed = exchange, False
        for swap in exchange.swaps:
            change = Ask(swap.give, exchange.other, asked=self._policy.me, asked_at=at)
            wanted = rows[swap.take] if swap.take is not None else None
            self.steps[swap.give] = _PendingSwap(change, wanted)
        self._expect()
        return [WriteRow(step.change) for step in self.steps.values()]

    def _expect(self) -> None:
        waiting = (step for step in self.steps.values() if step.since_instant is None)
        self.expected = tuple(step.wanted.key for step in waiting if step.wanted is not None)

    def resolved(
        self, change: Ask, outcome: Outcome, now: Instant
    ) -> tuple[list[Command], Lease | None]:
        """Take in the outcome of such a write. Also returns the lease to ask for now. An unknown
        outcome counts as applied until a scan shows otherwise."""
        step, exchange = self.steps.get(change.key), self._exchange
        is_awaited = step is not None and step.change == change and step.since_instant is None
        if step is None or exchange is None or not is_awaited:
            raise InvariantViolation(f"lease {change.key}: an outcome of no exchange under way")
        if not isinstance(outcome, Applied | OutcomeUnknown):
            self._end_step(change.key, now)
            return [], None
        step.since_instant = now
        self._expect()
        note = Note("lease_given_for_load", key=change.key)
        note.fields.update(row_owner=exchange.other, reason=exchange.because)
        return [note], step.wanted

    def after_scan(
        self, rows: Mapping[LeaseKey, Lease], scanned_instant: Instant, now: Instant
    ) -> None:
        """Follow our leases of the exchange under way until they are given, or are not."""
        for key, step in tuple(self.steps.items()):
            since, row = step.since_instant, rows.get(key)
            if since is None or scanned_instant <= since:
                continue
            is_ours = row is not None and not row.is_ended and row.owner == self._policy.me
            if is_ours and row is not None:
                if row.handoff is not None and now - since < ASK_STALE_AFTER_S:
                    continue
                self._has_failed = True
            self._end_step(key, now)

    def _end_step(self, key: LeaseKey, now: Instant) -> None:
        """One step is over. After the last one we rest: for long, if a lease was not given."""
        del self.steps[key]
        self._expect()
        if self.steps:
            return
        rest_s = STEADY_AFTER_S
        if self._has_failed:
            rest_s = min(_LEFT_ALONE_S * 2.0**self._failures, _LEFT_ALONE_MAX_S)
        self._failures = min(self._failures + 1, 16) if self._has_failed else 0
        self._rests_until = Instant(now + rest_s)
