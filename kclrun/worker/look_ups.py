"""Asks a service something for the core, on a thread of its own.

At the end of a shard the core needs a listing of the shards and the rows of other leases. Such an
answer may take longer than the failover: a listing of many pages, a service that throttles. The
lease thread must renew the lease meanwhile, so it asks nothing but the lease's own row.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence

import msgspec

from kclrun.calling.runners import MakeThread
from kclrun.errors import ServiceError
from kclrun.lease import events
from kclrun.model.lease import LeaseKey
from kclrun.model.stream import qualified_shards, stream_of
from kclrun.model.time import Instant
from kclrun.ports import LeaseTable, StreamAdmin
from kclrun.worker.fetching import FetchWatch

Ask = Callable[[], events.Event]


class LookUpView(msgspec.Struct, frozen=True):
    """`asking_since_instant` is 0 while nothing is asked."""

    asking_since_instant: Instant = Instant(0.0)


class LookUps:
    """The look-ups of one lease, one after the other. The core asks for one at a time.

    `key` is that of the lease. `post` gets each answer as an event, or `LookUpFailed`. `broke` gets
    an error that is not of a service, so a bug of ours. The thread starts with the first look-up:
    most leases make none. `watch`, set then, detects that one hangs, with the patience of
    `fetch_watch`.
    """

    def __init__(
        self,
        table: LeaseTable,
        admin: StreamAdmin,
        key: LeaseKey,
        *,
        post: Callable[[events.Event], None],
        broke: Callable[[BaseException], None],
        fetch_watch: FetchWatch,
        now: Callable[[], Instant],
        make_thread: MakeThread,
    ) -> None:
        self.view = LookUpView()
        self.watch: FetchWatch | None = None
        self._table = table
        self._admin = admin
        self._key = key
        self._post = post
        self._broke = broke
        self._fetch_watch = fetch_watch
        self._now = now
        self._make_thread = make_thread
        self._asked: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def read_rows(self, keys: Sequence[LeaseKey]) -> None:
        """Read the rows of other leases. Returns at once."""
        self._begin(functools.partial(self._rows_of, keys))

    def list_shards(self) -> None:
        """List the shards of the stream. Returns at once."""
        self._begin(self._listed)

    def _rows_of(self, keys: Sequence[LeaseKey]) -> events.RowsRead:
        return events.RowsRead(tuple((key, self._table.read(key)) for key in keys))

    def _listed(self) -> events.ShardsListed:
        shards = qualified_shards(stream_of(self._key), self._admin.list_shards())
        return events.ShardsListed(shards)

    def _begin(self, ask: Ask) -> None:
        if self.watch is None:
            what = "a look-up at the end of the shard"
            self.watch = self._fetch_watch.beside(lambda: self.view, what)
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
