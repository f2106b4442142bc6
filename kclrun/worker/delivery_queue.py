"""The queue between the threads: pages fetched ahead, the permit, and calls of user code.

The fetch thread puts pages on it, the lease thread the commands of the core. The main thread takes
its next task, as `calling/delivery.py` decides. The queue is bounded in bytes and records [I12].
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Final

import msgspec

from kclrun.calling.delivery import (
    Call,
    ConfirmEnd,
    ConfirmStop,
    Delivery,
    Repetition,
    StartBatch,
)
from kclrun.errors import LeaseLost, StaleCheckpoint
from kclrun.lease.commands import AllowDelivery, AnswerCheckpoint, CheckpointAnswer
from kclrun.lease.events import CheckpointRequested, Event
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import ChildShard
from kclrun.model.time import Instant, WallTime
from kclrun.outputs.destination_waits import DestinationView, DestinationWaits
from kclrun.processor import Checkpointer


class Inbox:
    """Events for the lease thread. Any thread posts; the lease thread takes. Order is kept.

    Bounded by the threads that post: user code and the fetch thread wait for the queue, so at most
    a few events for each batch are under way.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Closed with the last reference, which a thread of user code may hold: in a shared process
        # the number of the descriptor is soon that of another file.
        self.close = weakref.finalize(self, os.close, self._wake_fd)

    def fileno(self) -> int:
        """For a selector: readable once an event was posted."""
        return self._wake_fd

    def post(self, event: Event) -> None:
        self._events.append(event)
        os.eventfd_write(self._wake_fd, 1)

    def take(self) -> list[Event]:
        """All events posted so far. It clears the wake-up first, so that no event is missed."""
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return []
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events


# How often a waiting call checks whether the process is ending meanwhile.
LOOK_S: Final = 0.5


class CheckpointCalls:
    """Checkpoint requests of user code, by number, from any of its threads.

    `waits` learns that a call waits for the outputs. `ask` posts to the lease thread. `cover` is
    called before it, so that rows emitted until now become part of the checkpoint. `is_over`
    returns True once no answer can come any more.

    `given` limits what a `checkpoint()` without a position covers: to the last record of a call
    that gets only a part of its batch, or to the last processed record once a batch was left
    undone. `before` is called first, in a call that gets a part of a batch; user code gets its
    errors. `covers_rows` is cleared for `shard_ended`, which is called again until SHARD_END is on
    the row: what it emits belongs to that checkpoint, and not to the one that it asks for.
    """

    def __init__(
        self,
        ask: Callable[[CheckpointRequested], None],
        cover: Callable[[ExtendedSequenceNumber | None], None],
        is_over: Callable[[], bool],
        waits: DestinationWaits | None = None,
    ) -> None:
        self.checkpointer = Checkpointer(self._checkpoint)
        self.durable: ExtendedSequenceNumber | None = None
        self.given: ExtendedSequenceNumber | None = None
        self.before: Callable[[], None] | None = None
        self.covers_rows = True
        self._ask = ask
        self._cover = cover
        self._is_over = is_over
        self._waits = waits
        self._numbers = itertools.count(1)
        self._answered = threading.Condition()
        self._answers: dict[int, AnswerCheckpoint] = {}
        self._waiting: set[int] = set()

    def answer(self, answer: AnswerCheckpoint) -> None:
        """Called by the lease thread."""
        with self._answered:
            if answer.request in self._waiting:
                self._answers[answer.request] = answer
                self._answered.notify_all()

    def note_durable(self, position: ExtendedSequenceNumber) -> None:
        """A checkpoint at `position` is on the row; records up to it are not delivered again."""
        self.durable = position

    def _checkpoint(self, position: ExtendedSequenceNumber | None) -> None:
        if self.before is not None:
            self.before()
        position = position or self.given
        if self.covers_rows:
            self._cover(position)
        with self._answered:
            request = next(self._numbers)
            self._waiting.add(request)
        with nullcontext() if self._waits is None else self._waits.of_checkpoint():
            self._ask(CheckpointRequested(request, position))
            answer = self._wait(request)
        if answer is None or answer.answer is CheckpointAnswer.LOST:
            detail = answer.detail if answer is not None else "the process ends"
            raise LeaseLost(f"not checkpointed: {detail}")
        if answer.answer is CheckpointAnswer.STALE:
            raise StaleCheckpoint(answer.detail)

    def _wait(self, request: int) -> AnswerCheckpoint | None:
        with self._answered:
            while request not in self._answers and not self._is_over():
                self._answered.wait(LOOK_S)
            self._waiting.discard(request)
            return self._answers.pop(request, None)


