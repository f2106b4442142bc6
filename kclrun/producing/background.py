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
from collections.abc import Callable, Sequence
from typing import Final

from kclrun.errors import BufferFull, KclrunError, ServiceError, SinkError
from kclrun.model.record import PutEntry
from kclrun.producing.backlog import Settled
from kclrun.producing.delivery import SENDER, Batch, Delivery, count_done, settle
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
        self._pending = engine.pending
        self._backlog = engine.pending.backlog
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
        # Each `flush` waits for the records before it: those of its batch and the ones before.
        self._batch = Batch(self._settled)
        self._batches = [self._batch]
        self._failures = 0
        self._first_failure: KclrunError | None = None
        self._unlogged = 0
        self._logged_at = -math.inf

    def put(self, entry: PutEntry, size_bytes: int, *, waits: bool) -> Delivery:
        """Accept a record, with its size of `checked_size_bytes`. While the buffer is full it
        blocks with `waits`, otherwise it raises BufferFull. Raises: SinkError after the end."""
        if os.getpid() != self._pid:
            self._require_own_process()
        backlog = self._backlog
        with self._lock:
            if self._ended is not None:
                raise self._ended
            if backlog.is_full:
                self._wait_for_room(waits=waits)
            was_idle = backlog.records == 0
            batch = self._batch
            batch.put += 1
            delivery = Delivery(batch, time.monotonic() + self._give_up_after_s)
            is_full = self._pending.add_checked(entry, size_bytes, delivery)
            if (is_full or was_idle) and not self._is_woken:
                self._wake()
        return delivery

    def await_room(self) -> None:
        """Block until the buffer has room. Raises: SinkError after the end."""
        self._require_own_process()
        with self._lock:
            if self._backlog.is_full:
                self._wait_for_room(waits=True)

    def flush(self, timeout: float | None = None) -> None:
        """Send what waits, and block until the records that were put before are done.

        Raises: TimeoutError; the first error of the records that failed since the last `flush`.
        """
        self._require_own_process()
        with self._lock:
            self._require_open()
            self._require_other_thread("flush")
            batches = [*self._batches]
            self._batch = Batch(self._settled)
            self._batches.append(self._batch)
            in_time = self._hurried_until(lambda: all(batch.is_done for batch in batches), timeout)
            self._batches = [
                batch for batch in self._batches if batch is self._batch or not batch.is_done
            ]
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
        return self._backlog.records

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
            raise BufferFull(f"{self._name}: {self._backlog.records:,} records wait to be sent")
        self._require_other_thread("put")
        self._hurried_until(lambda: not self._backlog.is_full, None)
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
                settled = self._backlog.take_settled()
            self._resolve(settled)

    def _turn(self) -> bool:
        """Take answers in, send the requests that are due, wait for more. Returns whether to go
        on."""
        with self._lock:
            self._is_woken = False
            now = time.monotonic()
            if self._ended is None:
                if now >= self._expires_at:
                    self._pending.expire(now)
                    self._expires_at = now + _EXPIRY_PERIOD_S
                due_s = self._engine.step(hurried=self._hurrying > 0)
            settled = self._backlog.take_settled()
            has_ended = self._ended is not None
            waits = self._backlog.records > 0
        if settled:
            self._resolve(settled)
        if has_ended:
            return False
        self._engine.await_news(min(due_s, _EXPIRY_PERIOD_S) if waits else math.inf)
        return True

    def _end(self, error: KclrunError) -> None:
        self._ended = error
        self._pending.fail_all(error)
        self._changed.notify_all()
        self._engine.wake()

    def _resolve(self, settled: Sequence[Settled]) -> None:
        """Tell each `Delivery`, then those who wait for room or for a flush."""
        with self._settled:
            called = [delivery for group in settled for delivery in settle(group)]
            self._settled.notify_all()
        for delivery in called:
            delivery.call_back()
        failed = [group for group in settled if group.outcome.error is not None]
        failures = sum(len(group.receipts) for group in failed)
        with self._lock:
            for group in settled:
                count_done(group)
            self._failures += failures
            if failed and self._first_failure is None:
                self._first_failure = failed[0].outcome.error
            self._changed.notify_all()
        if failed:
            self._log(failures, failed[-1].outcome.error)

    def _log(self, failures: int, last: KclrunError | None) -> None:
        self._unlogged += failures
        now = time.monotonic()
        if now - self._logged_at < _LOG_PERIOD_S or self._is_closing:
            return
        _LOG.warning(
            "%s: %d records failed and are not in the stream; the last: %s",
            self._name,
            self._unlogged,
            last,
        )
        self._unlogged, self._logged_at = 0, now


def _all_failures(count: int, first: KclrunError) -> KclrunError:
    if count == 1 or not isinstance(first, ServiceError):
        return first
    return first.reworded(f"{count} records are not in the stream; the first: {first}")
