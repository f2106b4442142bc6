"""The terminal while an application runs on it: the live table below, log lines above.

Standard output and error of this process and of every process it starts go into a pipe for as long
as the display stands; a thread of its own prints what comes and draws the newest snapshot. Rule:
whoever shows a snapshot never waits: a terminal stopped with Ctrl-S must not stop a manager.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kclrun.cli.live_table import render
from kclrun.cli.messages import harmless
from kclrun.observe.snapshot import Snapshot

__all__ = ["LiveDisplay"]

_STDOUT: Final = 1
_STDERR: Final = 2
# Twice a look of the manager, which shows a snapshot a second.
_DRAW_EVERY_S: Final = 0.5
_READ_BYTES_MAX: Final = 65_536
# A line without an end is shown in pieces of this size.
_LINE_BYTES_MAX: Final = 8_192
# At the end: time to print what is in the pipe, unless the terminal stands still.
_END_MAX_S: Final = 2.0


class LiveDisplay:
    """Enter it, `show` snapshots from any thread, leave it: the terminal is as before."""

    def __init__(self) -> None:
        self._newest: Snapshot | None = None
        self._drawn: Snapshot | None = None
        self._rest = b""
        self._saved: tuple[int, int] = (-1, -1)
        self._read_fd = -1
        self._is_ending = threading.Event()

    def show(self, snapshot: Snapshot) -> None:
        """Draw this one next; at once and without waiting for the terminal."""
        self._newest = snapshot

    def __enter__(self) -> Self:
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = (os.dup(_STDOUT), os.dup(_STDERR))
        self._read_fd, write_fd = os.pipe()
        os.dup2(write_fd, _STDOUT)
        os.dup2(write_fd, _STDERR)
        os.close(write_fd)
        self._thread = threading.Thread(target=self._draw_all, name="display", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self._saved[0], _STDOUT)
        os.dup2(self._saved[1], _STDERR)
        self._is_ending.set()
        self._thread.join(_END_MAX_S)
        if self._thread.is_alive():
            return  # the terminal stands still: its descriptors stay the thread's
        for descriptor in (*self._saved, self._read_fd):
            os.close(descriptor)

    def _draw_all(self) -> None:
        with os.fdopen(os.dup(self._saved[1]), "w", encoding="utf-8", errors="replace") as terminal:
            console = Console(file=terminal, force_terminal=True)
            # No refresh thread of rich's, and no capture of Python's streams: both are done here.
            with Live(
                console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            ) as live:
                while self._print_arrived(console) or not self._is_ending.is_set():
                    self._draw(live, console)
                self._draw(live, console)

    def _draw(self, live: Live, console: Console) -> None:
        newest = self._newest
        if newest is not None and newest is not self._drawn:
            live.update(render(newest, console.width), refresh=True)
            self._drawn = newest

    def _print_arrived(self, console: Console) -> bool:
        """Print whole lines that have come; whether anything came (the end is waited for less)."""
        wait_s = 0.0 if self._is_ending.is_set() else _DRAW_EVERY_S
        if not select.select([self._read_fd], [], [], wait_s)[0]:
            return False
        arrived = os.read(self._read_fd, _READ_BYTES_MAX)
        *lines, self._rest = (self._rest + arrived).split(b"\n")
        if len(self._rest) > _LINE_BYTES_MAX or (not arrived and self._rest):
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            text = harmless(line.decode(errors="replace").rstrip("\r"))
            console.print(Text(text), soft_wrap=True)
        return bool(arrived)
