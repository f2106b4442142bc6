"""I4: who may begin batches of a lease, and until when.

Permissions of two readers of one lease never overlap, and a lease that its owner may still read is
never taken by another kclrun owner. A Java member may steal it, and somebody may delete its row:
then its owner hears of it with the next renewal, and its permission ends with its fence at the
latest. (What else holds beside Java members is in `java/overlap.py`.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from kclrun.model.lease import OWNER_PREFIX, Lease, OwnerId
from kclrun.simulation.oracles.reader import Reader, owner_of
from kclrun.simulation.story import RuleBroken

__all__ = ["Permissions"]

# Two clocks compared through world time round differently.
_ROUNDING_S: Final = 1e-6


class Permissions:
    """`now` is the world's."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until: dict[str, dict[Reader, float]] = {}
        # Whose row was stolen, or deleted: they may read on beside its new owners, to their fences.
        self._bereft: set[Reader] = set()

    def standing(self, key: str) -> Mapping[Reader, float]:
        """Who was permitted to begin batches, and until when; some of it has passed."""
        return self._until.get(key, {})

    def opened(self, reader: Reader, until_s: float) -> None:
        """It may begin batches until then. Raises: RuleBroken while another one may."""
        self._refuse_second(reader)
        self._until.setdefault(reader.key, {})[reader] = until_s

    def shut(self, reader: Reader) -> None:
        self._bereft.discard(reader)
        held = self._until.get(reader.key)
        if held is not None:
            held.pop(reader, None)

    def begins(self, reader: Reader) -> None:
        """It begins a batch. Raises: RuleBroken where it may not, or another one may."""
        now, key = self._now(), reader.key
        held = self._until.get(key, {})
        until_s = held.get(reader, -math.inf)
        if now > until_s + _ROUNDING_S:
            raise RuleBroken(
                "I4", key, f"{reader.who} began a batch {now - until_s:.3f} s too late"
            )
        if len(held) > 1:
            self._refuse_second(reader)

    def row_taken(self, after: Lease) -> None:
        """The row has another owner. Raises: RuleBroken where the last one may still read."""
        now = self._now()
        is_ours = after.owner is not None and after.owner.startswith(OWNER_PREFIX)
        for other, until_s in self._until.get(after.key, {}).items():
            if now >= until_s - _ROUNDING_S:
                continue
            if is_ours and other not in self._bereft:
                words = f"{after.owner} took what {other.who} may read for {until_s - now:.3f} s"
                raise RuleBroken("I4", after.key, words)
            self._bereft.add(other)

    def row_deleted(self, key: str) -> None:
        """By somebody, under its owner."""
        self._bereft.update(self._until.get(key, {}))

    def row_settled(self, key: str, owner: OwnerId | None) -> None:
        """Its owner wrote it again, or gave it away: none of that owner's overlaps is excused from
        here on."""
        self._bereft.difference_update(
            reader for reader in self._until.get(key, {}) if owner_of(reader.who) == owner
        )

    def require_waited(self, reader: Reader, row: Lease | None) -> None:
        """Before its first batch: whom the lease was taken from by force has had a failover."""
        if row is not None and row.taken_from is not None:
            words = f"{reader.who} began while {row.taken_from} may still process it [P18]"
            raise RuleBroken("I4", reader.key, words)

    def _refuse_second(self, reader: Reader) -> None:
        now, key = self._now(), reader.key
        for other, until_s in self._until.get(key, {}).items():
            if other is reader or now >= until_s - _ROUNDING_S:
                continue
            if other in self._bereft or reader in self._bereft:
                continue
            words = f"{reader.who} reads while {other.who} may for {until_s - now:.3f} s more"
            raise RuleBroken("I4", key, words)
