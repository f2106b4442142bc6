"""Ends lease processes whose patience is over: first a dump of their stacks, then the end.

It does not know why a process has to end by then.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping

from kclrun.leases.events import Event, ProcessExited
from kclrun.lifecycle.stopping import UNKILLABLE_AFTER_S, latest_fence, next_force
from kclrun.manager.loop import Loop
from kclrun.manager.ring_reader import Child
from kclrun.manager.sharing import SharedProcesses
from kclrun.model.time import Instant
from kclrun.observe.logs import EventLog


class Forcing:
    """Forces the processes of `children`. All calls in the loop's thread.

    The exit of a process that no signal ends is delivered after the latest fence that it could
    reach [P5]. `failover_s` is the longest failover that a lease process may have received.
    `has_forced`: whether a process that was asked to drain had to be killed.
    """

    def __init__(
        self,
        children: Mapping[int, Child],
        sharing: SharedProcesses,
        *,
        loop: Loop,
        log: EventLog,
        deliver: Callable[[Event], None],
        failover_s: float,
    ) -> None:
        self.has_forced = False
        self._children = children
        self._sharing = sharing
        self._loop = loop
        self._log = log
        self._deliver = deliver
        self._failover_s = failover_s

    def force_from(self, child: Child, force_instant: Instant) -> None:
        """Force this process from `force_instant` on, unless it is to be forced sooner."""
        before = child.force_instant
        child.force_instant = min(before, force_instant) if before is not None else force_instant
        self._loop.at(child.force_instant, self._force)

    def _force(self) -> None:
        """Force processes whose time is over."""
        for child in tuple(self._children.values()):
            following = next_force(child.force_instant, child.forced)
            if following is None or child.has_exited or child.pidfd is None:
                continue
            number, due = following
            if self._loop.now() < due:
                self._loop.at(due, self._force)
                continue
            if child.stall is None:  # else the watchdog logs it
                self._log.note("process_killed", shard=child.key, signal=number.name)
            self.has_forced = self.has_forced or child.drain_reason is not None
            child.send_signal(number)
            self._loop.after(0.0, self._force)
            if number is signal.SIGKILL:
                for neighbour in self._sharing.neighbours(child):
                    self._loop.after(
                        UNKILLABLE_AFTER_S, functools.partial(self._write_off, neighbour)
                    )

    def _write_off(self, child: Child) -> None:
        """KILL does not end it: report its exit once it can start no batch any more [P5]."""
        if child.has_exited or child.incarnation not in self._children:
            return
        now = self._loop.now()
        fence_instant = latest_fence(
            child.slot.last_send_instant(),
            expires_instant=child.start.expires_instant,
            failover_s=self._failover_s,
            now=now,
        )
        if now < fence_instant:
            self._loop.at(fence_instant, lambda: self._write_off(child))
            return
        assert child.pid is not None, "only a process with a pid is sent signals"
        child.is_written_off = True
        self._log.note("process_unkillable", shard=child.key, process=child.pid)
        self._deliver(
            ProcessExited(
                child.key,
                child.pid,
                "no signal ends it, and its fence has passed",
                is_shared=child.is_sharing,
            )
        )
