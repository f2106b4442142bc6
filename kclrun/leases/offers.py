"""Offered rows: when a manager looks for them, and when it may take each [P17].

Knows: the offered rows that scans and index queries showed, and since when. Must not know: how many
leases each owner should have (`assignment.py`), or how a take is written.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.leases.commands import Command, Note, WriteRow
from kclrun.model.lease import OFFERED, Lease, LeaseKey, OwnerId
from kclrun.model.time import Instant
from kclrun.protocol.writes import Applied, Offer, Outcome, Refused

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


class Waiting(msgspec.Struct, frozen=True):
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
        self._waiting: dict[LeaseKey, Waiting] = {}
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
            seen[lease.key] = Waiting(lease, due, Instant(due + LEFT_LYING_S))
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

    def due(self, now: Instant, *, is_below_target: bool) -> tuple[Waiting, ...]:
        """Look at all rows and return those whose turn for us has come, those meant for us first.
        At our target these are the rows meant for us and the rows left lying."""
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
    others = [owner for owner in owners if owner not in (me, lease.offered_by)]
    if len(others) >= _RANKED_OWNERS_MAX:
        return int.from_bytes(mine, "big") / 2.0 ** (8 * len(mine))
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

    def __init__(self, out: list[Command]) -> None:
        self._out = out
        self._under_way: set[LeaseKey] = set()
        self._refusal: str | None = None

    @property
    def has_writes_under_way(self) -> bool:
        return bool(self._under_way)

    def is_writing(self, key: LeaseKey) -> bool:
        """Whether such an offer of this row is under way."""
        return key in self._under_way

    def offer(self, lease: Lease) -> None:
        """Offer an expired lease in its owner's name. Raises: InvariantViolation without one."""
        if lease.owner is None:
            raise InvariantViolation(f"lease {lease.key}: nobody owns it, in whose name to offer?")
        at = lease.checkpoint
        self._under_way.add(lease.key)
        self._out.append(WriteRow(Offer(lease.key, lease.owner, lease.counter, at, at)))

    def resolved(self, change: Offer, outcome: Outcome) -> None:
        """Take in any outcome of the write. The table shows the rest."""
        if change.key not in self._under_way:
            raise InvariantViolation(f"lease {change.key}: an outcome of no offer under way")
        self._under_way.discard(change.key)
        if isinstance(outcome, Applied):
            self._refusal = None
            self._out.append(
                Note("lease_passed_on", key=change.key, fields={"row_owner": change.owner})
            )
        elif isinstance(outcome, Refused) and outcome.code != self._refusal:
            self._refusal = outcome.code
            fields: dict[str, str | int | float | bool | None] = {
                "code": outcome.code,
                "message": outcome.message,
            }
            self._out.append(Note("write_refused", "error", change.key, fields))