# The Java KCL stops fetching ahead at 30,000 records (`maxRecordsCount`).
RECORDS_AHEAD_MAX: Final = 30_000


# The cost of a user record beside its payload, if it shares its sequence number with others of its
# aggregate: 155 bytes measured for empty records, and the text of a partition key. Without this
# value, 1.7 million empty records would count as 0 bytes.
RECORD_OVERHEAD_BYTES: Final = 200


class QueueLimits(msgspec.Struct, frozen=True):
    """`buffer_bytes` is the limit ahead, for payload and record overhead (one page may exceed it);
    `batch_max` is the most records of a batch."""

    buffer_bytes: int
    batch_max: int


class Page(msgspec.Struct, frozen=True, gc=False):
    """User records of one answer, or of a part of it. `last` is the position at which the page
    ends, also if it has no records."""

    records: Sequence[Record]
    last: ExtendedSequenceNumber
    payload_bytes: int
    millis_behind_latest: int | None

    @property
    def bytes_held(self) -> int:
        return self.payload_bytes + RECORD_OVERHEAD_BYTES * len(self.records)


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Records for one call of user code; empty if a page held no user record."""

    records: Sequence[Record]
    last: ExtendedSequenceNumber
    payload_bytes: int
    millis_behind_latest: int | None


class Exhausted(msgspec.Struct, frozen=True):
    """All pages were taken, and the shard ends; `is_expired`: it was trimmed."""

    children: tuple[ChildShard, ...]
    is_expired: bool = False


class QueueClosed(msgspec.Struct, frozen=True):
    """The process ends."""


class QueueView(msgspec.Struct, frozen=True):
    """The queue as the status slot shows it.

    The totals count batches for which user code has returned: a batch that raised, or has not
    returned, is not included. `unprocessed_since` is the arrival time of the oldest record here
    that is not processed; None without such a record or without its arrival time.
    """

    is_empty: bool
    busy_since: Instant
    records_total: int
    bytes_total: int
    batches_total: int
    processing_s_total: float
    first_delivered: ExtendedSequenceNumber | None
    last_batch_instant: Instant
    unprocessed_since: WallTime | None = None
    destinations: DestinationView = DestinationView()


class FireTimers(msgspec.Struct, frozen=True):
    """Timers are due, before the record at `upcoming` if one waits."""

    upcoming: ExtendedSequenceNumber | None


# From now, and the position of the next record (None if none waits), to the seconds until timers
# are due; None if no timer is pending.
TimersDue = Callable[[Instant, ExtendedSequenceNumber | None], float | None]
Task = Batch | Call | Exhausted | ConfirmStop | QueueClosed | FireTimers


class Turn:
    """Lets one lease of a shared process run user code at a time, in the order of their requests.

    The queues of the process share its lock. So a lease gets the turn and decides what to start
    under one lock: no batch starts past its fence because of the wait for the turn [P7].
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        # The first queue has the turn.
        self._line: deque[threading.Condition] = deque()

    def ask(self, queue: threading.Condition) -> bool:
        """Whether this queue has the turn; else it waits in line, and is notified."""
        if queue not in self._line:
            self._line.append(queue)
        return self._line[0] is queue

    def leave(self, queue: threading.Condition) -> None:
        """Give up the turn, or the wait for it."""
        if queue not in self._line:
            return
        had_turn = self._line[0] is queue
        self._line.remove(queue)
        if had_turn and self._line:
            self._line[0].notify_all()


