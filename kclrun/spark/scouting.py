"""Where batches end, asked of Kinesis: the driver's side of the source, one object per query.

The shell over `scout/`: clocks, calls and waiting are here, decisions there. PySpark calls it from
one thread of a process that lives as long as the query.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from kclrun.errors import InvariantViolation, OffsetRefused, ServiceError, Throttled, Unavailable
from kclrun.model.shard import ShardGraph
from kclrun.model.time import WallTime
from kclrun.ports import (
    IteratorType,
    LeaseTable,
    ShardFilter,
    ShardReader,
    StreamAdmin,
    StreamSummary,
    backoff_s,
)
from kclrun.spark.asking import Asking
from kclrun.spark.leased_start import leases_of, tell_unleased
from kclrun.spark.offsets import Offset
from kclrun.spark.positions import Position
from kclrun.spark.ranges import Hint
from kclrun.spark.scout.asks import Gone, Refused
from kclrun.spark.scout.beginnings import beginnings, time_of
from kclrun.spark.scout.bounding import Bounding, Seeker
from kclrun.spark.scout.lease_beginnings import lease_beginnings, needs_time
from kclrun.spark.scout.scout import Scout
from kclrun.spark.settings import SourceSettings, StartKind

__all__ = ["CALLS_AT_ONCE", "Scouting"]

T = TypeVar("T")

# Spark asks again at once; a query that is to stop is never held up for longer.
_WAIT_MAX_S: Final = 1.0
# A look at a busy shard is two calls, 27 ms at AWS. A hundred shards are looked at in two rounds
# of 64, 54 ms; eight at a time, it would be 0.35 s. More than 500 calls a second are never made.
CALLS_AT_ONCE: Final = 64
# Pages of one listing are read at different instants: ten listings a second apart are not.
_LISTINGS_MAX: Final = 10
_LISTING_PAUSE_S: Final = 1.0


class Scouting:
    """Decides where batches end. Clocks, waiting and chance can be given, for tests in their own
    time. The reader bears `calls_at_once` threads; 0 makes every call in the caller's.
    `table` is the one whose leases the query starts at, if it does."""

    def __init__(
        self,
        reader: ShardReader,
        admin: StreamAdmin,
        settings: SourceSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        wait: Callable[[float], object] | None = None,
        chance: Callable[[], float] = random.random,
        calls_at_once: int = CALLS_AT_ONCE,
        table: LeaseTable | None = None,
    ) -> None:
        self._table = table
        self._reader = reader
        self._admin = admin
        self._settings = settings
        self._clock = clock
        self._wait = wait or threading.Event().wait
        self._chance = chance
        self._asking = Asking(reader, admin, clock=clock, calls_at_once=calls_at_once)
        self._scout = Scout(settings, wall() - clock(), clock())
        self._initial: Offset | None = None
        self._summary: StreamSummary | None = None

    def initial_offset(self) -> Offset:
        """Where a query without a checkpoint begins; the same every time it is called.

        Raises: SettingsError for positions that do not fit the stream, NotFound (also for a lease
        table), AccessDenied, Unavailable if the stream's listings never cover its key space.
        """
        if self._initial is None:
            positions = self._beginnings()
            summary = self._retried(self._summarised)
            self._initial = Offset(
                stream=summary.arn,
                created_ms=_created_ms(summary),
                shards=positions,
                # Spark runs a first batch even where this is also its end: a later start of the
                # query, which begins elsewhere, must find no range in it.
                began=positions,
                aligned_ms=max((each.timestamp_ms for each in positions.values()), default=0),
            )
        return self._initial

    def latest_offset(self, start: Offset, *, takes_all: bool = False) -> Offset:
        """The end of the batch that begins at `start`; `start` itself if there is no news.

        Waits for news, at most a second; with `takes_all`, and after `prepare_available_now`,
        until all that was there is in the answer or in `start`.
        Raises: OffsetRefused for an offset of another stream, DataLoss, and the ServiceErrors that
        waiting does not mend.
        """
        self.check(start)
        self._scout.begin(
            start, self._clock(), is_first=start == self._initial, takes_all=takes_all
        )
        deadline = self._clock() + _WAIT_MAX_S
        while True:
            self._exchange(self._scout, deadline)
            now = self._clock()
            if self._scout.may_offer(now):
                end = self._scout.offer(now)
                if end is not start or self._scout.is_exhausted():
                    return end
            if now >= deadline:
                if not self._scout.must_go_on:
                    return start
                deadline = now + _WAIT_MAX_S

    def prepare_available_now(self) -> None:
        """From now on, offsets end at what is in the stream at this moment [A9]."""
        self._scout.end_at_now(self._clock())

    def hints(self, start: Offset, end: Offset) -> Mapping[str, Hint]:
        """What is at hand for the batch (start, end]: nothing, unless `end` was just decided."""
        return self._scout.hints(start, end)

    def check(self, offset: Offset) -> None:
        """Whether an offset, of the checkpoint for instance, is of this very stream.

        Raises: OffsetRefused; NotFound if the stream is not there.
        """
        _compare(offset, self._retried(self._summarised))

    def bounded(self) -> tuple[Offset, Offset]:
        """Start and end of a batch read, by the settings' `start` and `end`; both exact."""
        start = self.initial_offset()
        listed = self._retried(self._admin.list_shards)
        now = self._clock()
        bounding = Bounding(self._settings, start, ShardGraph(listed), self._scout.service, now)
        while not bounding.is_over:
            self._exchange(bounding, self._clock() + _WAIT_MAX_S)
        return bounding.offsets()

    def report(self) -> dict[str, Any]:
        """Lag, rates and throttles by shard, as plain JSON values."""
        return self._scout.report()

    def close(self) -> None:
        """Ends the threads."""
        self._asking.close()

    def _exchange(self, seeker: Seeker, deadline: float) -> None:
        """Ask what is to be asked, and take what comes before there is something else to do."""
        now = self._clock()
        asks = seeker.asks(now)
        self._asking.send(asks)
        wake_at = min(deadline, max(now, seeker.next_at(now)))
        if not self._asking.is_waiting:
            if not asks and wake_at > now:
                self._wait(wake_at - now)
            return
        answered = self._asking.receive(wake_at - now)
        while answered is not None:
            ask, answer = answered
            if isinstance(answer, Gone | Refused):
                self._see_that_it_is_the_stream()
            seeker.take(ask, answer, self._clock(), self._chance())
            answered = self._asking.receive(0.0)

    def _see_that_it_is_the_stream(self) -> None:
        """Shards of a stream that was deleted and made again have the old ones' names."""
        known, self._summary = self._summary, None
        summary = self._retried(self._summarised)
        if known is not None and _created_ms(known) != _created_ms(summary):
            raise OffsetRefused(_recreated(summary.name))

    def _beginnings(self) -> Mapping[str, Position]:
        find = self._begun_at_leases() if self._settings.start.leases else self._begun
        for _ in range(_LISTINGS_MAX):
            positions = find(ShardGraph(self._retried(self._admin.list_shards)))
            if positions is not None:
                if self._settings.start.kind is StartKind.LATEST:
                    self._arm(positions)
                return positions
            self._wait(_LISTING_PAUSE_S)
        raise Unavailable(
            f"{_LISTINGS_MAX} listings of {self._settings.reached.name} did not cover its key"
            " space: is it being resharded all the time? Try again",
            operation="ListShards",
        )

    def _begun(self, graph: ShardGraph) -> Mapping[str, Position] | None:
        start = self._settings.start
        at_ms = time_of(start)
        open_then = () if at_ms is None else self._open_at(at_ms, graph)
        if start.kind is StartKind.LATEST:
            self._hear_time(graph)
        now_ms = self._scout.service.surely_past_ms(self._clock())
        return beginnings(start, graph, now_ms, open_then)

    def _begun_at_leases(self) -> Callable[[ShardGraph], Mapping[str, Position] | None]:
        leases, table = self._settings.start.leases, self._table
        if leases is None or table is None:
            raise InvariantViolation("a start at leases needs their table")
        # Before any listing: a shard that a row names is then in it, or has expired.
        stream = self._retried(self._summarised)
        rows = self._retried(partial(leases_of, table, leases.table, stream))

        def begun(graph: ShardGraph) -> Mapping[str, Position] | None:
            if needs_time(rows.values()):
                self._hear_time(graph)
            now_ms = self._scout.service.surely_past_ms(self._clock())
            found = lease_beginnings(rows, graph, now_ms)
            if found is None:
                return None
            tell_unleased(leases.table, found.unleased)
            return found.positions

        return begun

    def _open_at(self, at_ms: int, graph: ShardGraph) -> tuple[str, ...]:
        self._hear_time(graph)
        if at_ms >= self._scout.service.surely_past_ms(self._clock()):
            return tuple(each.shard_id for each in graph if each.is_open)
        at = ShardFilter("AT_TIMESTAMP", WallTime(at_ms / 1000))
        listed = self._retried(partial(self._admin.list_shards, at))
        return tuple(each.shard_id for each in listed)

    def _hear_time(self, graph: ShardGraph) -> None:
        """Any page tells the service's time."""
        for shard in graph.open_shards()[:1]:
            at_tip = partial(self._reader.iterator, shard.shard_id, IteratorType.LATEST)
            token = self._retried(at_tip)
            sent_at = self._clock()
            page = self._retried(partial(self._reader.fetch, token, 1))
            self._scout.service.hear(page.served_at, sent_at, self._clock())

    def _arm(self, positions: Mapping[str, Position]) -> None:
        """Iterators at the tip, made before the query is said to have begun."""
        for shard_id, position in positions.items():
            token = self._retried(partial(self._reader.iterator, shard_id, IteratorType.LATEST))
            self._scout.adopt(shard_id, position, token, self._clock())

    def _summarised(self) -> StreamSummary:
        if self._summary is None:
            self._summary = self._admin.summary()
        return self._summary

    def _retried(self, call: Callable[[], T]) -> T:
        """A call that must succeed, again and again as the settings allow."""
        attempt = 0
        while True:
            try:
                return call()
            except ServiceError as error:
                attempt += 1
                attempts_max = self._settings.retry_attempts
                is_spent = attempts_max is not None and attempt > attempts_max
                if is_spent or not isinstance(error, Throttled | Unavailable):
                    raise
            self._wait(backoff_s(attempt, self._chance(), max_s=self._settings.retry_backoff_max_s))


def _created_ms(summary: StreamSummary) -> int:
    return round(summary.created_at * 1000)


def _compare(offset: Offset, summary: StreamSummary) -> None:
    if offset.stream != summary.arn:
        raise OffsetRefused(
            f"the checkpoint is of {offset.stream}, the query reads {summary.arn}: another"
            " stream\nTo go on: name that stream, or use a new checkpoint location"
        )
    if offset.created_ms != _created_ms(summary):
        raise OffsetRefused(_recreated(summary.name))


def _recreated(name: str) -> str:
    return (
        f"{name} was deleted and re-created since the checkpoint was begun: what the checkpoint"
        " says of its shards is about records that are gone\nTo go on: a new checkpoint location"
    )
