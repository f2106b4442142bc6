"""The driver's side of the source, one object per query: asks Kinesis where batches end.

Clocks, calls and waiting are here; `planning/` decides. PySpark calls it from one thread of a
process that lives as long as the query.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from kclrun import errors
from kclrun.leases.stream_rows import key_in_table
from kclrun.model.lease import Lease
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.retries import Retries, repeated
from kclrun.model.shard import ShardGraph
from kclrun.model.stream import StreamKey, shard_id_of, stream_key, stream_of
from kclrun.model.time import WallTime
from kclrun.ports import LeaseTable, ShardFilter, ShardReader, StreamAdmin, StreamSummary
from kclrun.spark.offsets import Hint, Offset, StreamIs, together
from kclrun.spark.options import SourceSettings, StartKind
from kclrun.spark.planning.batch_bounds import OffsetSearch, RangeBounds
from kclrun.spark.planning.batch_planner import BatchPlanner
from kclrun.spark.planning.beginnings import (
    beginnings,
    lease_beginnings,
    lease_owners,
    needs_time,
    time_of,
)
from kclrun.spark.planning.offers import joined
from kclrun.spark.planning.shard_cursor import Gone, Refused
from kclrun.spark.positions import Position
from kclrun.spark.requests import Asking
from kclrun.spark.stream_set import (
    Streams,
    first_keys,
    moved,
    of_streams_in,
    parted,
    shard_name,
    summaries_of,
)
from kclrun.spark.subscribed import SubscribedReader, iterator_in


# Checks that a checkpoint belongs to the query's streams, by ARN and time of creation. Pure.
#
# A stream may be added to those of a checkpoint. A query that leaves one of them out is refused,
# because no query would read the remaining rows of that stream.
def identities(streams: Streams) -> Mapping[str, StreamIs]:
    """The identity of each stream, as an offset stores it."""
    return {stream: _identity(summary) for stream, summary in streams.items()}


def of_these_streams(offset: Offset, streams: Streams) -> Offset:
    """The offset as one of these streams, or of some of them. The offset of a single stream becomes
    a part of an offset of several. Raises: OffsetRefused for others, also of a re-created stream.
    """
    if "" in offset.streams:
        arn = offset.streams[""].arn
        (named,) = [name for name, summary in streams.items() if summary.arn == arn] or [""]
        if named:
            offset = together({named: offset}, offset.aligned_ms)
    unread = [which for name, which in offset.streams.items() if _is_another(which, streams, name)]
    if unread:
        arns = ", ".join(summary.arn for summary in streams.values())
        raise errors.OffsetRefused(
            f"the checkpoint is of {unread[0].arn}, the query reads {arns}: {_advice(offset)}"
        )
    refuse_recreated(offset.streams, streams)
    return offset


def refuse_recreated(
    known: Mapping[str, StreamIs],
    streams: Streams,
    *,
    of: str = "checkpoint",
    advice: str = "a new checkpoint location",
) -> None:
    """Raises: OffsetRefused for a stream that was made again since; the message names it."""
    for stream, which in known.items():
        if which.created_ms != _identity(streams[stream]).created_ms:
            raise errors.OffsetRefused(
                f"{streams[stream].name} was deleted and re-created since the {of} was begun:"
                f" the positions in it are of records that are gone\nTo go on: {advice}"
            )


def _is_another(which: StreamIs, streams: Streams, stream: str) -> bool:
    return stream not in streams or streams[stream].arn != which.arn


def _advice(offset: Offset) -> str:
    if "" in offset.streams:
        return "another stream\nTo go on: name that stream, or use a new checkpoint location"
    return (
        "streams may be added to a checkpoint, and none left out\n"
        f"To go on: name {','.join(sorted(offset.streams))} in streamName, and others as you like,"
        " or use a new checkpoint location"
    )


def _identity(summary: StreamSummary) -> StreamIs:
    return StreamIs(summary.arn, round(summary.created_at * 1000))


# Reads a lease table for a query that starts at its checkpoints.
#
# No row is changed. If owners still have leases, a warning is logged, and the query begins: a query
# may run beside a fleet, from the fleet's current checkpoints.
# `planning/beginnings.py` decides the positions.
_log = logging.getLogger(__name__)


def leases_of(table: LeaseTable, name: str, streams: Streams) -> Mapping[str, Lease]:
    """The rows of these streams by the source's shard names, of one complete consistent scan.

    Raises: NotFound without a table; SettingsError for one without leases, or with rows that
    cannot be read; a ServiceError leaf.
    """
    rows: dict[str, Lease] = {}
    first = first_keys(streams)
    broken: list[str] = []
    leases: list[Lease] = []
    try:
        for page in table.scan():
            leases += page.leases
            broken += page.broken
    except errors.NotFound as error:
        raise error.reworded(
            f"startingLeases: there is no lease table {name} in this region: name the application"
            " as its configuration does, or its table where leases.table names one"
        ) from None
    if broken:
        raise errors.SettingsError(
            f"startingLeases: of table {name}, {len(broken)} rows cannot be read as leases, such as"
            f" {broken[0][:60]!r}: their shards would be read from elsewhere\nTo go on: repair"
            " them, or give positions in startingOffsets"
        )
    keys = {
        stream: key_in_table(
            stream_key(summary.arn, summary.created_at),
            summary.created_at,
            leases,
            None,
            table=name,
        )
        for stream, summary in streams.items()
    }
    for lease in leases:
        if (shard := _shard_of(lease.key, keys)) is not None:
            rows[shard] = _placed(lease, shard, first)
    leased = {parted(shard)[0] for shard in rows}
    if without := [summary.name for of, summary in sorted(streams.items()) if of not in leased]:
        raise errors.SettingsError(
            f"startingLeases: table {name} holds no lease of {', '.join(without)}: that"
            " application has read nothing of it yet\nTo go on: say where to begin with"
            " startingOffsets"
        )
    if owners := lease_owners(rows.values()):
        _log.warning(
            "leases of %s still have owners (%s): what those process after their checkpoints of"
            " this moment, this query reads as well. To move an application, stop them first",
            name,
            ", ".join(owners[:5]) + (", …" if len(owners) > 5 else ""),
        )
    return rows


def _shard_of(key: str, keys: Mapping[str, StreamKey]) -> str | None:
    """A key is a shard id, or in a table of several streams `account:stream:created:shard`, as the
    Java KCL's `StreamIdentifier` writes it; None for another stream. With several streams, a bare
    shard id does not name one of them, so it is None, too. `keys`: how the table names each."""
    its_stream = stream_of(key)
    for stream, ours in keys.items():
        if its_stream == ours or not (its_stream or stream):
            return shard_name(stream, shard_id_of(key))
    return None


def _placed(lease: Lease, shard: str, first: Mapping[str, int]) -> Lease:
    """The row with its keys and parents as the source names them among several streams."""
    stream, _ = parted(shard)
    if not stream:
        return lease
    keys = lease.hash_range
    return msgspec.structs.replace(
        lease,
        hash_range=None if keys is None else moved(keys, first[stream]),
        parents=frozenset(shard_name(stream, parted(parent)[1]) for parent in lease.parents),
    )


def log_unleased(name: str, shard_ids: tuple[str, ...]) -> None:
    """Log which shards begin at the oldest record because the table has no row of them."""
    if shard_ids:
        _log.warning(
            "table %s has no row of %s: read from the oldest record", name, ", ".join(shard_ids)
        )


T = TypeVar("T")

# Spark calls again at once; a stop of the query never waits for longer.
_WAIT_MAX_S: Final = 1.0
# Spark calls again 10 ms after an answer without new records, if it has no other work. If more time
# has passed, it had other work: a batch of other sources, or another source of the same query that
# waits itself. A query of several sources calls them in turn, so at most one of them may wait.
_ASKED_AT_ONCE_S: Final = 0.05
# A look at a busy shard is two calls, 27 ms at AWS. A hundred shards are looked at in two rounds
# of 64, 54 ms; eight at a time, it would be 0.35 s. More than 500 calls a second are never made.
CALLS_AT_ONCE: Final = 64
# Pages of one listing are read at different instants; ten listings, a second apart, are enough.
_LISTINGS_MAX: Final = 10
_TIP: Final = StartPoint(IteratorType.LATEST)
_LISTING_PAUSE_S: Final = 1.0


def _for_executors(hint: Hint) -> Hint:
    """The hint without the driver's token: executors poll, with iterators of the service."""
    iterator = None if hint.iterator is None else iterator_in(hint.iterator)
    return msgspec.structs.replace(
        hint, iterator=iterator, iterator_at=0.0 if iterator is None else hint.iterator_at
    )


