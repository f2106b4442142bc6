"""When a lease process subscribes to its shard, and when it reads by polling instead. Pure.

With `fetch.mode: fan-out` the first page is polled: it shows whether records expired, and a
handoff has no gap although Kinesis refuses a second subscription within five seconds. Then the
process subscribes at the position of polling, and polls on while it has no subscription:

    polling ──began──► subscribed ──ended, an error, silence──► polling
       ▲ │                  │
       └─┘ refused          └── renewal due ──► subscribes again at once, at the same position

Source: SubscribeToShard in the Kinesis API reference.
"""

from __future__ import annotations

import math
from typing import Final

from kclrun.errors import ServiceError
from kclrun.model.quotas import RESUBSCRIBE_AFTER_S, SUBSCRIPTION_S
from kclrun.model.retries import PASSING
from kclrun.model.time import Instant, backoff_s

# The service ends a subscription after five minutes. A subscription made a little earlier replaces
# it at a moment of our choice; the chance spreads a fleet that began in the same second.
RENEWED_AFTER_S: Final = SUBSCRIPTION_S - 15.0
RENEWED_SPREAD_S: Final = 30.0
# The service sends an event every five seconds, also without records: after this, two are missing.
# The Java KCL waits 35 s, because it has nothing else to read by. Here polling takes over at once,
# and loses nothing if the silence was none: waiting longer would only make records late.
SILENCE_MAX_S: Final = 10.0
# So far behind, a subscription should catch up: it has twice what a shard takes. If the lag did not
# become smaller in so many seconds of waiting for its events, the connection is too slow.
BEHIND_MS_MAX: Final = 10_000
CATCH_UP_S: Final = 10.0
# Within five seconds of a subscription the service refuses another one of the same consumer. A
# subscription that ended earlier was broken off, and trying at once would meet the refusal.
SETTLED_AFTER_S: Final = RESUBSCRIBE_AFTER_S
# Another owner's subscription, or a consumer that is being created, ends within seconds.
RETRY_S: Final = 1.0
RETRY_MAX_S: Final = 30.0
# A deregistered consumer and a missing permission wait for an operator.
REFUSED_FOR_GOOD_S: Final = 60.0


def is_lasting(error: Exception) -> bool:
    """Whether a refusal stays until an operator changes something."""
    return isinstance(error, ServiceError) and not isinstance(error, PASSING)


class SubscriptionPlan:
    """Decides when to subscribe. Times are instants of one clock; `chance` is in [0, 1)."""

    def __init__(self) -> None:
        self._next_try: Instant | None = None
        self._began: Instant | None = None
        self._renew_at = Instant(0.0)
        self._failures = 0
        self._silent_s = 0.0
        self._behind_ms = 0  # when the wait for its events to catch up began
        self._waited_s = 0.0

    def is_due(self, now: Instant) -> bool:
        """Whether to subscribe now: none stands, and the first page was polled."""
        is_tried = self._next_try is not None and now >= self._next_try
        return self._began is None and is_tried

    def next_change_in_s(self, now: Instant) -> float:
        """How long until a subscription is due, or the renewal of the present one."""
        if self._began is not None:
            return max(0.0, self._renew_at - now)
        return math.inf if self._next_try is None else max(0.0, self._next_try - now)

    def polled(self, now: Instant) -> None:
        """A page was polled."""
        if self._next_try is None:
            self._next_try = now

    def began(self, now: Instant, chance: float) -> None:
        """The service accepted the subscription."""
        self._began = now
        self._silent_s = self._waited_s = 0.0
        self._renew_at = Instant(now + RENEWED_AFTER_S - chance * RENEWED_SPREAD_S)

    def event_came(self, behind_ms: int | None = 0, waited_s: float = 0.0) -> None:
        """The subscription works. It is `behind_ms` behind after this event, for which the thread
        waited so long since the last call."""
        waited_s, self._silent_s = self._silent_s + waited_s, 0.0
        if (behind_ms or 0) <= BEHIND_MS_MAX:
            self._failures, self._waited_s = 0, 0.0
            return
        if not self._waited_s or (behind_ms or 0) < self._behind_ms:
            self._behind_ms, self._waited_s = behind_ms or 0, 0.0
        self._waited_s += waited_s

    @property
    def is_slow(self) -> bool:
        """Whether the subscription is behind and does not catch up. As with silence, time in which
        the queue had no room does not count."""
        return self._waited_s >= CATCH_UP_S

    def waited(self, waited_s: float) -> None:
        """No event came while the thread waited so long. Only time spent waiting counts, not the
        time in which the queue had no room."""
        self._silent_s += waited_s

    @property
    def is_silent(self) -> bool:
        """Whether the subscription has ended unnoticed, by the time without an event."""
        return self._silent_s >= SILENCE_MAX_S

    def is_renewal_due(self, now: Instant) -> bool:
        """Whether to replace the subscription before the service ends it."""
        return self._began is not None and now >= self._renew_at

    def ended(self, now: Instant, chance: float) -> None:
        """The subscription is over, in good order: five minutes, or by `is_renewal_due`."""
        assert self._began is not None, "only a subscription that stands can end"
        if now - self._began >= SETTLED_AFTER_S:
            self._began, self._next_try = None, now
        else:
            self._retry(now, chance)

    def failed(self, error: Exception, now: Instant, chance: float) -> None:
        """The subscription was refused, or broke."""
        if is_lasting(error):
            pause_s = REFUSED_FOR_GOOD_S * (0.5 + chance / 2)
            self._began, self._next_try = None, Instant(now + pause_s)
        else:
            self._retry(now, chance)

    def _retry(self, now: Instant, chance: float) -> None:
        """Try again after a pause that grows, and not while the service refuses a second one."""
        self._failures += 1
        pause_s = backoff_s(self._failures, chance, base_s=RETRY_S, max_s=RETRY_MAX_S)
        began, self._began = self._began, None
        refused_until = -math.inf if began is None else began + SETTLED_AFTER_S
        self._next_try = Instant(max(now + pause_s, refused_until))
