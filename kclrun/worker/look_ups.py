"""Asks a service something for the core, on a thread of its own.

At the end of a shard the core needs a listing of the shards and the rows of other leases. Such an
answer may take longer than the failover: a listing of many pages, a service that throttles. The
lease thread must renew the lease meanwhile, so it asks nothing but the lease's own row.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import msgspec

from kclrun.calling.runners import MakeThread
from kclrun.errors import ServiceError
from kclrun.lease import events
from kclrun.model.time import Instant

Ask = Callable[[], events.Event]


class LookUpView(msgspec.Struct, frozen=True):
    """`asking_since_instant` is 0 while nothing is asked."""

    asking_since_instant: Instant = Instant(0.0)


class LookUps:
    """The look-ups of one lease, one after the other. The core asks for one at a time.

    `post` gets each answer as an event, or `LookUpFailed`. `broke` gets an error that is not of a
    service, so a bug of ours. The thread starts with the first look-up: most leases make none.
    """

    def __init__(
        self,
        post: Callable[[events.Event], None],
        broke: Callable[[BaseException], None],
        *,
        now: Callable[[], Instant],
        make_thread: MakeThread,
    ) -> None:
        self.view = LookUpView()
        self._post = post
        self._broke = broke
        self._now = now
        self._make_thread = make_thread
        self._asked: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, ask: Ask) -> None:
        """Ask, and return at once."""
        if self._thread is None:
            thread = self._make_thread(self._run, "look-up")
            try:
                thread.start()
            except RuntimeError as error:  # the host has no thread left: the core asks again
                self._post(events.LookUpFailed(str(error)))
                return
            self._thread = thread
        self._asked.put(ask)

    def close(self) -> None:
        """Ask nothing any more. A request under way may still wait for its answer."""
        self._asked.put(None)

    def _run(self) -> None:
        try:
            while (ask := self._asked.get()) is not None:
                self.view = LookUpView(self._now())
                answer = self._answer(ask)
                self.view = LookUpView()
                self._post(answer)
        except BaseException as error:  # noqa: BLE001 - the thread's edge: it ends the process
            self._broke(error)

    @staticmethod
    def _answer(ask: Ask) -> events.Event:
        try:
            return ask()
        except ServiceError as error:
            return events.LookUpFailed(str(error))
