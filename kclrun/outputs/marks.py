"""The marks beside a data file: which length it had at which position. Reads and writes them.

A marks file is cut, with its data file, when the rows of a shard are opened. This module does not
know leases.
"""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kclrun.errors import LimitExceeded, SinkError
from kclrun.files.durable import (
    close_locked,
    failure,
    make_folder,
    open_locked,
    replace_file,
    sync,
    sync_folder,
    write_at,
)
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber

# After a crash, the mark of the last acknowledged checkpoint is needed. Newer marks are of
# checkpoints that failed, all within one `failover` (10 s): after that the lease is lost. With one
# unresolved write at a time and a round trip to the table of some 40 ms there are at most 250 of
# them.
MARKS_KEPT: Final = 256
# One rewrite (two fsyncs) for every 768 checkpoints: at `every: 10s`, one in two hours.
MARKS_MAX: Final = 1024
# 8 + 20 + 129 + 20 + 18 digits and five separators; with MARKS_MAX lines under 210 KiB.
_FILE_BYTES_MAX: Final = 1024 * 1024
_LINE: Final = re.compile(
    r"([0-9a-f]{8}) ((\d{1,19}) (\w{1,129}) (\d{1,19})(?:\+(\d{1,18}))?)\Z", re.ASCII
)


class Mark(msgspec.Struct, frozen=True):
    """The rows of all records up to `position` are the first `length` bytes of the data file."""

    position: ExtendedSequenceNumber
    length: int

    @property
    def line(self) -> bytes:
        at = self.position
        tick = f"+{at.tick}" if at.tick else ""
        rest = f"{self.length} {at.sequence_number} {at.sub_sequence_number}{tick}".encode()
        return b"%08x %s\n" % (zlib.crc32(rest), rest)


def mark_at(marks: Iterable[Mark], position: ExtendedSequenceNumber) -> Mark | None:
    """The mark for a reader that starts at `position`: the longest mark not above it.

    The longest, not the highest: user code may checkpoint a record below one that it checkpointed
    before, and that covers all rows emitted until then.
    """
    return max(
        (mark for mark in marks if mark.position <= position),
        key=lambda mark: (mark.length, mark.position.sort_key),
        default=None,
    )


