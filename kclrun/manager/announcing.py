"""When a service manager such as systemd is told what: ready, alive, stopping, and how it goes.

    READY=1      once, when the lease table was read and leases can be taken
    WATCHDOG=1   at each look while the verdict of /health is not `failing`; so the watchdog bites
                 where work has stopped, and not only where the process has
    STOPPING=1   once, when a stop begins, whoever asked for it
    EXTEND_TIMEOUT_USEC=…
                 at each look while it goes well: a drained machine may wait for its group to end it
    STATUS=…     the verdict in words, when it changes

Rule: what was not taken is told again at the next look; nothing waits for it.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Mapping
from typing import Final

from kclrun.errors import SettingsError
from kclrun.observe.health import Verdict
from kclrun.observe.logs import EventLog, clean_text
from kclrun.observe.service_manager import NotifySocket, notify_socket, watchdog_s

__all__ = ["Announcer", "open_announcer"]

# Verdicts by which the manager has begun: it has read its table, and can work.
_BEGUN: Final = frozenset({"ok", "degraded"})
# A line of `systemctl status`.
_STATUS_CHARACTERS_MAX: Final = 200
# Looks are every 2 s (`metering.py`); sd_watchdog_enabled(3) advises two words a period, and a busy
# machine may be late with one.
_WATCHDOG_MIN_S: Final = 10.0
# What a stop that goes well asks for at each look, every 2 s: a drained instance may have to wait
# for its group longer than TimeoutStopSec. A manager that hangs meanwhile is ended all the same.
_MORE_TIME_US: Final = 30_000_000
_STDERR: Final = 2


class Announcer:
    """Tells one service manager about one manager. For the loop's thread."""

    def __init__(self, socket: NotifySocket, log: EventLog) -> None:
        self._socket = socket
        self._log = log
        self._is_ready = False
        self._is_stopping = False
        self._status = ""
        self._is_withheld = False
        self._is_heard = True

    def look(self, verdict: Verdict, leases: int) -> None:
        """Tell what follows from a verdict of this moment; `leases` is how many are held."""
        words = {}
        status = _status(verdict, leases)
        if verdict.is_healthy:
            words["WATCHDOG"] = "1"
        if verdict.is_healthy and self._is_stopping:
            words["EXTEND_TIMEOUT_USEC"] = str(_MORE_TIME_US)
        is_ready = self._is_ready or verdict.status in _BEGUN
        if is_ready and not self._is_ready:
            words["READY"] = "1"
        if status != self._status:
            words["STATUS"] = status
        self._note_withheld(verdict)
        if words and self._tell(words):
            self._is_ready, self._status = is_ready, status

    def stop_begins(self) -> None:
        """A stop was asked for, by whomever. A second call tells nothing new."""
        if not self._is_stopping:
            self._is_stopping = self._tell({"STOPPING": "1"})

    def close(self) -> None:
        self._socket.close()

    def _tell(self, words: Mapping[str, str]) -> bool:
        try:
            self._socket.tell(words)
        except OSError as error:
            if self._is_heard:
                self._log.note(
                    "service_manager_deaf",
                    endpoint=self._socket.address,
                    error=error.strerror or str(error),
                )
            self._is_heard = False
            return False
        self._is_heard = True
        return True

    def _note_withheld(self, verdict: Verdict) -> None:
        """Said once, so that the log shows why the watchdog bit."""
        is_withheld = not verdict.is_healthy
        if is_withheld and not self._is_withheld:
            self._log.note("watchdog_withheld", reason=verdict.reasons[0].text)
        self._is_withheld = is_withheld


def open_announcer(environment: Mapping[str, str], log: EventLog) -> Announcer | None:
    """For who started us, as the environment says; None if nobody wants to be told.

    Where a watchdog watches, a process that it ends (SIGABRT) leaves its stacks on standard error.
    Raises: SettingsError for an address or a period that cannot be served.
    """
    socket = notify_socket(environment)
    if socket is None:
        return None
    period_s = watchdog_s(environment)
    if period_s is not None and period_s < _WATCHDOG_MIN_S:
        socket.close()
        raise SettingsError(
            f"WatchdogSec: {period_s:g} s is shorter than the {_WATCHDOG_MIN_S:g} s that a manager"
            " needs to show progress; 30 s are good"
        )
    if period_s is not None:
        faulthandler.enable(_STDERR, all_threads=True)
    return Announcer(socket, log)


def _status(verdict: Verdict, leases: int) -> str:
    counted = f"{verdict.status}, {leases} {'lease' if leases == 1 else 'leases'}"
    because = f": {verdict.reasons[0].text}" if verdict.reasons else ""
    # Cleaned: an exception's message in a reason may hold line breaks.
    return clean_text(counted + because, _STATUS_CHARACTERS_MAX)
