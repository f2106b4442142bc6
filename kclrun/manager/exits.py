"""The exits of lease processes: a pidfd proves each, and the launcher, or we, know its status.

It does not know why a process exits, nor what follows for its lease.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, Protocol

from kclrun.ipc.messages import Exited, Left
from kclrun.leases.events import Event, ProcessExited
from kclrun.manager.lease_session import end_session, is_unreaped
from kclrun.manager.loop import Loop
from kclrun.manager.process_slots import ProcessSlots
from kclrun.manager.ring_reader import Child, RingReader, exit_words, waiting_since
from kclrun.manager.sharing import SharedProcesses
from kclrun.observe.logs import EventLog

# The launcher reports the exit status within a millisecond after the pidfd fires. A machine without
# CPU or memory to spare is late, and there the status names the reason of the death. Without a
# launcher the status may never come.
_STATUS_PATIENCE_S: Final = 1.0
_STATUS_PATIENCE_ALONE_S: Final = 0.1


class ProcessHost(Protocol):
    """The manager of lease processes. Its methods are called in the loop's thread."""

    def deliver(self, event: Event) -> None:
        """Called with each event for the core."""
        ...

    def departed(self, child: Child) -> None:
        """Called with each process that has exited, before the event of its exit."""
        ...


class ProcessExits:
    """All calls in the loop's thread. An exit is delivered only after the pidfd proved it and the
    ring was emptied. What the process held is released then, and it is taken out of `children`.
    """

    def __init__(
        self,
        children: dict[int, Child],
        slots: ProcessSlots,
        sharing: SharedProcesses,
        ring_reader: RingReader,
        host: ProcessHost,
        *,
        loop: Loop,
        log: EventLog,
        has_launcher: Callable[[], bool],
    ) -> None:
        self._children = children
        self._slots = slots
        self._sharing = sharing
        self._ring_reader = ring_reader
        self._host = host
        self._loop = loop
        self._log = log
        self._has_launcher = has_launcher

    def watch(self, child: Child) -> None:
        """The process runs: await its exit."""
        assert child.pidfd is not None, "a process that runs is one whose pidfd we hold"
        self._loop.watch(child.pidfd, lambda: self._pidfd_fired(child))

    def reaped(self, report: Exited) -> None:
        """The launcher reaped a process; its status may come before its pidfd fires, or after."""
        for child in tuple(self._children.values()):
            if child.pid == report.pid and child.status is None:
                child.status = report.status
                if child.has_exited:
                    self._note_exit(child)

    def left(self, child: Child, left: Left) -> None:
        """It ended in a shared process, which proved that no thread writes for it any more."""
        assert child.pidfd is not None, "only an admitted lease can leave"
        self._loop.unwatch(child.pidfd)
        child.has_exited = child.has_left = True
        child.status = left.code << 8
        self._note_exit(child)

    def _pidfd_fired(self, child: Child) -> None:
        """The exit is proven. The exit status comes from the launcher, or from us as its reaper."""
        pid, pidfd = child.pid, child.pidfd
        assert pidfd is not None, "a pidfd that fired is one we hold"
        assert pid is not None, "a pidfd comes with its pid"
        self._loop.unwatch(pidfd)
        child.has_exited = True
        if child.status is None:
            # The launcher ends a session before it reaps its leader. Without a launcher, the
            # processes that user code started end here, before the next start.
            end_session(pid, lambda: is_unreaped(pidfd))
            status = _reaped(pidfd)
            for neighbour in self._sharing.neighbours(child):
                neighbour.status = neighbour.status if status is None else status
        if child.status is not None:
            self._note_exit(child)
        else:
            patience_s = _STATUS_PATIENCE_S if self._has_launcher() else _STATUS_PATIENCE_ALONE_S
            self._loop.after(patience_s, lambda: self._note_exit(child))

    def _note_exit(self, child: Child) -> None:
        if self._children.pop(child.incarnation, None) is None:
            return
        assert child.pidfd is not None, "only a process whose pidfd we held is waited for"
        assert child.pid is not None, "a pidfd comes with its pid"
        for event in self._ring_reader.read_last(child):
            if not child.is_written_off:  # another process has its lease by now
                self._host.deliver(event)
        child.look()
        os.close(child.pidfd)
        child.pidfd = None
        cause = self._sharing.cause_of(child)
        self._sharing.forget(child)
        child.channel.close()
        self._host.departed(child)
        self._slots.give_back(child.place)
        words = exit_words(child.status, child.forced, is_vouched=child.has_reported_end)
        if child.stall is not None:
            words = f"{child.stall}, so its manager ended it; {words}"
        elif cause and not child.has_left:
            words = f"it shared its process with {cause}; {words}"
        self._log.note("process_exited", shard=child.key, process=child.pid, reason=words)
        if not child.is_written_off:
            since = waiting_since(child.last_status)
            has_shared = child.is_sharing and not child.has_left
            exited = ProcessExited(child.key, child.pid, words, since, is_shared=has_shared)
            self._host.deliver(exited)


def _reaped(pidfd: int) -> int | None:
    """The wait status of an orphan that we inherited; None if another process has to reap it."""
    try:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    if info is None:
        return None
    if info.si_code == os.CLD_EXITED:
        return info.si_status << 8
    return int(info.si_status)
