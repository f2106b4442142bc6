"""What Spark's JVM and its Python workers write to standard error, as lines of our log.

They write into a pipe; a thread reads it for as long as somebody holds the other end. Rule: what
Spark says at every start and the frames of its stack traces are for debugging; the rest is bounded
and cleaned like all foreign text (`observe/logs.py`).
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kclrun.observe.logs import EventLog

__all__ = ["captured_engine", "level_of_line"]

_STDERR: Final = 2
# A line without an end is logged in pieces of this size.
_LINE_BYTES_MAX: Final = 8_192
_READ_BYTES_MAX: Final = 65_536
_AT_EVERY_START: Final = re.compile(
    r"WARNING: (?:Using incubator modules|package sun\.security\.action)"
    r"|Warning: Java versions > Java 11 can only operate in restricted mode"
    r"|Using Spark's default log4j profile|Setting default log level|To adjust logging level"
    r"|.* WARN (?:NativeCodeLoader|Utils|SparkContext): "
)
_FRAME: Final = re.compile(r"\s|\.{3} \d+ more|Caused by: |Driver stacktrace:|Traceback |=== ")


def level_of_line(line: str) -> str:
    """`debug` for what is said at every start and for the frames of a trace; else `warning`."""
    return "debug" if _AT_EVERY_START.match(line) or _FRAME.match(line) else "warning"


@contextmanager
def captured_engine(log: EventLog) -> Iterator[None]:
    """Standard error of processes that are started inside goes to the log, for as long as they
    live; ours again once this is left."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    reader = threading.Thread(target=_log_lines, args=(read_fd, log), name="engine", daemon=True)
    sys.stderr.flush()
    kept = os.dup(_STDERR)
    os.dup2(write_fd, _STDERR)
    os.close(write_fd)
    reader.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, _STDERR)
        os.close(kept)


def _log_lines(read_fd: int, log: EventLog) -> None:
    rest = b""
    try:
        while arrived := os.read(read_fd, _READ_BYTES_MAX):
            *lines, rest = (rest + arrived).split(b"\n")
            if len(rest) > _LINE_BYTES_MAX:
                lines, rest = [*lines, rest], b""
            for line in lines:
                _log_line(line, log)
        if rest:
            _log_line(rest, log)
    finally:
        os.close(read_fd)


def _log_line(line: bytes, log: EventLog) -> None:
    text = line.decode(errors="replace").rstrip()
    if text:
        log.note("engine_said", level=level_of_line(text), text=text)
