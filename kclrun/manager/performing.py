"""The core's commands about the world's services, as requests on the pool; each ends in an event.

Holds: `Performer`, `Outages`. May not know: why a command was given. Rule: reads and listings are
repeated without end, writes are sent once; of one key, one write is under way at a time [P5].
Look next: `io_pool.py`, `runtime.py`.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kclrun.errors import NotFound, ServiceError
from kclrun.leases.events import (
    Event,
    LeasesScanned,
    OffersFound,
    ParentsRead,
    RowRead,
    ShardsListed,
    WriteResolved,
)
from kclrun.manager.io_pool import IoPool
from kclrun.manager.loop import Loop
from kclrun.manager.world import World
from kclrun.model.backoff import backoff_s
from kclrun.model.changes import LeaseChange, keys_of
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.stream_key import StreamKey, qualified_shards, stream_name_of
from kclrun.model.time import Instant
from kclrun.observe.logs import EventLog
from kclrun.ports import ShardFilter

__all__ = ["LOOK_FOR_OFFERS", "Outages", "Performer"]

# Scans find offers as well: without this request moves are slower, and nothing stands still.
LOOK_FOR_OFFERS: Final = "look for offered leases"

# Tables of 100,000 leases and more would not fit the promise of DESIGN 14 (10,000 leases).
_ROWS_MAX: Final = 100_000
_BROKEN_SHOWN_MAX: Final = 100
# A table that was just made may be unknown to one of the service's hosts for a moment: only a
# second scan, a pause later, proves that it is gone.
_SCANS_TO_PROVE_GONE: Final = 2


class Outages:
    """One warning when an operation begins to fail, one line when it works again."""

    def __init__(self, log: EventLog, now: Callable[[], Instant]) -> None:
        self._log = log
        self._now = now
        self._since: dict[str, Instant] = {}
        self._codes: dict[str, str] = {}

    def failed(self, operation: str, error: ServiceError, asked: Instant) -> None:
        """A try that began at `asked` failed: a service that hangs is away from then on."""
        if operation not in self._since:
            self._since[operation] = asked
            self._codes[operation] = error.code or type(error).__name__
            self._log.note(
                "service_unreachable", operation=operation, code=error.code, error=str(error)
            )

    def items(self) -> Iterator[tuple[str, tuple[Instant, str]]]:
        """What fails now, since when, and with which error it began."""
        for operation, since in self._since.items():
            yield operation, (since, self._codes[operation])

    def worked(self, operation: str) -> None:
        since = self._since.pop(operation, None)
        if since is not None:
            self._log.note("service_back", operation=operation, outage_s=self._now() - since)


@dataclass
class _Read:
    """A read that is repeated until it succeeds."""

    name: str
    job: Callable[[], Event]
    attempt: int = 1
    is_scan: bool = False


class Performer:
    """Performs for one manager. All calls, and `deliver`, in the loop's thread.

    `table_gone` is called, once, when a scan has proven that the lease table was deleted.
    """

    def __init__(
        self,
        world: World,
        start_filter_of: Callable[[StreamKey], ShardFilter],
        *,
        loop: Loop,
        pool: IoPool,
        log: EventLog,
        deliver: Callable[[Event], None],
        broke: Callable[[Exception], None],
        table_gone: Callable[[ServiceError], None],
    ) -> None:
        self._world = world
        self._start_filter_of = start_filter_of
        self._loop = loop
        self._pool = pool
        self._deliver = deliver
        self._broke = broke
        self._table_gone = table_gone
        self._log = log
        self.outages = Outages(log, loop.now)
        self._is_unindexed_told = False
        self._writes: dict[LeaseKey, collections.deque[LeaseChange]] = {}

    def scan_table(self) -> None:
        self._read(_Read("scan the lease table", lambda: _scanned(self._world), is_scan=True))

    def list_shards(self, stream: StreamKey, *, with_start: bool) -> None:
        start = self._start_filter_of(stream) if with_start else None
        name = stream_name_of(stream)
        operation = f"list the shards of {name}" if name else "list the shards"
        self._read(_Read(operation, lambda: _listed(self._world, stream, start)))

    def read_row(self, key: LeaseKey) -> None:
        table = self._world.table
        self._read(_Read("read a lease", lambda: RowRead(key, table.read(key))))

    def read_parents(self, key: LeaseKey, parents: tuple[LeaseKey, ...]) -> None:
        table = self._world.table

        def job() -> Event:
            return ParentsRead(key, tuple(table.read(parent) for parent in parents))

        self._read(_Read("read the parents of a lease", job))

    def find_offers(self, rows_max: int) -> None:
        """Once: the next look is soon, and scans find offers as well [P17]."""
        operation = LOOK_FOR_OFFERS
        asked = self._loop.now()

        def found(event: OffersFound) -> None:
            self.outages.worked(operation)
            self._deliver(event)

        def failed(error: Exception) -> None:
            match error:
                case NotFound():
                    self._tell_unindexed(error)
                case ServiceError():
                    self.outages.failed(operation, error, asked)
                case _:
                    self._broke(error)
                    return
            self._deliver(OffersFound(None))

        self._pool.run(lambda: OffersFound(self._world.table.offered(rows_max)), found, failed)

    def write_row(self, change: LeaseChange, not_before: Instant | None) -> None:
        """Send `change` once, when it is due and no other write of its key is under way. Children
        are created in the name of the first."""
        if not_before is not None and not_before > self._loop.now():
            self._loop.at(not_before, lambda: self.write_row(change, None))
            return
        key = keys_of(change)[0]
        if key in self._writes:
            self._writes[key].append(change)
            return
        self._writes[key] = collections.deque()
        self._send(key, change)

    def _send(self, key: LeaseKey, change: LeaseChange) -> None:
        def job() -> WriteResolved:
            return WriteResolved(change, self._world.table.write(change))

        def resolved(event: WriteResolved) -> None:
            self._next_write(key)
            self._deliver(event)

        self._pool.run(job, resolved, self._broke)

    def _next_write(self, key: LeaseKey) -> None:
        waiting = self._writes[key]
        if waiting:
            self._send(key, waiting.popleft())
        else:
            del self._writes[key]

    def _read(self, read: _Read) -> None:
        asked = self._loop.now()

        def succeeded(event: Event) -> None:
            self.outages.worked(read.name)
            self._deliver(event)

        def failed(error: Exception) -> None:
            if not isinstance(error, ServiceError):
                self._broke(error)
                return
            is_table_gone = read.is_scan and isinstance(error, NotFound)
            if is_table_gone and read.attempt >= _SCANS_TO_PROVE_GONE:
                self._table_gone(error)
                return
            if not is_table_gone:
                self.outages.failed(read.name, error, asked)
            read.attempt += 1
            self._loop.after(backoff_s(read.attempt, random.random()), lambda: self._read(read))

        self._pool.run(read.job, succeeded, failed)

    def _tell_unindexed(self, error: ServiceError) -> None:
        if not self._is_unindexed_told:
            self._is_unindexed_told = True
            self._log.note("offers_unindexed", code=error.code, error=str(error))


def _scanned(world: World) -> LeasesScanned:
    leases: list[Lease] = []
    broken: list[str] = []
    foreign = 0
    for page in world.table.scan():
        leases += page.leases
        broken += page.broken
        foreign += page.foreign
        if len(leases) > _ROWS_MAX:
            raise ServiceError(
                f"the lease table has more than {_ROWS_MAX} leases", operation="Scan"
            )
    return LeasesScanned(tuple(leases), tuple(broken[:_BROKEN_SHOWN_MAX]), foreign)


def _listed(world: World, stream: StreamKey, start: ShardFilter | None) -> ShardsListed:
    admin = world.streams[stream].admin
    shards = qualified_shards(stream, admin.list_shards())
    at_start = qualified_shards(stream, admin.list_shards(start)) if start is not None else None
    return ShardsListed(shards, world.service_time(), at_start, stream)
