"""How long a request is repeated: the one decision for every loop that waits for a service.

A caller says its limits as a `Retries` and performs the pauses: by `repeated`, or by itself, where
it counts over several requests or logs between them. Pure: the caller has the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from kclrun.errors import OutcomeUnknown, ServiceError, Throttled, Unavailable
from kclrun.model.time import backoff_s

T = TypeVar("T")

# After these failures the same request may succeed, and nothing has happened.
PASSING: Final = (Throttled, Unavailable)
# The same for a write that may be sent again although its outcome is not known.
PASSING_OF_WRITES: Final = (Throttled, Unavailable, OutcomeUnknown)


class Retries(msgspec.Struct, frozen=True):
    """How long a request is repeated, and how long the pauses are.

    `attempts_max` counts the first attempt, too; `lasts_s` is the time from the first attempt. None
    is for no limit. The pauses are those of `backoff_s`. `at_once` has the kinds of `passing` that
    are not repeated; `throttled` holds instead of these limits while the service throttles.
    """

    attempts_max: int | None = None
    lasts_s: float | None = None
    base_s: float = 0.05
    max_s: float = 3.0
    passing: tuple[type[ServiceError], ...] = PASSING
    at_once: tuple[type[ServiceError], ...] = ()
    throttled: Retries | None = None

    def pause_s(
        self, error: ServiceError, attempt: int, chance: float, elapsed_s: float = 0.0
    ) -> float | None:
        """The pause after the failure of attempt number `attempt` (from 1); None if the error is to
        be raised. `elapsed_s` is the time since the first attempt."""
        if not isinstance(error, self.passing) or isinstance(error, self.at_once):
            return None
        if self.throttled is not None and isinstance(error, Throttled):
            return self.throttled.pause_s(error, attempt, chance, elapsed_s)
        if self.attempts_max is not None and attempt >= self.attempts_max:
            return None
        pause_s = backoff_s(attempt, chance, base_s=self.base_s, max_s=self.max_s)
        is_late = self.lasts_s is not None and elapsed_s + pause_s > self.lasts_s
        return None if is_late else pause_s


def repeated(
    call: Callable[[], T],
    retries: Retries,
    *,
    wait: Callable[[float], object],
    chance: Callable[[], float],
    clock: Callable[[], float] = float,
    failed: Callable[[ServiceError, float], object] = lambda _error, _elapsed_s: None,
) -> T:
    """The value of `call`, repeated as `retries` allows. Raises: the last error.

    `failed` is called before each pause, with the error and the time since the first attempt. Only
    limits of time need a `clock`.
    """
    began = clock()
    attempt = 0
    while True:
        try:
            return call()
        except ServiceError as error:
            attempt += 1
            elapsed_s = clock() - began
            pause_s = retries.pause_s(error, attempt, chance(), elapsed_s)
            if pause_s is None:
                raise
            failed(error, elapsed_s)
        wait(pause_s)
