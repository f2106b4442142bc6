"""The lease thread: receives the manager's messages, has the core's commands performed, and waits
for what comes next.

All writes of the row go through this one thread [P5]. A slow answer of the table delays the next
event. It never delays a decision: each event carries the time to the core. It asks no service for
anything but the lease's own row: what else the core needs, another thread asks (`look_ups.py`).
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Final

from kclrun.lease import commands, events
from kclrun.model.time import Instant
from kclrun.worker.delivery_queue import DeliveryQueue, Inbox
from kclrun.worker.fetching import FetchWatch
from kclrun.worker.lease_driver import LeaseDriver
from kclrun.worker.manager_line import ManagerChannel
from kclrun.worker.sharing import LEASE_THREAD, LeaseThreads

# An idle lease publishes its status so often; every event (a batch, a write, a message, the tip of
# the shard) publishes it at once. Among a hundred idle processes the caches are cold and a turn
# takes 0.24 ms: five turns a second were 9 % of a core more than one (`bin/bench idle`).
LOOK_S: Final = 2.0
# A waiting thread wakes within milliseconds. If it is a whole second late, another thread held the
# GIL, or the process did not run.
STALL_LOGGED_S: Final = 1.0


class LeaseThread:
    """Runs the core until it returns Exit.

    `cause` is the reason of the Exit; `failure` is the error that ended the thread, if one did.
    `on_over` is called on this thread at the very end, with the queue closed.

    It is not a subclass of `threading.Thread`, which may use a new private name in any release
    (`_handle` of 3.13 hid a method of this class, and every lease process failed at its start).
    """

    def __init__(
        self,
        driver: LeaseDriver,
        inbox: Inbox,
        line: ManagerChannel,
        queue: DeliveryQueue,
        *,
        fetch_watch: FetchWatch,
        threads: LeaseThreads,
        now: Callable[[], Instant],
        on_over: Callable[[], None],
    ) -> None:
        self._thread = threads.make_thread(self._run, LEASE_THREAD)
        self.failure: BaseException | None = None
        self._driver = driver
        self._inbox = inbox
        self._line = line
        self._queue = queue
        self._fetch_watch = fetch_watch
        self._rest_s = threads.rest_s
        self._now = now
        self._on_over = on_over
        self._awake_since = now()
        self._user_code_before_s = 0.0

    @property
    def cause(self) -> commands.ExitCause | None:
        return self._driver.cause

    def start(self) -> None:
        self._driver.post(events.Started())
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the lease is over, at most `timeout_s`."""
        self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._driver.cause is None and self.failure is None:
                self._turn()
        except BaseException as error:  # noqa: BLE001 - the thread's edge: `main` reports it
            self.failure = error
        finally:
            self._queue.close()
            self._driver.look_ups.close()
            self._on_over()

    def break_off(self, error: BaseException) -> None:
        """Another thread broke: end the process; its successor begins anew. Any thread."""
        self.failure = error
        self._inbox.post(events.Ticked())

    def _turn(self) -> None:
        """Handle everything that has happened, then wait for more."""
        self._driver.run()
        if self._driver.cause is not None:
            return
        self._driver.publish()
        self._watch_requests()
        self._wait()
        self._driver.perform_due()
        self._driver.post(events.Ticked())

    def _watch_requests(self) -> None:
        """A lease that is renewed and not read stalls in silence: end the process instead."""
        for watch in (self._fetch_watch, self._driver.look_ups.watch):
            hung = None if watch is None else watch.look(self._now())
            if hung is not None:
                self._driver.warn(f"{hung}; the lease process ends and begins anew")
                self.break_off(hung)

    def _wait(self) -> None:
        before = self._now()
        deadline = min(self._driver.next_deadline(before), before + self._rest_s(before, LOOK_S))
        self._report_stall(before - self._awake_since - self._driver.own_row.asking_s)
        poller = select.poll()  # select() takes no descriptor above 1,023; user code may open more
        for descriptor in (self._inbox.fileno(), *self._line.filenos()):
            poller.register(descriptor, select.POLLIN)
        poller.poll(max(0.0, deadline - before) * 1000)
        self._awake_since, self._driver.own_row.asking_s = self._now(), 0.0
        self._report_stall(self._awake_since - max(deadline, before))
        for event in (*self._line.receive(), *self._inbox.take()):
            self._driver.post(event)

    def _report_stall(self, stalled_s: float) -> None:
        """Report a late wake-up, or long work that is not a request to a service."""
        if stalled_s >= STALL_LOGGED_S:
            # User code may have returned by now: the thread that waited longest need not run first.
            in_user_code = self._user_code_s() - self._user_code_before_s >= STALL_LOGGED_S
            self._driver.post(events.ThreadStalled(stalled_s, in_user_code))
        self._user_code_before_s = self._user_code_s()

    def _user_code_s(self) -> float:
        view = self._queue.view()
        running_s = self._now() - view.busy_since if view.busy_since else 0.0
        return view.processing_s_total + running_s
