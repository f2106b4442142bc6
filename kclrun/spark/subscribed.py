"""Reads shards at the tip by enhanced fan-out, for the planner in the driver's process.

`SubscribedReader` decorates the reader that polls: polling finds the tip, and reads the records
behind it. `aws/fan_out.py` and `model/subscribing.py` decide when to subscribe. This module
knows places in shards; it knows neither offsets nor batches.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec

from kclrun.aws.fan_out import (
    FanOut,
    FanOutReader,
    StreamConsumers,
    consumer_of,
    registered,
    require_active,
)
from kclrun.aws.wire import WireClient
from kclrun.errors import InvalidRequest, NotFound, SettingsError, Unavailable
from kclrun.model.reading import FetchedPage, PageCursor
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.time import Instant, WallTime
from kclrun.ports import ShardReader, ShardSubscriber, StreamAdmin, Subscription
from kclrun.spark.planning.shard_cursor import size_of
from kclrun.spark.positions import Position, after

_log = logging.getLogger(__name__)

# A waiting thread costs some 50 kB and a wake-up a second. One driver decodes the records of some
# tens of busy shards.
SUBSCRIPTIONS_MAX: Final = 100
# The records that wait in all buffers together, and one event more for each shard (1 MiB or one
# record). The service sends the rest when there is room: TCP's back-pressure.
BUFFER_BYTES_TOTAL: Final = 32 * 2**20
# A full buffer means that the planner reads nothing: a batch takes its time. Two events of an idle
# subscription are as far apart.
FULL_MAX_S: Final = 10.0
# A subscription begins at a tip that was seen at most so long ago: longer than the longest tick.
_STANDS_MAX_S: Final = 30.0
_LOG_EVERY_S: Final = 60.0
_IN_USE: Final = "ResourceInUseException"
# A subscription at a time may leave out a record with an earlier arrival time that an iterator at
# LATEST has: a shard without a record since LATEST is polled until its first record.
_EXACT: Final = (IteratorType.AFTER_SEQUENCE_NUMBER, IteratorType.TRIM_HORIZON)


class _Token(msgspec.Struct, array_like=True, frozen=True):
    """A place in a shard, and the iterator that is there, if one was made."""

    shard_id: str
    kind: IteratorType
    number: str | None
    timestamp: float | None
    iterator: str | None

    @property
    def start(self) -> StartPoint:
        at = None if self.timestamp is None else WallTime(self.timestamp)
        return StartPoint(self.kind, self.number, at)


_TOKENS: Final = msgspec.json.Decoder(_Token)


def _text(shard_id: str, start: StartPoint, iterator: str | None) -> str:
    token = _Token(shard_id, start.kind, start.sequence_number, start.timestamp, iterator)
    return msgspec.json.encode(token).decode()


def _parsed(text: str) -> _Token | None:
    try:
        return _TOKENS.decode(text)
    except msgspec.DecodeError:
        return None


def iterator_in(token: str) -> str | None:
    """The service's own iterator in a token of `SubscribedReader`; None if it has none."""
    parsed = _parsed(token)
    return None if parsed is None else parsed.iterator


