"""The threads of a tail: a few threads read many shards into one bounded queue."""

from __future__ import annotations

import heapq
import queue
import random
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, Self

import msgspec

from kclrun import errors
from kclrun.cli.messages import some_of
from kclrun.cli.times import GivenTime
from kclrun.consuming.policy import Pacing
from kclrun.model.reading import FetchedPage, PageCursor
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.shard import Shard
from kclrun.ports import ShardFilter, ShardReader, StreamAdmin, next_page


class TailLineage:
    """The shards of one tail, by their state: waiting for parents, being read, read to the end.

    A child waits until its parents were read to the end, so the records of one key come in their
    order across splits and merges. A shard of the start waits only for parents of the start. A
    shard that is added later waits for every parent, also for an unknown one (a child of a shard
    that is still being read). Pure.
    """

    def __init__(self, parents_of: Mapping[str, Sequence[str]]) -> None:
        self._known = set(parents_of)
        self._waiting = {
            shard_id: frozenset(parents) & self._known for shard_id, parents in parents_of.items()
        }
        self._over: set[str] = set()

    @property
    def is_over(self) -> bool:
        """Whether every shard was read to its end, so that no more records can come."""
        return self._over >= self._known

    def may_begin(self) -> tuple[str, ...]:
        """The shards that may be read from now on. Each is returned once."""
        ready = tuple(
            shard_id for shard_id, parents in self._waiting.items() if parents <= self._over
        )
        for shard_id in ready:
            del self._waiting[shard_id]
        return ready

    def add(self, parents_of: Mapping[str, Sequence[str]]) -> None:
        """Add the children that a closed shard named. Known ones are not changed."""
        for shard_id, parents in parents_of.items():
            if shard_id not in self._known:
                self._known.add(shard_id)
                self._waiting[shard_id] = frozenset(parents)

    def end(self, shard_id: str) -> None:
        """Record that a shard was read to its end."""
        self._over.add(shard_id)

    def trim(self, listed: Collection[str]) -> None:
        """Wait no longer for trimmed parents. `listed` has all shards of the stream. A parent that
        is neither listed nor known has passed the retention, so no shard will ever name it."""
        for parents in self._waiting.values():
            self._over |= parents - self._known - frozenset(listed)


# A shard allows 5 GetRecords a second to all its readers together. A tail takes half of them, so
# that the application of the stream is not throttled.
_FLOOR_S: Final = 0.4
# The pause at the tip, as an application's default `fetch.idle`.
_IDLE_S: Final = 1.0


class ShardTail:
    """Reads one shard, a page at a time. `is_begun`: it has got its first iterator.

    For one thread at a time. A failure never ends the shard. An iterator expires if a pager is not
    read for more than five minutes. Then it is replaced by one after the last received record, so
    no record is skipped.
    """

    def __init__(self, shard_id: str, start: StartPoint, reader: ShardReader) -> None:
        self.shard_id = shard_id
        self.is_begun = False
        self._reader = reader
        self._pacing = Pacing(_IDLE_S, _FLOOR_S)
        self._cursor = PageCursor(start)

    def begin(self) -> None:
        """Request the first iterator. Raises: a ServiceError leaf; then call it again."""
        self._cursor.opened(self._reader.iterator(self.shard_id, self._cursor.start))
        self.is_begun = True

    def fetch(self) -> FetchedPage:
        """The next page; with `next_iterator` None the shard may be over.

        Raises: a ServiceError leaf, RecordError; wait for `pause_after` then.
        """
        return next_page(self._reader, self.shard_id, self._cursor)

    def pause_s(self, page: FetchedPage) -> float:
        """The time from the start of a fetch to the start of the next one."""
        return self._pacing.after_page(len(page.records), page.millis_behind_latest)

    def pause_after(self, error: errors.ServiceError | errors.RecordError) -> float:
        """The pause after a failure. An expired iterator is replaced at once."""
        if isinstance(error, errors.ExpiredIterator):
            return 0.0
        if isinstance(error, errors.Throttled):
            return self._pacing.after_throttle(random.random())
        return self._pacing.after_error(random.random())


class ShardStart(msgspec.Struct, frozen=True):
    """A shard to read: its parents and its start point."""

    parents: tuple[str, ...]
    start: StartPoint


def start_point(given: GivenTime) -> StartPoint:
    """The first record of `--from`: a position, an instant, or a sequence number."""
    if given.start is None:
        return StartPoint(IteratorType.AT_SEQUENCE_NUMBER, sequence_number=given.text)
    if given.at is None:
        return StartPoint(IteratorType(given.text))
    return StartPoint(IteratorType.AT_TIMESTAMP, timestamp=given.at)


def first_listing(start: StartPoint) -> ShardFilter | None:
    """The filter for shards that can hold a record from `start` on. None: all shards."""
    match start.kind:
        case IteratorType.LATEST:
            return ShardFilter("AT_LATEST")
        case IteratorType.AT_TIMESTAMP:
            return ShardFilter("FROM_TIMESTAMP", start.timestamp)
        case _:
            return None