class DeliveryQueue:
    """The pages and the decisions about them, under one lock with one condition. `now` is the clock
    of the fence.

    So the main thread decides on a consistent state, and once delivery is stopped no batch starts
    [P7, P17]. In a shared process nothing starts without the `turn`. The wait for the turn does not
    count as time of user code.
    """

    def __init__(
        self, limits: QueueLimits, now: Callable[[], Instant], turn: Turn | None = None
    ) -> None:
        self._buffer_bytes = limits.buffer_bytes
        self._delivery = Delivery(limits.batch_max)
        self._records_max = max(RECORDS_AHEAD_MAX, limits.batch_max)
        self._now = now
        self.destinations = DestinationWaits(now)
        self._turn = turn
        self._changed = threading.Condition(turn.lock if turn is not None else None)
        self._pages: deque[Page] = deque()
        self._offset = 0
        self._cuts: deque[ExtendedSequenceNumber] = deque()
        self._bytes_ahead = 0
        self._records_ahead = 0
        self._exhausted: Exhausted | None = None
        # An event, so that a pause of the fetch thread ends with it, and with no other change.
        self._closed = threading.Event()
        self._busy_since = Instant(0.0)
        self._under_way: deque[Batch] = deque()
        self._on_change: Callable[[], None] | None = None
        self._timers_due: TimersDue | None = None
        self._records_total = 0
        self._bytes_total = 0
        self._batches_total = 0
        self._processing_s_total = 0.0
        self._first_delivered: ExtendedSequenceNumber | None = None
        self._last_batch_instant = Instant(0.0)

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def notify_of_changes(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` when a page comes, and when delivery is allowed, held or stopped: the
        calls of single records do not wait on this queue. `on_change` must not wait."""
        self._on_change = on_change

    def look_at_timers(self, due: TimersDue) -> None:
        """Call `due` before each batch, and while no batch waits."""
        self._timers_due = due

    @property
    def records_ahead_max(self) -> int:
        """With so many records the queue is full: a larger page is put in parts."""
        return self._records_max

    def put(self, page: Page) -> bool:
        """Put a page on the queue; wait while it is full. False once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or not self._is_full())
            if self.is_closed:
                return False
            if not page.records and self._pages and not self._pages[-1].records:
                self._pages.pop()  # pages without records fill no queue: the last one is enough
            self._pages.append(page)
            self._bytes_ahead += page.bytes_held
            self._records_ahead += len(page.records)
            self._notify()
            return True

    def finish(self, children: tuple[ChildShard, ...], *, is_expired: bool = False) -> None:
        """No further page will come: the shard ends, or was trimmed."""
        with self._changed:
            self._exhausted = Exhausted(children, is_expired)
            self._delivery.end()
            self._changed.notify_all()

    def pause(self, pause_s: float) -> bool:
        """Wait, unless the queue closes meanwhile; False once it is closed."""
        return not self._closed.wait(pause_s)

    def allow_delivery(self, permit: AllowDelivery) -> None:
        with self._changed:
            self._delivery.allow(permit)
            self._notify()

    def stop_delivery(self) -> None:
        """No batch starts from here on; the main thread gets ConfirmStop once it is idle."""
        with self._changed:
            self._delivery.stop()
            self._notify()

    def hold(self) -> None:
        """An output is full: no batch starts until `release`."""
        with self._changed:
            self._delivery.hold()
            self._notify()

    def release(self) -> None:
        """The output has room again."""
        with self._changed:
            self._delivery.release()
            self._notify()

    def cut_at(self, positions: Iterable[ExtendedSequenceNumber]) -> None:
        """A batch ends at each of these positions, which ascend. An output has its rows up to there
        already, and drops the rows of whole batches [K12]."""
        with self._changed:
            self._cuts.extend(positions)

    def halt(self) -> None:
        with self._changed:
            self._delivery.halt()
            self._notify()

    def call(self, call: Call) -> None:
        """Request a call of user code; the main thread is idle or about to be."""
        with self._changed:
            self._delivery.call(call)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed.set()
            self._notify()

    def view(self) -> QueueView:
        with self._changed:
            return QueueView(
                is_empty=not self._pages,
                busy_since=self._busy_since,
                records_total=self._records_total,
                bytes_total=self._bytes_total,
                batches_total=self._batches_total,
                processing_s_total=self._processing_s_total,
                first_delivered=self._first_delivered,
                last_batch_instant=self._last_batch_instant,
                unprocessed_since=self._unprocessed_since(),
                destinations=self.destinations.view(),
            )

    def note_returned(self, batch: Batch) -> None:
        """User code has returned for this batch: from now on its records count as processed."""
        with self._changed:
            if self._under_way and self._under_way[0] is batch:
                self._under_way.popleft()
            self._records_total += len(batch.records)
            self._bytes_total += batch.payload_bytes
            self._batches_total += bool(batch.records)

    def next_task(self) -> Task:
        """Wait for the next task. The caller confirms that no user code runs."""
        with self._changed:
            now = self._now()
            self._rest(now)
            while True:
                task = self._ready_task(now)
                if task is not None:
                    return task
                # No need to wake at the fence: nothing starts because a fence passes.
                self._changed.wait(self._until_timers_s(now))
                now = self._now()

    # For single records: the calls under way are a batch, and `busy` gets the start of the oldest.

    def more(self) -> Batch | None:
        """A batch that joins those under way. None while a timer waits for their end; always None
        in a shared process, where another lease may wait for its turn."""
        with self._changed:
            now = self._now()
            if self.is_closed or self._turn is not None or not self._pages:
                return None
            if self._until_timers_s(now) == 0.0:
                return None
            start = self._delivery.next_batch(self._waiting(), now)
            return None if start is None else self._take_batch(start.records)

    def is_ending(self) -> bool:
        """As `Delivery.is_ending`; True also once the queue is closed."""
        return self.is_closed or self._delivery.is_ending

    def may_go_on(self, fence: Instant) -> bool:
        """Whether a single record of the batches under way may start: before the fence, also during
        a stop, and with the turn [P7]."""
        with self._changed:
            if self.is_closed or self._now() >= fence:
                return False
            return self._turn is None or self._turn.ask(self._changed)

    @property
    def is_shared(self) -> bool:
        """Whether other leases run in the same process."""
        return self._turn is not None

    def busy(self, since: Instant) -> None:
        """The oldest call of a single record has run since this instant; 0 if no call runs: then
        another lease of the process may have the turn."""
        with self._changed:
            now = self._now()
            if not since:
                self._leave_line()
            if self._busy_since:
                self._last_batch_instant = now
                self._processing_s_total += (since or now) - self._busy_since
            self._busy_since = since

    def may_try_again(self, pause_s: float, *, is_batch: bool) -> bool:
        """Wait before a call of user code is repeated; False if delivery was stopped meanwhile."""

        def is_called_off() -> bool:
            return self._repetition(is_batch=is_batch) is Repetition.NEVER

        def is_decided() -> bool:
            match self._repetition(is_batch=is_batch):
                case Repetition.AFTER_RENEWAL:
                    self._leave_line()
                    return False
                case Repetition.NOW:
                    return self._turn is None or self._turn.ask(self._changed)
                case Repetition.NEVER:
                    return True

        with self._changed:
            self._rest(self._now())
            if not self._changed.wait_for(is_called_off, timeout=pause_s):
                self._changed.wait_for(is_decided)
            if is_called_off():
                self._leave_line()
                return False
            self._busy_since = self._now()
            return True

    def _repetition(self, *, is_batch: bool) -> Repetition:
        if self.is_closed:
            return Repetition.NEVER
        return self._delivery.repetition(self._now(), is_batch=is_batch)

    def _ready_task(self, now: Instant) -> Task | None:
        if self.is_closed:
            self._leave_line()
            return QueueClosed()
        if self._turn is None:
            return self._next_start(now)
        if not self._turn.ask(self._changed):
            return None
        task = self._next_start(now)
        if not self._busy_since:
            self._leave_line()
        return task

    def _notify(self) -> None:
        self._changed.notify_all()
        if self._on_change is not None:
            self._on_change()

    def _leave_line(self) -> None:
        if self._turn is not None:
            self._turn.leave(self._changed)

    def _until_timers_s(self, now: Instant) -> float | None:
        """In how many seconds timers fire; None while they may not, or none is pending."""
        if self._timers_due is None or not self._delivery.may_fire(now):
            return None
        return self._timers_due(now, self._upcoming)

    @property
    def _upcoming(self) -> ExtendedSequenceNumber | None:
        has_record = self._pages and self._offset < len(self._pages[0].records)
        return self._pages[0].records[self._offset].position if has_record else None

    def _next_start(self, now: Instant) -> Task | None:
        if self._until_timers_s(now) == 0.0:
            self._busy_since = now
            return FireTimers(self._upcoming)
        waiting = self._waiting() if self._pages else None
        match self._delivery.next_start(waiting, now):
            case StartBatch(records):
                self._busy_since = now
                self._under_way.clear()
                return self._take_batch(records)
            case ConfirmEnd():
                return self._exhausted
            case None | ConfirmStop() as nothing:
                return nothing
            case call:
                self._busy_since = now
                return call

    def _waiting(self) -> int:
        """How many records of the first page the next batch may have."""
        page, start = self._pages[0], self._offset
        while self._cuts and start < len(page.records):
            if page.records[start].position <= self._cuts[0]:
                ends = bisect.bisect_right(
                    page.records, self._cuts[0], lo=start, key=lambda record: record.position
                )
                return ends - start
            self._cuts.popleft()
        return len(page.records) - start

    def _take_batch(self, size: int) -> Batch:
        page = self._pages[0]
        if not size:
            self._drop_page()
            return Batch((), page.last, 0, page.millis_behind_latest)
        batch = self._slice(page, size)
        self._under_way.append(batch)
        self._first_delivered = self._first_delivered or batch.records[0].position
        return batch

    def _slice(self, page: Page, size: int) -> Batch:
        """The next `size` records of the first page; the whole page without a copy."""
        start, end = self._offset, self._offset + size
        # A page may end behind its last record: a batch that ends at a cut does not include that
        # end.
        is_cut = bool(self._cuts) and self._cuts[0] < page.last
        if start == 0 and end == len(page.records) and not is_cut:
            self._drop_page()
            return Batch(page.records, page.last, page.payload_bytes, page.millis_behind_latest)
        records = page.records[start:end]
        self._offset = end
        is_rest = end == len(page.records) and not is_cut
        last = page.last if is_rest else records[-1].position
        if is_rest:
            self._drop_page()
        payload_bytes = sum(len(record.data) for record in records)
        return Batch(records, last, payload_bytes, page.millis_behind_latest)

    def _unprocessed_since(self) -> WallTime | None:
        if self._under_way:
            oldest = self._under_way[0].records[0]
        else:
            # Only the first page is delivered in parts; after a cut only its end may be left.
            starts = ((page, self._offset if page is self._pages[0] else 0) for page in self._pages)
            rest = next((page.records[at] for page, at in starts if at < len(page.records)), None)
            if rest is None:
                return None
            oldest = rest
        return WallTime(oldest.approximate_arrival_timestamp) or None

    def _drop_page(self) -> None:
        page = self._pages.popleft()
        self._offset = 0
        self._bytes_ahead -= page.bytes_held
        self._records_ahead -= len(page.records)
        self._changed.notify_all()

    def _rest(self, now: Instant) -> None:
        if self._busy_since:
            self._last_batch_instant = now
            self._processing_s_total += now - self._busy_since
            self._busy_since = Instant(0.0)
            self._leave_line()

    def _is_full(self) -> bool:
        return bool(self._pages) and (
            self._bytes_ahead >= self._buffer_bytes or self._records_ahead >= self._records_max
        )
