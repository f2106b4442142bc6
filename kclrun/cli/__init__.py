"""The command line: one file a verb, and the place where the rooms are wired together.

`program.py` finds the verb and turns every error into a message and an exit code
(`messages.py`, `exit_codes.py`); `world.py` builds what talks to AWS, from the settings.
Rule: nothing heavy is imported before a verb needs it, so that `kclrun --help` is instant.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process; the exit code."""
    _open_what_is_closed()
    _hear_the_first_signal()
    from kclrun.cli.program import run_program

    return run_program(sys.argv[1:])


def _open_what_is_closed() -> None:
    """Give a program started with closed standard files (`>&-`) the null device in their place.

    Python sets `sys.stdout` to None then, and the next file opened, such as a socket, would get the
    number 1 and whatever is printed.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is the one that is closed: those below it are open by now.
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)  # noqa: FBT003 - as the standard files are
            setattr(sys, name, os.fdopen(null, mode, closefd=False))


def _hear_the_first_signal() -> None:
    """Let SIGTERM end us before the manager listens to signals, as process 1 too.

    The kernel drops signals that process 1 of a container has no handler for; without one, a stop
    during the start would be heard by nobody.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    """What is open is closed on the way; the code is what shells report for the signal."""
    sys.exit(128 + number)
