"""Which signals ask this process to stop in good order. Only here is decided what SIGHUP means."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final

from kclrun.lifecycle.stopping import STOP_SIGNALS

_STANDARD_FILES: Final = (0, 1, 2)


def stop_signals(
    is_terminal: Callable[[int], bool] = os.isatty,
    handler_of: Callable[[signal.Signals], object] = signal.getsignal,
) -> tuple[signal.Signals, ...]:
    """SIGTERM and SIGINT; and SIGHUP, if a standard file of this process is a terminal.

    The kernel or the shell sends SIGHUP when that terminal is closed: an application that went on
    would keep its leases where no person sees it. `nohup` starts a process with SIGHUP ignored, so
    that it goes on. Ask before the live table takes the standard files.
    """
    if handler_of(signal.SIGHUP) is signal.SIG_IGN:
        return STOP_SIGNALS
    is_on_terminal = any(is_terminal(descriptor) for descriptor in _STANDARD_FILES)
    return (*STOP_SIGNALS, signal.SIGHUP) if is_on_terminal else STOP_SIGNALS
