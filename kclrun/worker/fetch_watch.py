"""Whether the fetch thread hangs in a request that never comes back, as the lease thread sees it.

Every request has time-outs, so this is for what they do not cover: a resolver that does not
answer, a lock, a service that sends a byte now and then. The manager looks at the same figure with
`stall:`; this one knows the time-outs and needs no manager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kclrun.errors import Unavailable
from kclrun.model.time import Instant
from kclrun.model.wire import WireEndpoint
from kclrun.worker.fetching import FetchView

__all__ = ["FetchWatch", "silence_max_s"]

# One answer takes two requests (iterator, records); each may go out again on a new connection, and
# again with the service's clock: eight times connecting and reading. Half as much again is for a
# body that trickles in, which a restart would only begin anew.
PATIENCES_MAX: Final = 12
# The lease thread looks once a second. A longer pause means that it stood still itself (a stopped
# process, a held GIL), and the fetch thread with it: that is not the service's silence.
LOOK_S_MAX: Final = 2.0


def silence_max_s(endpoint: WireEndpoint) -> float:
    """How long one answer may take before the fetch thread counts as hung."""
    return PATIENCES_MAX * (endpoint.connect_timeout_s + endpoint.read_timeout_s)


class FetchWatch:
    """Asked at each turn of the lease thread; counts how long one answer has been waited for."""

    def __init__(self, view: Callable[[], FetchView], silence_max_s: float) -> None:
        self._view = view
        self._silence_max_s = silence_max_s
        self._asking_since = Instant(0.0)
        self._looked = Instant(0.0)
        self._waited_s = 0.0

    def look(self, now: Instant) -> Unavailable | None:
        """The error to end the process with, once it has hung for too long."""
        asking_since, passed_s = self._view().asking_since_instant, now - self._looked
        self._looked = now
        if not asking_since or asking_since != self._asking_since:
            self._asking_since, self._waited_s = asking_since, 0.0
            return None
        self._waited_s += min(passed_s, LOOK_S_MAX)
        if self._waited_s < self._silence_max_s:
            return None
        return Unavailable(
            f"a request for records has not come back for {self._waited_s:.0f} s, though its"
            " time-outs have passed"
        )