class PushedRecords:
    """The pushed records of one shard that were not read yet. Not thread-safe. Decides nothing.

    They follow the place `_begin` without a gap. `_reached` is the last record that was pushed,
    read or not. Polling has read the records up to `_skips_to`: later events leave them out.
    """

    def __init__(self, begin: StartPoint) -> None:
        self._begin = begin
        self._reached = _position_of(begin)
        self._skips_to: Position | None = None
        self._unread: list[Record] = []
        self._last: FetchedPage | None = None
        self._as_of: WallTime | None = None
        self.size_bytes = 0

    def put(self, event: FetchedPage, as_of: WallTime) -> bool:
        """Take in an event; `as_of` is when its subscription was requested. Returns: whether a read
        now has more to show than before."""
        was_behind = self._last is not None and bool(self._last.millis_behind_latest)
        self._last, self._as_of = event, as_of
        new = list(event.records)
        if new:
            self._reached = after(new[-1].sequence_number)
        if self._skips_to is not None:
            new = [record for record in new if not self._skips_to.covers(record.sequence_number)]
        self._unread += new
        self.size_bytes += size_of(new)
        return bool(new) or event.is_end or (was_behind and not event.millis_behind_latest)

    def is_at(self, place: StartPoint) -> bool:
        """Whether the next record to read is the one after this place. If polling is ahead of the
        events, the records that it read are left out of them."""
        if place != self._begin:
            begin, wanted = _position_of(self._begin), _position_of(place)
            if wanted is None or (begin is not None and wanted < begin):
                return False
            self._begin, self._skips_to = place, wanted
            self._unread = [e for e in self._unread if not wanted.covers(e.sequence_number)]
            self.size_bytes = size_of(self._unread)
        has_caught_up = self._skips_to is None or (
            self._reached is not None and self._skips_to <= self._reached
        )
        return self._last is not None and has_caught_up

    @property
    def has_page(self) -> bool:
        """Whether there are records, or it is known that there are none. After an event without
        records and with lag, records are on their way: polling finds them sooner."""
        last = self._last
        return last is not None and (
            bool(self._unread) or last.is_end or last.millis_behind_latest == 0
        )

    def take(self, limit: int) -> tuple[FetchedPage, StartPoint]:
        """The next records as a page without iterator, and the place after them."""
        assert self._last is not None, "`has_page` is true"
        last, records = self._last, self._unread[:limit]
        self._unread = self._unread[limit:]
        self.size_bytes -= size_of(records)
        if records:
            number = records[-1].sequence_number
            self._begin = StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, number)
        if last.is_end and not self._unread:
            return FetchedPage(records, None, 0, last.children), self._begin
        lag_ms = last.millis_behind_latest
        page = FetchedPage(
            records=records,
            next_iterator=None,
            millis_behind_latest=max(1, lag_ms or 0) if self._unread else lag_ms,
            served_at=self._as_of,
            # The last event of a shard has none, and the pages before it are pushed, too.
            continuation=last.continuation or records[-1].sequence_number,
        )
        return page, self._begin


def _position_of(start: StartPoint) -> Position | None:
    if start.kind is IteratorType.AFTER_SEQUENCE_NUMBER:
        assert start.sequence_number is not None, "the kind needs it"
        return after(start.sequence_number)
    return None


