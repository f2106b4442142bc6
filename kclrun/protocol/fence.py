"""The fence: until when a lease process may begin a batch [P7, I4].

`fence_instant` gives the rule; `FailoverTerms` applies it when the failover of the fleet changes.
"""

from __future__ import annotations

import math
from typing import Final

from kclrun.model.time import Instant

# Host clocks may run 1 % apart: the limit stated in the guarantees (I4).
RATE_DRIFT_MAX: Final = 0.01
# A lock and a call lie between the check of the fence and the first line of user code: far below
# 100 ms on a busy machine.
SCHEDULING_MARGIN_S: Final = 0.1
# The Java KCL renews every failover/3 - 25 ms (`DynamoDBLeaseCoordinator`, epsilon 25 ms): three
# tries fit into one failover.
RENEWALS_PER_FAILOVER: Final = 3
RENEW_EPSILON_S: Final = 0.025


def fence_instant(sent: Instant, failover_s: float) -> Instant:
    """Until when a write sent at `sent`, and known to have applied, permits new batches.

    Another manager starts its count-down only when it sees a new counter, hence after the write
    that moved it was applied, hence after that write was sent. So a permission that ends `failover`
    after the *sending*, by a clock that runs through suspend, ends before any owner may take the
    lease by expiry.
    """
    return Instant(sent + failover_s * (1 - RATE_DRIFT_MAX) - SCHEDULING_MARGIN_S)


def renew_interval_s(failover_s: float) -> float:
    """The fixed rate of renewals: three in one failover, so that two may be lost. 10 s gives the
    Java KCL's 3.308 s. Never below half of that pace: a floor for the short failovers of tests."""
    pace_s = failover_s / RENEWALS_PER_FAILOVER
    return max(pace_s - RENEW_EPSILON_S, pace_s / 2)


class FailoverTerms:
    """The smallest failover in the fleet, and the effect of a change of it on permissions.

    `failover_s` counts for new sends. For a send before the last shortening, `_before_s` is the
    failover that it counted by, and `_shortened_until` bounds it as well.

    A shorter failover in the fleet (a deploy that goes from 10 s to 3 s, one mistaken row) shortens
    the fence, but never into the past: every lease of the fleet would be lost at once, although all
    its owners renew. Who may expire our lease by the shorter failover?

    - Not a kclrun observer: it counts by the larger of its own failover and our row's [P9], and
      our row carries the one that we took it with.
    - A Java worker with a shorter setting, which stands on no row. It may do so from its own start
      on, so from before we know. The trace: renewal at 0 by 10 s; Java starts at 1 with 3 s and
      sees the counter; it takes the row at 4; we learn of 3 s at 5, from a row. No fence that is
      set at 5 prevents that, not even one in the past. Our next write is refused, and that ends it.

    So the requirement is: from the moment we know, an owner that counts by the shorter failover
    from then on never finds us permitted. A renewal is sent at once, and the fence counts by the
    shorter failover from that send. Until it is confirmed, and where it cannot be, the fence is a
    shorter failover after the moment that we knew, or the old one if that is nearer. A write that
    was sent before that moment and is confirmed after it proves nothing about the time since: it is
    bounded in the same way, and the renewal still follows. A second, shorter failover before the
    renewal bounds it further, never less.
    """

    def __init__(self, failover_s: float) -> None:
        self.failover_s = failover_s
        self._before_s = failover_s
        self._shortened_instant: Instant | None = None
        self._shortened_until = Instant(math.inf)

    def change(self, failover_s: float, now: Instant) -> None:
        """The smallest failover has changed, as we know from `now` on."""
        if failover_s < self.failover_s:
            if self._shortened_instant is None:
                self._before_s = self.failover_s
            self._shortened_instant = now
            self._shortened_until = min(self._shortened_until, fence_instant(now, failover_s))
        elif failover_s > self.failover_s:
            self._forget_shortening()
        self.failover_s = failover_s

    def confirmed(self, sent: Instant) -> None:
        """A write sent at `sent` has applied. One sent after the shortening ends the transition."""
        if not self._is_before_shortening(sent):
            self._forget_shortening()

    def fence(self, sent: Instant) -> Instant:
        """Until when a write sent at `sent`, and known to have applied, permits new batches."""
        fence = fence_instant(sent, self.failover_s)
        if not self._is_before_shortening(sent):
            return fence
        as_sent = fence_instant(sent, self._before_s)
        return max(fence, min(as_sent, self._shortened_until))

    def renewal_instant(self, sent: Instant) -> Instant:
        """When the next heartbeat is due: at once after a shortening."""
        if self._is_before_shortening(sent):
            assert self._shortened_instant is not None, "something is before it"
            return self._shortened_instant
        return Instant(sent + renew_interval_s(self.failover_s))

    def _is_before_shortening(self, sent: Instant) -> bool:
        return self._shortened_instant is not None and sent < self._shortened_instant

    def _forget_shortening(self) -> None:
        self._shortened_instant = None
        self._shortened_until = Instant(math.inf)
