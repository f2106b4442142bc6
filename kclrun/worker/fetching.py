"""The fetch thread: reads pages ahead of user code.

The pacing core decides when to send the next request; pages go to the queue.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

import msgspec

from kclrun import errors
from kclrun.aws.fan_out import FanOut
from kclrun.calling.timer_run import Quiet
from kclrun.codec.kpl import KplRange, drop_until, open_in_parts
from kclrun.lease.policy import Pacing
from kclrun.model.reading import FetchedPage, HeadWatch, PageCursor, Replay
from kclrun.model.record import Record, StartPoint
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import ChildShard, HashRange, Shard
from kclrun.model.stream import ONLY_STREAM, StreamKey, qualified_child
from kclrun.model.time import Instant
from kclrun.model.wire import WireEndpoint
from kclrun.ports import Outage, ShardReader, ShardSubscriber, StreamAdmin, next_page
from kclrun.protocol.trimming import ExpiryWatch
from kclrun.traffic.hot_keys import KeyMeter, ShardHeat
from kclrun.worker.delivery_queue import DeliveryQueue, Page
from kclrun.worker.sharing import LeaseThreads

if TYPE_CHECKING:
    from kclrun.observe.traces import LeaseSpans

# One answer takes two requests (iterator, records). Each may be sent again on a new connection, and
# again with the service's clock: eight times connecting and reading. Half as much again is for a
# body that trickles in: a restart would only begin it anew.
PATIENCES_MAX: Final = 12
# The lease thread looks every two seconds. After twice that it did not run itself (a stopped
# process, a held GIL), nor did the fetch thread: this does not count as silence of the service.
LOOK_S_MAX: Final = 4.0


def silence_max_s(endpoint: WireEndpoint) -> float:
    """How long one answer may take before the fetch thread counts as hung."""
    return PATIENCES_MAX * (endpoint.connect_timeout_s + endpoint.read_timeout_s)


class Asking(Protocol):
    """The requests of a thread."""

    @property
    def asking_since_instant(self) -> Instant:
        """When the request under way began; 0 between requests."""
        ...


class FetchWatch:
    """Detects, for the lease thread, that another thread hangs in a request that never returns:
    the fetch thread, or that of the look-ups.

    Every request has time-outs, so this is for the cases beyond them: a resolver that does not
    answer, a lock, a service that sends a byte now and then. The manager checks the same value with
    `stall:`; this check knows the time-outs and works without a manager. It is called at each turn
    of the lease thread and counts how long one answer has been awaited.
    """

    def __init__(
        self,
        view: Callable[[], Asking],
        silence_max_s: float,
        what: str = "a request for records",
    ) -> None:
        self._view = view
        self._silence_max_s = silence_max_s
        self._what = what
        self._asking_since = Instant(0.0)
        self._looked = Instant(0.0)
        self._waited_s = 0.0

    def beside(self, view: Callable[[], Asking], what: str) -> FetchWatch:
        """The watch of another thread, with the same patience."""
        return FetchWatch(view, self._silence_max_s, what)

    def look(self, now: Instant) -> errors.Unavailable | None:
        """The error to end the process with, once the thread has hung for too long."""
        asking_since, passed_s = self._view().asking_since_instant, now - self._looked
        self._looked = now
        if not asking_since or asking_since != self._asking_since:
            self._asking_since, self._waited_s = asking_since, 0.0
            return None
        self._waited_s += min(passed_s, LOOK_S_MAX)
        if self._waited_s < self._silence_max_s:
            return None
        return errors.Unavailable(
            f"{self._what} has not come back for {self._waited_s:.0f} s, though its time-outs have"
            " passed"
        )


Answer = TypeVar("Answer")


# A status is published once a second; the manager asks when the last answer was.
_STANDS_S: Final = 1.0


class FetchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how to read: `checkpoint` is the last processed position, `start` the first
    iterator.

    `stream` qualifies the children that the end of the shard names, if there are several streams.
    `expiry` decides when a shard that the service does not find was trimmed; by bare ids. `pacing`
    decides when the next request is sent. With `replay` reading ends at the end of that time range.
    """

    shard_id: str
    start: StartPoint
    checkpoint: ExtendedSequenceNumber
    expiry: ExpiryWatch
    pacing: Pacing
    hash_range: HashRange | None = None
    kpl_range: KplRange = "keep"
    stream: StreamKey = ONLY_STREAM
    replay: Replay | None = None