class PushedShard:
    """One shard's subscription and the records that it brought. `step` is for one thread of its
    own; the rest is for the planner's. Implements `ShardSubscriber`, to note the time of a request.

        standing ──step──► subscribed ──step──► … ──refused, broken, full for too long──► standing
           ▲ polled at the tip                                                               │
           └─────────────────────────────────────────────────────────────────────────────────┘
    """

    def __init__(
        self,
        subscriber: ShardSubscriber,
        shard_id: str,
        *,
        now: Callable[[], Instant],
        service_time: Callable[[], WallTime],
        bytes_max: Callable[[], int],
        came: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._changed = threading.Condition()
        self._subscriber = subscriber
        self._shard_id = shard_id
        self._now = now
        self._service_time = service_time
        self._bytes_max = bytes_max
        self._came = came
        self._warn = warn
        self._fan_out = FanOut(self, shard_id, now=now, warn=warn)
        self._cursor: PageCursor | None = None
        self._stood_at = now()
        self._records: PushedRecords | None = None
        self._requested_at = WallTime(0.0)
        self._full_since: Instant | None = None
        self._is_nudged = self._is_closed = self._is_ended = False

    @property
    def is_subscribed(self) -> bool:
        return self._records is not None

    @property
    def trouble(self) -> str | None:
        """The reason why the shard is polled now, if a subscription failed."""
        trouble = self._fan_out.trouble
        return None if trouble is None or self.is_subscribed else str(trouble)

    def polled(self, cursor: PageCursor) -> None:
        """A polled page ended at the tip, at this place: a subscription may begin there."""
        with self._changed:
            self._stood_at = self._now()
            former = self._cursor
            if self._records is not None or self._is_ended:
                return
            # A cursor at the same place also knows up to where the shard is empty after it.
            if former is None or former.start != cursor.start:
                self._cursor = cursor
            self._nudge()

    def take(self, place: StartPoint, limit: int) -> tuple[FetchedPage, StartPoint] | None:
        """The records that follow this place, maybe none; None if they must be polled."""
        with self._changed:
            records = self._records
            if records is None or not records.is_at(place) or not records.has_page:
                return None
            taken = records.take(limit)
            self._nudge()
            return taken

    def is_at(self, place: StartPoint) -> bool:
        """Whether `take` would have an answer."""
        with self._changed:
            return self._records is not None and self._records.is_at(place)

    def subscribe(self, shard_id: str, start: StartPoint) -> Subscription:
        self._requested_at = self._service_time()
        return self._subscriber.subscribe(shard_id, start)

    def run(self) -> None:
        """The thread: until `close`."""
        try:
            while not self._is_closed:
                pause_s = self.step()
                with self._changed:
                    wait_s = None if math.isinf(pause_s) else pause_s
                    self._changed.wait_for(lambda: self._is_nudged or self._is_closed, wait_s)
                    self._is_nudged = False
        except Exception:  # noqa: BLE001 - the thread's edge
            _log.exception("%s is polled from now on: an error of kclrun", self._shard_id)
        finally:
            self._fan_out.close()
            self._drop()

    def step(self) -> float:
        """Subscribe if that is due, or take in the next event. Returns: the seconds until the next
        step, if nothing changes before."""
        cursor = self._standing()
        if cursor is None or not self._takes_over(cursor):
            return math.inf if cursor is None else self._fan_out.pause_s(math.inf)
        if (full_s := self._room_in_s()) > 0:
            return full_s
        page = self._fan_out.next_page()
        if page is None:
            if not self._fan_out.is_subscribed and self._fan_out.trouble is not None:
                self._lost(self._fan_out.trouble)
            return 0.0
        cursor.took(page)
        self._put(page)
        return 0.0

    def close(self) -> None:
        """The thread ends, within a second, and closes the subscription."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _standing(self) -> PageCursor | None:
        """The place of the next event or subscription; None if polling must find the tip first."""
        with self._changed:
            is_stale = self._now() - self._stood_at > _STANDS_MAX_S
            return None if self._records is None and is_stale else self._cursor

    def _takes_over(self, cursor: PageCursor) -> bool:
        self._fan_out.polled()
        was_subscribed = self._records is not None
        if not self._fan_out.takes_over(cursor.subscription_start):
            self._drop()
            return False
        if not was_subscribed:
            with self._changed:
                # Meanwhile polling may have read on: `is_at` leaves those records out of the
                # events.
                self._cursor, self._records = cursor, PushedRecords(cursor.start)
        return True

    def _room_in_s(self) -> float:
        """0 if there is room for another event, else when to look again."""
        with self._changed:
            records, now = self._records, self._now()
            if records is None or records.size_bytes < self._bytes_max():
                self._full_since = None
                return 0.0
            since = now if self._full_since is None else self._full_since
            self._full_since = since
        if now - since < FULL_MAX_S:
            return FULL_MAX_S - (now - since)
        self._fan_out.end()
        self._drop(is_behind=True)
        return math.inf

    def _put(self, page: FetchedPage) -> None:
        if page.is_end and not page.children:
            # The service names the children of a closed shard, and may have lost its place.
            self._fan_out.end()
            self._drop(is_behind=True)
            return
        with self._changed:
            is_news = self._records is not None and self._records.put(page, self._requested_at)
            if page.is_end:
                self._is_ended, self._cursor = True, None
                self._fan_out.close()
        if is_news:
            self._came(self._shard_id)

    def _lost(self, trouble: Exception) -> None:
        if isinstance(trouble, Unavailable) and trouble.code == _IN_USE:
            self._warn(
                "another reader took the subscription over: a consumer name is for one query; give"
                " each its own in consumerName. The shard is polled meanwhile"
            )
        self._drop()

    def _drop(self, *, is_behind: bool = False) -> None:
        """Back to polling. The next subscription begins where this one was, unless it is behind."""
        with self._changed:
            if self._records is not None and not self._is_ended:
                self._records, self._full_since, self._stood_at = None, None, self._now()
            if is_behind:
                self._cursor = None

    def _nudge(self) -> None:
        self._is_nudged = True
        self._changed.notify_all()


class SubscribedReader:
    """Implements `ShardReader`: the pages of a subscription that is at the place, else of `reader`.

    Once a polled page ends at the tip, a subscription begins where that page ended, and its events
    wait in a bounded buffer. A read from exactly that place takes them, without a call to the
    service. So bounds, replays and executors know nothing of subscriptions:

    * A batch is still a function of two positions. The next polled page would have had the same
      records as the pushed page, and a replay reads them by polling.
    * Tokens name the place in the shard, and the iterator if one was made. An executor gets that
      iterator or none.
    * If a subscription is refused, breaks or is silent, its buffer is dropped, and reading polls
      from the place that the token names. The same if the buffer has been full for ten seconds:
      the planner reads too little, the records are backlog, and executors read them.
    * `served_at` of a pushed page is a time that the service's clock had reached when the
      subscription was requested. All its events are later, however long they were on their way, so
      the shard was at its tip then or later. An event is made at most five minutes after it.

    Each subscription has a thread, because its answer occupies one connection.

    `came` is called, by any thread, when `news` is not empty any more. `service_time` is never
    later than the service's clock. Without `has_threads` the caller drives the subscriptions, by
    `step`.
    """

    def __init__(
        self,
        reader: ShardReader,
        subscriber: ShardSubscriber,
        *,
        now: Callable[[], float],
        service_time: Callable[[], WallTime],
        came: Callable[[], None] = lambda: None,
        has_threads: bool = True,
    ) -> None:
        self._reader = reader
        self._subscriber = subscriber
        self._now = now
        self._service_time = service_time
        self._has_threads = has_threads
        self._lock = threading.Lock()
        self._shards: dict[str, PushedShard] = {}
        self._news: set[str] = set()
        self._logged_at: dict[str, float] = {}
        self.came = came
        self.subscribes = True

    def iterator(self, shard_id: str, start: StartPoint) -> str:
        """A token for this place; without a call where a subscription is there."""
        pushed = self._pushed(shard_id)
        if pushed is not None and pushed.is_at(start):
            return _text(shard_id, start, None)
        return _text(shard_id, start, self._reader.iterator(shard_id, start))

    def fetch(self, iterator: str, limit: int) -> FetchedPage:
        """The next page from the token's place. Raises: as `ShardReader`."""
        token = _parsed(iterator)
        if token is None:
            return self._reader.fetch(iterator, limit)
        pushed = self._pushed(token.shard_id)
        taken = None if pushed is None else pushed.take(token.start, limit)
        if taken is None:
            return self._polled(token, limit)
        page, place = taken
        if page.is_end:
            return page
        return msgspec.structs.replace(page, next_iterator=_text(token.shard_id, place, None))

    def news(self) -> Collection[str]:
        """Shards of which records, or an end, were pushed since the last call."""
        with self._lock:
            news, self._news = self._news, set()
        return news

    def retain(self, shard_ids: Collection[str]) -> None:
        """End the subscriptions to all other shards: only these are read from now on."""
        with self._lock:
            gone = [shard for shard in self._shards if shard not in shard_ids]
            ended = [self._shards.pop(shard_id) for shard_id in gone]
        for subscription in ended:
            subscription.close()

    def report(self) -> dict[str, Any]:
        """For the query's progress: how many shards are subscribed, and why others are polled."""
        with self._lock:
            shards = list(self._shards.values())
        troubles = {shard.trouble for shard in shards} - {None}
        return {
            "shardsSubscribed": sum(shard.is_subscribed for shard in shards),
            "subscriptionTrouble": min(filter(None, troubles), default=None),
        }

    def step(self) -> None:
        """Drive each subscription by one step."""
        for shard in list(self._shards.values()):
            shard.step()

    def close(self) -> None:
        """End all subscriptions."""
        self.subscribes = False
        self.retain(())

    def _polled(self, token: _Token, limit: int) -> FetchedPage:
        shard_id, start, iterator = token.shard_id, token.start, token.iterator
        if iterator is None:
            iterator = self._reader.iterator(shard_id, start)
        page = self._reader.fetch(iterator, limit)
        cursor = PageCursor(start)
        cursor.took(page)
        following = page.next_iterator
        if following is None:
            return page
        is_tip = page.millis_behind_latest == 0 and len(page.records) < limit
        if is_tip and self.subscribes and cursor.start.kind in _EXACT:
            self._stands(shard_id, cursor)
        return msgspec.structs.replace(page, next_iterator=_text(shard_id, cursor.start, following))

    def _stands(self, shard_id: str, cursor: PageCursor) -> None:
        with self._lock:
            pushed = self._shards.get(shard_id)
            if pushed is None and len(self._shards) >= SUBSCRIPTIONS_MAX:
                self._warn(
                    "",
                    f"more than {SUBSCRIPTIONS_MAX} shards: the others are polled, as each"
                    " subscription takes a thread of the driver",
                )
                return
            is_new = pushed is None
            if pushed is None:
                pushed = self._shards[shard_id] = self._made(shard_id)
        pushed.polled(cursor)
        if is_new and self._has_threads:
            name = f"kclrun-subscription-{shard_id}"
            threading.Thread(target=pushed.run, name=name, daemon=True).start()

    def _made(self, shard_id: str) -> PushedShard:
        return PushedShard(
            self._subscriber,
            shard_id,
            now=lambda: Instant(self._now()),
            service_time=self._service_time,
            bytes_max=lambda: BUFFER_BYTES_TOTAL // max(1, len(self._shards)),
            came=self._note,
            warn=lambda text: self._warn(shard_id, text),
        )

    def _pushed(self, shard_id: str) -> PushedShard | None:
        return self._shards.get(shard_id) if self.subscribes else None

    def _note(self, shard_id: str) -> None:
        with self._lock:
            is_first = not self._news
            self._news.add(shard_id)
        if is_first:
            self.came()

    def _warn(self, shard_id: str, text: str) -> None:
        """Log a warning; the same text for many shards is one line a minute."""
        now = self._now()
        if now - self._logged_at.get(text, -math.inf) >= _LOG_EVERY_S:
            self._logged_at = {
                line: at for line, at in self._logged_at.items() if now - at < _LOG_EVERY_S
            }
            self._logged_at[text] = now
            _log.warning("%s%s", f"{shard_id}: " if shard_id else "", text)


class NamedConsumer:
    """Implements `ShardSubscriber` for a stream's consumer that `consumerName` names.

    `register` finds or registers it; without that call the first subscription does. A consumer
    that was removed meanwhile is not registered again, because an operator has removed it.
    """

    def __init__(self, client: WireClient, admin: StreamAdmin, named: str) -> None:
        self._client = client
        self._admin = admin
        self._named = named
        self._lock = threading.Lock()
        self._arn: str | None = None
        self._was_found = False

    def register(self) -> None:
        """Raises: SettingsError for another stream's consumer, and where no more can be added;
        Unavailable with its status while it is not active; another ServiceError leaf."""
        summary = self._admin.summary()
        name = consumer_of(summary, self._named, "consumerName")
        consumers = StreamConsumers(self._client, summary.arn)
        if self._was_found:
            found = consumers.find(name)
            if found is None:
                raise NotFound(f"consumer {name} of stream {summary.name} was removed")
        else:
            found = registered(consumers, summary, name, to_poll="consumerMode=polling")
        self._was_found = True
        require_active(found, summary)
        self._arn = found.arn

    def subscribe(self, shard_id: str, start: StartPoint) -> Subscription:
        with self._lock:
            if self._arn is None:
                try:
                    self.register()
                except SettingsError as error:
                    raise InvalidRequest(str(error), operation="RegisterStreamConsumer") from None
            arn = self._arn
        assert arn is not None, "it was found"
        try:
            return FanOutReader(self._client, arn).subscribe(shard_id, start)
        except NotFound:
            with self._lock:
                self._arn = None  # a new consumer of the same name has another ARN
            raise
