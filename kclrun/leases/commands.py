"""The commands of the lease manager's core, and the order in which its shell and the simulator send
those that are requests to a service."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from kclrun.leases.events import Event, WriteResolved
from kclrun.model.lease import LeaseKey, Pause
from kclrun.model.stream import ONLY_STREAM, StreamKey
from kclrun.model.time import Instant, backoff_s
from kclrun.protocol.writes import LeaseChange, Outcome, keys_of


class ScanTable(msgspec.Struct, frozen=True):
    """Scan the whole lease table; comes back as LeasesScanned. `consistent`: read the current
    state; else the rows may be a moment old, for half the read units [P9]."""

    consistent: bool = True


class ListShards(msgspec.Struct, frozen=True):
    """List all shards of a stream; comes back as ShardsListed. `with_start` also lists by the start
    filter."""

    with_start: bool = False
    stream: StreamKey = ONLY_STREAM


class DescribeStream(msgspec.Struct, frozen=True):
    """Ask the service when a stream was created; comes back as StreamDescribed [P13]."""

    stream: StreamKey = ONLY_STREAM


class ReadRow(msgspec.Struct, frozen=True):
    """Read one row consistently and retry until it succeeds; comes back as RowRead, or at once as
    RowUnreadable. Not before `not_before`."""

    key: LeaseKey
    not_before: Instant | None = None


class ReadParents(msgspec.Struct, frozen=True):
    """Read the parents' rows consistently; comes back as ParentsRead [P11]."""

    key: LeaseKey
    parents: tuple[LeaseKey, ...]


class ReadKcl3Mode(msgspec.Struct, frozen=True):
    """Read the mode of a KCL 3 fleet where early KCL 3 versions keep it, outside of the lease
    table; comes back as Kcl3ModeRead, or at once as Kcl3ModeUnreadable [P8]."""


class FindOffers(msgspec.Struct, frozen=True):
    """Look for offered rows by the index, once; comes back as OffersFound [P17]."""

    rows_max: int


class WriteRow(msgspec.Struct, frozen=True):
    """Send one change once; comes back as WriteResolved. Not before `not_before` (back-off)."""

    change: LeaseChange
    not_before: Instant | None = None


class StartProcess(msgspec.Struct, frozen=True):
    """Start a lease process for a row that is ours. The counter travels in its start command [P4].

    Comes back as ProcessStarted or StartFailed, then as the reports of the process. `has_waited`: a
    failover has passed since a take by force, so its claim removes `takenFrom` [P18]. `is_alone`:
    the process must not be shared with other leases. `past_pause`: the pause on the row, which is
    over.
    """

    key: LeaseKey
    counter: int
    expires_instant: Instant
    has_waited: bool = False
    is_alone: bool = False
    past_pause: Pause | None = None


class DrainProcess(msgspec.Struct, frozen=True):
    """Ask a lease process to finish its batch, checkpoint, release and exit."""

    key: LeaseKey
    reason: str


class PublishOthersInSight(msgspec.Struct, frozen=True):
    """Send to all lease processes whether another kclrun owner is in sight. If so, they offer the
    leases that they give away; else they release them [P17]. New processes get it in their start
    command."""

    others: bool


class Note(msgspec.Struct, frozen=True):
    """One line for the log: an event of the catalogue and its fields. `level` only where it is not
    that of the catalogue."""

    event: str
    level: str | None = None
    key: LeaseKey | None = None
    fields: dict[str, str | int | float | bool | None] = {}


class StopRefused(msgspec.Struct, frozen=True):
    """The rows belong to another stream than the one that is there [P13]: drain, and do not start
    again before a person has looked. Comes back as DrainRequested."""

    reason: str


class Finish(msgspec.Struct, frozen=True):
    """No lease is ours any more and no write is under way: the manager may exit."""


Request = (
    ScanTable
    | ListShards
    | DescribeStream
    | ReadKcl3Mode
    | ReadRow
    | ReadParents
    | FindOffers
    | WriteRow
)

Command = Request | StartProcess | DrainProcess | PublishOthersInSight | Note | StopRefused | Finish


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
        due = request.not_before if isinstance(request, ReadRow | WriteRow) else None
        if due is not None and due > self._now():
            self._at(due, lambda: self._begin(request))
        else:
            self._begin(request)

    def _begin(self, request: Request) -> None:
        if not isinstance(request, WriteRow):
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
