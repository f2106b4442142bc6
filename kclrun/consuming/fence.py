"""The fence: until when a lease process may begin a batch [P7, I4].

Another manager starts its count-down only when it sees a new counter, hence after the write that
moved it was applied, hence after that write was sent. So permission that ends `failover` after
the *sending*, by a clock that runs through suspend, ends before anybody may take by expiry.
"""

from __future__ import annotations

from typing import Final

from kclrun.model.time import Instant

__all__ = ["RATE_DRIFT_MAX", "SCHEDULING_MARGIN_S", "fence_instant", "renew_interval_s"]

# Host clocks may run 1 % apart: the non-goal stated in the README's guarantees (I4).
RATE_DRIFT_MAX: Final = 0.01
# Between looking at the fence and the first line of user code lie a lock and a call: far below
# 100 ms on a busy machine.
SCHEDULING_MARGIN_S: Final = 0.1
# The Java KCL renews every failover/3 - 25 ms (`DynamoDBLeaseCoordinator`, epsilon 25 ms): three
# tries fit into one failover.
RENEWALS_PER_FAILOVER: Final = 3
RENEW_EPSILON_S: Final = 0.025


def fence_instant(sent: Instant, failover_s: float) -> Instant:
    """Until when a write sent at `sent`, and known to have applied, permits new batches."""
    return Instant(sent + failover_s * (1 - RATE_DRIFT_MAX) - SCHEDULING_MARGIN_S)


def renew_interval_s(failover_s: float) -> float:
    """The fixed rate of renewals."""
    return max(failover_s / RENEWALS_PER_FAILOVER - RENEW_EPSILON_S, RENEW_EPSILON_S)
