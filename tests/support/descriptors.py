"""The descriptors that this process has open, to see that a call leaves none behind; and what a
process under test writes on a terminal."""

import contextlib
import gc
import os


def open_descriptors():
    """Their numbers. What earlier tests left to the garbage collector is closed first; compare with
    `<=`, because a thread of theirs may still close one."""
    gc.collect()
    return {int(name) for name in os.listdir("/proc/self/fd")}  # names, not paths


def everything_on(terminal):
    """What comes on a pseudo terminal until no process has its other side open; one read may have
    a part of it."""
    parts = []
    with contextlib.suppress(OSError):  # Linux says EIO when the last writer has closed its end
        while part := os.read(terminal, 65_536):
            parts.append(part)
    return b"".join(parts)
