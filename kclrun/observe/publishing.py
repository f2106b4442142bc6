"""Sends measurements on a thread of its own, so that the manager never waits.

Measurements that cannot be sent are dropped and counted, with one warning for each outage: metrics
are of the moment, and a queue of old ones would be late. A request whose outcome is unknown is not
sent again: its values would count twice.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Final, Generic

from kclrun.errors import KclrunError, ServiceError
from kclrun.model.retries import Retries, repeated
from kclrun.observe.logs import EventLog
from kclrun.ports import Metric, MetricOutlet

# One set is offered each minute: more than a few waiting mean that no request succeeds.
_WAITING_MAX: Final = 3
# All within a few seconds; a longer outage costs the values of its minute.
_RETRIES: Final = Retries(attempts_max=3, base_s=0.5)


class Publisher(Generic[Metric]):
    """One thread calls `offer` and `close`; the publisher's own thread sends."""

    def __init__(self, outlet: MetricOutlet[Metric], log: EventLog) -> None:
        self._outlet = outlet
        self._log = log
        self._waiting: queue.Queue[Sequence[Metric] | None] = queue.Queue(_WAITING_MAX)
        self._is_closed = threading.Event()
        self._failing_since: float | None = None
        self._lock = threading.Lock()
        self._dropped = 0
        self._dropped_before_outage = 0
        self._thread = threading.Thread(target=self._run, name="kclrun-metrics", daemon=True)
        self._thread.start()

    @property
    def dropped_total(self) -> int:
        """Measurements that were not sent, or whose sending is not certain."""
        with self._lock:
            return self._dropped

    def offer(self, measurements: Sequence[Metric]) -> None:
        """Send them soon. Never waits: if too many are waiting already, these are dropped."""
        try:
            self._waiting.put_nowait(measurements)
        except queue.Full:
            self._drop(measurements)

    def close(self, patience_s: float) -> None:
        """Send the waiting measurements for at most `patience_s`; the rest is not sent."""
        deadline = time.monotonic() + patience_s
        try:
            self._waiting.put(None, timeout=patience_s)
        except queue.Full:
            pass
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._is_closed.set()

    def _run(self) -> None:
        while (measurements := self._waiting.get()) is not None:
            for batch in self._outlet.batches(measurements):
                self._send(batch)

    def _send(self, batch: Sequence[Metric]) -> None:
        asked = time.monotonic()
        try:
            repeated(
                partial(self._outlet.put, batch),
                _RETRIES,
                wait=self._is_closed.wait,
                chance=random.random,
            )
        except KclrunError as error:
            self._failed(batch, error, asked)
        except Exception as error:  # noqa: BLE001 - an error of metrics ends nothing else
            self._failed(batch, KclrunError(f"unexpected: {type(error).__name__}"), asked)
        else:
            self._worked()

    def _failed(self, batch: Sequence[Metric], error: KclrunError, asked: float) -> None:
        if self._failing_since is None:
            self._failing_since = asked
            self._dropped_before_outage = self.dropped_total
            self._log.note(
                "metrics_not_published",
                code=error.code if isinstance(error, ServiceError) else "",
                error=str(error),
            )
        self._drop(batch)

    def _worked(self) -> None:
        since, self._failing_since = self._failing_since, None
        if since is not None:
            self._log.note(
                "metrics_published_again",
                outage_s=time.monotonic() - since,
                dropped=self.dropped_total - self._dropped_before_outage,
            )

    def _drop(self, measurements: Sequence[Metric]) -> None:
        with self._lock:
            self._dropped += len(measurements)
