"""How lease processes and the manager leave once the patience of a stop has ended.

Pure. `force_instant` is that of the `StopPlan`. Rule: rows that are still ours then are left to
expire. Look next: `kclrun/stopping.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Final

from kclrun.model.time import Instant

__all__ = ["UNKILLABLE_AFTER_S", "latest_fence", "leave_at", "next_force"]

# After ABRT, the time to write the stacks of all threads; then KILL, which nothing survives.
_LAST_WORDS_S: Final = 1.0
# After the last process was forced, for the releases of its rows: a write and one retry.
_LAST_WRITES_S: Final = 5.0


# A process dies of KILL within milliseconds, unless it is inside a system call that cannot be
# interrupted: a disk, a network file system.
UNKILLABLE_AFTER_S: Final = 5.0


def latest_fence(
    last_send_instant: Instant | None,
    *,
    expires_instant: Instant,
    failover_s: float,
    now: Instant,
) -> Instant:
    """When a process that cannot be killed starts no batch any more, whatever becomes of it [P5].

    It may claim until its start command expires, and each write that it sent may have been granted
    it a `failover_s`. A last send that cannot be read (None) may be one of just now.
    """
    sent_instant = now if last_send_instant is None else last_send_instant
    return max(expires_instant, Instant(sent_instant + failover_s))


def leave_at(force_instant: Instant | None) -> Instant | None:
    """When to leave, whatever is still open: rows of ours then expire."""
    if force_instant is None:
        return None
    return Instant(force_instant + _LAST_WORDS_S + _LAST_WRITES_S)


def next_force(
    force_instant: Instant | None, forced: Sequence[signal.Signals]
) -> tuple[signal.Signals | None, Instant | None]:
    """The next signal for a process whose patience ends at `force_instant`, and when it is due."""
    if force_instant is None or signal.SIGKILL in forced:
        return None, None
    if signal.SIGABRT in forced:
        return signal.SIGKILL, Instant(force_instant + _LAST_WORDS_S)
    return signal.SIGABRT, force_instant
