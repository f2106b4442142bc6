"""`kclrun …` on a terminal of its own, which can be closed as a window or an SSH session is."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time

from tests.patience import HUNG_S

# The program is the session's leader, so the kernel sends it SIGHUP when the terminal is closed.
_BEGIN = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if sys.argv[1] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-m", "kclrun", *sys.argv[2:]])
"""


class OnTerminal:
    """The program, and what its terminal has shown. `nohup`: it is started with SIGHUP ignored."""

    def __init__(self, *arguments, cwd, nohup=False):
        self._terminal, theirs = pty.openpty()
        command = [sys.executable, "-c", _BEGIN, "nohup" if nohup else "", *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=os.environ | {"TERM": "xterm"},  # a dumb terminal gets no table
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = b""
        self._is_open = True

    def until_shown(self, part):
        over = time.monotonic() + HUNG_S
        while part not in self.shown:
            assert time.monotonic() < over, self.shown[-3000:]
            if select.select([self._terminal], [], [], 1.0)[0]:
                self.shown += os.read(self._terminal, 65_536)

    def close_terminal(self):
        """The window is closed. A shell sends the signal to its jobs, too."""
        os.close(self._terminal)
        self._is_open = False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGHUP)

    def wait(self):
        return self.process.wait(HUNG_S)

    def close(self):
        """Whatever became of the test: nothing is left running."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._is_open:
            os.close(self._terminal)
