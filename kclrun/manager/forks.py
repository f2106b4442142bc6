"""Forks asked of the launcher, a few at a time; and a launcher that is there to be asked.

Holds: `Forks`. May not know: leases; a request is a number and three descriptors.
Rule: every request is answered once, by `forked` or `refused`, whatever becomes of the launcher.
Look next: `launching.py` (one launcher), `children.py` (who asks).
"""

from __future__ import annotations

import collections
import socket
from collections.abc import Callable
from typing import Final

from kclrun.ipc.messages import Exited
from kclrun.manager.launching import (
    ForkRefused,
    Launcher,
    LauncherGone,
    LauncherReport,
    ProcessForked,
)
from kclrun.manager.loop import Loop
from kclrun.observe.logs import EventLog

__all__ = ["Forks"]

# Linux queues 11 messages on a channel by default; a fork takes 3 ms, so four keep it busy.
_FORKS_IN_FLIGHT_MAX: Final = 4
# A launcher that cannot live (its modules do not load, say) is tried twice a minute in the end.
_PAUSE_S_MAX: Final = 30.0
_PAUSE_FIRST_S: Final = 0.5


class Forks:
    """Requests in their order. The callbacks come in the loop's thread, also from `request`."""

    def __init__(
        self,
        launcher: Launcher,
        *,
        loop: Loop,
        log: EventLog,
        forked: Callable[[ProcessForked], None],
        refused: Callable[[int, str], None],
        exited: Callable[[Exited], None],
    ) -> None:
        self._launcher = launcher
        self._loop = loop
        self._log = log
        self._forked = forked
        self._refused = refused
        self._exited = exited
        self._unasked: collections.deque[tuple[int, tuple[int, ...], socket.socket]] = (
            collections.deque()
        )
        self._pause_s = 0.0
        self._is_closing = False

    @property
    def launcher_pid(self) -> int | None:
        return self._launcher.pid

    @property
    def has_launcher(self) -> bool:
        return self._launcher.fileno() != -1

    def open(self) -> None:
        """Start the launcher, if nobody has. A failure is noted and tried again later."""
        try:
            if self._launcher.fileno() == -1:
                self._launcher.start()
        except OSError as error:
            self._log.note("launcher_not_started", error=error.strerror)
            self._open_later()
            return
        self._loop.watch(self._launcher.fileno(), self._spoke)
        self._log.note("launcher_started", launcher_pid=self._launcher.pid)

    def request(self, request_id: int, shared_fds: tuple[int, ...], theirs: socket.socket) -> None:
        """Ask for a lease process that gets `shared_fds` and, last, `theirs`, which is taken."""
        self._unasked.append((request_id, shared_fds, theirs))
        self._ask()

    def close(self) -> None:
        """No more forks; the launcher ends, lease processes live on."""
        self._is_closing = True
        self._loop.unwatch(self._launcher.fileno())
        self._launcher.stop()
        for _, _, theirs in self._unasked:
            theirs.close()
        self._unasked.clear()

    def _ask(self) -> None:
        """A few at a time: a burst would overrun the channel's queue."""
        while self._unasked and self._launcher.in_flight < _FORKS_IN_FLIGHT_MAX:
            request_id, shared_fds, theirs = self._unasked.popleft()
            is_asked = self._launcher.fork(request_id, (*shared_fds, theirs.fileno()))
            # Held on here, it would hide the child's end of the channel from us and from it.
            theirs.close()
            if not is_asked:
                self._refused(request_id, "the launcher is not there or does not answer")

    def _spoke(self) -> None:
        fd = self._launcher.fileno()
        reports = self._launcher.hear()
        if self._launcher.fileno() == -1:
            # Closed by now, but the selector knows it by its number still.
            self._loop.unwatch(fd)
        for report in reports:
            self._take(report)
        self._ask()

    def _take(self, report: LauncherReport) -> None:
        match report:
            case ProcessForked():
                self._pause_s = 0.0
                self._forked(report)
            case ForkRefused(request_id, reason):
                self._refused(request_id, reason)
            case Exited():
                self._exited(report)
            case LauncherGone(exit_status):
                self._log.note("launcher_died", status=exit_status)
                self._open_later()

    def _open_later(self) -> None:
        """At once the first time; one that dies again and again without a fork, ever later."""
        if not self._is_closing:
            self._loop.after(self._pause_s, self.open)
        self._pause_s = min(_PAUSE_S_MAX, max(_PAUSE_FIRST_S, self._pause_s * 2))
