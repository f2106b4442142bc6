"""The fetch thread: keeps pages ahead of user code, through everything polling can meet.

What comes back goes to the pacing core, which says when to ask again; what it holds goes to the
desk. A failure is never an end: expired iterators are replaced, throttling and outages waited out
(`reference` D1-D6: the pitfalls of the Java KCL's fetcher, each a test).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from kclrun.codec.kpl import KplRange, drop_until, open_aggregates
from kclrun.consuming.pacing import Pacing
from kclrun.consuming.start_point import resumed_start
from kclrun.errors import (
    ExpiredIterator,
    InvalidRequest,
    RecordError,
    ServiceError,
    Throttled,
)
from kclrun.model.reading import StartPoint
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.stream_key import ONLY_STREAM, StreamKey, qualified_child
from kclrun.model.time import Instant
from kclrun.ports import FetchedPage, ShardReader, StreamAdmin
from kclrun.worker.desk import Desk, Page
from kclrun.worker.outage import Outage

__all__ = ["FetchPlan", "FetchThread", "FetchView"]

# GetRecords returns at most 10,000 records or 10 MiB, and that is what one asks for: a smaller
# limit only costs more of the five calls a second.
RECORDS_A_CALL: Final = 10_000

Answer = TypeVar("Answer")


class FetchPlan(msgspec.Struct, frozen=True):
    """Where and how to read: `checkpoint` is what was processed, `start` the first iterator.

    `stream` qualifies the children that the end of the shard names, where there are several.
    """

    shard_id: str
    start: StartPoint
    checkpoint: ExtendedSequenceNumber
    hash_range: HashRange | None = None
    kpl_range: KplRange = "keep"
    stream: StreamKey = ONLY_STREAM


class FetchView(msgspec.Struct, frozen=True):
    """What the status slot shows of the fetch thread. `asking_since_instant` is 0 between calls."""

    last_fetch_instant: Instant = Instant(0.0)
    fetched: ExtendedSequenceNumber | None = None
    millis_behind_latest: int | None = None
    at_tip: bool = False
    asking_since_instant: Instant = Instant(0.0)


class FetchThread(threading.Thread):
    """Reads one shard until it ends or the desk closes.

    `broke` is told of an error that is none of the service's: our bug. A lease that is renewed and
    not read would stall in silence.
    """

    def __init__(
        self,
        plan: FetchPlan,
        reader: ShardReader,
        admin: StreamAdmin,
        desk: Desk,
        pacing: Pacing,
        *,
        now: Callable[[], Instant],
        warn: Callable[[str], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        super().__init__(name="fetch", daemon=True)
        self.view = FetchView(fetched=plan.checkpoint)
        self._plan = plan
        self._reader = reader
        self._admin = admin
        self._desk = desk
        self._pacing = pacing
        self._now = now
        self._broke = broke
        self._outage = Outage("reading the shard", now, warn)
        self._iterator: str | None = None
        self._last_received: str | None = None
        self._is_above_checkpoint = False

    def run(self) -> None:
        try:
            self._read()
        except BaseException as error:  # noqa: BLE001 - the thread's edge: the process ends by it
            self._broke(error)

    def _read(self) -> None:
        asked = self._now()
        pause_s = 0.0
        while self._desk.pause(asked + pause_s - self._now()):
            asked = self._now()
            try:
                page = self._awaited(self._fetch)
                if not self._lay_down(page):
                    return
                if page.next_iterator is None and self._finish(page):
                    return
            except (ServiceError, RecordError) as error:
                pause_s = self._pause_after(error, asked)
            else:
                self._outage.end()
                pause_s = self._pacing.after_page(len(page.records), page.millis_behind_latest)

    def _awaited(self, ask: Callable[[], Answer]) -> Answer:
        """How long an answer is waited for is shown, for lease thread and manager to judge."""
        self.view = msgspec.structs.replace(self.view, asking_since_instant=self._now())
        try:
            return ask()
        finally:
            self.view = msgspec.structs.replace(self.view, asking_since_instant=Instant(0.0))

    def _fetch(self) -> FetchedPage:
        if self._iterator is None:
            start = resumed_start(self._last_received, self._plan.start)
            self._iterator = self._reader.iterator(
                self._plan.shard_id,
                start.kind,
                sequence_number=start.sequence_number,
                timestamp=start.timestamp,
            )
        page = self._reader.fetch(self._iterator, RECORDS_A_CALL)
        self._iterator = page.next_iterator
        return page

    def _lay_down(self, page: FetchedPage) -> bool:
        """Open the page and put it on the desk; False once the desk is closed."""
        fetched = self.view.fetched
        if page.records:
            self._last_received = page.records[-1].sequence_number
            laid = self._opened(page)
            if laid is not None:
                fetched = laid.last
                if not self._desk.put(laid):
                    return False
        self.view = FetchView(
            last_fetch_instant=self._now(),
            fetched=fetched,
            millis_behind_latest=page.millis_behind_latest,
            at_tip=not page.records and not page.millis_behind_latest,
        )
        return True

    def _opened(self, page: FetchedPage) -> Page | None:
        """The user records above the checkpoint; None for a page wholly at or below it."""
        records = open_aggregates(
            page.records, kpl_range=self._plan.kpl_range, hash_range=self._plan.hash_range
        )
        last_raw = ExtendedSequenceNumber(page.records[-1].sequence_number)
        if not self._is_above_checkpoint:
            records = drop_until(records, self._plan.checkpoint)
            self._is_above_checkpoint = bool(records) or last_raw > self._plan.checkpoint
        if not records and last_raw <= self._plan.checkpoint:
            return None
        # A page whose user records were all left out still moves the position on, or a shard full
        # of such pages would never be checkpointed.
        last = records[-1].position if records else last_raw
        return Page(records, last, _payload_bytes(records), page.millis_behind_latest)

    def _finish(self, page: FetchedPage) -> bool:
        """The shard ends here, unless the service only lost its place [D3]."""
        children = page.children
        if not children and not self._is_closed_shard():
            return False
        stream = self._plan.stream
        self._desk.finish(tuple(qualified_child(stream, child) for child in children))
        return True

    def _is_closed_shard(self) -> bool:
        """A null iterator without children: believe the listing, not the answer."""
        shards = {shard.shard_id: shard for shard in self._awaited(self._admin.list_shards)}
        shard = shards.get(self._plan.shard_id)
        return shard is not None and not shard.is_open

    def _pause_after(self, error: ServiceError | RecordError, asked: Instant) -> float:
        chance = random.random()
        if isinstance(error, ExpiredIterator):
            self._iterator = None
            return 0.0
        if isinstance(error, Throttled):
            # Sharing five reads a second with other applications is daily life, no outage.
            return self._pacing.after_throttle(chance)
        if isinstance(error, InvalidRequest):
            self._iterator = None
        self._outage.note(str(error), asked)
        return self._pacing.after_error(chance)


def _payload_bytes(records: list[Record]) -> int:
    return sum([len(record.data) for record in records])
