"""The marks beside a data file: at which position it had which length.

Holds: `Mark`, the text of a marks file in both directions, and `MarksFile`, which appends and
rewrites it. May not know: rows, leases. Rule: a mark is appended only after the bytes it speaks
of are durable, so whatever mark is found tells the truth. A line is

    <crc32 of the rest, 8 hex digits> <length in bytes> <sequence number> <sub-sequence number>

Only the last line can be torn by a crash, because each is synced before the next is written: a
bad last line is ignored and cut, a bad line elsewhere is damage and refused.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kclrun.errors import LimitExceeded, SinkError
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.sinks.durable_files import replace_file, sync, write_at

__all__ = ["MARKS_KEPT", "MARKS_MAX", "Mark", "MarksFile", "mark_at", "parse_marks"]

# What a crash needs is the mark of the last acknowledged checkpoint. Behind it are only attempts
# that failed, all within one `failover` (10 s) or the lease is lost; one unresolved write at a
# time and a round trip to the table of some 40 ms make 250 of them at the very most.
MARKS_KEPT: Final = 256
# One rewrite (two fsyncs) for every 768 checkpoints: at `every: 10s`, one in two hours.
MARKS_MAX: Final = 1024
# 8 + 20 + 129 + 20 digits and four separators; with MARKS_MAX lines under 200 KiB.
_FILE_BYTES_MAX: Final = 1024 * 1024
_LINE: Final = re.compile(r"([0-9a-f]{8}) ((\d{1,19}) (\w{1,129}) (\d{1,19}))\Z", re.ASCII)


class Mark(msgspec.Struct, frozen=True):
    """The rows of all records up to `position` are the first `length` bytes of the data file."""

    position: ExtendedSequenceNumber
    length: int

    @property
    def line(self) -> bytes:
        at = self.position
        rest = f"{self.length} {at.sequence_number} {at.sub_sequence_number}".encode()
        return b"%08x %s\n" % (zlib.crc32(rest), rest)


def mark_at(marks: Iterable[Mark], position: ExtendedSequenceNumber) -> Mark | None:
    """What a reader that starts at `position` goes back to: the longest mark not above it.

    The longest, not the highest: user code may checkpoint a record below one it asked for before,
    and that covers all rows emitted until then.
    """
    return max(
        (mark for mark in marks if mark.position <= position),
        key=lambda mark: (mark.length, mark.position.sort_key),
        default=None,
    )


def parse_marks(content: bytes) -> tuple[list[Mark], int]:
    """The marks in a file, and how many of its bytes hold them (the rest is a torn last line).

    Raises: SinkError when a line that is not the last is damaged.
    """
    marks: list[Mark] = []
    good_bytes = 0
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        mark = _parse_line(line)
        if mark is None and (number < len(lines) - 1 or lines[-1]):
            raise SinkError(f"line {number} is damaged, and it is not the last")
        if mark is None:
            break
        marks.append(mark)
        good_bytes += len(line) + 1
    return marks, good_bytes


def _parse_line(line: bytes) -> Mark | None:
    match = _LINE.match(line.decode("ascii", "replace"))
    if match is None or int(match[1], 16) != zlib.crc32(match[2].encode()):
        return None
    try:
        position = ExtendedSequenceNumber(match[4], int(match[5]))
    except LimitExceeded:
        return None
    return Mark(position, int(match[3]))


class MarksFile:
    """The marks of one data file, in memory and on disk. The data file's lock guards it."""

    def __init__(self, path: Path) -> None:
        """Read `path`; an absent file has no marks. Raises: SinkError for damage; OSError."""
        self.path = path
        content = _read(path)
        try:
            self.marks, self._length = parse_marks(content)
        except SinkError as damage:
            raise SinkError(
                f"{path}: {damage}. To go on, move it and its .jsonl away, together"
            ) from None
        self._torn = self._length < len(content)
        self._descriptor: int | None = None

    def drop_all_but(self, kept: Sequence[Mark]) -> None:
        """Keep only these, atomically; no write if nothing changes. Raises: OSError."""
        if list(kept) == self.marks and not self._torn:
            return
        content = b"".join(mark.line for mark in kept)
        self.close()
        replace_file(self.path, content)
        self.marks, self._length, self._torn = list(kept), len(content), False

    def append(self, mark: Mark) -> None:
        """Add one mark, durably. The bytes it speaks of must be durable. Raises: OSError."""
        if len(self.marks) >= MARKS_MAX:
            self.drop_all_but(self.marks[-MARKS_KEPT:])
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self.path, flags, 0o666)
        write_at(self._descriptor, mark.line, self._length)
        sync(self._descriptor)
        self._length += len(mark.line)
        self.marks.append(mark)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return b""
    if len(content) > _FILE_BYTES_MAX:
        raise SinkError(f"{path} is over {_FILE_BYTES_MAX} bytes: not a marks file of ours")
    return content
