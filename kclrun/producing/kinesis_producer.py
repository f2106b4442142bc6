"""Writes records to a Kinesis stream: batched, in order per key, adaptive, without dropping any.

A shell over `pending_records.py`, which makes the decisions.
"""

from __future__ import annotations

import math
import queue
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kclrun.codec.record_sizes import RecordLimit
from kclrun.errors import InvariantViolation, ServiceError, Unavailable
from kclrun.model.record import PutEntry, PutResult
from kclrun.model.retries import PASSING_OF_WRITES
from kclrun.model.shard import Shard
from kclrun.ports import RecordPutter
from kclrun.producing.flow_control import Flow, ProducerMetrics, ProducerSettings
from kclrun.producing.pending_records import PendingRecords, Request

# Shards change over minutes; the limit of ListShards is shared with every consumer of the stream.
RELIST_PERIOD_S: Final = 30.0

_DEFAULTS: Final = ProducerSettings()
_Outcome = tuple[PutResult, ...] | Exception


class KinesisProducer:
    """Sends records to one stream. For one thread; not after a fork.

    It acts only when called: `add` sends records that are due and handles answers, `flush` sends
    everything. A record is in the stream for certain only when `flush` has returned. The threads do
    nothing but wait for PutRecords. Delivery is at least once: a request whose outcome is unknown
    is sent again.

    `shards`: the open shards of the stream; a stale list only makes the flow control less precise.
    `relist` lists the shards again. It is called when an answer names a shard that is not in the
    list, at most every `RELIST_PERIOD_S`; its ServiceErrors are waited out. `limit` is of one
    record, in place of the one in `settings`. `flow` carries the
    state of the flow control from one producer of this process to the next. `clock` is monotonic;
    `wait` sleeps if no answer can come; `chance` is in [0, 1).

    Once it has raised a ServiceError it raises the same again, until `resume`: it is not certain
    that the records not flushed are in the stream.
    """

    def __init__(
        self,
        putter: RecordPutter,
        shards: Sequence[Shard],
        settings: ProducerSettings = _DEFAULTS,
        *,
        flow: Flow | None = None,
        relist: Callable[[], Sequence[Shard]] | None = None,
        limit: RecordLimit | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Raises: SettingsError if no shard is open."""
        self._putter = putter
        self._pending = PendingRecords(shards, settings, flow or Flow())
        self._concurrency = settings.concurrency
        self._relist = relist
        self._limit = limit
        self._clock = clock
        self._wait = wait
        self._chance = chance
        self._listed_at = -math.inf
        self._threads: ThreadPoolExecutor | None = None
        self._answers: queue.SimpleQueue[tuple[Request, _Outcome]] = queue.SimpleQueue()
        self._under_way = 0
        self._failure: Exception | None = None
        self._is_usable = True

    @property
    def waiting_records(self) -> int:
        """Records that are not acknowledged."""
        return self._pending.waiting_records

    @property
    def waiting_bytes(self) -> int:
        """The bytes of `waiting_records`."""
        return self._pending.waiting_bytes

    def add(self, entry: PutEntry) -> None:
        """Accept one record; blocks while the buffer is full.

        Raises: LimitExceeded for a record that the service never accepts (no other record is lost
        by it); Throttled or Unavailable once nothing has been accepted for `give_up_after_s`; any
        other ServiceError at once.
        """
        while self._pending.is_full:
            self._work(hurried=True, waits=True)
        if self._limit is None:
            self._pending.add(entry)
        else:
            self._pending.add_checked(entry, self._limit.checked_size_bytes(entry))
        self._work()

    def extend(self, checked: Iterable[tuple[PutEntry, int]]) -> None:
        """Accept records with their sizes, of `checked_size_bytes`, beyond any limit of the buffer,
        and send what can be sent now; never blocks. Raises: as `add`; all were accepted then."""
        add = self._pending.add_checked
        for entry, size_bytes in checked:
            add(entry, size_bytes)
        self._work(hurried=True)

    def resume(self) -> None:
        """After an error: send the unacknowledged records again, each key in its order, for another
        `give_up_after_s`. Without effect after an interrupt."""
        if self._failure is not None and self._is_usable:
            self._failure = None
            self._pending.forget_failures()

    def flush(self) -> None:
        """Return only when every record added was acknowledged. Raises: as `add`."""
        self._work(hurried=True)
        while self._pending.waiting_records:
            self._work(hurried=True, waits=True)

    def metrics(self) -> ProducerMetrics:
        """The totals so far, and the state of the shards."""
        return self._pending.metrics(self._clock())

    def close(self) -> None:
        """Wait for the requests under way and end the threads. Records that were not flushed are
        abandoned. May be called twice."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _work(self, *, hurried: bool = False, waits: bool = False) -> None:
        """Handle every answer, and send everything that is due. `waits`: wait for either first.

        An error in here, or an interrupt, may leave records under way without a thread that waits
        for them: this producer is unusable then.
        """
        if self._failure is not None:
            raise self._failure
        try:
            if waits:
                self._await_news(hurried=hurried)
            while not self._answers.empty():
                self._take_in(*self._answers.get())
            self._list_again()
            while self._under_way < self._concurrency:
                request = self._pending.take(self._clock(), hurried=hurried)
                if request is None:
                    return
                self._send(request)
        except Exception as error:
            self._failure = error
            raise
        except BaseException:
            self._is_usable = False
            self._failure = Unavailable("PutRecords: interrupted", operation="PutRecords")
            raise

    def _send(self, request: Request) -> None:
        self._under_way += 1
        if self._concurrency == 1:
            self._take_in(request, self._put(request))
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._concurrency, "kinesis-producer")
        try:
            self._threads.submit(lambda: self._answers.put((request, self._put(request))))
        except RuntimeError as error:
            # This host has no thread left, or the interpreter ends. Whether it is sent is unknown.
            self._is_usable = False
            raise Unavailable(f"PutRecords: {error}", operation="PutRecords") from error

    def _put(self, request: Request) -> _Outcome:
        try:
            return self._putter.put(request.entries)
        except Exception as error:  # noqa: BLE001 - handled, or raised again, in the caller's thread
            return error

    def _take_in(self, request: Request, outcome: _Outcome) -> None:
        self._under_way -= 1
        now = self._clock()
        if isinstance(outcome, tuple):
            self._pending.settle(request, outcome, now)
        elif isinstance(outcome, PASSING_OF_WRITES):
            self._pending.fail(request, outcome, now, self._chance())
        else:
            self._pending.put_back(request)
            raise outcome

    def _await_news(self, *, hurried: bool) -> None:
        """Wait until an answer was handled, or until a request may be due."""
        now = self._clock()
        due_s = max(0.0, self._pending.due_at(now, hurried=hurried) - now)
        if self._under_way:
            # An answer is certain to come: each request has a time-out of its own.
            may_send = self._under_way < self._concurrency and due_s < math.inf
            try:
                self._take_in(*self._answers.get(timeout=due_s if may_send else None))
            except queue.Empty:
                return
        elif due_s < math.inf:
            self._wait(due_s)
        else:
            raise InvariantViolation("records wait, but no shard has them and none is under way")

    def _list_again(self) -> None:
        if self._relist is None or not self._pending.is_stale:
            return
        now = self._clock()
        if now - self._listed_at < RELIST_PERIOD_S:
            return
        self._listed_at = now
        try:
            self._pending.remap(self._relist())
        except ServiceError:
            return  # the old list is still usable; the next answer asks again
