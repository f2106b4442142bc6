"""One range read by one thread: what its cursor asks for, sent, paced, and repeated if it fails.

Decides nothing about records: see `range_cursor.py`. Rule: whatever may pass is waited out, and
said once if it lasts; whatever will not pass is raised at once, with where it happened.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kclrun.errors import (
    AccessDenied,
    ExpiredIterator,
    InvalidRequest,
    NotFound,
    ServiceError,
    Throttled,
    Unavailable,
)
from kclrun.model.backoff import backoff_s
from kclrun.model.reading import StartPoint
from kclrun.model.record import Record
from kclrun.model.time import Instant, WallTime
from kclrun.ports import ShardReader, StreamAdmin
from kclrun.spark.executor.range_cursor import AskRetention, Fetch, RangeCursor, Request
from kclrun.spark.executor.read_pace import ReadPace
from kclrun.spark.ranges import ShardRange
from kclrun.spark.settings import SourceSettings

__all__ = ["Clocks", "ReadingFrom", "ShardReading"]

_log = logging.getLogger("kclrun.spark.executor.reading")

# An outage as long as this is said once; before, it is daily life.
_SAID_AFTER_S: Final = 30.0
# So is waiting for records: a gap of a day is 240 empty pages, a minute and a half of them.
_AWAITED_S_MAX: Final = 120.0
# GetRecords allows five calls a second: the shortest pause after a throttled one.
_RETRY_BASE_S: Final = 0.1


@dataclass(frozen=True)
class Clocks:
    """Time and chance as a reader sees them. `sleep` None really waits, and can be interrupted."""

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
    """Performs one range. `pause` waits some seconds, or raises where nobody wants pages more."""

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
        self._cursor = RangeCursor(
            wanted,
            stream=settings.reached.name,
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
                # Also for no time at all: it is here that a reader hears that it may stop.
                self._pause(self._pace.delay_s(self._now()))
                return self._cursor.take(self._reader.fetch(iterator, limit), self._now())
            case AskRetention():
                retention_hours = self._admin.summary().retention_hours
                return self._cursor.judge(retention_hours, WallTime(self._clocks.wall()))

    def _recover(self, error: ServiceError, request: Request) -> None:
        """Prepare for another attempt. Raises: what another attempt would not mend."""
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
                self._wanted.shard_id,
                self._settings.reached.name,
                now - self._failing_since,
                error,
            )
        max_s = self._settings.retry_backoff_max_s
        self._pause(
            backoff_s(self._failures, self._clocks.chance(), base_s=_RETRY_BASE_S, max_s=max_s)
        )

    def _say_wait(self, records: Sequence[Record]) -> None:
        """Say once that nothing comes for long: the driver has seen what is waited for."""
        waited_s = self._now() - self._asked_at
        if not records and waited_s >= _AWAITED_S_MAX and not self._is_awaited:
            self._is_awaited = True
            _log.warning(
                "%s of stream %s has given no record for %.0f s, still waiting for %s",
                self._wanted.shard_id,
                self._settings.reached.name,
                waited_s,
                self._wanted.end,
            )

    def _explained(self, error: ServiceError) -> ServiceError:
        """The same leaf, with where it happened and what may help."""
        text = f"{self._wanted.shard_id} of stream {self._settings.reached.name}: {error}"
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
