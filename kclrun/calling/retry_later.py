"""RetryLater in a row: a line when user code begins to ask for it, and one when it ends. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from kclrun.model.time import Instant


class Waited(NamedTuple):
    """A row of RetryLater that has ended: how often user code asked for it, and for how long."""

    tries: int
    waited_s: float


class RetryLaters:
    """The calls of one shard that user code asked to repeat later. Several records may wait at the
    same time: their rows are one, from the first to the last that waits."""

    def __init__(self) -> None:
        self._waiting: set[Hashable] = set()
        self._tries = 0
        self._began = Instant(0.0)

    def asked(self, call: Hashable, now: Instant) -> int:
        """User code asked to repeat this call later. Returns how often it has, in this row."""
        if not self._waiting:
            self._tries, self._began = 0, now
        self._waiting.add(call)
        self._tries += 1
        return self._tries

    def over(self, call: Hashable, clock: Callable[[], Instant]) -> Waited | None:
        """This call returned, or failed in another way. Returns the row, if it ended with that."""
        if call not in self._waiting:
            return None
        self._waiting.remove(call)
        return None if self._waiting else Waited(self._tries, clock() - self._began)

    def forget(self) -> None:
        """The calls are not repeated any more: delivery was stopped."""
        self._waiting.clear()
