"""Repeats reads and listings without end, and reports an outage as one warning with its length.

For reads only: a conditional write is never repeated by its sender [P6]. Clock, random numbers and
waiting are arguments. `errors.py` classifies errors, `ports.backoff_s` computes the pause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from kclrun.errors import ServiceError, Throttled, Unavailable
from kclrun.model.time import Instant, backoff_s

T = TypeVar("T")


class Stop(Protocol):
    """Ends the repetitions, for example a `threading.Event`."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool: ...


class Patient:
    """Repeats a call until it succeeds: after throttling, and while the service is unavailable.

    `on_outage(error)` is called once, when the first failure of a call is older than `notice_s`.
    `on_recovery(length_s)` is called once, when the call has succeeded after that. A single
    throttle or a dropped connection is not an outage. `clock` is monotonic; `chance` returns
    numbers in [0, 1).
    """

    def __init__(
        self,
        *,
        stop: Stop,
        clock: Callable[[], Instant],
        chance: Callable[[], float],
        on_outage: Callable[[ServiceError], None],
        on_recovery: Callable[[float], None],
        notice_s: float = 1.0,
    ) -> None:
        self._stop = stop
        self._clock = clock
        self._chance = chance
        self._on_outage = on_outage
        self._on_recovery = on_recovery
        self._notice_s = notice_s

    def __call__(self, call: Callable[[], T]) -> T:
        """The value of the first successful `call`.

        Raises: an error of `call` that a repetition cannot fix (AccessDenied, NotFound, …), and
        the last Throttled or Unavailable once `stop` is set.
        """
        attempt = 0
        noticed = False
        since = self._clock()
        while True:
            try:
                value = call()
            except (Throttled, Unavailable) as error:
                attempt += 1
                if not noticed and self._clock() - since >= self._notice_s:
                    noticed = True
                    self._on_outage(error)
                if self._stop.is_set() or self._stop.wait(backoff_s(attempt, self._chance())):
                    raise
            else:
                if noticed:
                    self._on_recovery(self._clock() - since)
                return value
