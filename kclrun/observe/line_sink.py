"""Writing whole lines to a descriptor without ever waiting, for output that nobody may be reading.

Rule: a full pipe, a closed terminal or a full disk costs the line, never the process; what was lost
is counted. Lines of up to PIPE_BUF bytes reach a pipe whole, so the lines of many processes do not
mix. Look next: `logs.py`.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["LINE_BYTES_MAX", "LineSink"]

# PIPE_BUF on Linux: writes up to here are all or nothing.
LINE_BYTES_MAX: Final = 4096


class LineSink:
    """Lines to `fd`, which stays the caller's. Threads may share it; a fork needs a new one."""

    def __init__(self, fd: int) -> None:
        self._write, self._own_fd = _writer(fd)
        self._lock = threading.Lock()
        self.dropped = 0

    def write(self, line: bytes) -> bool:
        """Write one line, its newline included; False if it was dropped. Never waits or raises."""
        with self._lock:
            try:
                is_whole = self._write(line) == len(line)
            except OSError:
                is_whole = False
            self.dropped += not is_whole
            return is_whole

    def close(self) -> None:
        if self._own_fd is not None:
            os.close(self._own_fd)
            self._own_fd = None
            self._write = _nowhere


def _writer(fd: int) -> tuple[Callable[[bytes], int], int | None]:
    """How to write to this kind of descriptor without waiting, and a descriptor of our own."""
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return _nowhere, None
    if stat.S_ISREG(mode):
        # A write to a file does not wait for a reader. Our own opening would have an offset of
        # its own, and overwrite what siblings write.
        return (lambda line: os.write(fd, line)), None
    if stat.S_ISSOCK(mode):
        return _socket_writer(fd)
    try:
        # Opened anew, O_NONBLOCK is ours alone; set on the shared descriptor it would confuse
        # the shell we were started from.
        own = os.open(
            f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        )
    except OSError:
        return (lambda line: _write_if_ready(fd, line)), None
    return (lambda line: os.write(own, line)), own


def _socket_writer(fd: int) -> tuple[Callable[[bytes], int], int]:
    # journald hands a socket to services; it has a flag for each call.
    own = os.dup(fd)

    def send(line: bytes) -> int:
        with socket.socket(fileno=os.dup(own)) as sock:
            return sock.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    return send, own


def _write_if_ready(fd: int, line: bytes) -> int:
    """For another user's pipe, which cannot be opened anew: a writable one has PIPE_BUF free."""
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    ready = poller.poll(0)
    return os.write(fd, line) if ready and ready[0][1] & select.POLLOUT else 0


def _nowhere(_line: bytes) -> int:
    return 0
