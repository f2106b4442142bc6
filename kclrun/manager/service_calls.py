"""Performs the core's commands that need AWS, on the I/O pool; the answer of each is an event.

It does not know why a command was given.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol, assert_never

import msgspec

from kclrun.errors import (
    AccessDenied,
    IndexMissing,
    InvalidRequest,
    KclrunError,
    NotFound,
    ServiceError,
    Unavailable,
)
from kclrun.leases import commands, events
from kclrun.leases.commands import Request, ServiceRequests
from kclrun.manager.loop import IoPool, Loop, LoopTimer
from kclrun.manager.world import CredentialSource, FleetServices
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.state import PrefetchJob, StateDestination, is_own_version, version_folder
from kclrun.model.stream import StreamKey, qualified_shards, shard_id_of, stream_name_of, stream_of
from kclrun.model.time import Instant
from kclrun.model.wire import WireCredentials
from kclrun.observe.logs import EventLog
from kclrun.ports import ShardFilter
from kclrun.protocol.writes import BROKEN_ROW, Ask, LeaseChange, Outcome, OutcomeUnknown

# botocore renews 15 minutes before expiry at the earliest and 10 at the latest, instance metadata
# five: every half minute leaves ten tries even for the last.
_LOOK_EVERY_S: Final = 30.0


class CredentialRenewal:
    """Renews the credentials for all lease processes: one request here, before the old ones expire.

    A lease process never requests its own. The request may wait on the network, so it runs on the
    pool. After a failure the old credentials stay in use, with one warning.
    It begins with `open`; `renewed` is called with each new set.
    """

    def __init__(
        self,
        source: CredentialSource,
        *,
        loop: Loop,
        pool: IoPool,
        log: EventLog,
        renewed: Callable[[WireCredentials], None],
    ) -> None:
        self._source = source
        self._loop = loop
        self._pool = pool
        self._log = log
        self._renewed = renewed
        self._is_failing = False
        self._is_looking = self._looks_again = False
        self._timer: LoopTimer | None = None
        self.held = source.current()

    def open(self) -> None:
        self._source.notify(lambda: self._loop.post(self._look_now))
        self._look_later()

    def _look_later(self) -> None:
        self._is_looking = False
        if self._looks_again:
            self._looks_again = False
            self.look()
            return
        self._timer = self._loop.after(_LOOK_EVERY_S, self.look)

    def _look_now(self) -> None:
        """The lease processes still use the keys that were replaced."""
        if self._is_looking:
            self._looks_again = True
            return
        if self._timer is not None:
            self._timer.cancel()
        self.look()

    def look(self) -> None:
        """Request once, and again after a pause."""
        self._is_looking = True
        self._pool.run(self._source.current, self._had, self._missed)

    def _had(self, credentials: WireCredentials) -> None:
        self._is_failing = False
        if credentials != self.held:
            self.held = credentials
            self._renewed(credentials)
        self._look_later()

    def _missed(self, error: Exception) -> None:
        if not self._is_failing:
            # Our errors quote no secret. Of another one only the type: it may.
            is_ours = isinstance(error, KclrunError)
            words = str(error) if is_ours else type(error).__name__
            self._log.note("credentials_not_renewed", error=words)
        self._is_failing = True
        self._look_later()


# Scans find offers as well: without this request moves are slower, but no lease waits for ever.
LOOK_FOR_OFFERS: Final = "look for offered leases"
# For a warning only; the table of an early KCL 3 fleet may have little capacity.
READ_KCL3_MODE: Final = "read the mode of a KCL 3 fleet"

# Ten times the largest table that is measured, of 10,000 leases.
_ROWS_MAX: Final = 100_000
_BROKEN_SHOWN_MAX: Final = 100
# A table that was just made may be unknown to one of the service's hosts for a moment: only a
# second scan that finds no table, after a pause, proves that it is gone.
_SCANS_TO_PROVE_GONE: Final = 2


class OutageLog:
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


class CallHost(Protocol):
    """The manager whose requests are performed. Its methods are called in the loop's thread."""

    def deliver(self, event: events.Event) -> None:
        """Called with the event that answers a request."""
        ...

    def broke(self, error: Exception) -> None:
        """Called after an error that is not of a service."""
        ...

    def table_gone(self, error: ServiceError) -> None:
        """Called, once, when a scan has proven that the lease table was deleted."""
        ...


