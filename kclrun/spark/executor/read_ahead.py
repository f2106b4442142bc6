"""Pages on their way from the threads that read shards to the one that takes them.

May not know what a page holds, or how it is read. Rules: of each shard at most one page is on its
way, in order; all of them together stay within a bound of bytes; closing wakes everybody.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

__all__ = ["Closed", "ReadAhead"]

Page = TypeVar("Page")

# What a task holds beside the page that is worked on: small beside a Python worker, and enough to
# have several shards' largest answers (10 MiB of data) under way.
BYTES_MAX: Final = 64 * 2**20
_PAGE_BYTES_MAX: Final = 10 * 2**20
# A page is counted before it is there, as large as the largest so far; the first as this.
_FIRST_PAGE_BYTES: Final = 2**20


class Closed(Exception):
    """The pages are not wanted any more."""


class ReadAhead(Generic[Page]):
    """A bounded hand-over from `readers` threads to one taker.

    The bound is exceeded at most by what the first pages are larger than 1 MiB each: before them,
    nobody can know.
    """

    def __init__(self, readers: int) -> None:
        self._changed = threading.Condition()
        self._readers = readers
        self._held_bytes: dict[str, int] = {}
        self._waiting: deque[tuple[str, Page]] = deque()
        self._largest_bytes = _FIRST_PAGE_BYTES
        self._error: BaseException | None = None
        self._is_closed = False

    def admit(self, shard_id: str) -> None:
        """Wait until the shard's next page may be fetched; counts it. Raises: Closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_room(shard_id))
            if self._is_closed:
                raise Closed
            self._held_bytes[shard_id] = self._largest_bytes

    def put(self, shard_id: str, page: Page, size_bytes: int) -> None:
        """A page that was admitted, to be taken."""
        with self._changed:
            self._held_bytes[shard_id] = size_bytes
            self._largest_bytes = min(max(self._largest_bytes, size_bytes), _PAGE_BYTES_MAX)
            self._waiting.append((shard_id, page))
            self._changed.notify_all()

    def leave(self, error: BaseException | None = None) -> None:
        """A reading thread has done its work, or failed with an error that the taker shall see."""
        with self._changed:
            self._readers -= 1
            self._error = self._error or error
            self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait for some time. Raises: Closed, at once when it happens."""
        with self._changed:
            if self._changed.wait_for(lambda: self._is_closed, seconds):
                raise Closed

    def pages(self) -> Iterator[Page]:
        """The pages as they come, until all readers have left. Raises: what a reader raised."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._waiting or self._error is not None or self._readers == 0
                )
                if self._error is not None:
                    raise self._error
                if not self._waiting:
                    return
                shard_id, page = self._waiting.popleft()
                del self._held_bytes[shard_id]
                self._changed.notify_all()
            yield page

    def close(self) -> None:
        """Nothing will be taken any more: every waiting reader is told."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _has_room(self, shard_id: str) -> bool:
        if shard_id in self._held_bytes:
            return False
        # With nothing held there is always room: the largest is counted as 10 MiB at most.
        return sum(self._held_bytes.values()) + self._largest_bytes <= BYTES_MAX
