"""Reaps the processes that programs of user code leave behind: this manager inherits them.

It does not know lease processes: their pids are spared.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final

import psutil

from kclrun.manager.loop import Loop

_AGAIN_S: Final = 1.0


def reap_adopted(spared: AbstractSet[int]) -> tuple[int, ...] | None:
    """Reap orphaned children that have exited, except those in `spared`; the pids reaped.

    As process 1 of a container, or as the subreaper that we declare ourselves, we inherit the
    processes that programs of user code leave behind. Only children of another session are orphans:
    lease processes and the launcher have sessions of their own, and all processes that they start
    are in those. A child that the program around us started itself is for that program to reap.

    None if /proc could not be read to its end, because this process has no descriptor or memory
    left: some orphans may still wait, and only another call reaps them.
    """
    reaped = []
    session = os.getsid(0)
    try:
        for child in psutil.Process().children():
            if child.pid in spared or not _is_exited_orphan(child, session):
                continue
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(child.pid, os.WNOHANG)[0]:
                    reaped.append(child.pid)
    except (psutil.Error, OSError):
        return None
    return tuple(reaped)


def _is_exited_orphan(child: psutil.Process, session: int) -> bool:
    try:
        return child.status() == psutil.STATUS_ZOMBIE and os.getsid(child.pid) != session
    except (psutil.Error, ProcessLookupError):
        return False


class OrphanReaper:
    """Reaps at each SIGCHLD. If this host has no free descriptor then, it tries again later: there
    may be no further signal. `spared` gives the pids of our own processes."""

    def __init__(self, spared: Callable[[], AbstractSet[int]], loop: Loop) -> None:
        self._spared = spared
        self._loop = loop
        self._is_due = False

    def reap(self) -> None:
        """Reap all orphans that have exited."""
        if reap_adopted(self._spared()) is None and not self._is_due:
            self._is_due = True
            self._loop.after(_AGAIN_S, self._reap_again)

    def _reap_again(self) -> None:
        self._is_due = False
        self.reap()