def parse_marks(content: bytes) -> tuple[list[Mark], int]:
    """The marks in a file, and the number of bytes that hold them (the rest is a torn last line).

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
        position = ExtendedSequenceNumber(match[4], int(match[5]), int(match[6] or 0))
    except LimitExceeded:
        return None
    return Mark(position, int(match[3]))


class MarksFile:
    """The marks of one data file, in memory and on disk. The data file's lock guards it.

    A mark is appended only after its bytes of the data file are durable, so every mark that is
    found is true. A line is

        <crc32 of the rest, 8 hex digits> <length in bytes> <sequence number> <sub-sequence number>

    with `+<tick>` behind it if timers fired since that record.

    A crash can tear only the last line, because each line is synced before the next is written: a
    bad last line is ignored and cut, a bad line elsewhere is damage and refused.
    """

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
        """Keep only these marks, atomically; no write if nothing changes. Raises: OSError."""
        if list(kept) == self.marks and not self._torn:
            return
        content = b"".join(mark.line for mark in kept)
        self.close()
        replace_file(self.path, content)
        self.marks, self._length, self._torn = list(kept), len(content), False

    def append(self, mark: Mark) -> None:
        """Add one mark, durably. Its bytes of the data file must be durable. Raises: OSError."""
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


# After a thousand resets of one shard in one folder an operator has to look at the folder.
_SET_ASIDE_MAX: Final = 1000
# Room for some hundred rows; less than the buffer of one shard, so that many shards can start.
_ROOM_BYTES: Final = 2**16
# The characters that Kinesis allows in a shard id; so a file name stays inside its folder.
_SHARD_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z", re.ASCII)

_log = logging.getLogger(__name__)


def open_at(
    folder: Path, shard_id: str, position: ExtendedSequenceNumber, lock_wait_s: float
) -> tuple[int, MarksFile, Mark]:
    """The locked data file, cut back to `position`; its marks; and its mark at that length.

    Marks are cut before their bytes, so after a crash in between both are cut again the same way.
    Bytes without a mark are set aside, never deleted.

    Raises: SinkError, as `EmittedRows.open` says.
    """
    if not _SHARD_ID.match(shard_id):
        raise SinkError(f"{shard_id[:128]!r} is not a shard id: no file is named after it")
    path = folder / f"{shard_id}.jsonl"
    try:
        make_folder(folder)
        descriptor = open_locked(path, lock_wait_s)
    except OSError as error:
        raise failure(path, "open", error) from error
    try:
        marks = MarksFile(folder / f"{shard_id}.marks")
        if _must_be_set_aside(descriptor, marks, position):
            descriptor = _set_aside(path, descriptor, lock_wait_s)
        base = _go_back(path, descriptor, marks, position)
        _prove_room(path)
        return descriptor, marks, base
    except OSError as error:
        close_locked(descriptor)
        raise failure(path, "open", error) from error
    except BaseException:
        close_locked(descriptor)
        raise


def _prove_room(path: Path) -> None:
    """Fail the start on a full disk. A process that starts there would process records whose rows
    it cannot store, again and again. Raises: OSError."""
    probe = path.with_name(f"{path.name}.room")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(probe, flags, 0o666)
    try:
        write_at(descriptor, os.urandom(_ROOM_BYTES), 0)  # zeros would be a hole on some disks
    finally:
        os.close(descriptor)
        probe.unlink()


def _must_be_set_aside(descriptor: int, marks: MarksFile, position: ExtendedSequenceNumber) -> bool:
    """Whether the file has rows that belong to another run than the one that begins at `position`.

    That is so if no mark shows how many rows belong to `position`. It is also so if a shard begins
    at a sentinel although the file has marks of two checkpoints: a crash explains one of them, only
    a lease table that was reset or lost explains more, and a new LATEST is another instant.
    """
    if os.fstat(descriptor).st_size == 0:
        return False
    numbered = sum(not mark.position.is_sentinel for mark in marks.marks)
    begins_anew = mark_at(marks.marks, position) is None
    is_start = position.is_sentinel and position != SHARD_END
    return begins_anew or (is_start and numbered >= 2)


def _set_aside(path: Path, descriptor: int, lock_wait_s: float) -> int:
    """Rename the file to the first free `.old-<n>`, and lock a new, empty one in its place."""
    for number in range(1, _SET_ASIDE_MAX + 1):
        aside = path.with_name(f"{path.name}.old-{number}")
        if not aside.exists():
            break
    else:
        raise SinkError(f"{path} was set aside {_SET_ASIDE_MAX} times: clear the folder")
    path.rename(aside)
    sync_folder(path.parent)
    fresh = open_locked(path, lock_wait_s)
    close_locked(descriptor)
    _log.warning("rows of another run were set aside as %s: its lease was reset", aside)
    return fresh


def _go_back(
    path: Path, descriptor: int, marks: MarksFile, position: ExtendedSequenceNumber
) -> Mark:
    """Cut marks, then data, to the rows that `position` covers; returns the mark of that length."""
    size = os.fstat(descriptor).st_size
    base = mark_at(marks.marks, position)
    if size == 0:  # new, set aside, or moved away by its reader: the old marks are void
        base = Mark(position, 0)
        marks.drop_all_but([base])
        return base
    if base is None or base.length > size:
        raise SinkError(
            f"{path} has {size} bytes and its marks say"
            f" {base.length if base else 'nothing'}: it was cut or replaced from outside."
            f" To go on, move it and {marks.path.name} away, together"
        )
    marks.drop_all_but([mark for mark in marks.marks if mark.position <= position])
    os.ftruncate(descriptor, base.length)
    sync(descriptor)
    if base.length and os.pread(descriptor, 1, base.length - 1) != b"\n":
        raise SinkError(f"{path} has no line end at {base.length}, where its marks say one is")
    return Mark(position, base.length)