class ServiceCalls(ServiceRequests):
    """Performs the requests of one manager. All calls in the loop's thread.

    `delays` returns whether it sends a write itself, after other work.
    """

    def __init__(
        self,
        world: FleetServices,
        start_filter_of: Callable[[StreamKey], ShardFilter],
        host: CallHost,
        *,
        loop: Loop,
        pool: IoPool,
        log: EventLog,
        delays: Callable[[LeaseChange, Callable[[], None]], bool] = lambda *_: False,
    ) -> None:
        self._delays = delays
        super().__init__(
            now=loop.now, at=loop.at, after=loop.after, chance=random.random, deliver=host.deliver
        )
        self._world = world
        self._start_filter_of = start_filter_of
        self._pool = pool
        self._host = host
        self._log = log
        self.outages = OutageLog(log, loop.now)
        self._is_unindexed_logged = False
        self._missing: set[StreamKey] = set()
        self._scans_without_table = 0  # since the last scan that succeeded

    def _send(self, request: Request, attempt: int) -> None:
        name, job = self._job(request)
        asked = self._now()

        def succeeded(event: events.Event) -> None:
            if isinstance(request, commands.ScanTable):
                self._scans_without_table = 0
            self.outages.worked(name)
            if isinstance(request, commands.ListShards):
                self._missing.discard(request.stream)
            self._deliver(event)

        def failed(error: Exception) -> None:
            if not isinstance(error, ServiceError):
                self._host.broke(error)
            elif isinstance(request, commands.FindOffers):
                self._offers_failed(error, asked)
            elif isinstance(request, commands.ScanTable) and isinstance(error, NotFound):
                self._scans_without_table += 1
                if self._scans_without_table >= _SCANS_TO_PROVE_GONE:
                    self._host.table_gone(error)
                else:
                    self._failed(request, attempt)
            else:
                of_stream = commands.ListShards | commands.DescribeStream
                if isinstance(error, NotFound) and isinstance(request, of_stream):
                    self._log_missing(request.stream, error)
                else:
                    self.outages.failed(name, error, asked)
                self._failed(request, attempt)

        self._pool.run(job, succeeded, failed)

    def _job(self, request: Request) -> tuple[str, Callable[[], events.Event]]:
        """The name of the operation for the log, and its work on a thread of the pool."""
        world = self._world
        match request:
            case commands.ScanTable(consistent):
                return "scan the lease table", lambda: _scanned(world, consistent=consistent)
            case commands.ListShards(with_start, stream):
                start = self._start_filter_of(stream) if with_start else None
                of_stream = f" of {name}" if (name := stream_name_of(stream)) else ""
                return f"list the shards{of_stream}", lambda: _listed(world, stream, start)
            case commands.DescribeStream(stream):
                admin = world.streams[stream].admin
                return (
                    "describe the stream",
                    lambda: events.StreamDescribed(admin.summary().created_at, stream),
                )
            case commands.ReadKcl3Mode():
                return READ_KCL3_MODE, lambda: _kcl3_mode(world)
            case commands.ReadRow(key):
                return "read a lease", lambda: _row(world, key)
            case commands.ReadParents(key, parents):
                return (
                    "read the parents of a lease",
                    lambda: events.ParentsRead(key, tuple(map(world.table.read, parents))),
                )
            case commands.FindOffers(rows_max):
                return LOOK_FOR_OFFERS, lambda: events.OffersFound(world.table.offered(rows_max))
            case commands.WriteRow():
                raise AssertionError("a write is sent by `_send_write`")
            case _:
                assert_never(request)

    def _offers_failed(self, error: ServiceError, asked: Instant) -> None:
        """The next look is soon, and scans find offers as well [P17]."""
        if isinstance(error, IndexMissing):
            self._log_unindexed(error)
        elif not isinstance(error, NotFound):  # a missing table is for the scans to find
            self.outages.failed(LOOK_FOR_OFFERS, error, asked)
        self._deliver(events.OffersFound(None))

    def _send_write(self, key: LeaseKey, change: LeaseChange) -> None:
        def resolved(outcome: Outcome) -> None:
            self._resolved(key, change, outcome)

        def failed(error: Exception) -> None:
            # Failures of the table are outcomes. This failure is the host's, anywhere in the call.
            if isinstance(error, Unavailable):
                resolved(OutcomeUnknown(str(error)))
            else:
                self._host.broke(error)

        def send() -> None:
            self._pool.run(lambda: self._world.table.write(change), resolved, failed)

        if not self._delays(change, send):
            send()

    def _log_missing(self, stream: StreamKey, error: ServiceError) -> None:
        """A stream was deleted while we run: not an outage. Logged once; it may come back."""
        if stream not in self._missing:
            self._missing.add(stream)
            name = self._world.streams[stream].summary.name
            self._log.note("stream_missing", stream=name, error=str(error))

    def _log_unindexed(self, error: ServiceError) -> None:
        if not self._is_unindexed_logged:
            self._is_unindexed_logged = True
            self._log.note("offers_unindexed", code=error.code, error=str(error))


def _scanned(world: FleetServices, *, consistent: bool) -> events.LeasesScanned:
    leases: list[Lease] = []
    broken: list[str] = []
    reasons: dict[str, str] = {}
    foreign = 0
    kcl3_mode = None
    for page in world.table.scan(consistent=consistent):
        leases += page.leases
        broken += page.broken
        reasons |= page.reasons
        foreign += page.foreign
        kcl3_mode = page.kcl3_mode or kcl3_mode
        if len(leases) > _ROWS_MAX:
            raise ServiceError(
                f"the lease table has more than {_ROWS_MAX} leases", operation="Scan"
            )
    return events.LeasesScanned(
        tuple(leases), tuple(broken[:_BROKEN_SHOWN_MAX]), foreign, kcl3_mode, reasons
    )


