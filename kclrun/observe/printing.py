"""The user's own print and logging inside a lease process: each line with its shard, none blocking.

Rule: whatever user code does to logging or to sys.stdout, our own lines do not depend on it.
botocore and urllib3 are capped at INFO: their debug lines show signed headers and bodies [S6].
"""

from __future__ import annotations

import io
import logging
import sys
from typing import Final

from kclrun.observe.logs import EventLog

__all__ = ["configure_lease_logging"]

_CAPPED: Final = ("botocore", "boto3", "urllib3", "s3transfer")
# A line that never ends is cut into pieces of this size.
_LINE_CHARACTERS_MAX: Final = 2048


def configure_lease_logging(log: EventLog) -> None:
    """Send print, sys.stderr and logging of this process through `log`. Once, after the fork."""
    sys.stdout = _PrintedLines(log, "stdout")
    sys.stderr = _PrintedLines(log, "stderr")
    root = logging.getLogger()
    root.handlers[:] = [_LoggedLines(log)]
    root.setLevel(logging.DEBUG if log.is_enabled("debug") else logging.INFO)
    for name in _CAPPED:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.captureWarnings(capture=True)


class _LoggedLines(logging.Handler):
    """One line a record; its message is cleaned like any text."""

    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.INFO and record.name.partition(".")[0] in _CAPPED:
            return
        try:
            text = record.getMessage()
            if record.exc_info:
                text += "\n" + logging.Formatter().formatException(record.exc_info)
        except Exception as error:  # noqa: BLE001 - a wrong format string of user code
            text = f"a log line could not be formatted: {type(error).__name__}"
        self._log.note("logged", level=_level(record.levelno), logger=record.name, message=text)


def _level(number: int) -> str:
    if number >= logging.ERROR:
        return "error"
    if number >= logging.WARNING:
        return "warning"
    return "info" if number >= logging.INFO else "debug"


class _PrintedLines(io.TextIOBase):
    """A text stream whose lines become log lines."""

    def __init__(self, log: EventLog, name: str) -> None:
        self._log = log
        self._name = name
        self._rest = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a read-only attribute of the base
        return "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._print(line)
        while len(self._rest) > _LINE_CHARACTERS_MAX:
            self._print(self._rest[:_LINE_CHARACTERS_MAX])
            self._rest = self._rest[_LINE_CHARACTERS_MAX:]
        return len(text)

    def flush(self) -> None:
        """Nothing is held but an unfinished line, which waits for its end."""

    def fileno(self) -> int:
        """The descriptor behind the name, for code that bypasses Python (faulthandler)."""
        return 1 if self._name == "stdout" else 2

    def _print(self, line: str) -> None:
        if line:
            self._log.note("printed", text=line, resource=self._name)
