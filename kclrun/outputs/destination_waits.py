"""Since when destinations of a lease fail, and until when user code waited for one of them.

A destination is an output, the store of the state, or the place of the dead letters. A call that
waits for one stands still for another reason than the code in it: the manager must not end its
process for that [L5].
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from kclrun.model.time import Instant

_NEVER: Final = Instant(0.0)
# The thread that sends the rows: user code does not wait for it, except in `checkpoint()`.
OUTPUTS_THREAD: Final = -1


class DestinationView(msgspec.Struct, frozen=True):
    """`since` is the first failure of a destination that still fails, 0 for none. `waited_until` is
    until when a call of user code last waited for one, 0 for never: now while it rests between two
    attempts, else the start of the attempt under way."""

    since: Instant = _NEVER
    waited_until: Instant = _NEVER


class _Wait(msgspec.Struct, frozen=True):
    since: Instant
    tries_since: Instant | None = None  # None while it rests


class DestinationWaits:
    """The waits of one lease, by the thread that waits. Any thread may call it."""

    def __init__(self, now: Callable[[], Instant]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._waits: dict[int, _Wait] = {}
        self._checkpoints = 0  # calls of `checkpoint()` that wait for the outputs
        self._ended = _NEVER

    def failed(self, thread: int | None = None) -> None:
        """An attempt of this thread failed: it rests now."""
        with self._lock:
            number = _known(thread)
            known = self._waits.get(number)
            self._waits[number] = _Wait(self._now() if known is None else known.since)

    def tries(self, thread: int | None = None) -> None:
        """This thread tries again."""
        with self._lock:
            number = _known(thread)
            wait = self._waits.get(number)
            if wait is not None:
                self._waits[number] = _Wait(wait.since, self._now())

    def over(self, thread: int | None = None) -> None:
        """This thread waits no more: its destination answered, or was given up."""
        with self._lock:
            number = _known(thread)
            wait = self._waits.pop(number, None)
            if wait is not None and (number != OUTPUTS_THREAD or self._checkpoints):
                self._ended = self._now()

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        """The pause of this thread between two attempts."""
        self.failed()
        try:
            yield
        finally:
            self.tries()

    @contextlib.contextmanager
    def of_checkpoint(self) -> Iterator[None]:
        """User code waits for a checkpoint, which waits for the outputs."""
        with self._lock:
            self._checkpoints += 1
        try:
            yield
        finally:
            with self._lock:
                self._checkpoints -= 1
                if OUTPUTS_THREAD in self._waits:
                    self._ended = self._now()

    def view(self) -> DestinationView:
        with self._lock:
            now = self._now()
            since = min((wait.since for wait in self._waits.values()), default=_NEVER)
            until = [
                now if wait.tries_since is None else wait.tries_since
                for thread, wait in self._waits.items()
                if thread != OUTPUTS_THREAD or self._checkpoints
            ]
            return DestinationView(since, max([self._ended, *until]))


def _known(thread: int | None) -> int:
    return threading.get_ident() if thread is None else thread
