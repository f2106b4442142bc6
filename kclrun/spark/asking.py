"""Performs what the scout asks: several calls at once, each outcome a value. Thin: no decisions.

May know: the ports and threads. May not know: offsets, shards' states. Rule: every ask gets
exactly one answer, whatever happens.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kclrun.errors import (
    ExpiredIterator,
    InvalidRequest,
    NotFound,
    Throttled,
    Unavailable,
)
from kclrun.ports import ShardReader, StreamAdmin
from kclrun.spark.scout.asks import (
    Answer,
    AskListing,
    AskPage,
    Delayed,
    Expired,
    Gone,
    Listed,
    NotListed,
    Outcome,
    Paged,
    Refused,
    Slowed,
)

__all__ = ["Asking"]

Ask = AskPage | AskListing


class Asking:
    """Sends questions and hands out answers. `calls_at_once` 0 performs each in the caller."""

    def __init__(
        self,
        reader: ShardReader,
        admin: StreamAdmin,
        *,
        clock: Callable[[], float],
        calls_at_once: int,
    ) -> None:
        self._reader = reader
        self._admin = admin
        self._clock = clock
        self._answers: queue.SimpleQueue[tuple[Ask, Answer | BaseException]] = queue.SimpleQueue()
        self._under_way = 0
        self._closed = threading.Event()
        self._pool = None
        if calls_at_once:
            self._pool = ThreadPoolExecutor(calls_at_once, thread_name_prefix="scout")

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is still to come."""
        return self._under_way > 0

    def send(self, asks: Sequence[Ask]) -> None:
        """Begin to perform all of them."""
        for ask in asks:
            self._under_way += 1
            if self._pool is None:
                self._perform(ask)
            else:
                self._pool.submit(self._perform, ask)

    def receive(self, timeout_s: float) -> tuple[Ask, Answer] | None:
        """The next answer, None if none comes in time. Raises: what cannot be waited out."""
        try:
            ask, answer = self._answers.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        self._under_way -= 1
        if isinstance(answer, BaseException):
            raise answer
        return ask, answer

    def close(self) -> None:
        """Send nothing more; calls under way end by their own time-outs."""
        self._closed.set()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _perform(self, ask: Ask) -> None:
        try:
            answer: Answer | BaseException = (
                self._list() if ask == AskListing() else self._page(ask)
            )
        except BaseException as error:  # noqa: BLE001 - handed to the caller, which raises it
            answer = error
        self._answers.put((ask, answer))

    def _list(self) -> Listed | NotListed:
        sent_at = self._clock()
        try:
            return Listed(self._admin.list_shards(), sent_at)
        except (Throttled, Unavailable) as error:
            return NotListed(error)

    def _page(self, ask: Ask) -> Outcome:
        assert isinstance(ask, AskPage)
        token, opening, sent_at = ask.read.token, ask.read.opening, self._clock()
        try:
            if token is None:
                assert opening is not None
                token = self._reader.iterator(
                    ask.shard_id,
                    opening.kind,
                    sequence_number=opening.sequence_number,
                    timestamp=opening.timestamp,
                )
            asked_at = self._clock()
            page = self._reader.fetch(token, ask.read.limit)
        except ExpiredIterator:
            return Expired()
        except Throttled as error:
            return Slowed(token, error)
        except Unavailable as error:
            return Delayed(token, error)
        except NotFound as error:
            return Gone(error, sent_at)
        except InvalidRequest as error:
            return Refused(error)
        return Paged(token, page, asked_at, self._clock())
