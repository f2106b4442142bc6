"""The launcher: a process that loads what a lease process needs, once, and forks on request.

Run by the manager as `python -m kclrun.manager.launcher <fd> <module:function> <module>…`. It has
one thread, so its forks are safe; its memory is frozen, so they share it; it knows no lease.
Why not multiprocessing's fork server: when that one is killed, `Process.sentinel` fires within
1 ms and `is_alive()` is False with exit code 255 while the child works on (measured): a dead
sentinel proves nothing, and a lease restarted on its word would have two writers [P5].
Rule: a pidfd is opened before the process could be reaped, so no number is ever reused in between.
Its own death ends no lease process; the manager's death (end of the channel) ends it at once.
Look next: `launching.py`, the manager's side.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import gc
import importlib
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Final

from kclrun.errors import InvariantViolation
from kclrun.ipc.channel import Channel, NotSent, PeerGone, Quiet
from kclrun.ipc.exit_codes import BUG
from kclrun.ipc.messages import (
    Exited,
    Fork,
    Forked,
    ForkFailed,
    FromLauncher,
    Quit,
    Ready,
    ToLauncher,
    channel_of_launcher,
)
from kclrun.manager.process_rights import (
    close_descriptors_except,
    drop_rights,
    name_process,
    speak_on_the_channel_only,
)

__all__ = ["main"]

Entry = Callable[[int, int, int], int]
_DESCRIPTORS_OF_A_FORK: Final = 3
_STDERR: Final = 2
# A manager that did not read for 10 ms is busy for a while: four more tries in 100 ms.
_RETRY_MS: Final = 20


def main(arguments: Sequence[str]) -> int:
    """Serve the channel on descriptor `arguments[0]` until it ends; always 0."""
    channel = channel_of_launcher(int(arguments[0]))
    os.set_inheritable(channel.fileno(), False)  # noqa: FBT003 - its only argument
    entry = _load(arguments[1], arguments[2:])
    name_process("kclrun-launcher")
    # A core dump of the launcher holds nothing; what a lease process drops, it drops for itself.
    wakeup_read, wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _only_wake)
    # Ctrl-C is the manager's business; a TERM to the whole group must not stop forks of a drain.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if threading.active_count() != 1:
        raise InvariantViolation("a preloaded module started a thread: forks would be unsafe")
    gc.collect()
    gc.freeze()
    outbox = Outbox(channel)
    outbox.post(Ready(os.getpid()))
    _serve(channel, outbox, wakeup_read, entry)
    return 0


class Outbox:
    """Answers on their way to a manager that may be busy: none is lost while it lives.

    Bounded by what is answered: a few forks in flight, and one death a lease process.
    """

    def __init__(self, channel: Channel[FromLauncher, ToLauncher]) -> None:
        self._channel = channel
        self._waiting: collections.deque[tuple[FromLauncher, tuple[int, ...]]] = collections.deque()

    def post(self, message: FromLauncher, fds: tuple[int, ...] = ()) -> None:
        """Send in order, now or later; closes `fds` once they were sent."""
        self._waiting.append((message, fds))
        self.flush()

    def flush(self) -> None:
        while self._waiting:
            message, fds = self._waiting[0]
            if isinstance(self._channel.send(message, fds), NotSent):
                return
            self._waiting.popleft()
            _close(fds)

    @property
    def retry_ms(self) -> int | None:
        """How long to wait before the next flush; None if there is nothing to send."""
        return _RETRY_MS if self._waiting else None


def _load(entry: str, modules: Sequence[str]) -> Entry:
    for name in modules:
        importlib.import_module(name)
    module, _, function = entry.partition(":")
    found: Entry = getattr(importlib.import_module(module), function)
    return found


def _only_wake(_number: int, _frame: object) -> None:
    """The wakeup descriptor does the rest: a handler that does nothing cannot be interrupted."""


def _serve(
    channel: Channel[FromLauncher, ToLauncher], outbox: Outbox, wakeup_fd: int, entry: Entry
) -> None:
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLIN)
    poller.register(wakeup_fd, select.POLLIN)
    while True:
        poller.poll(outbox.retry_ms)
        outbox.flush()
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup_fd, 4096)
        _reap(outbox)
        got = channel.receive_with_fds()
        if isinstance(got, PeerGone):
            return
        if isinstance(got, Quiet):
            continue
        message, fds = got
        if isinstance(message, Quit):
            return
        _fork(outbox, message, fds, entry)


def _fork(outbox: Outbox, request: Fork, fds: tuple[int, ...], entry: Entry) -> None:
    if len(fds) != _DESCRIPTORS_OF_A_FORK:
        raise InvariantViolation(f"a fork request with {len(fds)} descriptors")
    try:
        pid = os.fork()
    except OSError as error:
        _close(fds)
        outbox.post(ForkFailed(request.request_id, f"fork: {error.strerror}"))
        return
    if pid == 0:
        _become_lease_process(fds, entry)
    _close(fds)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        # Without a pidfd its death could not be proven: it has not begun anything, so end it.
        os.kill(pid, signal.SIGKILL)
        outbox.post(ForkFailed(request.request_id, f"pidfd_open: {error.strerror}"))
        return
    outbox.post(Forked(request.request_id, pid), (pidfd,))


def _become_lease_process(fds: tuple[int, ...], entry: Entry) -> None:
    """Never returns: whatever happens, this process ends here and not in the launcher's loop."""
    code = BUG
    try:
        signal.set_wakeup_fd(-1)
        speak_on_the_channel_only()
        close_descriptors_except(fds)
        drop_rights()
        name_process("kclrun-lease")
        # ABRT, the last word but one of a stop by force, leaves the stacks of all threads.
        faulthandler.enable(_STDERR, all_threads=True)
        code = entry(*fds)
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else BUG
    except BaseException:  # noqa: BLE001 - the last frame of a process: report, then end it
        _print_traceback()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)


def _print_traceback() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        traceback.print_exc()


def _reap(outbox: Outbox) -> None:
    """Reap all that died, and say so. Their pids may be used again from here on."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        outbox.post(Exited(pid, status))


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
