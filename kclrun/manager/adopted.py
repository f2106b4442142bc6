"""Dead descendants that are nobody's: we are their parent by adoption, so we reap them.

As process 1 of a container, or as the subreaper that we declare ourselves, we inherit what the
programs of user code leave behind. Rule: only children of another session are adopted ones (lease
processes and the launcher have sessions of their own, and so has all they start); what the program
around us started itself is its own to reap.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Set as AbstractSet

import psutil

__all__ = ["reap_adopted"]


def reap_adopted(spared: AbstractSet[int]) -> tuple[int, ...]:
    """Reap adopted children that are dead, but those in `spared`; the pids reaped."""
    reaped = []
    session = os.getsid(0)
    for child in psutil.Process().children():
        if child.pid in spared or not _is_adopted_and_dead(child, session):
            continue
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(child.pid, os.WNOHANG)[0]:
                reaped.append(child.pid)
    return tuple(reaped)


def _is_adopted_and_dead(child: psutil.Process, session: int) -> bool:
    try:
        return child.status() == psutil.STATUS_ZOMBIE and os.getsid(child.pid) != session
    except (psutil.Error, ProcessLookupError):
        return False
