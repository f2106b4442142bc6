"""Signals from outside, turned into words on a pipe: the handlers do nothing else.

Rule: a handler runs between any two instructions, so it may take no lock, write no log and decide
nothing; Python itself writes the signal's number to the wakeup descriptor, the loop reads it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Final

__all__ = ["SignalPipe"]

# PIPE holds 4096 numbers; more of them say nothing new.
_READ_BYTES: Final = 4096
_LISTENED: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGCHLD,
)
_Handler = Callable[[int, FrameType | None], object] | int | None


class SignalPipe:
    """The listened signals, in order of arrival. For the main thread, from `open` to `close`."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._former: dict[signal.Signals, _Handler] = {}
        self._former_wakeup_fd = -1

    def open(self) -> None:
        """Take over the handlers. Raises: ValueError outside the main thread."""
        self._former_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in _LISTENED:
            self._former[number] = signal.signal(number, _only_enqueue)

    def fileno(self) -> int:
        return self._read_fd

    def take(self) -> tuple[signal.Signals, ...]:
        """What arrived since the last call; a burst of one signal may count as fewer."""
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self._read_fd, _READ_BYTES)
            return tuple(signal.Signals(number) for number in numbers if number in _LISTENED)
        return ()

    def close(self) -> None:
        """Give the handlers back."""
        for number, former in self._former.items():
            signal.signal(number, signal.SIG_DFL if former is None else former)
        if self._former:
            signal.set_wakeup_fd(self._former_wakeup_fd)
        self._former.clear()
        os.close(self._read_fd)
        os.close(self._write_fd)


def _only_enqueue(_number: int, _frame: object) -> None:
    """The wakeup descriptor has the number already."""