def shard_starts(
    shards: Sequence[Shard], named: Sequence[str], start: StartPoint
) -> Mapping[str, ShardStart]:
    """The shards to begin with. `named` narrows them to these ids; empty means all.

    If a shard's parent is read too, the shard is read from its beginning, because all its records
    are later.
    Raises: SettingsError for a sequence number without its one shard; NotFound for an unknown id.
    """
    if start.kind is IteratorType.AT_SEQUENCE_NUMBER and len(set(named)) != 1:
        raise errors.SettingsError(
            "--from with a sequence number is of one shard: name it with --shard"
        )
    chosen = _chosen(shards, named)
    ids = {shard.shard_id for shard in chosen}
    at_its_beginning = StartPoint(IteratorType.TRIM_HORIZON)
    return {
        shard.shard_id: ShardStart(
            shard.parents, at_its_beginning if ids & set(shard.parents) else start
        )
        for shard in chosen
    }


def _chosen(shards: Iterable[Shard], named: Sequence[str]) -> list[Shard]:
    listed = {shard.shard_id: shard for shard in shards}
    if not named:
        return list(listed.values())
    for shard_id in named:
        if shard_id not in listed:
            raise errors.NotFound(
                f"the stream has no shard {shard_id} with records from there on\n"
                f"It has: {some_of(sorted(listed))}"
            )
    return [listed[shard_id] for shard_id in dict.fromkeys(named)]


# A request takes some 10 ms: eight threads read 800 idle shards each second.
_THREADS: Final = 8
_PAGES_WAITING_MAX: Final = 2
# A waiting thread checks this often whether the tail has ended.
_NOTICE_S: Final = 0.2
# The next attempt repairs a dropped connection. A failure is reported if it lasts longer.
_NOTICED_S: Final = 1.0
# These errors are permanent. NotFound here means the stream: if a shard is not found, the shards
# are listed, and only the listing raises NotFound.
_FATAL: Final = (errors.AccessDenied, errors.InvalidRequest, errors.NotFound)
# With these errors the service has answered, but refused for the moment.
_ANSWERS: Final = (errors.ExpiredIterator, errors.Throttled)


class AllBegun(msgspec.Struct, frozen=True):
    """Every shard of the start has its iterator: records put from now on will be shown."""


class Arrived(msgspec.Struct, frozen=True):
    """Records of one shard as fetched, with aggregates not yet opened."""

    shard_id: str
    records: Sequence[Record]


class Ended(msgspec.Struct, frozen=True):
    """A shard was read to its end; its `children` continue it."""

    shard_id: str
    children: tuple[str, ...]


class Trouble(msgspec.Struct, frozen=True):
    """Reading fails and is repeated, or works again: a line for standard error."""

    text: str


TailEvent = AllBegun | Arrived | Ended | Trouble


