"""Whether a lease process stands still that should move [L5].

Pure. Rule: only what a restart can mend counts: user code that does not return, and a process that
never came to read. A service that is away is waited for; a shard without records is idle.
"""

from __future__ import annotations

from typing import Final

from kclrun.ipc.board import LeaseStatus, WorkerState
from kclrun.model.time import Instant

__all__ = ["stalled"]

_BEFORE_READING: Final = (WorkerState.STARTING, WorkerState.CLAIMING)


def stalled(
    status: LeaseStatus | None, *, began_instant: Instant, stall_s: float, now: Instant
) -> str | None:
    """Why a process that began at `began_instant` counts as stalled, in words; None if not."""
    if status is None or status.state in _BEFORE_READING:
        waited_s = now - began_instant
        return f"reading has not begun for {waited_s:.0f} s" if waited_s >= stall_s else None
    since = status.processing_since_instant
    if since > 0.0 and now - since >= stall_s:
        return f"user code has not returned for {now - since:.0f} s"
    return None
