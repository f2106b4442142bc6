"""Writes records to a Kinesis stream: batched, in order per key, adaptive, without dropping any.

A shell over `pending_records.py`, which makes the decisions. Its caller drives it: `add` and
`flush` of a task that writes, or the thread of `background.py`.
"""

from __future__ import annotations

import math
import queue
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, TypeVar, assert_never

from kclrun.codec.record_sizes import RecordLimit
from kclrun.errors import InvariantViolation, ServiceError, Unavailable
from kclrun.model.record import PutEntry, PutResult
from kclrun.model.retries import PASSING_OF_WRITES
from kclrun.model.shard import Shard
from kclrun.ports import RecordPutter
from kclrun.producing.flow_control import Flow, ProducerMetrics, ProducerSettings
from kclrun.producing.packing import Request
from kclrun.producing.pending_records import PendingRecords

# Shards change over minutes; the limit of ListShards is shared with every consumer of the stream.
RELIST_PERIOD_S: Final = 30.0
# While records wait for a listing: a new shard is in it after some seconds.
HURRIED_RELIST_PERIOD_S: Final = 1.0

_DEFAULTS: Final = ProducerSettings()


class _Answered(NamedTuple):
    request: Request
    outcome: tuple[PutResult, ...] | Exception


class _Listed(NamedTuple):
    outcome: Sequence[Shard] | Exception


class _Woken(NamedTuple):
    """The driving thread has something to do."""


_T = TypeVar("_T")
_News = _Answered | _Listed | _Woken


