"""The command line: one module for each verb. The other packages are wired together here.

`program.py` finds the verb and converts every error to a message and an exit code (`messages.py`,
`exit_codes.py`). `services.py` builds the AWS clients from the settings. A large module is imported
only by the verb that needs it, so that `kclrun --help` is fast.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process; the exit code."""
    _open_closed_files()
    _print_in_every_encoding()
    _end_at_the_first_signal()
    try:
        from kclrun.cli.program import run_program
        from kclrun.cli.terminal import stop_signals
    except KeyboardInterrupt:
        return 128 + signal.SIGINT

    hangs_up = signal.SIGHUP in stop_signals()
    code = run_program(sys.argv[1:])
    if hangs_up:
        # The kernel and the shell send one each. Python takes its handlers away as it ends, and the
        # second one would end the process instead of its exit code.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return code


def _open_closed_files() -> None:
    """Open the null device in place of each closed standard file (`>&-`).

    For a closed file Python sets `sys.stdout` to None. The next opened file, such as a socket,
    would get the descriptor 1 and receive all printed text.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The closed descriptor is the lowest free number: those below it are open by now.
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, closefd=False))


def _print_in_every_encoding() -> None:
    """Print `?` for a character that the encoding of the output has not: `…` in Latin-1. Standard
    error escapes it already."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _end_at_the_first_signal() -> None:
    """Let SIGTERM end this process before the manager has its handler, also as process 1; and
    SIGHUP where it asks to stop.

    If process 1 of a container has no handler for a signal, the kernel drops the signal. Without
    this handler, a stop during the start would be ignored.
    """
    if os.getpid() != 1:
        return
    from kclrun.cli.terminal import stop_signals

    for number in stop_signals():
        if number is not signal.SIGINT:  # Python has a handler for it
            signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    """Exit with the code that shells report for the signal. Open resources are closed."""
    sys.exit(128 + number)