class TailReaders:
    """Reads shards until all were read to their ends, or the `with` block ends.

    `follows`: children of an ended shard are read, too. If the service answers nothing at all for
    `patience_s`, `events` raises Unavailable.

    At most one thread reads a shard, and its page is in the queue before the shard is due again. So
    the records of a shard arrive in order, and a parent's last before a child's first. The memory
    is a page for each thread and two in the queue, each of 10 MiB at most.
    """

    def __init__(
        self,
        starts: Mapping[str, ShardStart],
        reader: ShardReader,
        admin: StreamAdmin,
        *,
        follows: bool,
        patience_s: float,
    ) -> None:
        self._starts = dict(starts)
        self._reader = reader
        self._admin = admin
        self._follows = follows
        self._patience_s = patience_s
        self._events: queue.Queue[TailEvent | BaseException] = queue.Queue(_PAGES_WAITING_MAX)
        self._changed = threading.Condition()
        # All fields below are protected by the condition's lock.
        self._lineage = TailLineage({id_: start.parents for id_, start in starts.items()})
        self._due: list[tuple[float, str, ShardTail]] = []
        self._unbegun = 0
        self._failing_since: dict[str, float] = {}
        self._is_shown = False
        self._answered_instant = time.monotonic()
        self._is_closed = False

    def __enter__(self) -> Self:
        with self._changed:
            self._begin_ready()
            self._unbegun = len(self._due)
        for number in range(_THREADS):
            threading.Thread(target=self._work, name=f"tail-{number}", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def events(self) -> Iterator[TailEvent | None]:
        """The events in order; None if there was none for a moment. Ends when all shards have.

        Raises: Unavailable, AccessDenied, NotFound (the stream), InvalidRequest.
        """
        while True:
            try:
                event = self._events.get(timeout=_NOTICE_S)
            except queue.Empty:
                with self._changed:
                    is_over = self._lineage.is_over
                if is_over and self._events.empty():
                    return
                yield None
                continue
            if isinstance(event, BaseException):
                raise event
            yield event

    # In the threads that read

    def _work(self) -> None:
        try:
            while (tail := self._next_due()) is not None:
                self._visit(tail)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that shows
            self._publish(error)

    def _next_due(self) -> ShardTail | None:
        """Wait for the shard that is due first; None once the tail has ended."""
        with self._changed:
            while not self._is_closed and not self._lineage.is_over:
                wait_s = self._due[0][0] - time.monotonic() if self._due else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(wait_s)
            return None

    def _visit(self, tail: ShardTail) -> None:
        asked = time.monotonic()
        try:
            page = self._read(tail)
            if page is not None and page.records:
                self._publish(Arrived(tail.shard_id, page.records))
            if (page is None or page.next_iterator is None) and self._has_ended(tail, page):
                return
            pause_s = _NOTICED_S if page is None else tail.pause_s(page)
        except _FATAL:
            raise
        except (errors.ServiceError, errors.RecordError) as error:
            pause_s = tail.pause_after(error)
            self._note_failure(tail, error, asked)
        self._schedule(tail, asked + pause_s)

    def _read(self, tail: ShardTail) -> FetchedPage | None:
        """The next page; None if the shard does not exist: it is trimmed, or the stream deleted."""
        try:
            if not tail.is_begun:
                tail.begin()
                self._note_begun()
            page = tail.fetch()
        except errors.NotFound:
            return None
        self._note_answer(tail)
        return page

    def _has_ended(self, tail: ShardTail, page: FetchedPage | None) -> bool:
        """Whether the shard ends here. The service may only have lost its position [D3]."""
        children = {c.shard_id: c.parents for c in page.children} if page is not None else {}
        listed: dict[str, Shard] | None = None
        if not children:
            listed = {shard.shard_id: shard for shard in self._admin.list_shards()}
            shard = listed.get(tail.shard_id)
            if shard is not None and shard.is_open:
                return False
            children = {
                shard.shard_id: shard.parents
                for shard in listed.values()
                if tail.shard_id in shard.parents
            }
        if not tail.is_begun:
            self._note_begun()
        self._publish(Ended(tail.shard_id, tuple(sorted(children))))
        with self._changed:
            self._failing_since.pop(tail.shard_id, None)
            if self._follows:
                self._lineage.add(children)
            self._lineage.end(tail.shard_id)
            if listed is not None:
                self._lineage.trim(listed)
            self._begin_ready()
            self._changed.notify_all()
        return True

    def _begin_ready(self) -> None:
        """Make the shards due that wait for no parent any more. Call it under the lock."""
        beginning = StartPoint(IteratorType.TRIM_HORIZON)
        for shard_id in self._lineage.may_begin():
            known = self._starts.get(shard_id)
            tail = ShardTail(shard_id, known.start if known else beginning, self._reader)
            heapq.heappush(self._due, (time.monotonic(), shard_id, tail))

    def _schedule(self, tail: ShardTail, due_instant: float) -> None:
        with self._changed:
            heapq.heappush(self._due, (due_instant, tail.shard_id, tail))
            self._changed.notify()

    def _publish(self, event: TailEvent | BaseException) -> None:
        """Put an event into the queue. Waits for room as long as the queue is read."""
        while not self._is_closed:
            try:
                self._events.put(event, timeout=_NOTICE_S)
            except queue.Full:
                continue
            return

    def _note_begun(self) -> None:
        with self._changed:
            self._unbegun -= 1
            is_last = self._unbegun == 0
        if is_last:
            self._publish(AllBegun())

    def _note_answer(self, tail: ShardTail) -> None:
        with self._changed:
            self._answered_instant = time.monotonic()
            self._failing_since.pop(tail.shard_id, None)
            is_healed = self._is_shown and not self._failing_since
            self._is_shown = self._is_shown and not is_healed
        if is_healed:
            self._publish(Trouble("Reading works again"))

    def _note_failure(self, tail: ShardTail, error: Exception, asked: float) -> None:
        with self._changed:
            now = time.monotonic()
            since = self._failing_since.setdefault(tail.shard_id, asked)
            is_news = not self._is_shown and now - since >= _NOTICED_S
            self._is_shown = self._is_shown or is_news
            if isinstance(error, _ANSWERS):
                self._answered_instant = now
            # Counted from the first failure: while a pager blocks the threads, they send nothing.
            silent_since = max(self._answered_instant, min(self._failing_since.values()))
            is_out = now - silent_since >= self._patience_s
        if is_out:
            raise errors.Unavailable(
                f"nothing was answered for {self._patience_s:g} s (aws.start_timeout)\n"
                f"The last attempt: {error}"
            )
        if is_news:
            self._publish(Trouble(f"Reading {tail.shard_id} fails and is tried again: {error}"))
