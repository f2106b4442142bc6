"""Whose fault it is that Spark ended the query: one of our errors, user code, or Spark itself.

Spark passes on what a Python process of it raised as text only: the traceback's last paragraph
names the class. Pure.

    kclrun.errors.DataLoss: …         that error, with its message
    any other Python error            ProcessorError: the pipeline's or the processor's code
    SQLSTATE 22xxx                    ProcessorError: an expression and a value that do not fit
    anything else                     EngineFailed: Spark, its executors, a checkpoint, an output
"""

from __future__ import annotations

import re
from typing import Final

from kclrun import errors
from kclrun.errors import EngineFailed, KclrunError, ProcessorError, ServiceError

__all__ = ["failure_of", "own_failure_in"]

_WORDS_MAX: Final = 2_000
# Where the message of a Python error ends in what Spark makes of it.
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
    """The error that the text of Spark's exception stands for, with a message for a person."""
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
    """The error of ours that a text names; None where it names none."""
    ours = _OURS.search(text)
    kind = getattr(errors, ours[1], None) if ours is not None else None
    if ours is None or not (isinstance(kind, type) and issubclass(kind, KclrunError)):
        return None
    return _rebuilt(kind, _message(ours[2]))


def _rebuilt(kind: type[KclrunError], message: str) -> KclrunError:
    return kind(message, code="") if issubclass(kind, ServiceError) else kind(message)


def _message(text: str) -> str:
    end = _END.search(text)
    return text[: end.start() if end else None].strip()[:_WORDS_MAX]


def _where(traceback: str) -> str:
    """The last file and line of the traceback, on a line of its own."""
    places = re.findall(r'^\s+File "([^"]+)", line (\d+)', traceback, re.MULTILINE)
    return f"In {places[-1][0]} line {places[-1][1]}\n" if places else ""


def _first_line(text: str) -> str:
    """What Spark says first, without the ids of its query."""
    said = text.partition("terminated with exception: ")[2] or text
    return said.strip().split("\n", 1)[0][:_WORDS_MAX]
