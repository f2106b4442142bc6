"""The promise of a pause: no batch begins a failover after it came, until it is over or taken away.

Any live lease process has its row confirmed within a failover, or its fence stops it [P7]; the
first row that shows the pause stops it, too. It does not know how.
"""

from __future__ import annotations

from typing import Final

from kclrun.model.lease import Lease
from kclrun.model.time import WallTime
from kclrun.simulation.clocks import WORLD_BEGAN_AT
from kclrun.simulation.oracles.permissions import Reader
from kclrun.simulation.stories import RuleBroken

# The service tells its time in whole seconds, rounded down, and the last listing may be a cycle
# old; a host's clock drifts.
_END_S: Final = 2.0
_DRIFT: Final = 1.01


class PauseWatch:
    """Gets each row that was written, and each batch that begins."""

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
        stands = row.pause.stands_at(WallTime(WORLD_BEGAN_AT + now + _END_S))
        if stands and for_s > self._patience_s:
            raise RuleBroken("pause", row.key, f"{reader.who} reads it, paused for {for_s:.1f} s")
