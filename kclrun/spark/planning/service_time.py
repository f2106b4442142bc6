"""The service's clock, estimated from its answers: from below and from above [A3]. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

# An answer's `served_at` has whole seconds, so the true time of serving lies in
# [served_at, served_at + 1 s), between sending and receiving. Each sample bounds the difference to
# the local clock on both sides. The best bounds of the last minutes count, because clocks drift.
# Cheap quartz drifts 100 ppm: 60 ms in ten minutes, well inside the margin below a target.
_REMEMBERED_S: Final = 600.0
_BUCKET_S: Final = 5.0
# Without any answer the host's clock is used; NTP keeps hosts within this error.
_HOST_ERROR_S: Final = 1.0


class ServiceTime:
    """`wall_ahead_s`: the host's wall clock minus the local clock, until the first answer."""

    def __init__(self, wall_ahead_s: float) -> None:
        self._wall_ahead_s = wall_ahead_s
        self._buckets: deque[tuple[float, float, float]] = deque()
        self._margin_s = 0.0

    @property
    def is_known(self) -> bool:
        """Whether an answer has contained the time."""
        return bool(self._buckets)

    def add_sample(self, served_at: float | None, sent_at: float, received_at: float) -> None:
        """Take in one answer's time."""
        if served_at is None:
            return
        low, high = served_at - received_at, served_at + 1.0 - sent_at
        began = received_at
        if self._buckets and received_at - self._buckets[-1][0] < _BUCKET_S:
            began, low_before, high_before = self._buckets.pop()
            low, high = max(low, low_before), min(high, high_before)
        self._buckets.append((began, low, high))
        while self._buckets[0][0] < received_at - _REMEMBERED_S:
            self._buckets.popleft()

    def was_ahead(self) -> None:
        """The service called a time of ours a future one: trust the estimate less from now on."""
        self._margin_s = min(60.0, self._margin_s * 2 + 1.0)

    def surely_past_ms(self, now: float) -> int:
        """A time that the service's clock has reached."""
        ahead_s = max((low for _, low, _ in self._buckets), default=self._host_s(-_HOST_ERROR_S))
        return int((now + ahead_s - self._margin_s) * 1000)

    def surely_ahead_ms(self, now: float) -> int:
        """A time that the service's clock has not passed."""
        ahead_s = min((high for _, _, high in self._buckets), default=self._host_s(_HOST_ERROR_S))
        return int((now + ahead_s) * 1000) + 1

    def _host_s(self, error_s: float) -> float:
        return self._wall_ahead_s + error_s