class KinesisProducer:
    """Sends records to one stream. One thread at a time; not after a fork.

    It acts only when called: `add` sends records that are due and handles answers, `flush` sends
    everything. A record is in the stream for certain only when `flush` has returned. The threads do
    nothing but wait for PutRecords and ListShards. Delivery is at least once: a request whose
    outcome is unknown is sent again.

    `shards`: the open shards of the stream; a stale list only makes the flow control less precise.
    `relist` lists the shards again. It is called when an answer names a shard that is not in the
    list, at most every `RELIST_PERIOD_S`; its ServiceErrors are waited out. Aggregates need it.
    `limit` is of one record, in place of the one in `settings`. `flow` carries the state of the
    flow control from one producer of this process to the next. `clock` is monotonic; `wait` sleeps
    if no answer can come; `chance` is in [0, 1).

    Once it has raised a ServiceError it raises the same again, until `resume`: it is not certain
    that the records not flushed are in the stream. `pending` has the records.
    """

    def __init__(  # noqa: PLR0913 - the settings of a producer, by name
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
        assert relist or not settings.aggregates, "after a split, aggregates need a new listing"
        self._putter = putter
        self.pending = PendingRecords(shards, settings, flow or Flow())
        self._concurrency = settings.concurrency
        self._fails_alone = settings.fails_alone
        self._relist = relist
        self._limit = limit
        self._clock = clock
        self._wait = wait
        self._chance = chance
        self._listed_at = -math.inf
        self._threads: ThreadPoolExecutor | None = None
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._arrived: _News | None = None
        self._under_way = 0
        self._is_listing = False
        self._failure: Exception | None = None
        self._is_usable = True

    def add(self, entry: PutEntry) -> None:
        """Accept one record; blocks while the buffer is full.

        Raises: LimitExceeded for a record that the service never accepts (no other record is lost
        by it); Throttled or Unavailable once nothing has been accepted for `give_up_after_s`; any
        other ServiceError at once.
        """
        while self.pending.backlog.is_full:
            self._work(hurried=True, waits=True)
        if self._limit is None:
            self.pending.add(entry)
        else:
            self.pending.add_checked(entry, self._limit.checked_size_bytes(entry))
        self._work()

    def extend(self, checked: Iterable[tuple[PutEntry, int]]) -> None:
        """Accept records with their sizes, of `checked_size_bytes`, beyond any limit of the buffer,
        and send what can be sent now; never blocks. Raises: as `add`; all were accepted then."""
        add = self.pending.add_checked
        for entry, size_bytes in checked:
            add(entry, size_bytes)
        self._work(hurried=True)

    def step(self, *, hurried: bool) -> float:
        """Handle every answer, and send everything that is due; never blocks. Returns when the next
        step is due if no answer comes, in seconds from now."""
        if self._arrived is not None:
            arrived, self._arrived = self._arrived, None
            self._take_in(arrived)
        self._work(hurried=hurried)
        return self._due_s(hurried=hurried)

    def await_news(self, timeout_s: float) -> None:
        """Block until an answer came, `wake` was called, or the time is over. Beside it another
        thread may call `pending.add_checked` and `wake`."""
        try:
            self._arrived = self._news.get(timeout=None if timeout_s == math.inf else timeout_s)
        except queue.Empty:
            return

    def wake(self) -> None:
        """End `await_news`. From any thread."""
        self._news.put(_Woken())

    def resume(self) -> None:
        """After an error: send the unacknowledged records again, each key in its order, for another
        `give_up_after_s`. Without effect after an interrupt."""
        if self._failure is not None and self._is_usable:
            self._failure = None
            self.pending.forget_failures()

    def flush(self) -> None:
        """Return only when every record added was acknowledged. Raises: as `add`."""
        self._work(hurried=True)
        while self.pending.backlog.records:
            self._work(hurried=True, waits=True)

    def metrics(self) -> ProducerMetrics:
        """The totals so far, and the state of the shards."""
        return self.pending.metrics(self._clock())

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
            while not self._news.empty():
                self._take_in(self._news.get())
            self._list_again()
            while self._under_way < self._concurrency:
                request = self.pending.take(self._clock(), hurried=hurried)
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
        self._run(lambda: _Answered(request, _outcome(lambda: self._putter.put(request.entries))))

    def _list_again(self) -> None:
        if self._relist is None or self._is_listing or self._listing_due_s() > 0.0:
            return
        self._listed_at = self._clock()
        self._is_listing = True
        relist = self._relist
        self._run(lambda: _Listed(_outcome(relist)))

    def _listing_due_s(self) -> float:
        if not self.pending.is_stale or self._relist is None:
            return math.inf
        is_hurried = self.pending.waits_for_listing
        period_s = HURRIED_RELIST_PERIOD_S if is_hurried else RELIST_PERIOD_S
        return max(0.0, self._listed_at + period_s - self._clock())

    def _run(self, ask: Callable[[], _News]) -> None:
        """Ask the service in a thread; with `concurrency` 1, at once."""
        if self._concurrency == 1:
            self._take_in(ask())
            return
        if self._threads is None:
            # One more, for a listing beside all requests.
            self._threads = ThreadPoolExecutor(self._concurrency + 1, "kinesis-producer")
        try:
            self._threads.submit(lambda: self._news.put(ask()))
        except RuntimeError as error:
            # This host has no thread left, or the interpreter ends. Whether it is sent is unknown.
            self._is_usable = False
            raise Unavailable(f"PutRecords: {error}", operation="PutRecords") from error

    def _take_in(self, news: _News) -> None:
        match news:
            case _Answered(request, outcome):
                self._under_way -= 1
                self._settle(request, outcome)
            case _Listed(outcome):
                self._is_listing = False
                if not isinstance(outcome, Exception):
                    self.pending.remap(outcome)
                elif isinstance(outcome, ServiceError):
                    # The old list is still usable, and the next answer asks again.
                    self.pending.listing_failed()
                else:
                    raise outcome
            case _Woken():
                pass
            case _:
                assert_never(news)

    def _settle(self, request: Request, outcome: tuple[PutResult, ...] | Exception) -> None:
        now = self._clock()
        if isinstance(outcome, tuple):
            self.pending.settle(request, outcome, now)
        elif isinstance(outcome, PASSING_OF_WRITES):
            self.pending.fail(request, outcome, now, self._chance())
        elif self._fails_alone and isinstance(outcome, ServiceError):
            self.pending.drop(request, outcome)
        else:
            self.pending.put_back(request)
            raise outcome

    def _due_s(self, *, hurried: bool) -> float:
        """When a request or a listing may be due, if no answer comes: seconds from now."""
        now = self._clock()
        may_send = self._under_way < self._concurrency
        due_s = max(0.0, self.pending.due_at(now, hurried=hurried) - now) if may_send else math.inf
        return min(due_s, math.inf if self._is_listing else self._listing_due_s())

    def _await_news(self, *, hurried: bool) -> None:
        """Wait until an answer was handled, or until a request may be due."""
        due_s = self._due_s(hurried=hurried)
        if self._under_way or self._is_listing:
            # An answer is certain to come: each request has a time-out of its own.
            self.await_news(due_s)
            if self._arrived is not None:
                arrived, self._arrived = self._arrived, None
                self._take_in(arrived)
        elif due_s < math.inf:
            self._wait(due_s)
        else:
            raise InvariantViolation("records wait, but no shard has them and none is under way")


def _outcome(ask: Callable[[], _T]) -> _T | Exception:
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - handled, or raised again, in the caller's thread
        return error
