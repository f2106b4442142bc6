"""What is watched in a simulated fleet, and the promises it must keep.

Sees the world from outside: rows as they are written, gates as they open, batches as they begin.
Asks no core what it thinks. `watch.py` is told everything and passes it on: `deliveries.py` (I1,
I6, I7, I8), `permissions.py` (I4), `row_history.py` (I2, I5), `row_lives.py` (I11), `causality.py`
(I3), `cost.py` and `limits.py` (I12). Rule: whatever is watched costs a constant time an event.
"""

from kclrun.simulation.oracles.policy import WatchPolicy
from kclrun.simulation.oracles.reader import Reader
from kclrun.simulation.oracles.watch import Oracles, Tally

__all__ = ["Oracles", "Reader", "Tally", "WatchPolicy"]
