"""Performs the core's commands that need AWS, on the I/O pool; the answer of each is an event.

It does not know why a command was given.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kclrun.errors import AccessDenied, InvalidRequest, NotFound, ServiceError, Unavailable
from kclrun.leases.events import (
    Event,
    Kcl3ModeRead,
    Kcl3ModeUnreadable,
    LeasesScanned,
    OffersFound,
    ParentsRead,
    RowRead,
    RowUnreadable,
    ShardsListed,
    StreamDescribed,
    WriteResolved,
)
from kclrun.manager.loop import IoPool, Loop
from kclrun.manager.world import CredentialSource, World
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.stream import StreamKey, qualified_shards, stream_name_of
from kclrun.model.time import Instant, backoff_s
from kclrun.model.wire import WireCredentials
from kclrun.observe.logs import EventLog
from kclrun.ports import ShardFilter
from kclrun.protocol.writes import BROKEN_ROW, LeaseChange, OutcomeUnknown, keys_of

# botocore renews 15 minutes before expiry at the earliest and 10 at the latest, instance metadata
# five: every half minute leaves ten tries even for the last.
_LOOK_EVERY_S: Final = 30.0


class CredentialHanding:
    """Renews the credentials for all lease processes: one request here, before the old ones expire.

    A lease process never requests its own [DESIGN 7]. The request may wait on the network, so it
    runs on the pool. After a failure the old credentials stay in use, with one warning.
    It begins with `open`; `hand_over` is called with each new set.
    """

    def __init__(
        self,
        source: CredentialSource,
        *,
        loop: Loop,
        pool: IoPool,
        log: EventLog,
        hand_over: Callable[[WireCredentials], None],
    ) -> None:
        self._source = source
        self._loop = loop
        self._pool = pool
        self._log = log
        self._hand_over = hand_over
        self._is_failing = False
        self.held = source.current()

    def open(self) -> None:
        self._loop.after(_LOOK_EVERY_S, self.look)

    def look(self) -> None:
        """Request once, and again after a pause."""
        self._pool.run(self._source.current, self._had, self._missed)

    def _had(self, credentials: WireCredentials) -> None:
        self._is_failing = False
        if credentials != self.held:
            self.held = credentials
            self._hand_over(credentials)
        self.open()

    def _missed(self, error: Exception) -> None:
        if not self._is_failing:
            # Only the type: the texts of credential providers may quote secrets that they read.
            self._log.note("credentials_not_renewed", error=type(error).__name__)
        self._is_failing = True
        self.open()


# Scans find offers as well: without this request moves are slower, but no lease waits for ever.
LOOK_FOR_OFFERS: Final = "look for offered leases"
# For a warning only; the table of an early KCL 3 fleet may have little capacity.
READ_KCL3_MODE: Final = "read the mode of a KCL 3 fleet"

# Tables of 100,000 leases and more would not fit the promise of DESIGN 14 (10,000 leases).
_ROWS_MAX: Final = 100_000
_BROKEN_SHOWN_MAX: Final = 100
# A table that was just made may be unknown to one of the service's hosts for a moment: only a
# second scan, after a pause, proves that it is gone.
_SCANS_TO_PROVE_GONE: Final = 2


class Outages:
    """One warning when an operation begins to fail, one log line when it works again."""

    def __init__(self, log: EventLog, now: Callable[[], Instant]) -> None:
        self._log = log
        self._now = now
        self._since: dict[str, Instant] = {}
        self._codes: dict[str, str] = {}

    def failed(self, operation: str, error: ServiceError, asked: Instant) -> None:
        """A try that began at `asked` failed: the outage of a hanging service begins then."""
        if operation not in self._since:
            self._since[operation] = asked
            self._codes[operation] = error.code or type(error).__name__
            self._log.note(
                "service_unreachable", operation=operation, code=error.code, error=str(error)
            )

    def items(self) -> Iterator[tuple[str, tuple[Instant, str]]]:
        """The operations that fail now: since when, and with which first error."""
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


class ServiceCalls:
    """Performs commands for one manager. All calls, and `deliver`, in the loop's thread.

    Reads and listings are repeated without end. A write is sent once. For each key, one write is
    under way at a time [P5].
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

    def scan_table(self, *, consistent: bool = True) -> None:
        def job() -> Event:
            return _scanned(self._world, consistent=consistent)

        self._read(_Read("scan the lease table", job, is_scan=True))

    def list_shards(self, stream: StreamKey, *, with_start: bool) -> None:
        start = self._start_filter_of(stream) if with_start else None
        name = stream_name_of(stream)
        operation = f"list the shards of {name}" if name else "list the shards"
        self._read(_Read(operation, lambda: _listed(self._world, stream, start)))

    def describe_stream(self, stream: StreamKey) -> None:
        admin = self._world.streams[stream].admin

        def job() -> Event:
            return StreamDescribed(admin.summary().created_at, stream)

        self._read(_Read("describe the stream", job))

    def read_kcl3_mode(self) -> None:
        """Read the mode. A refusal is an answer: most policies written by users do not grant it."""
        coordinator = self._world.coordinator
        assert coordinator is not None, "the core reads a mode that nobody keeps"

        def job() -> Event:
            try:
                return Kcl3ModeRead(coordinator.mode())
            except (AccessDenied, InvalidRequest) as error:
                return Kcl3ModeUnreadable(str(error))

        self._read(_Read(READ_KCL3_MODE, job))

    def read_row(self, key: LeaseKey, not_before: Instant | None = None) -> None:
        """Read the row, when it is due. A broken row is an answer; the core decides about it."""
        if not_before is not None and not_before > self._loop.now():
            self._loop.at(not_before, lambda: self.read_row(key))
            return
        table = self._world.table

        def job() -> Event:
            try:
                return RowRead(key, table.read(key))
            except InvalidRequest as error:
                if error.code != BROKEN_ROW:
                    raise
                return RowUnreadable(key, str(error))

        self._read(_Read("read a lease", job))

    def read_parents(self, key: LeaseKey, parents: tuple[LeaseKey, ...]) -> None:
        table = self._world.table

        def job() -> Event:
            return ParentsRead(key, tuple(table.read(parent) for parent in parents))

        self._read(_Read("read the parents of a lease", job))

    def find_offers(self, rows_max: int) -> None:
        """Query the index once: the next query is soon, and scans find offers as well [P17]."""
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
        """Send `change` once, when it is due and no other write of its key is under way. A creation
        of children counts as a write of the first child's key."""
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

        def failed(error: Exception) -> None:
            # Failures of the table are outcomes. This failure is the host's, anywhere in the call.
            if isinstance(error, Unavailable):
                resolved(WriteResolved(change, OutcomeUnknown(str(error))))
            else:
                self._broke(error)

        self._pool.run(job, resolved, failed)

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


def _scanned(world: World, *, consistent: bool) -> LeasesScanned:
    leases: list[Lease] = []
    broken: list[str] = []
    foreign = 0
    kcl3_mode = None
    for page in world.table.scan(consistent=consistent):
        leases += page.leases
        broken += page.broken
        foreign += page.foreign
        kcl3_mode = page.kcl3_mode or kcl3_mode
        if len(leases) > _ROWS_MAX:
            raise ServiceError(
                f"the lease table has more than {_ROWS_MAX} leases", operation="Scan"
            )
    return LeasesScanned(tuple(leases), tuple(broken[:_BROKEN_SHOWN_MAX]), foreign, kcl3_mode)


def _listed(world: World, stream: StreamKey, start: ShardFilter | None) -> ShardsListed:
    admin = world.streams[stream].admin
    shards = qualified_shards(stream, admin.list_shards())
    at_start = qualified_shards(stream, admin.list_shards(start)) if start is not None else None
    return ShardsListed(shards, world.service_time(), at_start, stream)