class DriverClock(msgspec.Struct, frozen=True):
    """The time of the driver, for tests in virtual time: seconds that only grow, seconds since
    1970, and how to wait. By default it waits for an answer as well."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    wait: Callable[[float], object] | None = None


class OffsetPlanner:
    """Decides where batches end. Clock and chance are arguments, for tests in virtual time. The
    reader must bear `calls_at_once` threads; 0 makes every call in the caller's thread. `table` is
    the lease table that the query starts at, if it does. A `SubscribedReader` is closed with the
    planner."""

    def __init__(
        self,
        reader: ShardReader,
        admin: StreamAdmin,
        settings: SourceSettings,
        *,
        clock: DriverClock | None = None,
        chance: Callable[[], float] = random.random,
        calls_at_once: int = CALLS_AT_ONCE,
        table: LeaseTable | None = None,
    ) -> None:
        self._table = table
        self._reader = reader
        self._admin = admin
        self._settings = settings
        clock = clock or DriverClock()
        self._clock = clock.monotonic
        self._wall = clock.wall
        self._wait = clock.wait or threading.Event().wait
        self._chance = chance
        self._asking = Asking(reader, admin, clock=self._clock, calls_at_once=calls_at_once)
        self._subscribed = reader if isinstance(reader, SubscribedReader) else None
        self._idle = self._wait
        if self._subscribed is not None:
            self._subscribed.came = self._asking.wake
            self._idle = clock.wait or self._asking.receive
        self._planner = BatchPlanner(settings, self._wall() - self._clock(), self._clock())
        self._initial: Offset | None = None
        self._answered_at: float | None = None
        self._streams: Streams | None = None

    def initial_offset(self) -> Offset:
        """Where a query without a checkpoint begins; the same every time it is called.

        Raises: SettingsError for positions that do not fit the stream, NotFound (also for a lease
        table), AccessDenied, Unavailable if the stream's listings never cover its key space.
        """
        if self._initial is None:
            positions = self._beginnings(self.shards)
            aligned_ms = max((position.timestamp_ms for position in positions.values()), default=0)
            if self._settings.start.kind is StartKind.LATEST:
                # The service's times are whole seconds. A query that is stopped and started within
                # one second would take its checkpoint for its own beginning, and would take the
                # records in between for old ones.
                aligned_ms -= int(self._wall() * 1000) % 1000
            self._initial = Offset(
                streams=identities(self._retried(self._summarised)),
                shards=positions,
                # Spark runs a first batch even where this is also its end. A later start of the
                # query begins elsewhere, and must not find a range in it.
                began=positions,
                aligned_ms=aligned_ms,
            )
        return self._initial

    def latest_offset(self, start: Offset, *, takes_all: bool = False) -> Offset:
        """The end of the batch that begins at `start`; `start` itself without new records.

        If a stream was named that the checkpoint does not have, the end is that stream's beginning,
        and no record is read: a later start of the query finds it in the checkpoint.
        Looks at the shards if a look is due. Then it waits for new records, at most a second, and
        only if Spark called again at once: then no other source needs the time. With `takes_all`,
        and after `prepare_available_now`, it waits until all records that existed are in the answer
        or in `start`.
        Raises: OffsetRefused for an offset of another stream, DataLoss, and the ServiceErrors that
        waiting does not repair.
        """
        start = self.known(start)
        if (entered := self._with_new_streams(start)) is not start:
            return entered
        began_at = self._clock()
        # A step of the host's clock would make iterators look old, or young, to executors.
        self._planner.wall_ahead_s = self._wall() - began_at
        self._planner.begin(start, began_at, is_first=start == self._initial, takes_all=takes_all)
        if self._subscribed is not None:
            # A pushed page is of an earlier time: poll for the records that exist now.
            self._subscribed.subscribes = not self._planner.must_go_on
            self._subscribed.retain(self._planner.searches.keys())
        may_wait = self._answered_at is not None and began_at - self._answered_at < _ASKED_AT_ONCE_S
        try:
            return self._look(start, may_wait=may_wait)
        finally:
            self._answered_at = self._clock()

    def _look(self, start: Offset, *, may_wait: bool) -> Offset:
        deadline = self._clock() + _WAIT_MAX_S
        while True:
            if self._subscribed is not None and self._subscribed.subscribes:
                self._planner.came(self._subscribed.news())
            if not (may_wait or self._planner.must_go_on or self._is_looking()):
                return start
            self._exchange(self._planner, deadline)
            now = self._clock()
            if self._planner.may_offer(now):
                end = self._planner.offer(now)
                if end is not start or self._planner.is_exhausted():
                    return end
            if now >= deadline:
                if not self._planner.must_go_on:
                    return start
                deadline = now + _WAIT_MAX_S

    def prepare_available_now(self) -> None:
        """From now on, offsets end at the records that exist at this moment [A9]."""
        self._planner.end_at_now(self._clock())

    def everything(self, start: Offset) -> Offset:
        """All records of the stream now as the one batch that begins at `start`, whatever its
        limits; `start` itself if there are none.

        For a Spark that calls once, and ends the query after that batch. Children come in the same
        batch as their parents: `Offset.parents` has their order. Raises: as `latest_offset`.
        """
        start = self.known(start)
        self.prepare_available_now()
        end = start
        try:
            while (later := self.latest_offset(end, takes_all=True)) is not end:
                graph = self._planner.listing.graph
                end = later if end is start else joined(start, end, later, graph)
        finally:
            self._planner.end_nowhere()
        return end

    def hints(self, start: Offset, end: Offset) -> Mapping[str, Hint]:
        """The hints for the batch (start, end]: none, unless `end` was just decided."""
        hints = self._planner.hints(start, end)
        if self._subscribed is None:
            return hints
        return {shard_id: _for_executors(hint) for shard_id, hint in hints.items()}

    def known(self, offset: Offset) -> Offset:
        """An offset, of the checkpoint for instance, as one of exactly these streams.

        Raises: OffsetRefused; NotFound if a stream does not exist.
        """
        return of_these_streams(offset, self._retried(self._summarised))

    def bounded(self) -> tuple[Offset, Offset]:
        """Start and end of a batch read, by the settings' `start` and `end`; both exact."""
        start = self.initial_offset()
        listed = self._retried(self._admin.list_shards)
        now = self._clock()
        bounding = RangeBounds(
            self._settings, start, ShardGraph(listed), self._planner.service, now
        )
        while not bounding.is_over:
            self._exchange(bounding, self._clock() + _WAIT_MAX_S)
        return bounding.offsets()

    def report(self) -> dict[str, Any]:
        """Lag, rates and throttles by shard, as plain JSON values."""
        pushed = {} if self._subscribed is None else self._subscribed.report()
        return {**self._planner.report(), **pushed}

    def close(self) -> None:
        """Ends the threads."""
        self._asking.close()
        if self._subscribed is not None:
            self._subscribed.close()

    def _is_looking(self) -> bool:
        """Whether an answer is on its way, or a request is due before Spark could ask again."""
        now = self._clock()
        return self._asking.is_waiting or self._planner.next_at(now) <= now + _ASKED_AT_ONCE_S

    def _exchange(self, seeker: OffsetSearch, deadline: float) -> None:
        """Send due requests and process answers until the next deadline."""
        now = self._clock()
        asks = seeker.asks(now)
        self._asking.send(asks)
        wake_at = min(deadline, max(now, seeker.next_at(now)))
        if not self._asking.is_waiting:
            if not asks and wake_at > now:
                self._idle(wake_at - now)
            return
        answered = self._asking.receive(wake_at - now)
        while answered is not None:
            ask, answer = answered
            if isinstance(answer, Gone | Refused):
                self._refuse_recreated()
            seeker.take(ask, answer, self._clock(), self._chance())
            answered = self._asking.receive(0.0)

    def _refuse_recreated(self) -> None:
        """Raises: OffsetRefused for a re-created stream, whose shards have the same names."""
        known, self._streams = self._streams, None
        streams = self._retried(self._summarised)
        if known is not None:
            refuse_recreated(identities(known), streams)

    def _with_new_streams(self, start: Offset) -> Offset:
        """The beginnings of streams that the checkpoint does not have; `start` without any."""
        streams = identities(self._retried(self._summarised))
        new = streams.keys() - start.streams.keys()
        if not new:
            return start
        positions: dict[str, Position] = {}
        for stream in sorted(new):
            positions |= self._beginnings(partial(self.shards, stream))
        is_at_tip = self._settings.start.kind is StartKind.LATEST
        shards = {**start.shards, **positions}
        return Offset(
            streams=streams,
            shards=shards,
            began={
                shard: at for shard, at in shards.items() if shard in positions or not at.is_exact
            },
            # Its records may be older than all records read so far; shards ahead wait for it.
            aligned_ms=start.aligned_ms if is_at_tip else 0,
            as_of_ms=start.as_of_ms,
        )

    def shards(self, only: str | None = None) -> ShardGraph:
        """The shards of all streams now, or of one of them. Raises: a ServiceError leaf that
        waiting does not repair."""
        listed = self._retried(self._admin.list_shards)
        if only is None:
            return ShardGraph(listed)
        return ShardGraph(shard for shard in listed if parted(shard.shard_id)[0] == only)

    def _beginnings(self, listed: Callable[[], ShardGraph]) -> Mapping[str, Position]:
        find = self._begun_at_leases() if self._settings.start.leases else self._begun
        for _ in range(_LISTINGS_MAX):
            positions = find(listed())
            if positions is not None:
                if self._settings.start.kind is StartKind.LATEST:
                    self._arm(positions)
                return positions
            self._wait(_LISTING_PAUSE_S)
        raise errors.Unavailable(
            f"{_LISTINGS_MAX} listings of {self._settings.address.name} did not cover its key"
            " space: is it being resharded all the time? Try again",
            operation="ListShards",
        )

    def _begun(self, graph: ShardGraph) -> Mapping[str, Position] | None:
        start = self._settings.start
        if start.streams:
            refuse_recreated(
                start.streams,
                self._retried(self._summarised),
                of="offset in startingOffsets",
                advice="startingOffsets=earliest, or positions of the new stream",
            )
        named = of_streams_in(graph, start.positions)
        start = msgspec.structs.replace(start, positions=named)
        at_ms = time_of(start)
        open_then = () if at_ms is None else self._open_at(at_ms, graph)
        if start.kind is StartKind.LATEST:
            self._sample_time(graph)
        now_ms = self._planner.service.surely_past_ms(self._clock())
        return beginnings(start, graph, now_ms, open_then)

    def _begun_at_leases(self) -> Callable[[ShardGraph], Mapping[str, Position] | None]:
        leases, table = self._settings.start.leases, self._table
        if leases is None or table is None:
            raise errors.InvariantViolation("a start at leases needs their table")
        # Read before any listing: a shard that a row names is then in the listing, or has expired.
        streams = self._retried(self._summarised)
        rows = self._retried(partial(leases_of, table, leases.table, streams))

        def begun(graph: ShardGraph) -> Mapping[str, Position] | None:
            if needs_time(rows.values()):
                self._sample_time(graph)
            now_ms = self._planner.service.surely_past_ms(self._clock())
            found = lease_beginnings(of_streams_in(graph, rows), graph, now_ms)
            if found is None:
                return None
            log_unleased(leases.table, found.unleased)
            return found.positions

        return begun

    def _open_at(self, at_ms: int, graph: ShardGraph) -> tuple[str, ...]:
        self._sample_time(graph)
        if at_ms >= self._planner.service.surely_past_ms(self._clock()):
            return tuple(shard.shard_id for shard in graph if shard.is_open)
        at = ShardFilter("AT_TIMESTAMP", WallTime(at_ms / 1000))
        listed = self._retried(partial(self._admin.list_shards, at))
        return tuple(shard.shard_id for shard in listed)

    def _sample_time(self, graph: ShardGraph) -> None:
        """Note the service's time, which any page contains, also that of a closed shard."""
        for shard in (*graph.open_shards(), *graph)[:1]:
            at_tip = partial(self._reader.iterator, shard.shard_id, _TIP)
            token = self._retried(at_tip)
            sent_at = self._clock()
            page = self._retried(partial(self._reader.fetch, token, 1))
            self._planner.service.add_sample(page.served_at, sent_at, self._clock())

    def _arm(self, positions: Mapping[str, Position]) -> None:
        """Make iterators at the tip, before the query is reported as begun."""

        def armed(shard_id: str) -> tuple[str, float]:
            return self._retried(partial(self._reader.iterator, shard_id, _TIP)), self._clock()

        made = self._asking.all_of([partial(armed, shard_id) for shard_id in positions])
        for (shard_id, position), (token, at) in zip(positions.items(), made, strict=True):
            self._planner.adopt(shard_id, position, token, at)

    def _summarised(self) -> Streams:
        if self._streams is None:
            self._streams = summaries_of(self._admin)
        return self._streams

    def _retried(self, call: Callable[[], T]) -> T:
        """A call that must succeed; repeated as the settings allow."""
        settings = self._settings
        retries = Retries(attempts_max=settings.retry_attempts, max_s=settings.retry_backoff_max_s)
        return repeated(call, retries, wait=self._wait, chance=self._chance)