class FetchView(msgspec.Struct, frozen=True):
    """The fetch thread as the status slot shows it. `asking_since_instant` is 0 between calls.
    `passed_over_total` counts records of other keys than those of a replay. `quiet` is None unless
    the last answer was the end of the shard, without a record."""

    last_fetch_instant: Instant = Instant(0.0)
    fetched: ExtendedSequenceNumber | None = None
    millis_behind_latest: int | None = None
    at_tip: bool = False
    asking_since_instant: Instant = Instant(0.0)
    passed_over_total: int = 0
    quiet: Quiet | None = None


class ShardSource(NamedTuple):
    """The services that a shard is read from. With `subscriber` it is read by enhanced fan-out when
    that is possible."""

    reader: ShardReader
    admin: StreamAdmin
    subscriber: ShardSubscriber | None = None


class FetchHost(Protocol):
    """The lease process of a fetch thread. Its methods are called on that thread."""

    def warn(self, text: str, /) -> None:
        """Called with a warning for the log; the reading continues."""
        ...

    def records_lost(self, position: ExtendedSequenceNumber, text: str, /) -> None:
        """Called with the last position and a sentence if records expired before they were read."""
        ...

    def broke(self, error: BaseException, /) -> None:
        """Called with an error that is not from the service, so a bug of ours. It ends the process,
        because a lease that is renewed and not read would stall in silence."""
        ...

    def reached_tip(self) -> None:
        """Called when the view shows the tip of the shard for the first time, or again."""
        ...

    def report(self, heat: ShardHeat, /) -> None:
        """Called with each report of the traffic."""
        ...


