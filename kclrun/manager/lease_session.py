"""Ends a lease process together with all processes that user code started in its session.

It does not know leases.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
# A member that forks while it is killed leaves a child for the next round. A program that forks
# without end is a fork bomb: the limit of processes has to stop it.
_ROUNDS_MAX: Final = 10
# In the order of the interpreter's own exit; the first also waits for threads of user code. They
# have no public name, and are there from Python 3.11 to 3.13 at least: the launcher looks for them.
_HOOKS: Final = ((threading, "_shutdown"), (atexit, "_run_exitfuncs"))
# The same time as user code gets to return when its lease is lost (`worker/main.py`): an idle pool
# ends in some milliseconds, and a busy pool works for a lease that is lost.
EXIT_HOOKS_WAIT_S: Final = 1.0


def end_session(leader: int, has_leader: Callable[[], bool]) -> tuple[int, ...]:
    """Kill all processes in the session of the process `leader`, except the leader and ourselves.

    A lease process leads a session of its own. A process that user code starts (a
    ProcessPoolExecutor, a program) is in that session, in any process group, unless it made its own
    session. The session ends with its leader, and before the next process of the lease starts.

    The number names this session and no other only while the leader lives or is not reaped.
    `has_leader` says that this still holds. It is called after the members were found and before
    they are killed. A member is found by its session and killed by a pidfd that was opened before,
    so no other process can be killed.
    Returns the pids that were sent the signal; none if the kernel or /proc refuses the information.
    """
    spared = {leader, os.getpid()}
    ended: set[int] = set()
    for _ in range(_ROUNDS_MAX):
        found = _members(leader, spared | ended)
        try:
            if not found or not has_leader():
                break
            for pid, pidfd in found.items():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                ended.add(pid)
        finally:
            for pidfd in found.values():
                os.close(pidfd)
    return tuple(sorted(ended))


def session_members(leader: int) -> tuple[int, ...]:
    """The processes in the session of `leader`, which is known to live, without the leader."""
    found = _members(leader, {leader, os.getpid()})
    for pidfd in found.values():
        os.close(pidfd)
    return tuple(sorted(found))


def is_unreaped(pidfd: int) -> bool:
    """Whether the process lives, or has exited and its number is not free yet."""
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except OSError:
        return False
    return True


def run_exit_hooks(wait_s: float, leave: Callable[[], None]) -> None:
    """Run the exit hooks of the interpreter, because a lease process exits without them: the hooks
    of `concurrent.futures` and `multiprocessing`, which end their workers, and those of user code.

    From the main thread. `leave` is called on another thread if they take longer than `wait_s`.
    If no thread can be started, no hook is run.
    """
    late = threading.Timer(wait_s, leave)
    late.daemon = True
    try:
        late.start()
    except RuntimeError:
        return
    for module, name in _HOOKS:
        hook = getattr(module, name, None)
        with contextlib.suppress(
            BaseException
        ):  # errors of user code; the process ends all the same
            if hook is not None:
                hook()
    late.cancel()


def missing_hooks() -> tuple[str, ...]:
    """What this Python lacks of what `run_exit_hooks` calls. Without it the hooks do not run; the
    processes that user code started are ended all the same."""
    return tuple(
        f"{module.__name__}.{name}"
        for module, name in _HOOKS
        if not callable(getattr(module, name, None))
    )


def _members(leader: int, spared: set[int]) -> dict[int, int]:
    """The processes of a session without `spared`: each pid with a pidfd that the caller closes."""
    found: dict[int, int] = {}
    try:
        names = os.listdir(_PROC)  # names, not paths
    except OSError:
        return found
    for name in names:
        if not name.isdecimal() or int(name) in spared or not _is_in(int(name), leader):
            continue
        pid = int(name)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        # Checked again: the first answer may be that of a former process of this number.
        if _is_in(pid, leader):
            found[pid] = pidfd
        else:
            os.close(pidfd)
    return found


def _is_in(pid: int, leader: int) -> bool:
    try:
        return os.getsid(pid) == leader
    except OSError:
        return False
