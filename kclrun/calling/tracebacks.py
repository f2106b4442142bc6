"""Describes an exception of user code: where it was raised, and at which record.

It knows tracebacks and records, not who reports the failure. No text contains a payload.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, TracebackType
from typing import Final

import msgspec

from kclrun.calling.delivery import error_words
from kclrun.errors import UndecodableRecord
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber

# Enough frames to name the place; the ring also truncates the text to its own limit.
FRAMES_MAX: Final = 30
# `raise … from …`, and groups within groups: deeper exceptions explain nothing more.
_CHAIN_MAX: Final = 8
# A source of this size parses in a fraction of a second; generated ones may be larger.
_SOURCE_LINES_MAX: Final = 20_000
_LOOPS: Final = (
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)
_OURS: Final = f"{Path(__file__).parent.parent}{os.sep}"
_LIBRARY: Final = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

Frame = tuple[TracebackType, str]


class Failure(msgspec.Struct, frozen=True):
    """One exception. Its texts contain no payload, unless the exception's own text does.

    `raised_at` is file, line and function of user code. `record` is the record's place within the
    batch, as far as it is known. `position` is its position; None if the record is not known.
    """

    error: str
    raised_at: str = ""
    record: str = ""
    position: ExtendedSequenceNumber | None = None
    traceback_text: str = ""

    def is_as(self, other: Failure) -> bool:
        """Whether it is a repetition: the same error, place and record."""
        return (self.error, self.raised_at, self.record) == (
            other.error,
            other.raised_at,
            other.record,
        )


def describe(error: BaseException, records: Sequence[Record] = ()) -> Failure:
    """`error` as raised by user code; `records` is the batch of the call.

    It uses the traceback and the names of local variables, never a payload or a key.
    """
    frames = list(_frames(error.__traceback__))
    if isinstance(error, UndecodableRecord):
        index = next((n for n, record in enumerate(records) if record is error.record), None)
    else:
        index = _record_at_hand(frames, records) if records else None
    return Failure(
        error_words(error),
        _raised_at(frames),
        _place(index, records) if records else "",
        records[index].position if index is not None else None,
        _traceback_text(error),
    )


def _frames(tb: TracebackType | None) -> Iterator[Frame]:
    """The frames outside kclrun, the innermost last, each with its file."""
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        if not is_ours(file):
            yield tb, file
        tb = tb.tb_next


def is_ours(file: str) -> bool:
    """Whether the file belongs to kclrun, or to the machinery of imports."""
    return file.startswith((_OURS, "<frozen "))


def _raised_at(frames: Sequence[Frame]) -> str:
    """The innermost line of user code, not of a library that it called. User code may be installed
    as a library: then all its frames are."""
    if not frames:
        return ""
    own = [frame for frame in frames if not frame[1].startswith((*_LIBRARY, "<"))]
    tb, file = (own or frames)[-1]
    return f"{_shortened(file)}:{tb.tb_lineno} in {tb.tb_frame.f_code.co_name}"


def _shortened(file: str) -> str:
    """The path relative to the folder that it was imported from."""
    roots = [root.rstrip(os.sep) + os.sep for root in sys.path if root.startswith(os.sep)]
    root = max((root for root in roots if file.startswith(root)), key=len, default="")
    return file.removeprefix(root)


def _record_at_hand(frames: Sequence[Frame], records: Sequence[Record]) -> int | None:
    """The index of the record that the failing line works on, if that is certain.

    It is the variable of a loop around that line, or an argument of the function. A record that a
    finished loop left in its variable is not the cause.
    """
    if len(records) == 1:
        return 0
    indexes = {id(record): index for index, record in enumerate(records)}
    for tb, file in reversed(frames):
        code, values = tb.tb_frame.f_code, tb.tb_frame.f_locals
        found = {
            indexes[id(value)]
            for name, value in _records_among(values, indexes).items()
            if _is_worked_on(name, code, file, tb)
        }
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def _records_among(values: Mapping[str, object], indexes: Mapping[int, int]) -> dict[str, object]:
    # By identity: a comparison would call user code.
    return {name: value for name, value in values.items() if id(value) in indexes}


def _is_worked_on(name: str, code: CodeType, file: str, tb: TracebackType) -> bool:
    if name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return True
    lines = linecache.getlines(file, tb.tb_frame.f_globals)
    if not 0 < len(lines) <= _SOURCE_LINES_MAX:
        return False
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        _binds(node, name)
        for node in ast.walk(tree)
        if isinstance(node, _LOOPS) and node.lineno <= tb.tb_lineno <= (node.end_lineno or 0)
    )


def _binds(loop: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name
        for node in ast.walk(loop)
    )


def _place(index: int | None, records: Sequence[Record]) -> str:
    count = len(records)
    if index is not None:
        return f"{index + 1} of {count}, at {records[index].position}"
    return f"not known: one of {count}, from {records[0].position} to {records[-1].position}"


def _traceback_text(error: BaseException) -> str:
    try:
        raised = traceback.TracebackException.from_exception(error, limit=-FRAMES_MAX)
    except Exception:  # noqa: BLE001 - an exception of user code may be anything
        return error_words(error)
    for link in itertools.islice(_chain(raised), _CHAIN_MAX):
        theirs = [frame for frame in link.stack if not is_ours(frame.filename)]
        if theirs:  # else all frames are ours: keep them
            link.stack = traceback.StackSummary.from_list(theirs)
    return "".join(raised.format())


def _chain(
    raised: traceback.TracebackException | None,
) -> Iterator[traceback.TracebackException]:
    if raised is None:
        return
    yield raised
    yield from _chain(raised.__cause__)
    yield from _chain(raised.__context__)
    for member in raised.exceptions or ():
        yield from _chain(member)
