"""The calm after a storm of a fleet with Java members: everything is read, in Java's rhythm.

Even shares are not demanded: a Java worker counts ended rows as load, its own and others', so what
it holds of the work depends on what its cleanup, every five minutes, has left. Nor is rest.
"""

from __future__ import annotations

from typing import Final

from kclrun.simulation.calm import Calm
from kclrun.simulation.fleet import Fleet

__all__ = ["MixedCalm"]

# A dead owner's lease: one run of a taker sees its counter moved, the next that it has not since,
# each 2 x (failover + epsilon) after the other.
_FAILOVERS_TO_TAKE: Final = 4
# The parents' poll, the loop that starts a consumer, and half a second for the rest: four epsilons,
# the take, and the reads before the first batch.
_TO_BEGIN_S: Final = 10.0 + 1.0 + 0.5


class MixedCalm(Calm):
    """Of one fleet, from the end of its storm."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        failover_s = fleet.world.settings.failover_s
        self._patience_s = max(
            self._patience_s, _FAILOVERS_TO_TAKE * failover_s + _TO_BEGIN_S + self._poll_s
        )

    def demand_all(self) -> bool:
        """As `Calm.demand_all`, of what holds beside Java workers."""
        self._pass(self._pending_s)
        self._resume()
        self._pass(self._patience_s)
        if self._is_short():
            return False
        self._fleet.judge(self._require_readers)
        self._read_up()
        self._pass(self._patience_s)
        self._fleet.require_all_read(self._patience_s)
        return True
