"""A few threads read many shards into one bounded queue, children after their parents.

`kclrun.read` and `kclrun tail` are built on it.
"""

from __future__ import annotations

import heapq
import queue
import random
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, Self

import msgspec

from kclrun import errors
from kclrun.lease.policy import Pacing
from kclrun.model.reading import FetchedPage, HeadWatch, PageCursor
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.shard import ChildShard, Shard
from kclrun.model.time import Instant
from kclrun.ports import ShardReader, StreamAdmin, next_page
from kclrun.protocol.trimming import ExpiryWatch
from kclrun.reading.ends import FLOOR_S, FOR_EVER, ReadingEnd
from kclrun.reading.starts import ShardStart


class ShardLineage:
    """The shards of one reading, by their state: waiting for parents, being read, read to the end.

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


# The pause at the tip, as an application's default `fetch.idle`.
_IDLE_S: Final = 1.0


class ShardPages:
    """Reads one shard, a page at a time. `is_begun`: it has got its first iterator.

    `was_waiting`: it waited for its parents. `head` notices records that expired unread. `expiry`
    proves that a shard which is not found was trimmed, with `may_be_listed`. For one thread at a
    time. A failure never ends the shard. An iterator expires if a page is not taken for more than
    five minutes. Then it is replaced by one after the last received record, so no record is
    skipped.
    """

    def __init__(
        self,
        shard_id: str,
        start: StartPoint,
        reader: ShardReader,
        *,
        was_waiting: bool = False,
        may_be_listed: bool = False,
    ) -> None:
        self.shard_id = shard_id
        self.is_begun = False
        self.was_waiting = was_waiting
        self.head = HeadWatch(start)
        self.expiry = ExpiryWatch(
            shard_id, None, (), gives_up_unknown=True, may_be_listed=may_be_listed
        )
        self._reader = reader
        self._pacing = Pacing(_IDLE_S, FLOOR_S)
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
        """The pause after a failure."""
        if isinstance(error, errors.ExpiredIterator):
            return self._pacing.after_expired(random.random())
        if isinstance(error, errors.Throttled):
            return self._pacing.after_throttle(random.random())
        return self._pacing.after_error(random.random())


# A request takes some 10 ms: eight threads read 800 idle shards each second.
_THREADS: Final = 8
_PAGES_WAITING_MAX: Final = 2
# A waiting thread checks this often whether the reading has ended.
_NOTICE_S: Final = 0.2
# The next attempt repairs a dropped connection. A failure is reported if it lasts longer.
_NOTICED_S: Final = 1.0
# These errors are permanent. NotFound here means the stream: if a shard is not found, the shards
# are listed, and only the listing raises NotFound.
_FATAL: Final = (errors.AccessDenied, errors.InvalidRequest, errors.NotFound)
# With these errors the service has answered, but refused for the moment.
_ANSWERS: Final = (errors.ExpiredIterator, errors.NotFound, errors.Throttled)


class EveryShardBegan(msgspec.Struct, frozen=True):
    """Every shard of the start has its iterator: records put from now on will be shown."""


class Arrived(msgspec.Struct, frozen=True):
    """Records of one shard as fetched, with aggregates not yet opened."""

    shard_id: str
    records: Sequence[Record]


class Ended(msgspec.Struct, frozen=True):
    """A shard was read to its end; its `children` continue it.

    `is_trimmed`: the service has no such shard any more, and records of it were not read yet.
    """

    shard_id: str
    children: tuple[str, ...]
    is_trimmed: bool = False


class Passed(msgspec.Struct, frozen=True):
    """A shard was read up to the end of the reading."""

    shard_id: str


class Expired(msgspec.Struct, frozen=True):
    """Records of a shard may have expired before they were read; `text` says which."""

    shard_id: str
    text: str


class Trouble(msgspec.Struct, frozen=True):
    """Reading fails and is repeated, or works again: a line for standard error."""

    text: str


ReadEvent = EveryShardBegan | Arrived | Ended | Passed | Expired | Trouble


class StreamReaders:
    """Reads shards until all were read to their ends or to `end`, or the `with` block ends.

    `follows`: children of an ended shard are read, too. If the service answers nothing at all for
    `patience_s`, `events` raises Unavailable. With `gives_up` "each" it raises as soon as one shard
    cannot be read for that time, throttled or not. `may_be_listed`: see `ExpiryWatch`.

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
        gives_up: Literal["all", "each"] = "all",
        end: ReadingEnd = FOR_EVER,
        may_be_listed: bool = False,
    ) -> None:
        self._starts = dict(starts)
        self._reader = reader
        self._admin = admin
        self._follows = follows
        self._patience_s = patience_s
        self._gives_up = gives_up
        self._end = end
        self._may_be_listed = may_be_listed
        self._end_lock = threading.Lock()
        self._closed_at_end: frozenset[str] | None = None
        self._known: dict[str, Shard] = {}  # as pages and listings showed them
        self._threads: list[threading.Thread] = []
        self._events: queue.Queue[ReadEvent | BaseException] = queue.Queue(_PAGES_WAITING_MAX)
        self._changed = threading.Condition()
        # All fields below are protected by the condition's lock.
        self._lineage = ShardLineage({id_: start.parents for id_, start in starts.items()})
        self._due: list[tuple[float, str, ShardPages]] = []
        self._unbegun = 0
        self._failing_since: dict[str, float] = {}
        self._is_shown = False
        self._answered_instant = time.monotonic()
        self._is_closed = False

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Begin to read."""
        with self._changed:
            self._begin_ready()
            self._unbegun = len(self._due)
        for number in range(_THREADS):
            thread = threading.Thread(target=self._work, name=f"kclrun-read-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Tell the threads to end: each does after its request, at once if it has none."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self, patience_s: float) -> None:
        """After `close`: wait for the threads, at most for `patience_s`."""
        until = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def events(self) -> Iterator[ReadEvent | None]:
        """The events in order; None if there was none for a moment. Ends when all shards have.

        Raises: Unavailable, AccessDenied, NotFound (the stream), InvalidRequest; with `gives_up`
        "each" also Throttled, ExpiredIterator, RecordError.
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
            while (pages := self._next_due()) is not None:
                self._visit(pages)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that shows
            self._publish(error)

    def _next_due(self) -> ShardPages | None:
        """Wait for the shard that is due first; None once the reading has ended."""
        with self._changed:
            while not self._is_closed and not self._lineage.is_over:
                wait_s = self._due[0][0] - time.monotonic() if self._due else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(wait_s)
            return None

    def _visit(self, pages: ShardPages) -> None:
        asked = Instant(time.monotonic())
        try:
            page = self._read(pages)
            if page is None:
                pause_s = self._miss(pages, asked)
            else:
                pages.expiry.page_came()
                pause_s = self._take_in(pages, page, asked)
                self._note_success(pages)
        except _FATAL:
            raise
        except (errors.ServiceError, errors.RecordError) as error:
            pause_s = pages.pause_after(error)
            self._note_failure(pages, error, asked)
        if pause_s is not None:
            self._schedule(pages, asked + pause_s)

    def _take_in(self, pages: ShardPages, page: FetchedPage, asked: Instant) -> float | None:
        """Publish the records of a page up to the end. The pause before the next page; None if
        there is none to read."""
        self._check_head(pages, page)
        cut, is_cut = self._end.cut(page)
        if cut.records:
            self._publish(Arrived(pages.shard_id, cut.records))
        is_lost = page.next_iterator is None and not is_cut
        if is_lost and self._has_ended(pages, page):
            return None
        # Where the iterator was lost, the shard was listed as open just now.
        is_past = self._end.is_past(page, asked) and (
            is_lost or self._was_open_at_end(pages.shard_id)
        )
        if is_cut or is_past:
            self._publish(Passed(pages.shard_id))
            self._finish(pages, children={}, listed=None)
            return None
        return self._end.pause_s(pages.pause_s(page), asked)

    def _miss(self, pages: ShardPages, asked: Instant) -> float | None:
        """The service does not find the shard; see `_take_in`. It has ended if it was trimmed."""
        listed = {shard.shard_id: shard for shard in self._admin.list_shards()}
        found = listed.get(pages.shard_id)
        if found is not None:
            self._known[pages.shard_id] = found
        elif (known := self._known.get(pages.shard_id)) is not None:
            pages.expiry.learn(known)
        if pages.expiry.listing_came(tuple(listed.values()), Instant(time.monotonic())):
            # The oldest shards may pass the retention between the listing and their first request.
            self._end_shard(pages, listed, is_trimmed=pages.is_begun or pages.was_waiting)
            return None
        state = "not listed" if found is None else "listed as open" if found.is_open else "listed"
        text = f"GetRecords: {pages.shard_id} is {state}, and it is not found"
        self._note_failure(pages, errors.NotFound(text), asked)
        return _NOTICED_S

    def _check_head(self, pages: ShardPages, page: FetchedPage) -> None:
        """Publish that records expired before this page. While the retention is not known, a later
        page shows it."""
        if pages.head.took(page):
            try:
                summary = self._admin.summary()
            except errors.ServiceError:
                return
            pages.head.know(summary.retention_hours * 3600.0)
        if text := pages.head.loss():
            self._publish(Expired(pages.shard_id, text))

    def _was_open_at_end(self, shard_id: str) -> bool:
        """Whether all children of a shard hold only records after the end.

        The first listing after the end decides it: a shard that is closed by then is read on to its
        own end, because its children may have records from before.
        """
        with self._end_lock:
            if self._closed_at_end is None:
                listed = self._admin.list_shards()
                self._closed_at_end = frozenset(
                    shard.shard_id for shard in listed if not shard.is_open
                )
            return shard_id not in self._closed_at_end

    def _read(self, pages: ShardPages) -> FetchedPage | None:
        """The next page; None if the shard does not exist: it is trimmed, or the stream deleted."""
        try:
            if not pages.is_begun:
                pages.begin()
                self._note_begun()
            page = pages.fetch()
        except errors.NotFound:
            return None
        with self._changed:
            self._answered_instant = time.monotonic()
        return page

    def _has_ended(self, pages: ShardPages, page: FetchedPage) -> bool:
        """Whether the shard ends here. The service may only have lost its position [D3]."""
        if page.children:
            self._learn(page.children)
            children = {child.shard_id: child.parents for child in page.children}
            self._publish(Ended(pages.shard_id, tuple(sorted(children))))
            self._finish(pages, children=children, listed=None)
            return True
        listed = {shard.shard_id: shard for shard in self._admin.list_shards()}
        shard = listed.get(pages.shard_id)
        if shard is not None and shard.is_open:
            return False
        self._end_shard(pages, listed, is_trimmed=False)
        return True

    def _end_shard(
        self, pages: ShardPages, listed: Mapping[str, Shard], *, is_trimmed: bool
    ) -> None:
        """The shard is over; its children are in this listing."""
        children = {
            shard.shard_id: shard.parents
            for shard in listed.values()
            if pages.shard_id in shard.parents
        }
        if not pages.is_begun:
            self._note_begun()
        self._publish(Ended(pages.shard_id, tuple(sorted(children)), is_trimmed))
        self._finish(pages, children=children, listed=listed)

    def _learn(self, children: Iterable[ChildShard]) -> None:
        """A listing that lags does not show them: then they are too new for it, and not trimmed."""
        for child in children:
            first, second, *_ = (*child.parents, None, None)
            self._known[child.shard_id] = Shard(
                child.shard_id, child.hash_range, "0", None, first, second
            )

    def _finish(
        self,
        pages: ShardPages,
        *,
        children: Mapping[str, Sequence[str]],
        listed: Collection[str] | None,
    ) -> None:
        """Read the shard no more, and begin the shards that waited for it alone."""
        with self._changed:
            self._failing_since.pop(pages.shard_id, None)
            if self._follows:
                self._lineage.add(children)
            self._lineage.end(pages.shard_id)
            if listed is not None:
                self._lineage.trim(listed)
            self._begin_ready(was_waiting=True)
            self._changed.notify_all()

    def _begin_ready(self, *, was_waiting: bool = False) -> None:
        """Make the shards due that wait for no parent any more. Call it under the lock."""
        beginning = StartPoint(IteratorType.TRIM_HORIZON)
        for shard_id in self._lineage.may_begin():
            known = self._starts.get(shard_id)
            start = known.start if known else beginning
            pages = ShardPages(
                shard_id,
                start,
                self._reader,
                was_waiting=was_waiting,
                may_be_listed=self._may_be_listed,
            )
            heapq.heappush(self._due, (time.monotonic(), shard_id, pages))

    def _schedule(self, pages: ShardPages, due_instant: float) -> None:
        with self._changed:
            heapq.heappush(self._due, (due_instant, pages.shard_id, pages))
            self._changed.notify()

    def _publish(self, event: ReadEvent | BaseException) -> None:
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
            self._publish(EveryShardBegan())

    def _note_success(self, pages: ShardPages) -> None:
        with self._changed:
            self._failing_since.pop(pages.shard_id, None)
            is_healed = self._is_shown and not self._failing_since
            self._is_shown = self._is_shown and not is_healed
        if is_healed:
            self._publish(Trouble("Reading works again"))

    def _note_failure(
        self,
        pages: ShardPages,
        error: errors.ServiceError | errors.RecordError,
        asked: float,
    ) -> None:
        with self._changed:
            now = time.monotonic()
            since = self._failing_since.setdefault(pages.shard_id, asked)
            is_news = not self._is_shown and now - since >= _NOTICED_S
            self._is_shown = self._is_shown or is_news
            if isinstance(error, _ANSWERS):
                self._answered_instant = now
            # Counted from the first failure: while a pager blocks the threads, they send nothing.
            silent_since = max(self._answered_instant, min(self._failing_since.values()))
            is_out = now - silent_since >= self._patience_s
            is_given_up = self._gives_up == "each" and now - since >= self._patience_s
        if is_given_up:
            raise _given_up(pages.shard_id, error, self._patience_s) from None
        if is_out:
            raise errors.Unavailable(
                f"nothing was answered for {self._patience_s:g} s (aws.start_timeout)\n"
                f"The last attempt: {error}"
            )
        if is_news:
            self._publish(Trouble(f"Reading {pages.shard_id} fails and is tried again: {error}"))


def _given_up(
    shard_id: str, error: errors.ServiceError | errors.RecordError, patience_s: float
) -> errors.KclrunError:
    text = f"{shard_id} could not be read for {patience_s:g} s\nThe last attempt: {error}"
    return error.reworded(text) if isinstance(error, errors.ServiceError) else type(error)(text)
