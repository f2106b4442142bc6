"""Reads one range in one thread: sends the requests of its cursor, paced, and repeats failed ones.

It decides nothing about records; `range_cursor.py` does. Temporary errors are waited out, with one
log message if they last. Other errors are raised at once, with the shard and the stream.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kclrun.errors import (
    AccessDenied,
    ExpiredIterator,
    InvalidRequest,
    NotFound,
    ServiceError,
    Throttled,
    Unavailable,
)
from kclrun.model.record import Record, StartPoint
from kclrun.model.time import Instant, WallTime, backoff_s
from kclrun.ports import ShardReader, StreamAdmin
from kclrun.spark.executor.range_cursor import AskRetention, Fetch, RangeCursor, ReadPace, Request
from kclrun.spark.offsets import ShardRange
from kclrun.spark.options import SourceSettings
from kclrun.spark.stream_set import summary_of

# Pages on their way from the threads that read shards to the thread that takes them.
#
# This part does not know the content of a page or how it is read. Each shard has at most one page
# on its way, in order; all pages together stay within a bound of bytes; closing wakes all threads.
Page = TypeVar("Page")

# Bytes that a task holds beside the page in work: little for a Python worker, and enough to have
# several shards' largest answers (10 MiB of data) under way.
BYTES_MAX: Final = 64 * 2**20
_PAGE_BYTES_MAX: Final = 10 * 2**20
# A page is counted before it arrives, with the size of the largest so far; the first with this.
_FIRST_PAGE_BYTES: Final = 2**20


class Closed(Exception):
    """The pages are not wanted any more."""


class ReadAhead(Generic[Page]):
    """A bounded queue of pages from `readers` threads to one taker.

    The bound is exceeded at most by the bytes that the first pages have above 1 MiB each: the size
    of a page is unknown before the first one has arrived.
    """

    def __init__(self, readers: int) -> None:
        self._changed = threading.Condition()
        self._readers = readers
        self._held_bytes: dict[str, int] = {}
        self._waiting: deque[tuple[str, Page]] = deque()
        self._largest_bytes = _FIRST_PAGE_BYTES
        self._error: BaseException | None = None
        self._is_closed = False

    def admit(self, shard_id: str) -> None:
        """Wait until the shard's next page may be fetched; counts it. Raises: Closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_room(shard_id))
            if self._is_closed:
                raise Closed
            self._held_bytes[shard_id] = self._largest_bytes

    def put(self, shard_id: str, page: Page, size_bytes: int) -> None:
        """Queue a page that was admitted."""
        with self._changed:
            self._held_bytes[shard_id] = size_bytes
            self._largest_bytes = min(max(self._largest_bytes, size_bytes), _PAGE_BYTES_MAX)
            self._waiting.append((shard_id, page))
            self._changed.notify_all()

    def leave(self, error: BaseException | None = None) -> None:
        """A reading thread has finished, or failed with an error that the taker shall raise."""
        with self._changed:
            self._readers -= 1
            self._error = self._error or error
            self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait for some time. Raises: Closed, as soon as the queue is closed."""
        with self._changed:
            if self._changed.wait_for(lambda: self._is_closed, seconds):
                raise Closed

    def pages(self) -> Iterator[Page]:
        """The pages as they come, until all readers have left. Raises: the error of a reader."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._waiting or self._error is not None or self._readers == 0
                )
                if self._error is not None:
                    raise self._error
                if not self._waiting:
                    return
                shard_id, page = self._waiting.popleft()
                del self._held_bytes[shard_id]
                self._changed.notify_all()
            yield page

    def close(self) -> None:
        """The taker takes no more pages: wakes every waiting reader."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _has_room(self, shard_id: str) -> bool:
        if shard_id in self._held_bytes:
            return False
        # An empty queue always has room: the largest page is counted as 10 MiB at most.
        return sum(self._held_bytes.values()) + self._largest_bytes <= BYTES_MAX


_log = logging.getLogger("kclrun.spark.executor.reading")

# An outage is logged once it has lasted so long; shorter ones are normal.
_SAID_AFTER_S: Final = 30.0
# So is waiting for records: a gap of a day is 240 empty pages, which take a minute and a half.
_AWAITED_S_MAX: Final = 120.0
# GetRecords allows five calls a second: the shortest pause after a throttled call.
_RETRY_BASE_S: Final = 0.1


@dataclass(frozen=True)
class Clocks:
    """The time and random sources of a reader. `sleep` None really waits, and is interruptible."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    chance: Callable[[], float] = random.random
    sleep: Callable[[float], None] | None = None


@dataclass(frozen=True)
class ReadingFrom:
    """The stream that a task reads, and how."""

    reader: ShardReader
    admin: StreamAdmin
    settings: SourceSettings
    clocks: Clocks


