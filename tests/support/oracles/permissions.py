"""I4: which reader may begin batches of a lease, and until when; and that a pause is kept.

Permissions of two readers of one lease never overlap. Another kclrun owner never takes a lease that
its owner may still read. A Java worker may steal the lease, or its row may be deleted from outside:
then its owner notices with the next renewal, and its permission ends with its fence at the latest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from kclrun.model.lease import OWNER_PREFIX, Lease, OwnerId
from kclrun.model.time import WallTime
from kclrun.simulation.clocks import WORLD_BEGAN_AT
from kclrun.simulation.observer import Reader
from kclrun.simulation.stories import RuleBroken

# Two clocks compared through world time round differently.
_ROUNDING_S: Final = 1e-6
# The service gives its time in whole seconds, rounded down, and the last listing may be a cycle
# old; a host's clock drifts.
_PAUSE_END_S: Final = 2.0
_DRIFT: Final = 1.01


def owner_of(who: str) -> OwnerId:
    """The owner in whose name a kclrun manager, or one of its lease processes, writes."""
    return OwnerId(OWNER_PREFIX + who.partition("/")[0])


class Permissions:
    """`now` is the world's time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until: dict[str, dict[Reader, float]] = {}
        # Readers whose row was stolen or deleted: they may read on beside the row's new owners, to
        # their fences.
        self._bereft: set[Reader] = set()

    def loads(self, key: str) -> Mapping[Reader, float]:
        """The readers that may begin batches, and until when; some of these times have passed."""
        return self._until.get(key, {})

    def opened(self, reader: Reader, until_s: float) -> None:
        """It may begin batches until then. Raises: RuleBroken while another reader may."""
        self._refuse_second(reader)
        self._until.setdefault(reader.key, {})[reader] = until_s

    def shut(self, reader: Reader) -> None:
        self._bereft.discard(reader)
        held = self._until.get(reader.key)
        if held is not None:
            held.pop(reader, None)

    def begins(self, reader: Reader) -> None:
        """It begins a batch. Raises: RuleBroken where it may not, or another reader may."""
        now, key = self._now(), reader.key
        held = self._until.get(key, {})
        until_s = held.get(reader, -math.inf)
        if now > until_s + _ROUNDING_S:
            raise RuleBroken(
                "I4", key, f"{reader.who} began a batch {now - until_s:.3f} s too late"
            )
        self._refuse_second(reader)

    def row_taken(self, after: Lease) -> None:
        """The row has another owner. Raises: RuleBroken where the last owner may still read."""
        now = self._now()
        is_ours = (after.owner or "").startswith(OWNER_PREFIX)
        for other, until_s in self._until.get(after.key, {}).items():
            if now >= until_s - _ROUNDING_S:
                continue
            if is_ours and other not in self._bereft:
                words = f"{after.owner} took what {other.who} may read for {until_s - now:.3f} s"
                raise RuleBroken("I4", after.key, words)
            self._bereft.add(other)

    def row_deleted(self, key: str) -> None:
        """The row was deleted from outside, under its owner."""
        self._bereft.update(self._until.get(key, {}))

    def row_settled(self, key: str, owner: OwnerId | None) -> None:
        """The owner wrote the row again, or gave it away: from here on no overlap of this owner is
        excused."""
        self._bereft.difference_update(
            reader for reader in self._until.get(key, {}) if owner_of(reader.who) == owner
        )

    def require_waited(self, reader: Reader, row: Lease | None) -> None:
        """Before its first batch: an owner that lost the lease by force has had a failover."""
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


class PauseWatch:
    """No batch begins a failover after a pause came, until it is over or taken away.

    Any live lease process has its row confirmed within a failover, or its fence stops it [P7]; the
    first row that shows the pause stops it, too. Gets each row that was written, and each batch
    that begins.
    """

    def __init__(self, failover_s: float) -> None:
        self._patience_s = failover_s * _DRIFT
        self._since: dict[str, tuple[object, float]] = {}

    def written(self, after: Lease, now: float) -> None:
        """The row is there, or as it is now."""
        if after.pause is None:
            self._since.pop(after.key, None)
        elif self._since.get(after.key, (None,))[0] != after.pause:
            self._since[after.key] = (after.pause, now)

    def require_not_paused(self, reader: Reader, row: Lease | None, now: float) -> None:
        """A batch begins. Raises: RuleBroken if the pause on the row stands for so long."""
        if row is None or row.pause is None or row.key not in self._since:
            return
        for_s = now - self._since[row.key][1]
        stands = row.pause.stands_at(WallTime(WORLD_BEGAN_AT + now + _PAUSE_END_S))
        if stands and for_s > self._patience_s:
            raise RuleBroken("pause", row.key, f"{reader.who} reads it, paused for {for_s:.1f} s")
