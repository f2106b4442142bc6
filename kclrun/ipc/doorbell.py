"""A byte on a pipe that wakes the manager: something is in one of its rings.

Holds: `Doorbell`. Rule: pressing it never waits and never fails; one press may stand for many,
so whoever answers looks into every ring. A pipe, not an eventfd: writers of any incarnation may
die at any time, and single bytes in a pipe survive that (measured: 25 kills of 25).
"""

from __future__ import annotations

import os
from typing import Final

__all__ = ["Doorbell"]

# A pipe of Linux holds 64 KiB: one read empties it.
_PIPE_BYTES: Final = 64 * 1024


class Doorbell:
    """Both ends in the manager (`create`); the write end in everybody else (`at_door`)."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self.write_fd = write_fd

    @classmethod
    def create(cls) -> Doorbell:
        """A new pipe, close-on-exec; `write_fd` is what to pass on, `fileno()` what to poll."""
        return cls(*os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))

    @classmethod
    def at_door(cls, write_fd: int) -> Doorbell:
        """The end for a lease process, from a passed descriptor, which it takes over."""
        return cls(-1, write_fd)

    def fileno(self) -> int:
        """The read end, for a selector; -1 in a lease process."""
        return self._read_fd

    def press(self) -> None:
        """Wake the manager. A full pipe has woken it already; a closed one has none to wake."""
        try:
            os.write(self.write_fd, b"!")
        except (BlockingIOError, BrokenPipeError):
            pass

    def answer(self) -> bool:
        """Take all presses so far; whether there were any. Before the rings are drained."""
        try:
            return bool(os.read(self._read_fd, _PIPE_BYTES))
        except BlockingIOError:
            return False

    def close(self) -> None:
        for fd in (self._read_fd, self.write_fd):
            if fd >= 0:
                os.close(fd)
        self._read_fd = self.write_fd = -1
