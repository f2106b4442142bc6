"""The order of a manager's requests to the services, for its shell and for the simulator.

It does not know how a request is sent. Its callers give it clock, timer and chance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kclrun.leases import commands as do
from kclrun.leases.events import Event, WriteResolved
from kclrun.model.lease import LeaseKey
from kclrun.model.time import Instant, backoff_s
from kclrun.protocol.writes import LeaseChange, Outcome, keys_of

Request = (
    do.ScanTable
    | do.ListShards
    | do.DescribeStream
    | do.ReadKcl3Mode
    | do.ReadRow
    | do.ReadParents
    | do.FindOffers
    | do.WriteRow
)


class ServiceRequests:
    """Performs the core's requests. Each ends in an event for `deliver`.

    Reads and listings are repeated until they succeed; a write, and a look for offers, is sent
    once. For each key, one write is under way at a time [P5]; children that are created count under
    the key of the first.

    A shell sends: `_send_write` must end in one call of `_resolved`, and `_send` in one of
    `deliver` or `_failed`.
    """

    def __init__(
        self,
        *,
        now: Callable[[], Instant],
        at: Callable[[Instant, Callable[[], None]], object],
        after: Callable[[float, Callable[[], None]], object],
        chance: Callable[[], float],
        deliver: Callable[[Event], None],
    ) -> None:
        self._now = now
        self._at = at
        self._after = after
        self._chance = chance
        self._deliver = deliver
        # The keys with a write under way, and the changes that wait for it.
        self._writes: dict[LeaseKey, deque[LeaseChange]] = {}

    def perform(self, request: Request) -> None:
        """Send the request once it is due."""
        due = request.not_before if isinstance(request, do.ReadRow | do.WriteRow) else None
        if due is not None and due > self._now():
            self._at(due, lambda: self._begin(request))
        else:
            self._begin(request)

    def _begin(self, request: Request) -> None:
        if not isinstance(request, do.WriteRow):
            self._send(request, 1)
            return
        key = keys_of(request.change)[0]
        if key in self._writes:
            self._writes[key].append(request.change)
        else:
            self._writes[key] = deque()
            self._send_write(key, request.change)

    def _resolved(self, key: LeaseKey, change: LeaseChange, outcome: Outcome) -> None:
        waiting = self._writes[key]
        if waiting:
            self._send_write(key, waiting.popleft())
        else:
            del self._writes[key]
        self._deliver(WriteResolved(change, outcome))

    def _failed(self, request: Request, attempt: int) -> None:
        """The read is sent again after a pause, which grows."""
        pause_s = backoff_s(attempt, self._chance())
        self._after(pause_s, lambda: self._send(request, attempt + 1))

    def _send(self, request: Request, attempt: int) -> None:
        """Send a request that is not a write. `attempt` counts from 1."""
        raise NotImplementedError

    def _send_write(self, key: LeaseKey, change: LeaseChange) -> None:
        raise NotImplementedError