class FetchThread:
    """Reads one shard until it ends, is proven trimmed, or the queue closes.

    A failure never ends it: expired iterators are replaced, throttling and outages are waited out
    (`reference` D1-D6: the pitfalls of the Java KCL's fetcher, each with a test).

    `meter` measures the traffic. `spans` traces the pages; None without traces.
    """

    def __init__(
        self,
        plan: FetchPlan,
        source: ShardSource,
        queue: DeliveryQueue,
        host: FetchHost,
        *,
        threads: LeaseThreads,
        now: Callable[[], Instant],
        meter: KeyMeter | None = None,
        spans: LeaseSpans | None = None,
    ) -> None:
        self._thread = threads.make_thread(self._run, "fetch")
        self.view = FetchView(fetched=plan.checkpoint)
        self._plan = plan
        self._reader = source.reader
        self._admin = source.admin
        self._queue = queue
        self._host = host
        self._pacing = plan.pacing
        self._rest_s = threads.rest_s
        self._now = now
        self._outage = Outage("reading the shard", now, host.warn)
        self._fan_out = (
            None
            if source.subscriber is None
            else FanOut(source.subscriber, plan.shard_id, now=now, warn=host.warn)
        )
        self._cursor = PageCursor(plan.start)
        self._head = HeadWatch(plan.start)
        self._is_above_checkpoint = False
        self._meter = meter
        self._passed_over = 0
        self._spans = spans

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the reading has ended, at most `timeout_s`."""
        self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as error:  # noqa: BLE001 - the thread's edge: it ends the process
            self._host.broke(error)
        finally:
            if self._fan_out is not None:
                self._fan_out.close()

    def _read(self) -> None:
        asked = self._now()
        pause_s = 0.0
        while self._queue.pause(asked + pause_s - self._now()):
            asked = self._now()
            try:
                page = self._awaited(self._fetch)
                if page is None:
                    pause_s = 0.0
                    continue
                if self._spans is not None:
                    self._spans.fetched(page, asked)
                self._check_head(page)
                replay = self._plan.replay
                page, is_over = (page, False) if replay is None else replay.cut(page)
                if not self._put(page):
                    return
                if is_over and self._waits_at_end():
                    return
                if is_over or self._is_behind_range(page):
                    self._queue.finish(())
                    return
                if page.is_end and self._finish(page):
                    return
            except (errors.ServiceError, errors.RecordError) as error:
                if isinstance(error, errors.NotFound) and self._was_trimmed():
                    self._queue.finish((), is_expired=True)
                    return
                pause_s = self._pause_after(error, asked)
            else:
                self._plan.expiry.page_came()
                self._outage.end()
                pause_s = self._pause_after_page(page)
                pause_s = self._pacing.polite_s(self._rest_s(asked, pause_s), pause_s)

    def _awaited(self, ask: Callable[[], Answer]) -> Answer:
        """Publish the instant of the request in `view`; lease thread and manager check it."""
        self.view = msgspec.structs.replace(self.view, asking_since_instant=self._now())
        try:
            return ask()
        finally:
            self.view = msgspec.structs.replace(self.view, asking_since_instant=Instant(0.0))

    def _fetch(self) -> FetchedPage | None:
        """The next page; None if the subscription has no page yet."""
        fan_out, cursor = self._fan_out, self._cursor
        if fan_out is None:
            return next_page(self._reader, self._plan.shard_id, cursor)
        if fan_out.takes_over(cursor.subscription_start):
            page = fan_out.next_page()
            if page is not None:
                cursor.took(page)
            return page
        page = next_page(self._reader, self._plan.shard_id, cursor)
        fan_out.polled()
        return page

    def _pause_after_page(self, page: FetchedPage) -> float:
        """No pause after an event of a subscription, or where a subscription can replace
        polling."""
        pause_s = self._pacing.after_page(len(page.records), page.millis_behind_latest)
        if self._fan_out is None:
            return pause_s
        return self._fan_out.pause_s(pause_s)

    def _check_head(self, page: FetchedPage) -> None:
        """Report records that expired before this page. While the retention is not known, a later
        page reports them."""
        if self._head.took(page):
            try:
                summary = self._awaited(self._admin.summary)
            except errors.ServiceError:
                return
            self._head.know(summary.retention_hours * 3600.0)
        if text := self._head.loss():
            self._host.records_lost(self.view.fetched or self._plan.checkpoint, text)

    def _waits_at_end(self) -> bool:
        """At the end of a replay of a shard that goes on: wait there, as at a tip, until the queue
        closes. False if the replay ends differently."""
        replay = self._plan.replay
        if replay is None or not replay.stands:
            return False
        pause_s = 0.0
        while self._queue.pause(pause_s):
            view = msgspec.structs.replace(
                self.view, at_tip=True, last_fetch_instant=self._now(), millis_behind_latest=0
            )
            self._show(view)
            pause_s = _STANDS_S
        return True

    def _is_behind_range(self, page: FetchedPage) -> bool:
        """Whether an open shard is read beyond the time range of a replay."""
        replay = self._plan.replay
        if replay is None or not replay.is_past(page):
            return False
        shard = self._listed()
        return shard is not None and shard.is_open

    def _put(self, page: FetchedPage) -> bool:
        """Open the page and put it on the queue; False once the queue is closed."""
        fetched = self.view.fetched
        self._measure(page)
        if page.records:
            for part in self._parts(page):
                fetched = part.last
                if not self._queue.put(part):
                    return False
        # A replay ends at the end of its range, never at a tip before. A replay that `stands` has
        # nothing between the last record and that end.
        replay = self._plan.replay
        at_tip = page.is_empty_tip and (replay is None or replay.stands)
        before, quiet = self.view.quiet, None
        if at_tip and replay is None and page.served_at is not None:
            since = page.served_at if before is None else before.since
            quiet = Quiet(since, page.served_at)
        view = FetchView(
            last_fetch_instant=self._now(),
            fetched=fetched,
            millis_behind_latest=page.millis_behind_latest,
            at_tip=at_tip,
            passed_over_total=self._passed_over,
            quiet=quiet,
        )
        self._show(view)
        return True

    def _show(self, view: FetchView) -> None:
        was_at_tip, self.view = self.view.at_tip, view
        if view.at_tip and not was_at_tip:
            self._host.reached_tip()

    def _measure(self, page: FetchedPage) -> None:
        """Count the page in the traffic of the shard, and report the traffic when that is due."""
        if self._meter is None:
            return
        now = self._now()
        self._meter.took(page.records, page.millis_behind_latest, now)
        heat = self._meter.report(now)
        if heat is not None:
            self._host.report(heat)

    def _parts(self, page: FetchedPage) -> Iterator[Page]:
        """The user records above the checkpoint, in parts of at most as many as the queue holds. A
        part is opened only when there is room for it."""
        for records, last_raw in open_in_parts(
            page.records,
            self._queue.records_ahead_max,
            kpl_range=self._plan.kpl_range,
            hash_range=self._plan.hash_range,
        ):
            if self._meter is not None and records is not page.records:
                self._meter.opened(records)
            part = self._above_checkpoint(
                records, ExtendedSequenceNumber(last_raw.sequence_number), page
            )
            if part is not None:
                yield part

    def _above_checkpoint(
        self, records: list[Record], last_raw: ExtendedSequenceNumber, page: FetchedPage
    ) -> Page | None:
        """The part above the checkpoint; None if all of it is at or below the checkpoint."""
        if not self._is_above_checkpoint:
            records = drop_until(records, self._plan.checkpoint)
            self._is_above_checkpoint = bool(records) or last_raw > self._plan.checkpoint
        if not records and last_raw <= self._plan.checkpoint:
            return None
        # A page whose user records were all dropped still advances the position. Otherwise a shard
        # full of such pages would never be checkpointed.
        last = records[-1].position if records else last_raw
        if self._plan.replay is not None:
            chosen = self._plan.replay.chosen(records)
            self._passed_over += len(records) - len(chosen)
            records = chosen
        return Page(records, last, _payload_bytes(records), page.millis_behind_latest)

    def _finish(self, page: FetchedPage) -> bool:
        """The shard ends here, unless the service lost its position [D3]."""
        children = page.children
        if not children and not self._is_closed_shard():
            return False
        if not children and self._plan.replay is not None:
            # The core takes an end without children for that of the time range: list them here.
            children = self._children_listed()
            if not children:
                return False
        stream = self._plan.stream
        self._queue.finish(tuple(qualified_child(stream, child) for child in children))
        return True

    def _is_closed_shard(self) -> bool:
        """Whether the shard is closed by the listing. A null iterator without children proves
        nothing."""
        shard = self._listed()
        return shard is not None and not shard.is_open

    def _listed(self) -> Shard | None:
        shards = self._awaited(self._admin.list_shards)
        return next((shard for shard in shards if shard.shard_id == self._plan.shard_id), None)

    def _children_listed(self) -> tuple[ChildShard, ...]:
        return tuple(
            ChildShard(shard.shard_id, shard.parents, shard.hash_range)
            for shard in self._awaited(self._admin.list_shards)
            if self._plan.shard_id in shard.parents
        )

    def _was_trimmed(self) -> bool:
        """The service does not find the shard: check whether it was trimmed [P13]."""
        expiry = self._plan.expiry
        if not expiry.is_listing_due(self._now()):
            return False
        try:
            shards = self._awaited(self._admin.list_shards)
        except errors.ServiceError:
            expiry.listing_failed(self._now())
            return False
        return expiry.listing_came(shards, self._now())

    def _pause_after(
        self, error: errors.ServiceError | errors.RecordError, asked: Instant
    ) -> float:
        chance = random.random()
        if isinstance(error, errors.ExpiredIterator):
            pause_s = self._pacing.after_expired(chance)
            if pause_s:
                self._outage.note(str(error), asked)
            return pause_s
        if isinstance(error, errors.Throttled):
            # Other applications share the five reads a second: throttling is normal, not an outage.
            if self._meter is not None:
                self._meter.throttled(self._now())
            return self._pacing.after_throttle(chance)
        self._outage.note(str(error), asked)
        return self._pacing.after_error(chance)


def _payload_bytes(records: list[Record]) -> int:
    return sum([len(record.data) for record in records])
