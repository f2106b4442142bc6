"""What a process that runs user code writes, until it has ended.

Not until the end of the pipe: user code may start processes, and they keep the pipe open.
"""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Iterator
from typing import Final

from kclrun.errors import HostRefused

_PIECE_BYTES: Final = 64 * 1024


def open_pidfd(process: subprocess.Popen[bytes]) -> int:
    """A descriptor that is readable once the process has ended. Raises: HostRefused
    under a kernel or a seccomp profile that does not know it; the process still runs then."""
    try:
        return os.pidfd_open(process.pid)
    except OSError as error:
        raise HostRefused(
            f"this host refuses pidfd_open: {error.strerror}. kclrun watches its processes with it:"
            " it needs Linux 5.3, and a seccomp profile that allows it"
        ) from None


def lines_of(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """The lines of its standard output, as they come; the last one may lack its end."""
    assert process.stdout is not None
    fd, rest = process.stdout.fileno(), b""
    try:
        pidfd = open_pidfd(process)
    except HostRefused:
        process.kill()
        process.wait()
        raise
    poller = select.poll()
    for waits in (fd, pidfd):
        poller.register(waits, select.POLLIN)
    try:
        while True:
            has_more = fd in dict(poller.poll())
            piece = os.read(fd, _PIECE_BYTES) if has_more else b""
            if not piece:
                break  # it has ended, and nothing is left to be read; or the pipe has
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line + b"\n"
    finally:
        os.close(pidfd)
    if rest:
        yield rest
