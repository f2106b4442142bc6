"""Finds the cause when Spark ended the query: one of our errors, user code, or Spark itself. Pure,
except for the capture of standard error."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kclrun import errors
from kclrun.errors import EngineFailed, KclrunError, ProcessorError, ProcessorVerdict, ServiceError
from kclrun.observe.logs import EventLog

# The standard error of Spark's JVM and its Python workers becomes lines of our log.
#
# They write into a pipe; a thread reads it as long as a process holds the other end. Lines that
# Spark writes at every start and the frames of its stack traces are logged as `debug`; all lines
# are bounded and cleaned like all foreign text (`observe/logs.py`).
_STDERR: Final = 2
# A line without a newline is logged in pieces of this size.
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
    """`debug` for lines of every start and for frames of a stack trace; else `warning`."""
    return "debug" if _AT_EVERY_START.match(line) or _FRAME.match(line) else "warning"


@contextmanager
def captured_engine(log: EventLog) -> Iterator[None]:
    """Logs the standard error of processes that start inside, as long as they live. Standard error
    of this process is restored afterwards."""
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


_WORDS_MAX: Final = 2_000
# The end of a Python error's message inside Spark's text.
_END: Final = re.compile(
    r"^\s*SQLSTATE: |^\s+at [\w.$]+\(|^=== Streaming Query ===|^Caused by: |^JVM stacktrace:"
    r"|^Driver stacktrace:|^\s*$",
    re.MULTILINE,
)
_OURS: Final = re.compile(r"^kclrun\.errors\.(\w+): ?(.*)", re.MULTILINE | re.DOTALL)
_PYTHON: Final = re.compile(
    r"Traceback \(most recent call last\):\n(?:[ \t][^\n]*\n)+(?P<error>[A-Za-z_][\w.]*(?::|$).*)",
    re.MULTILINE | re.DOTALL,
)
_DATA_EXCEPTION: Final = re.compile(r"SQLSTATE: 22[0-9A-Z]{3}\b")


def failure_of(text: str) -> KclrunError:
    """The error that the text of Spark's exception is about, with a message for the user.

    Spark passes the error of one of its Python processes on as text only: the traceback's last
    paragraph names the class.

        kclrun.errors.DataLoss: …         that error, with its message
        any other Python error            ProcessorError: the pipeline's or the processor's code
        SQLSTATE 22xxx                    ProcessorError: an expression and a value that do not fit
        anything else                     EngineFailed: Spark, its executors, a checkpoint, an
                                          output
    """
    if (ours := own_failure_in(text)) is not None:
        return ours
    if python := _PYTHON.search(text):
        return ProcessorError(
            f"user code raised on Spark, and Spark's retries did not help: "
            f"{_message(python['error'])}\n"
            f"{_where(python[0])}What was not committed is read again at the next start"
        )
    if _DATA_EXCEPTION.search(text):
        return ProcessorError(
            f"an expression of the pipeline and a value do not fit: {_first_line(text)}\n"
            "What was not committed is read again at the next start"
        )
    return EngineFailed(f"Spark ended the query: {_first_line(text)}")


def own_failure_in(text: str) -> KclrunError | None:
    """The kclrun error that a text names; None where it names none."""
    if (ours := _OURS.search(text)) is None:
        return None
    kind = getattr(errors, ours[1], None)
    if not (isinstance(kind, type) and issubclass(kind, KclrunError)):
        return None
    return _rebuilt(kind, _message(ours[2]))


def _rebuilt(kind: type[KclrunError], message: str) -> KclrunError:
    if issubclass(kind, ServiceError):
        return kind(message)
    # User code raises a verdict in place of any other exception; elsewhere it decides nothing.
    # Without `__init__`: some classes make the message from other arguments.
    known = ProcessorError if issubclass(kind, ProcessorVerdict) else kind
    return known.__new__(known, message)


def _message(text: str) -> str:
    end = _END.search(text)
    return text[: end.start() if end else None].strip()[:_WORDS_MAX]


def _where(traceback: str) -> str:
    """The last file and line of the traceback, on a line of its own."""
    places = re.findall(r'^\s+File "([^"]+)", line (\d+)', traceback, re.MULTILINE)
    return f"In {places[-1][0]} line {places[-1][1]}\n" if places else ""


def _first_line(text: str) -> str:
    """The first line of Spark's text, without the ids of its query."""
    cause = text.partition("terminated with exception: ")[2] or text
    return cause.strip().split("\n", 1)[0][:_WORDS_MAX]
