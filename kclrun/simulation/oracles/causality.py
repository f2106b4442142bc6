"""I3: parents first. A child is read once every parent's shard end stands on its row, and no shard
is read after its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from kclrun.model.lease import Lease, LeaseKey
from kclrun.simulation.oracles.reader import Reader
from kclrun.simulation.oracles.row_lives import RowLives
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.story import RuleBroken

__all__ = ["Causality"]

# From a look at the parents' rows to a first batch: the answer is waited for, then the claim comes
# within a failover [P4], and the batch before the fence [P7].
_LOOK_S: Final = 2.0


class Causality:
    """`lives` knows which rows have ended, also those that are gone since."""

    def __init__(
        self,
        stream: ShardStream,
        row_of: Callable[[LeaseKey], Lease | None],
        lives: RowLives,
        *,
        now: Callable[[], float],
        failover_s: float,
    ) -> None:
        self._stream = stream
        self._row_of = row_of
        self._lives = lives
        self._now = now
        self._under_way_max_s = 2 * failover_s + _LOOK_S

    def require_open(self, reader: Reader) -> None:
        """Any batch. Raises: RuleBroken once the shard's own end is written."""
        if reader.key in self._lives.ended:
            raise RuleBroken("I3", reader.key, f"{reader.who} reads it after its shard end")

    def require_parents_ended(self, reader: Reader) -> None:
        """A shard's first batch. Raises: RuleBroken for a parent that may have records unread."""
        for parent in self._stream.parents_of(reader.key):
            row = self._row_of(LeaseKey(parent))
            is_over = self._lives.may_be_absent(parent) if row is None else row.is_ended
            if not is_over and not self._was_over_just_now(parent):
                raise RuleBroken("I3", reader.key, f"read before its parent {parent} ended")

    def _was_over_just_now(self, parent: str) -> bool:
        """Somebody deleted the row of a shard that had ended, and a manager created it again: who
        had looked before that may go on to its first batch."""
        came_s = self._lives.came_again_s.get(parent, -math.inf)
        return self._now() - came_s <= self._under_way_max_s
