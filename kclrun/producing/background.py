"""The thread that drives a producer: records from any thread in, a `Delivery` for each out.

`kinesis_producer.py` batches, sends and tries again; here are the lock, the thread, the limit of
the buffer and the end. Rule: user code (callbacks) and services are never called under the lock.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from kclrun.errors import BufferFull, KclrunError, ServiceError, SinkError
from kclrun.model.record import PutEntry
from kclrun.producing.backlog import Outcome
from kclrun.producing.delivery import SENDER, Delivery
from kclrun.producing.flow_control import ProducerMetrics
from kclrun.producing.kinesis_producer import KinesisProducer

_LOG: Final = logging.getLogger("kclrun.producer")
# Looking for records that have waited too long takes a look at each key that waits: 5 ms for the
# 50,000 of a full buffer.
_EXPIRY_PERIOD_S: Final = 1.0
# Records that failed are in the log once in this time, with their number.
_LOG_PERIOD_S: Final = 60.0


class BackgroundProducer:
    """Sends records to one stream, for any number of threads. Not across a fork.

    A record that is not in the stream after `give_up_after_s` fails by itself, with the reason in
    its `Delivery`; so does one that the service refuses for good. `engine` has `fails_alone`.
    """

    def __init__(self, engine: KinesisProducer, *, name: str, give_up_after_s: float) -> None:
        self._engine = engine
        self._name = name
        self._give_up_after_s = give_up_after_s
        self._lock = threading.Lock()
        # Records left the buffer, or the end came.
        self._changed = threading.Condition(self._lock)
        self._settled = threading.Condition()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._is_woken = False
        self._hurrying = 0
        self._is_closing = False
        self._ended: KclrunError | None = None
        self._expires_at = -math.inf
        # Each `flush` waits for the records before it, by their batch.
        self._batch = 0
        self._unsettled: Counter[int] = Counter()
        self._failures = 0
        self._first_failure: KclrunError | None = None
        self._unlogged = 0
        self._logged_at = -math.inf

    def put(self, entry: PutEntry, size_bytes: int, *, waits: bool) -> Delivery:
        """Accept a record, with its size of `checked_size_bytes`. While the buffer is full it
        blocks with `waits`, otherwise it raises BufferFull. Raises: SinkError after the end."""
        self._require_own_process()
        with self._lock:
            self._require_open()
            if self._engine.pending.backlog.is_full:
                self._wait_for_room(waits=waits)
            deadline = time.monotonic() + self._give_up_after_s
            delivery = Delivery(self._settled, deadline, self._batch)
            self._unsettled[self._batch] += 1
            if self._engine.accept(entry, size_bytes, delivery):
                self._wake()
        return delivery

    def await_room(self) -> None:
        """Block until the buffer has room. Raises: SinkError after the end."""
        self._require_own_process()
        with self._lock:
            if self._engine.pending.backlog.is_full:
                self._wait_for_room(waits=True)

    def flush(self, timeout: float | None = None) -> None:
        """Send what waits, and block until the records that were put before are done.

        Raises: TimeoutError; the first error of the records that failed since the last `flush`.
        """
        self._require_own_process()
        with self._lock:
            self._require_open()
            self._require_other_thread("flush")
            batch = self._batch
            self._batch += 1
            in_time = self._hurried_until(lambda: self._is_settled(batch), timeout)
            failures, first = self._failures, self._first_failure
            self._failures, self._first_failure = 0, None
            if self._ended is not None:
                raise self._ended
        if first is not None:
            raise _all_failures(failures, first)
        if not in_time:
            raise TimeoutError(f"{self._name}: records wait after {timeout} s; flush again")

    def close(self) -> None:
        """End the thread once every record is done. Raises: as `flush`. May be called twice."""
        try:
            if self.is_of_this_process and self._ended is None:
                self.flush()
        finally:
            self.stop(SinkError(f"{self._name} is closed"))

    def stop(self, error: KclrunError) -> None:
        """End the thread. The records that are not done fail with this error; those under way may
        be in the stream."""
        if not self.is_of_this_process:
            return
        with self._lock:
            if self._ended is None and not self._is_closing:
                self._is_closing = True
                self._end(error)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._engine.close()

    def metrics(self) -> ProducerMetrics:
        self._require_own_process()
        with self._lock:
            return self._engine.metrics()

    @property
    def waiting_records(self) -> int:
        return self._engine.pending.backlog.records

    @property
    def is_of_this_process(self) -> bool:
        """False in a child of a fork: it lacks the thread, and a lock may be held for ever."""
        return os.getpid() == self._pid

    def _require_own_process(self) -> None:
        if not self.is_of_this_process:
            raise SinkError(
                f"{self._name} was made before this process was forked: its threads and connections"
                " are the other process's. Make a producer in each process"
            )

    def _require_open(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _wait_for_room(self, *, waits: bool) -> None:
        if not waits:
            raise BufferFull(
                f"{self._name}: {self._engine.pending.backlog.records:,} records wait to be sent"
            )
        self._require_other_thread("put")
        self._hurried_until(lambda: not self._engine.pending.backlog.is_full, None)
        self._require_open()

    def _require_other_thread(self, what: str) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError(f"{what} waits for the thread that sends: do not call it there")

    def _hurried_until(self, is_over: Callable[[], bool], timeout: float | None) -> bool:
        """Wait, with the lock, while everything is sent at once."""
        self._hurrying += 1
        try:
            self._wake()
            return self._changed.wait_for(lambda: self._ended is not None or is_over(), timeout)
        finally:
            self._hurrying -= 1

    def _is_settled(self, batch: int) -> bool:
        return all(number > batch for number in self._unsettled)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=SENDER, daemon=True)
            self._thread.start()
        if not self._is_woken:
            self._is_woken = True
            self._engine.wake()

    # The thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001 - the records must not wait for ever
            with self._lock:
                self._end(SinkError(f"{self._name} ended by an error: {error!r}"))
                outcomes = self._engine.pending.backlog.take_outcomes()
            self._resolve(outcomes)

    def _turn(self) -> bool:
        """Take in what came, send what is due, wait for more. Returns whether to go on."""
        with self._lock:
            self._is_woken = False
            now = time.monotonic()
            if self._ended is None:
                if now >= self._expires_at:
                    self._engine.pending.expire(now)
                    self._expires_at = now + _EXPIRY_PERIOD_S
                due_s = self._engine.step(hurried=self._hurrying > 0)
            outcomes = self._engine.pending.backlog.take_outcomes()
            has_ended = self._ended is not None
            waits = self._engine.pending.backlog.records > 0
        if outcomes:
            self._resolve(outcomes)
        if has_ended:
            return False
        self._engine.await_news(min(due_s, _EXPIRY_PERIOD_S) if waits else math.inf)
        return True

    def _end(self, error: KclrunError) -> None:
        self._ended = error
        self._engine.pending.backlog.fail_all(error)
        self._changed.notify_all()
        self._engine.wake()

    def _resolve(self, outcomes: Sequence[Outcome]) -> None:
        """Tell each `Delivery`, then those who wait for room or for a flush."""
        called: list[Delivery] = []
        batches: Counter[int] = Counter()
        failures = [outcome for outcome in outcomes if outcome.error is not None]
        with self._settled:
            for outcome in outcomes:
                delivery = outcome.receipt
                assert isinstance(delivery, Delivery)
                batches[delivery.batch] += 1
                if delivery.settle(outcome):
                    called.append(delivery)
            self._settled.notify_all()
        for delivery in called:
            delivery.call_back()
        with self._lock:
            self._unsettled -= batches
            self._failures += len(failures)
            if failures and self._first_failure is None:
                self._first_failure = failures[0].error
            self._changed.notify_all()
        if failures:
            self._log(failures)

    def _log(self, failures: Sequence[Outcome]) -> None:
        self._unlogged += len(failures)
        now = time.monotonic()
        if now - self._logged_at < _LOG_PERIOD_S or self._is_closing:
            return
        _LOG.warning(
            "%s: %d records failed and are not in the stream; the last: %s",
            self._name,
            self._unlogged,
            failures[-1].error,
        )
        self._unlogged, self._logged_at = 0, now


def _all_failures(count: int, first: KclrunError) -> KclrunError:
    if count == 1 or not isinstance(first, ServiceError):
        return first
    return first.reworded(f"{count} records are not in the stream; the first: {first}")