class ShardReading:
    """Performs one range. `pause` waits some seconds, or raises once the pages are not wanted."""

    def __init__(
        self, wanted: ShardRange, source: ReadingFrom, pause: Callable[[float], None]
    ) -> None:
        clocks, settings = source.clocks, source.settings
        self._wanted = wanted
        self._reader = source.reader
        self._admin = source.admin
        self._settings = settings
        self._clocks = clocks
        self._pause = pause
        self._stream, self._shard_id = settings.reached.named(wanted.shard_id)
        self._cursor = RangeCursor(
            wanted,
            stream=self._stream,
            tolerates_loss=not settings.fails_on_data_loss,
            token_now=WallTime(clocks.wall()),
        )
        self._pace = ReadPace(settings.reads_per_second_max, self._now())
        self._failures = 0
        self._failing_since = self._now()
        self._is_said = False
        self._asked_at = self._now()
        self._is_awaited = False

    @property
    def is_done(self) -> bool:
        """Whether the range's end was reached."""
        return self._cursor.request() is None

    def next_records(self) -> Sequence[Record]:
        """The next records of the range; none only once it is done.

        Raises: DataLoss, AccessDenied, InvalidRequest; Throttled and Unavailable once
        `retry_attempts` in a row have failed.
        """
        self._asked_at = self._now()
        while (request := self._cursor.request()) is not None:
            try:
                records = self._perform(request)
            except ServiceError as error:
                self._recover(error, request)
                records = ()
            else:
                if isinstance(request, Fetch):
                    self._failures = 0
                    self._say_wait(records)
            self._say_losses()
            if records:
                return records
        return ()

    def _perform(self, request: Request) -> Sequence[Record]:
        match request:
            case StartPoint(kind, sequence_number, timestamp):
                self._cursor.opened(
                    self._reader.iterator(
                        self._wanted.shard_id,
                        kind,
                        sequence_number=sequence_number,
                        timestamp=timestamp,
                    )
                )
                return ()
            case Fetch(iterator, limit):
                # Pause also for zero seconds: `pause` raises Closed when reading must stop.
                self._pause(self._pace.delay_s(self._now()))
                return self._cursor.take(self._reader.fetch(iterator, limit), self._now())
            case AskRetention():
                summary = summary_of(self._admin, self._wanted.shard_id)
                retention_hours = summary.retention_hours
                return self._cursor.judge(retention_hours, WallTime(self._clocks.wall()))

    def _recover(self, error: ServiceError, request: Request) -> None:
        """Prepare for another attempt. Raises: errors that another attempt would not mend."""
        is_refused = isinstance(error, ExpiredIterator | NotFound | InvalidRequest)
        if is_refused and self._cursor.is_hinted:
            self._cursor.reopen()
            return
        if isinstance(error, NotFound) and not isinstance(request, AskRetention):
            self._cursor.missing(str(error))
            return
        if not isinstance(error, ExpiredIterator | Throttled | Unavailable):
            raise self._explained(error) from error
        if isinstance(error, ExpiredIterator):
            self._cursor.reopen()
        self._wait_after(error)

    def _wait_after(self, error: ServiceError) -> None:
        now = self._now()
        if not self._failures:
            self._failing_since, self._is_said = now, False
        self._failures += 1
        attempts = self._settings.retry_attempts
        if attempts is not None and self._failures >= attempts:
            raise self._explained(error) from error
        if now - self._failing_since >= _SAID_AFTER_S and not self._is_said:
            self._is_said = True
            _log.warning(
                "%s of stream %s cannot be read for %.0f s now, still trying: %s",
                self._shard_id,
                self._stream,
                now - self._failing_since,
                error,
            )
        max_s = self._settings.retry_backoff_max_s
        self._pause(
            backoff_s(self._failures, self._clocks.chance(), base_s=_RETRY_BASE_S, max_s=max_s)
        )

    def _say_wait(self, records: Sequence[Record]) -> None:
        """Log once that no record comes for long, although the driver has seen the next one."""
        waited_s = self._now() - self._asked_at
        if not records and waited_s >= _AWAITED_S_MAX and not self._is_awaited:
            self._is_awaited = True
            _log.warning(
                "%s of stream %s has given no record for %.0f s, still waiting for %s",
                self._shard_id,
                self._stream,
                waited_s,
                self._wanted.end,
            )

    def _explained(self, error: ServiceError) -> ServiceError:
        """An error of the same class, with the shard, the stream and advice added."""
        text = f"{self._shard_id} of stream {self._stream}: {error}"
        if isinstance(error, AccessDenied):
            text += (
                "\n  Each executor uses the AWS credentials of its own host: its role needs"
                " kinesis:GetShardIterator, kinesis:GetRecords and kinesis:DescribeStreamSummary"
            )
        elif isinstance(error, InvalidRequest):
            text += (
                f"\n  The range is {self._wanted.begin} to {self._wanted.end}: a stream that was"
                " deleted and created again needs a new checkpoint location"
            )
        return type(error)(text, operation=error.operation, code=error.code)

    def _say_losses(self) -> None:
        while self._cursor.notices:
            _log.warning("%s", self._cursor.notices.pop(0))

    def _now(self) -> Instant:
        return Instant(self._clocks.monotonic())
