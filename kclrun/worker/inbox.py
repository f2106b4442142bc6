"""Events on their way to the lease thread, and the descriptor that wakes it."""

from __future__ import annotations

import os
from collections import deque

from kclrun.consuming.events import Event

__all__ = ["Inbox"]


class Inbox:
    """Any thread posts; the lease thread takes. Order is kept.

    Bounded by its posters: user code and the fetch thread wait for the desk, so a few events a
    batch are the most that can be on their way.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """For a selector: readable while something was posted."""
        return self._wake_fd

    def post(self, event: Event) -> None:
        self._events.append(event)
        os.eventfd_write(self._wake_fd, 1)

    def take(self) -> list[Event]:
        """All that was posted so far; empties the wake-up first, so that none is missed."""
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return []
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        os.close(self._wake_fd)
