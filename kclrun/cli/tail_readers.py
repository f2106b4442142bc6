"""The threads of a tail: many shards, few readers, one queue that holds them back.

Each shard is with one reader at most and its page is in the queue before it is due again, so
records of a shard arrive in their order, and a parent's last before a child's first. Memory: a
page a reader and two in the queue, each 10 MiB at the worst.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

import msgspec

from kclrun.cli.tail_lineage import TailLineage
from kclrun.cli.tail_shard import ShardTail
from kclrun.cli.tail_start import ShardStart
from kclrun.errors import (
    AccessDenied,
    ExpiredIterator,
    InvalidRequest,
    NotFound,
    RecordError,
    ServiceError,
    Throttled,
    Unavailable,
)
from kclrun.model.reading import IteratorType, StartPoint
from kclrun.model.record import Record
from kclrun.model.shard import Shard
from kclrun.ports import FetchedPage, ShardReader, StreamAdmin

__all__ = ["AllBegun", "Arrived", "Ended", "TailEvent", "TailReaders", "Trouble"]

# A request takes some 10 ms: eight threads visit 800 idle shards each second.
_THREADS: Final = 8
_PAGES_WAITING_MAX: Final = 2
# How soon a thread that waits notices that the tail is over.
_NOTICE_S: Final = 0.2
# A dropped connection is repaired by the next try; who fails for longer is told of.
_NOTICED_S: Final = 1.0
# Repeating will not help. A shard that is not found was asked for in the listing: NotFound here is
# the stream.
_FATAL: Final = (AccessDenied, InvalidRequest, NotFound)
# The service answered, and refused for now.
_ANSWERS: Final = (ExpiredIterator, Throttled)


class AllBegun(msgspec.Struct, frozen=True):
    """Every shard of the start has its iterator: what is put from now on will be shown."""


class Arrived(msgspec.Struct, frozen=True):
    """Records of one shard as they were fetched, aggregates not yet opened."""

    shard_id: str
    records: Sequence[Record]


class Ended(msgspec.Struct, frozen=True):
    """A shard was read to its end; `children` go on where it ended."""

    shard_id: str
    children: tuple[str, ...]


class Trouble(msgspec.Struct, frozen=True):
    """Reading fails and is tried again (or works again): a line for standard error."""

    text: str


TailEvent = AllBegun | Arrived | Ended | Trouble


class TailReaders:
    """Reads shards until they are over, or the `with` block ends.

    `follows`: children of an ended shard are read, too. `patience_s` is how long nothing at all may
    be answered before `events` raises Unavailable.
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
        # All below is under the condition's lock.
        self._lineage = TailLineage({id_: start.parents for id_, start in starts.items()})
        self._due: list[tuple[float, str, ShardTail]] = []
        self._unbegun = 0
        self._failing_since: dict[str, float] = {}
        self._is_told = False
        self._answered_instant = time.monotonic()
        self._is_closed = False

    def __enter__(self) -> Self:
        with self._changed:
            self._begin_ready()
            self._unbegun = len(self._due)
        for number in range(_THREADS):
            threading.Thread(target=self._work, name=f"tail-{number}", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def events(self) -> Iterator[TailEvent | None]:
        """What happens, in order; None when nothing did for a moment. Ends when all shards have.

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

    # A reader's thread

    def _work(self) -> None:
        try:
            while (tail := self._next_due()) is not None:
                self._visit(tail)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that shows
            self._tell(error)

    def _next_due(self) -> ShardTail | None:
        """Wait for the shard that is due first; None once the tail is over."""
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
                self._tell(Arrived(tail.shard_id, page.records))
            if (page is None or page.next_iterator is None) and self._has_ended(tail, page):
                return
            pause_s = _NOTICED_S if page is None else tail.pause_s(page)
        except _FATAL:
            raise
        except (ServiceError, RecordError) as error:
            pause_s = tail.pause_after(error)
            self._note_failure(tail, error, asked)
        self._schedule(tail, asked + pause_s)

    def _read(self, tail: ShardTail) -> FetchedPage | None:
        """The next page; None where there is no such shard: it is trimmed, or the stream gone."""
        try:
            if not tail.is_begun:
                tail.begin()
                self._note_begun()
            page = tail.fetch()
        except NotFound:
            return None
        self._note_answer(tail)
        return page

    def _has_ended(self, tail: ShardTail, page: FetchedPage | None) -> bool:
        """The shard ends here, unless the service only lost its place [D3]."""
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
        self._tell(Ended(tail.shard_id, tuple(sorted(children))))
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
        """Under the lock: shards that need not wait for a parent any more are due now."""
        beginning = StartPoint(IteratorType.TRIM_HORIZON)
        for shard_id in self._lineage.may_begin():
            known = self._starts.get(shard_id)
            tail = ShardTail(shard_id, known.start if known else beginning, self._reader)
            heapq.heappush(self._due, (time.monotonic(), shard_id, tail))

    def _schedule(self, tail: ShardTail, due_instant: float) -> None:
        with self._changed:
            heapq.heappush(self._due, (due_instant, tail.shard_id, tail))
            self._changed.notify()

    def _tell(self, event: TailEvent | BaseException) -> None:
        """Into the queue, waiting for room as long as anybody reads it."""
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
            self._tell(AllBegun())

    def _note_answer(self, tail: ShardTail) -> None:
        with self._changed:
            self._answered_instant = time.monotonic()
            self._failing_since.pop(tail.shard_id, None)
            is_healed = self._is_told and not self._failing_since
            self._is_told = self._is_told and not is_healed
        if is_healed:
            self._tell(Trouble("Reading works again"))

    def _note_failure(self, tail: ShardTail, error: Exception, asked: float) -> None:
        with self._changed:
            now = time.monotonic()
            since = self._failing_since.setdefault(tail.shard_id, asked)
            is_news = not self._is_told and now - since >= _NOTICED_S
            self._is_told = self._is_told or is_news
            if isinstance(error, _ANSWERS):
                self._answered_instant = now
            # Counted from the first failure: a reader that a pager held back has not asked.
            silent_since = max(self._answered_instant, min(self._failing_since.values()))
            is_out = now - silent_since >= self._patience_s
        if is_out:
            raise Unavailable(
                f"nothing was answered for {self._patience_s:g} s (aws.start_timeout)\n"
                f"The last attempt: {error}"
            )
        if is_news:
            self._tell(Trouble(f"Reading {tail.shard_id} fails and is tried again: {error}"))