def _row(world: FleetServices, key: LeaseKey) -> events.RowRead | events.RowUnreadable:
    """A broken row is an answer; the core decides about it."""
    try:
        return events.RowRead(key, world.table.read(key))
    except InvalidRequest as error:
        if error.code != BROKEN_ROW:
            raise
        return events.RowUnreadable(key, str(error))


def _kcl3_mode(world: FleetServices) -> events.Kcl3ModeRead | events.Kcl3ModeUnreadable:
    """A refusal is an answer: most policies written by users do not grant it."""
    assert world.coordinator is not None, "the core reads a mode that has no reader"
    try:
        return events.Kcl3ModeRead(world.coordinator.mode())
    except (AccessDenied, InvalidRequest) as error:
        return events.Kcl3ModeUnreadable(str(error))


def _listed(
    world: FleetServices, stream: StreamKey, start: ShardFilter | None
) -> events.ShardsListed:
    admin = world.streams[stream].admin
    shards = qualified_shards(stream, admin.list_shards())
    at_start = qualified_shards(stream, admin.list_shards(start)) if start is not None else None
    return events.ShardsListed(shards, world.service_time(), at_start, stream)


# The owner works meanwhile, so that nothing stands still. A state that takes longer is read when
# the lease comes. At 15 MB/s into SQLite it is 450 MB.
_COPY_WAIT_S: Final = 30.0
# A machine that joins asks for many leases at once: each copy takes its share of disk and network
# from the leases that are here. The others are asked for at once, and read when they come.
_COPIES_MAX: Final = 2
_COPY_LOOK_S: Final = 0.1


class Prefetching:
    """Before a lease is asked for, a process of its own copies the state that the row names to this
    machine. With `state.local` the lease process then begins with it, and reads the deltas since.

    `delays` is given each write before it is sent. With `place` None, or without `local`, and for
    all but our own asks it does nothing. `is_stopping`: no copy is of use any more.
    """

    def __init__(
        self,
        place: StateDestination | None,
        *,
        application: str,
        owner: OwnerId,
        world: FleetServices,
        credentials: Callable[[], WireCredentials],
        loop: Loop,
        log: EventLog,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._place = None if place is None or place.local is None else place
        self._application = application
        self._owner = owner
        self._world = world
        self._credentials = credentials
        self._loop = loop
        self._log = log
        self._is_stopping = is_stopping
        self._running: list[threading.Thread] = []

    def delays(self, change: LeaseChange, send: Callable[[], None]) -> bool:
        """Whether a copy is made first. Then `send` is called in the loop's thread, in any case."""
        if self._place is None or not isinstance(change, Ask) or change.owner != self._owner:
            return False
        self._running = [thread for thread in self._running if thread.is_alive()]
        if len(self._running) >= _COPIES_MAX or self._is_stopping():
            return False
        arguments = (self._place, change.key, self._credentials(), send)
        thread = threading.Thread(
            target=self._run, args=arguments, name="kclrun-prefetch", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # this host has no thread left: the lease process reads the state
            return False
        self._running.append(thread)
        return True

    def _run(
        self,
        place: StateDestination,
        key: LeaseKey,
        keys: WireCredentials,
        send: Callable[[], None],
    ) -> None:
        try:
            job = self._job(place, key, keys)
            if job is not None and _is_copied(job, self._is_stopping):
                self._loop.post(lambda: self._log.note("state_prefetched", shard=key))
        except (OSError, ServiceError):
            pass  # the lease process reads it, and reports the error
        finally:
            self._loop.post(send)

    def _job(
        self, place: StateDestination, key: LeaseKey, keys: WireCredentials
    ) -> PrefetchJob | None:
        """Raises: a ServiceError leaf."""
        row = self._world.table.read(key)
        source = self._world.streams.get(stream_of(key))
        if row is None or source is None or not is_own_version(row.state_version):
            return None
        assert row.state_version is not None, "it is one of its own"
        return PrefetchJob(
            place=place,
            folder=version_folder(self._application, source.summary.name),
            shard_id=shard_id_of(key),
            checkpoint=row.checkpoint,
            version=row.state_version,
            kinesis=self._world.kinesis,
            credentials=keys,
        )


def _is_copied(job: PrefetchJob, is_stopping: Callable[[], bool]) -> bool:
    """Wait for the process, which ends with its standard input. Raises: OSError."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "kclrun.worker.prefetching"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C is for the manager. Not a session of its own: the manager reaps an exited child of
        # another session as an orphan, and the exit code would be lost.
        process_group=0,
    ) as process:
        assert process.stdin is not None, "it is a pipe"
        try:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
            deadline = time.monotonic() + _COPY_WAIT_S
            while process.poll() is None and time.monotonic() < deadline and not is_stopping():
                time.sleep(_COPY_LOOK_S)
        finally:
            if process.poll() is None:
                process.kill()
        return process.wait() == 0
