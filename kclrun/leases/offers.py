"""Rows that were given away: when they are looked for, and when each may be taken [P17].

Knows: the offered rows that scans and index queries showed, and since when. May not know: who
should have how many (`standing.py`), or how a take is written.
Rule: each row has one owner that is first in line, so that a fleet does not race for it; the
others follow a fifth of a second later at most, and a row that its first takers leave is taken by
whoever has room, for a shard must not wait.

Who may take a row, counted from when we first saw it:
the one it is meant for at once; others in the order of a hash, within 0.2 s, and 1 s later where
it is meant for somebody who may be alive; its giver after 2 s, and a draining manager never.
Everybody who has room looks, also at the target: while four owners are at theirs, the leases of a
fifth that drains are above everybody's, until its first offer shows that it is leaving.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from kclrun.model.lease import OFFERED, Lease, LeaseKey, OwnerId
from kclrun.model.time import Instant

__all__ = [
    "LEFT_LYING_S",
    "OFFERS_PER_QUERY_MAX",
    "OfferWatch",
    "Waiting",
    "delay_s",
    "delay_words",
    "find_every_s",
]

# One BatchGetItem reads at most 100 rows; more than that wait for the next half second.
OFFERS_PER_QUERY_MAX: Final = 100
_FIND_EVERY_S: Final = 0.5
# The fleet's queries on the one index key that offers have, a second [P17]: 64 owners at 2 each.
_FLEET_QUERIES_PER_S: Final = 128
_SPREAD_S: Final = 0.2
_AFTER_ASKER_S: Final = 1.0
_GIVER_WAITS_S: Final = 2.0
# Left lying for so long after our turn, a row is taken beyond the target too: its fair owner is
# full, blind or dead. An extra lease is asked back by whoever lacks it.
LEFT_LYING_S: Final = 2.0
# Up to so many owners are put in order for a row; among more, the hash itself is spread enough.
_RANKED_OWNERS_MAX: Final = 64


class Waiting(msgspec.Struct, frozen=True):
    """An offered row that we know of. `due_instant`: our turn; `left_instant`: anybody's."""

    lease: Lease
    due_instant: Instant
    left_instant: Instant


class OfferWatch:
    """The offered rows known to one manager, and the rhythm of looking for more."""

    def __init__(self, me: OwnerId) -> None:
        self._me = me
        self._waiting: dict[LeaseKey, Waiting] = {}
        self._find_instant: Instant | None = None
        # When the next row's turn comes, after the last look at them all.
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
        """Take in offered rows. `is_complete`: what is not among them is offered no more."""
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
            seen[lease.key] = Waiting(lease, due, Instant(due + LEFT_LYING_S))
        self._waiting = seen
        self._turn_instant = now if seen else Instant(math.inf)

    @property
    def are_any(self) -> bool:
        return bool(self._waiting)

    def is_turn_due(self, now: Instant) -> bool:
        """Whether a row's turn has come since the last look at them all: for us, or for anybody."""
        return now >= self._turn_instant

    def due(self, now: Instant, *, is_below_target: bool) -> tuple[Waiting, ...]:
        """Look at all: the rows whose turn for us has come, those meant for us first. At our
        target that is what is meant for us, and what was left lying."""
        me, ready, turn = self._me, [], math.inf
        for each in self._waiting.values():
            is_wanted = is_below_target or each.lease.offered_to == me
            at = each.due_instant if is_wanted else each.left_instant
            if at <= now:
                ready.append(each)
                at = each.left_instant
            if now < at < turn:
                turn = at
        self._turn_instant = Instant(turn)
        ready.sort(key=lambda each: (each.lease.offered_to != me, each.due_instant))
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
    """How long we leave this row to others. `owners`: the living kclrun owners; `silent`: those
    of whom only expired leases are left. Who asked and owns nothing yet counts as alive."""
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
    others = [owner for owner in owners if owner not in (me, lease.offered_by)]
    if len(others) >= _RANKED_OWNERS_MAX:
        return int.from_bytes(mine, "big") / 2.0 ** (8 * len(mine))
    before = sum(1 for owner in others if _digest(owner, lease.key) < mine)
    return before / (len(others) + 1)


def _digest(owner: OwnerId, key: LeaseKey) -> bytes:
    return hashlib.blake2b(f"{owner} {key}".encode(), digest_size=8).digest()
